"""A part: copied exactly once, whoever dies, freezes or comes twice."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from tests.fixtures.processes.copy_child import CopyChild
from tests.fixtures.wait import wait_for

from millrace import failpoint, retry
from millrace.clone.copy_task import CopyTask, Outcome, copy_parts, part_statements
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, ServerError, SnapshotLost, WorkDirError
from millrace.postgres import run_record as record
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.snapshot.export import HeldSnapshot, open_snapshot
from millrace.split.plan import plan_parts

ROWS = 1000
SECRET = "s3cret"


class Bench:
    """A source under a snapshot and a target with the same empty table."""

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = Dsn.parse(source), Dsn.parse(target)
        self.stack = ExitStack()
        self.at_source = self.stack.enter_context(connect(self.source, "test"))
        self.at_target = self.stack.enter_context(connect(self.target, "test"))
        self.snapshot: HeldSnapshot | None = None
        self.epoch = 0

    def create(self, ddl: str, fill: str, *, target_ddl: str | None = None) -> None:
        """The table on both sides, its rows on the source; then the snapshot is taken."""
        self.at_source.execute(ddl.encode())
        self.at_source.execute(fill.encode())
        self.at_target.execute((target_ddl or ddl).encode())
        self.snapshot = self.stack.enter_context(open_snapshot(self.source))
        self.epoch = record.open_run(self.at_target, record.RunRecord("run1", "the source"))

    def task(self, cuts: tuple[int, ...] = ()) -> CopyTask:
        assert self.snapshot is not None
        tables = catalog.read_tables(self.at_source)
        return CopyTask(
            run_id="run1",
            epoch=self.epoch,
            source=self.source,
            target=self.target,
            snapshot=self.snapshot.id,
            encoding="UTF8",
            parts=tuple(
                part_statements(table, part) for table in tables for part in plan_parts(table, cuts)
            ),
        )

    def stored(self, query: str = "SELECT count(*), count(DISTINCT id) FROM public.t") -> Any:
        return self.at_target.execute(query.encode()).fetchone()

    def records(self) -> list[tuple[Any, ...]]:
        return self.at_target.execute(
            "SELECT part, rows, attempt FROM millrace.copied_part ORDER BY table_oid, part"
        ).fetchall()

    def assert_copied_once(self, attempt: int = 0) -> None:
        assert self.stored() == (ROWS, ROWS)
        assert self.records() == [(1, ROWS, attempt)]


@pytest.fixture(scope="module")
def databases(source_cluster: Cluster, target_cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Made once: there are many tests, and each empties them."""
    yield source_cluster.create_database("part"), target_cluster.create_database("part")
    for cluster in (source_cluster, target_cluster):
        cluster.drop_database("part")


@pytest.fixture
def bench(databases: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(failpoint, "_hits", failpoint.Counter())
    bench = Bench(*databases)
    with bench.stack:
        for connection in (bench.at_source, bench.at_target):
            connection.execute("DROP SCHEMA IF EXISTS public, millrace CASCADE")
            connection.execute("CREATE SCHEMA public")
        yield bench


@pytest.fixture
def filled(bench: Bench) -> Bench:
    bench.create(
        "CREATE TABLE public.t (id int PRIMARY KEY, v text)",
        f"INSERT INTO public.t SELECT g, 'row ' || g FROM generate_series(1, {ROWS}) g",
    )
    return bench


@pytest.fixture
def start() -> Iterator[Callable[..., CopyChild]]:
    children: list[CopyChild] = []

    def start(task: CopyTask, **how: Any) -> CopyChild:
        children.append(CopyChild(task, **how))
        return children[-1]

    yield start
    for child in children:
        child.close()


def only(outcomes: list[Outcome]) -> Outcome:
    assert len(outcomes) == 1
    return outcomes[0]


def error_of(outcomes: list[Outcome]) -> MillraceError:
    error = only(outcomes).error
    assert error is not None
    return error


def waiting_for_locks(connection: psycopg.Connection[Any], locktype: str) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
        " WHERE l.locktype = %s AND NOT l.granted AND d.datname = current_database()",
        (locktype,),
    ).fetchone()
    return int(row[0]) if row else 0


def test_whole_table_arrives_with_its_record(filled: Bench) -> None:
    outcome = only(copy_parts(filled.task()))
    assert outcome.error is None
    assert (outcome.rows, outcome.label) == (ROWS, "public.t")
    filled.assert_copied_once()
    assert filled.stored("SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM public.t t") == (
        filled.at_source.execute(
            "SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM public.t t"
        ).fetchone()
    )


def test_parts_of_a_split_table_make_it_whole(filled: Bench) -> None:
    outcomes = copy_parts(filled.task(cuts=(100, 101, 900)))
    assert [outcome.rows for outcome in outcomes] == [99, 1, 799, 101]
    assert filled.stored() == (ROWS, ROWS)
    assert [part for part, _, _ in filled.records()] == [1, 2, 3, 4]


def test_same_part_twice_at_once_is_copied_once(
    filled: Bench, start: Callable[..., CopyChild]
) -> None:
    """The source's table is locked until both are under way: one in COPY, one at the door."""
    task = filled.task()
    with psycopg.connect(filled.source.conninfo()) as holder:
        holder.execute("LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE")
        children = [start(task), start(task)]
        wait_for(lambda: waiting_for_locks(filled.at_source, "relation") == 1)
        wait_for(lambda: waiting_for_locks(filled.at_target, "advisory") == 1)
    outcomes = [only(child.outcomes()) for child in children]
    filled.assert_copied_once()
    rounded = {dataclasses.replace(o, seconds=round(o.seconds, 5)) for o in outcomes}
    assert len(rounded) == 1, "both know the same"


def test_part_that_is_done_is_not_touched_again(filled: Bench) -> None:
    task = filled.task()
    first = only(copy_parts(task))
    filled.at_target.execute("CREATE TABLE public.before AS SELECT ctid AS place, * FROM public.t")
    again = only(copy_parts(task, attempt=3))
    assert (again.rows, again.bytes) == (first.rows, first.bytes)
    filled.assert_copied_once()
    moved = "SELECT count(*) FROM public.t JOIN public.before b USING (id) WHERE t.ctid <> b.place"
    assert filled.stored(moved) == (0,)


@pytest.mark.parametrize("point", ["copy.begin", "copy.before-commit", "copy.after-commit"])
def test_lost_connection_is_made_anew_under_the_same_snapshot(
    filled: Bench, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, f"{point}=error*1")
    filled.at_source.execute("INSERT INTO public.t VALUES (-1, 'after the snapshot')")
    filled.at_source.execute("UPDATE public.t SET v = 'after the snapshot' WHERE id = 5")
    filled.at_source.execute("DELETE FROM public.t WHERE id = 6")
    assert only(copy_parts(filled.task())).error is None
    assert failpoint._hits[point] >= 1
    filled.assert_copied_once()
    assert filled.stored("SELECT min(id), max(id) FROM public.t") == (1, ROWS)
    assert filled.stored("SELECT v FROM public.t WHERE id = 5") == ("row 5",)


def test_connection_that_is_lost_each_time_is_an_error(
    filled: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, "copy.before-commit=error")
    assert "failpoint" in error_of(copy_parts(filled.task())).message
    assert failpoint._hits["copy.before-commit"] == retry.ATTEMPTS
    assert filled.stored() == (0, 0)
    assert filled.records() == []


@pytest.mark.parametrize("point", ["copy.begin", "copy.before-commit", "copy.after-commit"])
@pytest.mark.parametrize("cuts", [(), (500,)], ids=["whole", "split"])
def test_killed_task_leaves_all_or_nothing_and_its_successor_does_the_rest(
    filled: Bench, start: Callable[..., CopyChild], point: str, cuts: tuple[int, ...]
) -> None:
    task = filled.task(cuts)
    assert start(task, failpoints=f"{point}=kill").exit_status() == -signal.SIGKILL
    there, copied = filled.stored()[0], filled.records()
    assert there == sum(rows for _, rows, _ in copied), "a part and its record go together"
    assert len(copied) == (point == "copy.after-commit")

    outcomes = copy_parts(task, attempt=1)
    assert [outcome.error for outcome in outcomes] == [None] * len(task.parts)
    assert sum(outcome.rows for outcome in outcomes) == ROWS
    assert filled.stored() == (ROWS, ROWS)
    assert len(filled.records()) == len(task.parts)


@pytest.mark.parametrize("point", ["copy.begin", "copy.before-commit"])
def test_frozen_task_is_evicted_and_changes_nothing_when_it_wakes(
    filled: Bench, start: Callable[..., CopyChild], point: str
) -> None:
    task = filled.task()
    frozen = start(task, failpoints=f"{point}=stop*1")
    frozen.wait_until_frozen()
    assert only(copy_parts(task, attempt=1)).error is None
    filled.assert_copied_once(attempt=1)
    frozen.process.send_signal(signal.SIGCONT)
    late = only(frozen.outcomes())
    assert (late.error, late.rows) == (None, ROWS)
    filled.assert_copied_once(attempt=1)


def test_first_attempt_evicts_nobody(filled: Bench, start: Callable[..., CopyChild]) -> None:
    """Attempts with the number 0 wait for each other: neither was given up."""
    task = filled.task()
    frozen = start(task, failpoints="copy.begin=stop*1")
    frozen.wait_until_frozen()
    other = start(task)
    wait_for(lambda: waiting_for_locks(filled.at_target, "advisory") == 1)
    frozen.process.send_signal(signal.SIGCONT)
    assert [only(child.outcomes()).rows for child in (frozen, other)] == [ROWS, ROWS]
    filled.assert_copied_once()


def test_eviction_spares_the_other_parts(filled: Bench, start: Callable[..., CopyChild]) -> None:
    whole = filled.task(cuts=(500,))
    one, other = (dataclasses.replace(whole, parts=(part,)) for part in whole.parts)
    frozen = start(one, failpoints="copy.before-commit=stop*1")
    frozen.wait_until_frozen()
    assert only(copy_parts(other, attempt=1)).error is None
    frozen.process.send_signal(signal.SIGCONT)
    assert only(frozen.outcomes()).error is None
    assert filled.records() == [(1, 499, 0), (2, 501, 1)]


def test_task_of_an_earlier_epoch_is_refused(filled: Bench) -> None:
    stale = filled.task()
    assert (
        record.open_run(filled.at_target, record.RunRecord("run1", "the source")) == stale.epoch + 1
    )
    error = error_of(copy_parts(stale))
    assert isinstance(error, WorkDirError)
    assert "run1" in error.message
    assert filled.stored() == (0, 0)
    assert filled.records() == []


@pytest.mark.parametrize("cuts", [(), (500,)], ids=["whole", "split"])
def test_full_disk_is_not_tried_again(bench: Bench, cuts: tuple[int, ...]) -> None:
    bench.create(
        "CREATE TABLE public.t (id int PRIMARY KEY, v text)",
        f"INSERT INTO public.t SELECT g, 'x' FROM generate_series(1, {ROWS}) g",
    )
    bench.at_target.execute(
        b"""CREATE SEQUENCE public.tries;
        CREATE FUNCTION public.full() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM nextval('public.tries');
            RAISE EXCEPTION 'could not extend file: No space left' USING ERRCODE = '53100';
        END $$;
        CREATE TRIGGER full_disk BEFORE INSERT ON public.t
            FOR EACH ROW EXECUTE FUNCTION public.full()"""
    )
    task = dataclasses.replace(bench.task(cuts), parts=bench.task(cuts).parts[:1])
    error = error_of(copy_parts(task))
    assert error.facts["sqlstate"] == "53100"
    assert "disk" in error.hint
    assert bench.stored("SELECT last_value FROM public.tries") == (1,)
    assert bench.records() == []


def test_snapshot_that_is_gone_is_told_apart(filled: Bench) -> None:
    task = filled.task()
    assert filled.snapshot is not None
    filled.snapshot.close()
    error = error_of(copy_parts(task))
    assert isinstance(error, SnapshotLost)
    assert "public.t" in error.message
    assert error.hint
    assert filled.stored() == (0, 0)


def test_dropped_table_is_told_with_a_hint(filled: Bench) -> None:
    task = filled.task()
    filled.at_source.execute("DROP TABLE public.t")
    error = error_of(copy_parts(task))
    assert isinstance(error, ServerError)
    assert error.facts["sqlstate"] == "42P01"
    assert "dropped" in error.hint
    assert "public.t" in error.message
    assert filled.stored() == (0, 0)


def test_table_missing_on_the_target_is_not_blamed_on_the_source(filled: Bench) -> None:
    task = filled.task()
    filled.at_target.execute("DROP TABLE public.t")
    error = error_of(copy_parts(task))
    assert error.facts["sqlstate"] == "42P01"
    assert "target" in error.message
    assert "source" not in error.hint


REFUSED = {
    "domain": (
        "CREATE DOMAIN public.d AS text; CREATE TABLE public.t (id int, v public.d)",
        f"CREATE DOMAIN public.d AS text CONSTRAINT polite CHECK (VALUE <> '{SECRET}');"
        " CREATE TABLE public.t (id int, v public.d)",
        f"'{SECRET}'",
        "23514",
    ),
    "check": (
        "CREATE TABLE public.t (id int, v text)",
        f"CREATE TABLE public.t (id int, v text, CONSTRAINT polite CHECK (v <> '{SECRET}'))",
        f"'{SECRET}'",
        "23514",
    ),
    "unique": (
        "CREATE TABLE public.t (id int, v text)",
        "CREATE TABLE public.t (id int, v text UNIQUE)",
        f"'{SECRET}'",
        "23505",
    ),
    "too long": (
        "CREATE TABLE public.t (id int, v text)",
        "CREATE TABLE public.t (id int, v varchar(3))",
        f"'{SECRET}'",
        "22001",
    ),
    "enum": (
        f"CREATE TYPE public.e AS ENUM ('{SECRET}'); CREATE TABLE public.t (id int, v public.e)",
        "CREATE TYPE public.e AS ENUM ('x'); CREATE TABLE public.t (id int, v public.e)",
        f"'{SECRET}'",
        "22P02",
    ),
    "enum array, as text": (
        f"CREATE TYPE public.e AS ENUM ('{SECRET}'); CREATE TABLE public.t (id int, v public.e[])",
        "CREATE TYPE public.e AS ENUM ('x'); CREATE TABLE public.t (id int, v public.e[])",
        f"'{{{SECRET}}}'",
        "22P02",
    ),
    "number, as text": (
        "CREATE TYPE public.c AS (n int8); CREATE TABLE public.t (id int, v public.c)",
        "CREATE TYPE public.c AS (n int4); CREATE TABLE public.t (id int, v public.c)",
        "row(98765432109)::public.c",
        "22003",
    ),
    "null": (
        "CREATE TABLE public.t (id int, v text)",
        "CREATE TABLE public.t (id int, v text NOT NULL)",
        "NULL",
        "23502",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_refused_row_is_told_with_its_table_and_without_its_values(bench: Bench, kind: str) -> None:
    ddl, target_ddl, value, sqlstate = REFUSED[kind]
    bench.create(
        ddl,
        f"INSERT INTO public.t SELECT g, {value} FROM generate_series(1, 2) g",
        target_ddl=target_ddl,
    )
    error = error_of(copy_parts(bench.task()))
    assert error.facts["sqlstate"] == sqlstate
    assert "public.t" in error.message
    told = f"{error} {error.message} {error.hint} {error.to_dict()}"
    assert SECRET not in told
    assert "98765432109" not in told
    assert bench.stored("SELECT count(*) FROM public.t") == (0,)
    assert bench.records() == []


def test_bytes_that_are_not_utf8_are_told_with_their_table_and_without_their_values(
    source_cluster: Cluster, bench: Bench
) -> None:
    source = source_cluster.create_database("ascii_source", encoding="SQL_ASCII")
    bench = Bench(source, bench.target.conninfo())
    try:
        with bench.stack:
            bench.create(
                "CREATE TABLE public.t (id int, v text)",
                rf"INSERT INTO public.t VALUES (1, 'fine'), (2, E'caf\xe9 {SECRET}')",
            )
            error = error_of(copy_parts(bench.task()))
            assert error.facts["sqlstate"] == "22021"
            assert "public.t" in error.message
            assert "encoding" in error.hint
            told = f"{error.message} {error.hint} {error.to_dict()}"
            assert SECRET not in told
            assert "0xe9" not in told
            assert bench.stored("SELECT count(*) FROM public.t") == (0,)
    finally:
        source_cluster.drop_database("ascii_source")


def test_failed_part_does_not_stop_the_others(bench: Bench) -> None:
    bench.create(
        "CREATE TABLE public.a (id int); CREATE TABLE public.t (id int);"
        " CREATE TABLE public.z (id int)",
        "INSERT INTO public.a VALUES (1); INSERT INTO public.t VALUES (1), (2);"
        " INSERT INTO public.z VALUES (1), (2), (3)",
    )
    bench.at_target.execute("ALTER TABLE public.t ADD CHECK (id <> 2)")
    outcomes = copy_parts(bench.task())
    assert [(o.label, o.rows, o.error is None) for o in outcomes] == [
        ("public.a", 1, True),
        ("public.t", 0, False),
        ("public.z", 3, True),
    ]


def test_outcome_with_an_error_is_the_same_after_pickle(filled: Bench) -> None:
    task = filled.task()
    filled.at_source.execute("DROP TABLE public.t")
    outcome = only(copy_parts(task))
    again = pickle.loads(pickle.dumps(outcome))
    assert outcome.error is not None
    assert type(again.error) is type(outcome.error)
    assert again.error.to_dict() == outcome.error.to_dict()
    assert again.error.facts["table"] == "public.t"
    assert str(again.error) == str(outcome.error)


def test_task_is_the_same_after_pickle_and_shows_no_password(filled: Bench) -> None:
    task = dataclasses.replace(filled.task(), source=Dsn.parse(f"host=db password={SECRET}"))
    assert pickle.loads(pickle.dumps(task)) == task
    assert SECRET not in repr(task)


def test_records_can_be_read_and_leave_no_trace_when_dropped(filled: Bench) -> None:
    copy_parts(filled.task())
    assert [part.rows for _, part in record.read_copied_parts(filled.at_target, "run1")] == [ROWS]
    record.drop_records(filled.at_target, "run1")
    assert filled.stored("SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'") == (0,)
    assert filled.stored() == (ROWS, ROWS)
