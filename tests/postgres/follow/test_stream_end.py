"""The end of a stream: where it is, and what the target is then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.followed import Followed, lsn_of, open_followed
from tests.fixtures.stream.rerouted import rerouted
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from typer.testing import CliRunner

from millrace.cli.command_options import CommandOptions
from millrace.cli.stream import app
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings
from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, MismatchError, PreflightError, ServerError, WorkDirError
from millrace.filter.rules import parse_filters
from millrace.follow.clone_follow import clone_and_follow
from millrace.follow.cutover import cutover
from millrace.follow.feed import receive_settings
from millrace.follow.settings import SlotSettings
from millrace.follow.setup import read_left
from millrace.follow.slot import cleanup, prepare_source
from millrace.follow.stream import apply_spooled, follow, require_setup
from millrace.lsn import parse_lsn, render_lsn
from millrace.receive.loop import receive
from millrace.route import Route
from millrace.snapshot.holder import hold
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Followed]:
    with open_followed(source_db, target_db, tmp_path / "work", DirectEngine()) as opened:
        yield opened


def on_both(followed: Followed, *statements: str) -> None:
    for uri in (followed.source, followed.target):
        execute(uri, *statements)


def execute(uri: str, *statements: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = on")
        for statement in statements:
            connection.execute(statement.encode())


def value(uri: str, query: str) -> object:
    with psycopg.connect(uri) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def sequences(uri: str, *names: str) -> list[object]:
    return [value(uri, f"SELECT (last_value, is_called)::text FROM {name}") for name in names]


def seats(followed: Followed) -> object:
    return value(followed.target, "SELECT array_agg(id ORDER BY id) FROM seat WHERE id > 100")


@pytest.mark.parametrize("version", [16, 18])
def test_partition_that_the_application_keeps_locked_keeps_no_stream_from_its_end(
    source_db: str, target_db: str, tmp_path: Path, version: int
) -> None:
    """Nor from its beginning: each time a receiver connects anew."""
    if version == 18:
        source_db, target_db = target_db, source_db
    parted = """
        CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE part PARTITION OF parted DEFAULT PARTITION BY RANGE (id);
        CREATE TABLE leaf PARTITION OF part DEFAULT
    """
    rules = parse_filters("[exclude-table]\npublic.seat\n", name="filters.ini")
    engine = DirectEngine()
    with (
        open_followed(source_db, target_db, tmp_path / "work", engine, more=parted) as followed,
        psycopg.connect(source_db) as application,
    ):
        execute(source_db, "INSERT INTO parted SELECT generate_series(1, 5)")
        application.execute("LOCK TABLE part, leaf IN ACCESS EXCLUSIVE MODE")
        left = read_left(Dsn.parse(source_db), rules)
        assert followed.follow(left=left, filters=rules).reached_endpos
        assert value(target_db, "SELECT count(*) FROM parted") == 5
        execute(source_db, "INSERT INTO transfer (amount) VALUES (1)")
        assert followed.follow(left=left, filters=rules).reached_endpos
        assert value(target_db, "SELECT count(*) FROM transfer") == 1


def test_sequences_are_as_on_the_source_when_a_stream_has_ended(followed: Followed) -> None:
    on_both(
        followed,
        "CREATE SEQUENCE down INCREMENT -2 START -10 MAXVALUE -1",
        "CREATE SEQUENCE untouched",
        "CREATE SEQUENCE kept_out",
        "CREATE SCHEMA aside",
        "CREATE TABLE aside.bill (id serial PRIMARY KEY)",
    )
    execute(followed.target, "CREATE SEQUENCE own START 7", "SELECT nextval('kept_out')")
    execute(
        followed.source,
        "INSERT INTO transfer (amount) SELECT generate_series(1, 50)",
        "SELECT nextval('down'), nextval('down')",
        "SELECT setval('kept_out', 99)",
        "SELECT setval('aside.bill_id_seq', 99)",
    )
    rules = parse_filters("[exclude-schema]\naside\n", name="filters.ini")
    left = read_left(Dsn.parse(followed.source), rules)
    assert followed.follow(left=left).sequences == 4
    names = ("transfer_id_seq", "down", "untouched", "kept_out")
    assert sequences(followed.target, *names) == sequences(followed.source, *names)
    assert sequences(followed.target, "aside.bill_id_seq", "own") == ["(1,f)", "(7,f)"]
    execute(followed.target, "INSERT INTO transfer (amount) VALUES (51)")

    # Backward, too, if that is where the source is.
    execute(followed.target, "DELETE FROM transfer WHERE amount = 51")
    execute(
        followed.source,
        "TRUNCATE transfer RESTART IDENTITY",
        "INSERT INTO transfer (amount) VALUES (1)",
    )
    compare = CompareSettings(Route(Dsn.parse(followed.source), Dsn.parse(followed.target)))
    followed.follow(left=left)
    assert sequences(followed.target, *names) == sequences(followed.source, *names)
    execute(followed.target, "INSERT INTO transfer (amount) VALUES (2)")
    assert value(followed.target, "SELECT max(id) FROM transfer") == 2
    execute(followed.target, "DELETE FROM transfer WHERE id = 2")
    ended = cutover(followed.settings(), compare, followed.engine, followed.reporter)
    assert (ended.is_equal, ended.sequences) == (True, 5)
    assert sequences(followed.target, "aside.bill_id_seq") == ["(99,t)"]


def test_sequences_are_brought_forward_while_following(followed: Followed) -> None:
    on_both(
        followed,
        "CREATE SEQUENCE down INCREMENT -1",
        "CREATE SEQUENCE back",
        "CREATE SEQUENCE first",
    )
    execute(followed.source, "SELECT nextval('down'), nextval('down'), nextval('first')")
    execute(followed.target, "SELECT setval('back', 500)")
    execute(followed.source, "SELECT setval('back', 400)")
    running = followed.start(sequence_seconds=0.05)
    wait_for(lambda: sequences(followed.target, "down", "first") == ["(-2,t)", "(1,t)"])
    execute(followed.source, "SELECT setval('first', 70), setval('down', -70)")
    wait_for(lambda: sequences(followed.target, "down", "first") == ["(-70,t)", "(70,t)"])
    assert sequences(followed.target, "back") == ["(500,t)"]
    followed.set_endpos(followed.end())
    running.join(DEADLINE_SECONDS)
    assert followed.result.reached_endpos
    assert sequences(followed.target, "back") == ["(400,t)"]


def test_an_unforeseen_failure_with_sequences_ends_the_stream(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no end position: nothing else would end it."""

    def fail(*_: object) -> int:
        raise ValueError("unforeseen")

    monkeypatch.setattr("millrace.follow.sequences.bring_sequences_forward", fail)
    settings = followed.settings(sequence_seconds=0.05)
    with pytest.raises(ValueError, match="unforeseen"):
        follow(settings, followed.engine, followed.reporter)


def test_a_source_that_is_away_when_the_stream_ends_is_told_of(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(followed.source, "INSERT INTO seat VALUES (101, 101)")
    monkeypatch.setattr("millrace.retry.FIRST_PAUSE_SECONDS", 0.01)
    followed.follow()
    away = rerouted(followed.settings(), source=Dsn.parse("host=127.0.0.1 port=1 dbname=gone"))
    with pytest.raises(ServerError, match="is applied, but the target's sequences are not set"):
        apply_spooled(away, followed.engine, followed.reporter, waits=False)


def test_the_current_position_holds_commits_that_did_not_wait_for_the_disk(
    followed: Followed,
) -> None:
    with psycopg.connect(followed.source, autocommit=True) as writer:
        writer.execute("SET synchronous_commit = off")
        for number in range(101, 1101):
            writer.execute("INSERT INTO seat VALUES (%s, %s)", (number, number))
        asked = ["sentinel", "set", "endpos", "--current", "--source", followed.source]
        ended = CliRunner().invoke(
            app, [*asked, "--dir", str(followed.directory)], catch_exceptions=False
        )
        row = writer.execute("SELECT count(*) FROM seat").fetchone()
    end = parse_lsn(ended.stdout.strip())
    follow(followed.settings(), followed.engine, followed.reporter)
    with Sentinel(followed.directory) as sentinel:
        assert sentinel.read().endpos == end
    assert row == (value(followed.target, "SELECT count(*) FROM seat"),)


def test_an_end_position_that_the_target_has_passed_is_told_of(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    start = followed.end()
    first = lsn_of(followed.source, "INSERT INTO seat VALUES (101, 101)")
    lsn_of(followed.source, "INSERT INTO seat VALUES (102, 102)")
    followed.follow()
    end = followed.end()

    def follow_to(lsn: int) -> None:
        follow(followed.settings(endpos=lsn), followed.engine, followed.reporter)

    for lsn in (start, first):
        with pytest.raises(MismatchError, match=r"already, with [12] changes between"):
            follow_to(lsn)
    with Sentinel(followed.directory) as sentinel:
        setup = sentinel.read_setup()
        assert setup is not None
        before = sentinel.read().endpos
    with pytest.raises(MismatchError, match="already, with 2 changes between"):
        follow_to(setup.start_lsn - 1)
    assert "is before the copy" in caplog.text
    # One that is set while nobody looks, and one that nothing was committed after.
    followed.set_endpos(first)
    with pytest.raises(MismatchError, match="already"):
        follow(followed.settings(), followed.engine, followed.reporter)
    followed.set_endpos(before)
    follow_to(end)
    assert seats(followed) == [101, 102]
    asked = ["sentinel", "set", "endpos", "--dir", str(followed.directory)]
    assert isinstance(CliRunner().invoke(app, [*asked, render_lsn(first)]).exception, MismatchError)
    assert CliRunner().invoke(app, [*asked, "--none"]).exit_code == 0


def test_catchup_that_lacks_changes_before_the_end_position_fails(followed: Followed) -> None:
    lsn_of(followed.source, "INSERT INTO seat VALUES (101, 101)")
    followed.follow()
    end = lsn_of(followed.source, "INSERT INTO seat VALUES (102, 102)")
    settings = followed.settings(endpos=end)
    with pytest.raises(ServerError, match="the rest was not received"):
        apply_spooled(settings, followed.engine, followed.reporter, waits=False)
    # Without an end, what is there is all that is asked for.
    followed.set_endpos(None)
    result = apply_spooled(followed.settings(), followed.engine, followed.reporter, waits=False)
    assert (result.reached_endpos, result.sequences) == (False, None)
    assert seats(followed) == [101]


def test_what_was_received_is_applied_without_the_source(
    followed: Followed, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    end = lsn_of(followed.source, "INSERT INTO seat VALUES (101, 101)")
    followed.set_endpos(end)
    with Sentinel(followed.directory) as sentinel, SpoolWriter(followed.directory) as spool:
        setup = require_setup(sentinel, followed.directory)
        receive(receive_settings(followed.settings(), setup), spool, sentinel)
    followed.set_endpos(None)
    assert seats(followed) is None
    gone = {"source": "host=127.0.0.1 port=1 dbname=gone", "target": followed.target}
    asked = CommandOptions(**gone, directory=followed.directory)
    with pytest.raises(ConnectionLost):
        asked.follow_settings()
    with pytest.raises(ConnectionLost):  # what they leave out, only the source says
        replace(asked, filters=tmp_path / "filters.ini").follow_settings(needs_source=False)
    with caplog.at_level(logging.WARNING, logger="millrace"):
        away = asked.follow_settings(needs_source=False)
    assert "what was received is applied all the same" in caplog.text
    result = apply_spooled(away, followed.engine, followed.reporter, waits=False)
    assert (result.reached_endpos, result.sequences) == (False, None)
    assert seats(followed) == [101]


def test_a_task_that_does_not_see_the_sentinel_ends_before_an_end_position_set_meanwhile(
    followed: Followed,
) -> None:
    engine = DirectEngine(is_local=False)
    followed.engine = engine
    first = lsn_of(followed.source, "INSERT INTO seat VALUES (101, 101)")
    end: list[int] = []

    def change_the_end(description: str) -> None:
        """While the first task starts: the end is set, and more than that is received."""
        engine.before_task = lambda description: None
        with Sentinel(followed.directory) as sentinel:
            assert sentinel.try_endpos(first - 1) is not None
            end.append(lsn_of(followed.source, "INSERT INTO seat VALUES (102, 102)"))
            beyond = lsn_of(followed.source, "INSERT INTO seat VALUES (103, 103)")
            wait_for(lambda: (sentinel.read().flushed_lsn or 0) >= beyond)
            assert sentinel.try_endpos(end[0]) is None

    engine.before_task = change_the_end
    running = followed.start()
    running.join(DEADLINE_SECONDS)
    assert followed.result.reached_endpos
    assert seats(followed) == [101, 102]


def test_following_goes_on_after_a_cutover_that_found_a_difference(followed: Followed) -> None:
    execute(followed.target, "UPDATE seat SET place = -1 WHERE id = 1")
    compare = CompareSettings(Route(Dsn.parse(followed.source), Dsn.parse(followed.target)))
    ended = cutover(followed.settings(), compare, followed.engine, followed.reporter)
    assert not ended.is_equal
    running = followed.start()
    lsn_of(followed.source, "INSERT INTO seat VALUES (101, 101)")
    wait_for(lambda: seats(followed) == [101])
    followed.set_endpos(followed.end())
    running.join(DEADLINE_SECONDS)
    # A cut-over that can't even compare takes its end back, too; one in the future stays.
    later = followed.end() + (1 << 30)
    for before, after in ((followed.end(), None), (later, later)):
        followed.set_endpos(before)
        with pytest.raises(WorkDirError, match="apply-jobs"):
            cutover(followed.settings(apply_jobs=2), compare, followed.engine, followed.reporter)
        with Sentinel(followed.directory) as sentinel:
            assert sentinel.read().endpos == after


def test_a_start_that_is_refused_leaves_no_end_position(
    followed: Followed, tmp_path: Path, source_db: str, target_db: str
) -> None:
    followed.follow()
    followed.set_endpos(None)
    end = followed.end()
    settings = followed.settings(endpos=end, apply_jobs=2)
    with pytest.raises(WorkDirError, match="apply-jobs"):
        follow(settings, followed.engine, followed.reporter)
    with Sentinel(followed.directory) as sentinel:
        assert sentinel.read().endpos is None

    source, target, directory = Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "second"
    slot = f"{followed.slot}_second"

    def prepare() -> None:
        prepare_source(source, slot, "pgoutput", None)

    with hold(directory, source, slot=slot, before_slot=prepare):
        settings = rerouted(followed.settings(endpos=followed.end()), directory=directory)
        with pytest.raises(PreflightError):
            clone_and_follow(
                CloneSettings(Route(source, target, directory)),
                settings,
                SlotSettings(slot),
                followed.engine,
                followed.reporter,
                on_cloned=lambda result: None,
            )
        with Sentinel(directory) as sentinel:
            assert sentinel.read().endpos is None
    with psycopg.connect(source_db, autocommit=True) as connection:
        cleanup(connection, None, slot)
