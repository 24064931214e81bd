"""Writers kept off while a stream is cut over, and let in again if that fails."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.port import free_port
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.followed import Followed, open_followed
from tests.fixtures.wait import wait_for

from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, MismatchError, ServerError
from millrace.follow import cutover as cutover_module
from millrace.follow.cutover import CutoverResult, cutover
from millrace.follow.pause import FILE, PauseKind, PauseSettings
from millrace.follow.settings import CompareMode
from millrace.route import Route

SETTING = "SELECT setconfig FROM pg_db_role_setting WHERE setrole = 0 AND setdatabase ="
SETTING += " (SELECT oid FROM pg_database WHERE datname = current_database())"
MAY_CONNECT = "SELECT has_database_privilege('public_one', current_database(), 'CONNECT')"


def cut_over(
    followed: Followed, pause: PauseSettings, mode: CompareMode = CompareMode.FULL
) -> CutoverResult:
    compare = CompareSettings(Route(Dsn.parse(followed.source), Dsn.parse(followed.target)))
    return cutover(followed.settings(), compare, followed.engine, followed.reporter, pause, mode)


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Followed]:
    with open_followed(source_db, target_db, tmp_path / "work", DirectEngine()) as opened:
        yield opened


@pytest.fixture
def role(followed: Followed) -> Iterator[str]:
    execute(followed.source, "CREATE ROLE public_one")
    yield "public_one"
    execute(followed.source, "SET default_transaction_read_only = off", "DROP ROLE public_one")


@pytest.mark.parametrize("kind", [PauseKind.READ_ONLY, PauseKind.REVOKE_CONNECT])
def test_a_pause_ends_writers_and_is_taken_back_only_if_the_cutover_fails(
    followed: Followed, role: str, kind: PauseKind
) -> None:
    pause = PauseSettings(kind)
    execute(followed.target, "UPDATE seat SET place = -1 WHERE id = 1")
    assert not cut_over(followed, pause).is_good
    assert rows(followed.source, SETTING) == []
    assert rows(followed.source, MAY_CONNECT) == [(True,)]
    assert not (followed.directory / FILE).exists()
    execute(followed.target, "UPDATE seat SET place = 1 WHERE id = 1")
    writer = psycopg.connect(followed.source)
    try:
        writer.execute("INSERT INTO seat VALUES (500, 500)")
        result = cut_over(followed, pause)
        assert result.is_good
        assert result.pause_seconds > 0
        with pytest.raises(psycopg.OperationalError):
            writer.commit()
    finally:
        writer.close()
    if kind is PauseKind.REVOKE_CONNECT:
        assert rows(followed.source, MAY_CONNECT) == [(False,)]
    else:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            execute(followed.source, "INSERT INTO seat VALUES (501, 501)")
    assert rows(followed.target, "SELECT count(*) FROM seat WHERE id >= 500") == [(0,)]


def test_what_a_killed_cutover_found_is_what_the_next_one_gives_back(followed: Followed) -> None:
    """As if it had been killed in its pause, of a source that had a setting of its own."""
    database = rows(followed.source, "SELECT quote_ident(current_database())")[0][0]
    (followed.directory / FILE).write_text('{"kind": "read-only", "setting": "off"}')
    execute(followed.source, f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    execute(followed.target, "UPDATE seat SET place = -1 WHERE id = 1")
    assert not cut_over(followed, PauseSettings(PauseKind.READ_ONLY)).is_good
    assert rows(followed.source, SETTING) == [(["default_transaction_read_only=off"],)]
    execute(followed.source, "INSERT INTO seat VALUES (500, 500)")


def test_a_prepared_transaction_is_no_pause(followed: Followed) -> None:
    if rows(followed.source, "SHOW max_prepared_transactions") == [("0",)]:
        pytest.skip("the server has no prepared transactions")
    with psycopg.connect(followed.source) as writer:
        writer.tpc_begin("late")
        writer.execute("INSERT INTO seat VALUES (500, 500)")
        writer.tpc_prepare()
    try:
        with pytest.raises(ServerError, match="prepared transactions"):
            cut_over(followed, PauseSettings(PauseKind.READ_ONLY))
        assert rows(followed.source, SETTING) == []
    finally:
        execute(followed.source, "ROLLBACK PREPARED 'late'")


def test_commands_pause_and_resume(followed: Followed, tmp_path: Path) -> None:
    stopped, again = tmp_path / "stopped", tmp_path / "again"
    pause = PauseSettings(command=f"touch {stopped}", resume_command=f"touch {again}")
    assert cut_over(followed, pause, CompareMode.NONE).is_good
    assert stopped.exists()
    assert not again.exists()
    with pytest.raises(ServerError, match="--pause-command ended with 3"):
        cut_over(followed, PauseSettings(command="exit 3", resume_command=f"touch {again}"))
    assert again.exists()
    for wrong in (PauseSettings(PauseKind.PGBOUNCER), PauseSettings(resume_command="true")):
        with pytest.raises(ConfigError):
            cut_over(followed, wrong)


@pytest.mark.parametrize("mode", CompareMode)
def test_a_writer_after_the_end_position_is_found(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, mode: CompareMode
) -> None:
    """Also one whose transaction began before it."""
    writer = psycopg.connect(followed.source)
    writer.execute("INSERT INTO seat VALUES (500, 500)")
    finish = cutover_module.finish

    def commit_late(*arguments: Any, **more: Any) -> Any:
        writer.commit()
        return finish(*arguments, **more)

    def compare_early(*arguments: Any) -> Any:
        """As if the table had been compared before the writer came."""
        return [one for one in compare_data(*arguments) if one.is_equal]

    monkeypatch.setattr(cutover_module, "finish", commit_late)
    monkeypatch.setattr(cutover_module, "compare_data", compare_early)
    try:
        with pytest.raises(MismatchError, match=r"1 changes were made .*after the end position"):
            cut_over(followed, PauseSettings(), mode)
    finally:
        writer.close()
    monkeypatch.undo()
    result = cut_over(followed, PauseSettings())
    assert result.is_good
    assert rows(followed.target, "SELECT count(*) FROM seat WHERE id = 500") == [(1,)]


@contextmanager
def pgbouncer(uri: str, directory: Path) -> Iterator[int]:
    """Debian's, in front of one database; its port."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    if not Path(program).exists():
        pytest.skip("there is no pgbouncer")
    port = free_port()
    user = "postgres" if os.geteuid() == 0 else getpass.getuser()
    behind = psycopg.conninfo.make_conninfo(uri)
    users = directory / "users.txt"
    users.write_text('"postgres" ""\n')
    config = directory / "pgbouncer.ini"
    config.write_text(
        f"[databases]\nsource = {behind}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nauth_type = any\nadmin_users = postgres\nunix_socket_dir =\n"
        f"auth_file = {users}\nlogfile = {directory}/bouncer.log\n"
    )
    for path in (directory, users, config):
        shutil.chown(path, user)
    command = [program, str(config)] if os.geteuid() else [program, "-u", user, str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def test_pgbouncer_is_paused_and_resumed(followed: Followed, tmp_path: Path) -> None:
    place = tmp_path / "bouncer"
    place.mkdir()
    with pgbouncer(followed.source, place) as port:
        console = f"postgresql://postgres@127.0.0.1:{port}/pgbouncer"

        def paused() -> int | None:
            try:
                with psycopg.connect(console, autocommit=True) as connection:
                    found = connection.execute("SHOW DATABASES")
                    names = [column.name for column in found.description or ()]
                    listed = [dict(zip(names, row, strict=True)) for row in found]
            except psycopg.OperationalError:
                return None
            return next(int(one["paused"]) for one in listed if one["name"] == "source")

        wait_for(lambda: paused() is not None, "pgbouncer answers")
        pause = PauseSettings(PauseKind.PGBOUNCER, pgbouncer=console, pgbouncer_database="source")
        execute(followed.target, "UPDATE seat SET place = -1 WHERE id = 1")
        assert not cut_over(followed, pause).is_good
        assert paused() == 0
        execute(followed.target, "UPDATE seat SET place = 1 WHERE id = 1")
        assert cut_over(followed, pause).is_good
        assert paused() == 1
