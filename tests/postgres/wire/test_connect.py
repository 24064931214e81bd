"""Sessions: what they are set to, and how they are ended."""

from __future__ import annotations

import psycopg
import pytest

from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import cancel_sessions, connect, session_owner
from millrace.postgres.wire.libpq import copy_in, execute, open_session


def test_commits_are_waited_for_where_the_server_would_not(target_db: str) -> None:
    name = Dsn.parse(target_db).parameters["dbname"]
    with connect(Dsn.parse(target_db), "test") as connection:
        for setting, expected in (("off", "local"), ("remote_write", "remote_write")):
            connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")
            with connect(Dsn.parse(target_db), "test") as fresh:
                assert fresh.execute("SHOW synchronous_commit").fetchone() == (expected,)


def test_money_looks_the_same_whatever_the_database_says(source_db: str, target_db: str) -> None:
    for uri in (source_db, target_db):
        dsn = Dsn.parse(uri)
        with psycopg.connect(uri, autocommit=True) as connection:
            name = dsn.parameters["dbname"]
            connection.execute(f"ALTER DATABASE {name} SET lc_monetary = 'POSIX'".encode())
        with connect(dsn, "test") as fresh:
            assert fresh.execute("SHOW lc_monetary").fetchone() == ("C",)
        bare = open_session(dsn, "test", "UTF8")
        assert execute(bare, "SHOW lc_monetary")[0].get_value(0, 0) == b"C"
        bare.finish()


def test_sessions_that_are_ended_are_gone_afterwards(target_db: str) -> None:
    dsn = Dsn.parse(target_db)
    with psycopg.connect(target_db, autocommit=True) as other:
        names = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        for round_ in range(20):
            busy = connect(dsn, f"index {round_}run")
            other_run = connect(dsn, f"index {round_}other")
            # Something to roll back.
            busy.execute("BEGIN")
            busy.execute("CREATE TABLE public.half AS SELECT generate_series(1, 1000)")
            assert cancel_sessions(dsn, [f"{round_}run"]) == 1
            found = {name for (name,) in other.execute(names)}
            assert f"millrace index {round_}run" not in found
            assert f"millrace index {round_}other" in found
            busy.close()
            other_run.close()
    assert cancel_sessions(dsn, ["nobody"]) == 0


def test_statements_are_sent_in_the_encoding_of_the_session(target_cluster: Cluster) -> None:
    uri = target_cluster.create_database("latin_names", encoding="LATIN1")
    session = open_session(Dsn.parse(uri), "test", "LATIN1")
    try:
        execute(session, 'CREATE TABLE public."tä" (v text)')
        assert copy_in(session, 'COPY public."tä" FROM STDIN', memoryview(b"\xe4\n")) == 1
        with pytest.raises(ServerError, match="a statement contains a character"):
            execute(session, "SELECT '\u20ac'")
        with psycopg.connect(uri, client_encoding="UTF8") as other:
            assert other.execute('SELECT v FROM "tä"').fetchone() == ("ä",)
    finally:
        session.finish()
        target_cluster.drop_database("latin_names")


def test_sessions_of_one_owner_are_ended_and_nobody_elses(target_db: str) -> None:
    """Names that begin alike, that would match as patterns, or that the server would cut."""
    dsn = Dsn.parse(target_db)
    long = "s" * 60
    owners = ["shop", "shop2", "sho_", "s%", "shop_2", "shop x", f"{long}_1", f"{long}_2"]
    sessions = {owner: connect(dsn, f"apply {session_owner(owner)} catalog") for owner in owners}
    reading = connect(dsn, "read shop")
    try:
        for number, owner in enumerate(owners):
            assert cancel_sessions(dsn, [owner], "apply") == 1, owner
            with pytest.raises(psycopg.OperationalError):
                sessions[owner].execute("SELECT 1")
            for other in owners[number + 1 :]:
                sessions[other].execute("SELECT 1")
        reading.execute("SELECT 1")
    finally:
        for session in (*sessions.values(), reading):
            session.close()
