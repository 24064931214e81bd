"""Indexes, constraints and views of a clone: each as soon as it can be, none before."""

from __future__ import annotations

import time

import psycopg
from tests.fixtures.cloning import Cloner
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.clone.progress import Progress


class HoldsOneTable:
    """A reporter that keeps one table from being filled until another has its indexes."""

    def __init__(self, target: str, held: str, awaited: list[str]) -> None:
        self._connection = psycopg.connect(target)
        self._held = held
        self._awaited = awaited
        self._deadline: float | None = None
        self.seen = False

    def update(self, progress: Progress) -> None:
        if self._connection.closed:
            return
        if self._deadline is None and progress.step == "wait for Spark":
            # The tables are there, and no task has begun.
            self._connection.execute(f"LOCK TABLE {self._held} IN ACCESS SHARE MODE".encode())
            self._deadline = time.monotonic() + DEADLINE_SECONDS
        elif self._deadline is not None:
            found = self._connection.execute(
                "SELECT conname FROM pg_constraint WHERE contype IN ('p', 'u')"
                " UNION SELECT indexname FROM pg_indexes"
            ).fetchall()
            self.seen = {(name,) for name in self._awaited} <= set(found)
            if self.seen or time.monotonic() > self._deadline:
                count = f"SELECT count(*) FROM {self._held}".encode()
                assert self._connection.execute(count).fetchone() == (0,)
                self._connection.close()


def test_indexes_of_a_copied_table_are_built_while_another_is_still_copied(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(
        source_db,
        "CREATE TABLE big (id int PRIMARY KEY, filler text STORAGE PLAIN)",
        "INSERT INTO big SELECT i, repeat('x', 7000) FROM generate_series(1, 1200) AS i",
        "CREATE TABLE small (id int PRIMARY KEY, name text UNIQUE)",
        "INSERT INTO small SELECT i, 'name ' || i FROM generate_series(1, 100) AS i",
        "CREATE INDEX small_lower ON small (lower(name))",
    )
    reporter = HoldsOneTable(target_db, "big", ["small_pkey", "small_name_key", "small_lower"])
    cloner(source_db, target_db, reporter=reporter)
    assert reporter.seen
    assert rows(target_db, "SELECT count(*) FROM big") == [(1200,)]


CONSTRAINTS = """
SELECT conname, contype, condeferrable, condeferred, pg_get_constraintdef(c.oid), indimmediate,
    indnullsnotdistinct
FROM pg_constraint AS c JOIN pg_index ON indexrelid = conindid
WHERE contype IN ('p', 'u', 'x') AND conrelid = 'keys'::regclass ORDER BY conname"""


# An index that was there before its constraint was made by another transaction.
BUILT_BEFORE = """
SELECT conname, a.xmin <> c.xmin FROM pg_constraint AS c
JOIN pg_attribute AS a ON attrelid = conindid AND attnum = 1
WHERE contype IN ('p', 'u', 'x') AND conrelid = 'keys'::regclass ORDER BY conname"""


def test_keys_are_made_from_built_indexes_and_stay_deferrable(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(
        source_db,
        "CREATE TABLE keys (id int, d int, i int, n int, inc int, during int4range,"
        " CONSTRAINT primary_deferred PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED,"
        " CONSTRAINT unique_deferrable UNIQUE (d) DEFERRABLE,"
        " CONSTRAINT unique_immediate UNIQUE (i),"
        " CONSTRAINT unique_nulls UNIQUE NULLS NOT DISTINCT (n),"
        " CONSTRAINT unique_include UNIQUE (inc) INCLUDE (d),"
        " CONSTRAINT whole EXCLUDE USING gist (during WITH &&))",
        "INSERT INTO keys SELECT i, i, i, i, i, int4range(i, i + 1)"
        " FROM generate_series(1, 100) AS i",
    )
    cloner(source_db, target_db)
    assert rows(target_db, CONSTRAINTS) == rows(source_db, CONSTRAINTS)
    assert rows(target_db, BUILT_BEFORE) == [
        ("primary_deferred", True),
        ("unique_deferrable", True),
        ("unique_immediate", True),
        ("unique_include", True),
        ("unique_nulls", True),
        ("whole", False),
    ]
    # Deferred until the commit: two rows change places.
    execute(target_db, "UPDATE keys SET id = 101 - id")


def test_foreign_keys_in_circles_do_not_deadlock(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    numbers = range(6)
    columns = ", ".join(f"r{n} int" for n in numbers)
    execute(
        source_db,
        *(f"CREATE TABLE f{n} (id int PRIMARY KEY, {columns})" for n in numbers),
        *(
            f"INSERT INTO f{n} SELECT i, i, i, i, i, i, i FROM generate_series(1, 2000) AS i"
            for n in numbers
        ),
        *(
            f"ALTER TABLE f{n} ADD CONSTRAINT f{n}_r{m} FOREIGN KEY (r{m}) REFERENCES f{m}"
            for n in numbers
            for m in numbers
        ),
    )
    result = cloner(source_db, target_db, restore_jobs=8)
    assert result.summary is not None
    assert result.summary.foreign_keys == 36
    made = "SELECT conname, convalidated FROM pg_constraint WHERE contype = 'f' ORDER BY 1"
    assert rows(target_db, made) == [(f"f{n}_r{m}", True) for n in numbers for m in numbers]
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert rows(target_db, deadlocks) == [(0,)]


def test_materialized_views_are_filled_in_the_order_of_their_dependencies(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(
        source_db,
        "CREATE TABLE base (n int)",
        "INSERT INTO base SELECT generate_series(1, 100)",
        # By name and by OID the last is the first.
        "CREATE MATERIALIZED VIEW a AS SELECT 0::bigint AS n",
        "CREATE MATERIALIZED VIEW z AS SELECT sum(n) AS n FROM base",
        "CREATE VIEW m AS SELECT n + 1 AS n FROM z",
        "DROP MATERIALIZED VIEW a",
        "CREATE MATERIALIZED VIEW a AS SELECT n * 2 AS n FROM m",
        "CREATE UNIQUE INDEX a_n ON a (n)",
        "CREATE MATERIALIZED VIEW empty AS SELECT n FROM a WITH NO DATA",
    )
    cloner(source_db, target_db)
    assert rows(target_db, "SELECT n FROM a") == [(10102,)]
    assert rows(target_db, "SELECT indexname FROM pg_indexes WHERE tablename = 'a'") == [("a_n",)]
    assert rows(target_db, "SELECT matviewname, ispopulated FROM pg_matviews ORDER BY 1") == [
        ("a", True),
        ("empty", False),
        ("z", True),
    ]
