"""Five thousand small tables: a plan of few tasks, and not a table lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millrace.clone.plan import plan_packs
from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.name import Naming
from millrace.postgres.program.embedded import open_cluster
from millrace.route import Route
from millrace.spark.session import Engine

TABLES = 5000
TABLES_AT_ONCE = 500  # in one transaction

# On the source, the snapshot's holder and pg_dump each lock every table. The target gets by with
# what every server has.
MANY_LOCKS = {"max_locks_per_transaction": "256"}

# Every fifth has a key and a TOAST table; the others are as cheap as tables come.
CREATE = """
DO $$
BEGIN
    FOR i IN {first}..{last} LOOP
        EXECUTE format(
            'CREATE TABLE many.t%s (id int %s, name %s, at timestamptz)', i,
            CASE WHEN i % 5 = 0 THEN 'PRIMARY KEY' END,
            CASE WHEN i % 5 = 0 THEN 'text' ELSE 'varchar(40)' END);
        EXECUTE format(
            'INSERT INTO many.t%s SELECT n, %L || n, now() FROM generate_series(1, %s) AS n',
            i, 'table ' || i || ' row ', i % 7);
    END LOOP;
END $$"""


@pytest.fixture(scope="module")
def many_db() -> Iterator[str]:
    with open_cluster(16, settings=MANY_LOCKS) as source:
        uri = source.create_database("many")
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA many")
            for first in range(1, TABLES + 1, TABLES_AT_ONCE):
                statement = CREATE.format(first=first, last=first + TABLES_AT_ONCE - 1)
                connection.execute(statement.encode())
        yield uri


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["many", "few"], ids=["same name", "renamed"])
def test_five_thousand_small_tables_arrive_in_few_tasks(
    many_db: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path, schema: str
) -> None:
    settings = CloneSettings(
        Route(Dsn.parse(many_db), Dsn.parse(target_db), tmp_path, naming=Naming({"many": schema})),
        skip_vacuum=schema != "many",
    )
    result = clone(settings, engine, reporter)
    assert result.summary is not None
    for step in result.summary.steps:
        print(f"{float(str(step['seconds'])):6.2f} s  {step['name']}")  # noqa: T201
    print(f"{result.summary.seconds:6.2f} s  the whole run")  # noqa: T201

    assert len(result.summary.tables) == TABLES
    packs = plan_packs(result.plan.every_part, jobs=settings.table_jobs)
    assert len(packs) <= 32
    assert max(len(pack.parts) for pack in packs) < TABLES / settings.table_jobs
    sums = checksums(many_db)
    assert len(sums) == TABLES
    assert checksums(target_db, schema) == sums
    assert result.summary.rows == sum(rows for _, rows, _ in sums)
    assert keys(target_db, schema) == keys(many_db)
    assert len(keys(many_db)) == TABLES / 5


def checksums(uri: str, schema: str = "many") -> list[tuple[Any, ...]]:
    """Name, count and checksum of every table."""
    found: list[tuple[Any, ...]] = []
    with psycopg.connect(uri) as connection:
        names = [
            row[0]
            for row in connection.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'r'"
                f" AND relnamespace = '{schema}'::regnamespace ORDER BY 1".encode()
            )
        ]
        for at in range(0, len(names), TABLES_AT_ONCE):
            query = " UNION ALL ".join(
                f"SELECT '{name}', count(*), sum(hashtextextended(t::text, 0))"
                f" FROM {schema}.{name} t"
                for name in names[at : at + TABLES_AT_ONCE]
            )
            found += connection.execute(query.encode()).fetchall()
    return sorted(found)


def keys(uri: str, schema: str = "many") -> list[tuple[Any, ...]]:
    """The primary keys, valid and in use."""
    with psycopg.connect(uri) as connection:
        return connection.execute(
            "SELECT conname, pg_get_constraintdef(c.oid), indisvalid FROM pg_constraint AS c"
            " JOIN pg_index ON indexrelid = conindid WHERE contype = 'p'"
            f" AND connamespace = '{schema}'::regnamespace ORDER BY 1".encode()
        ).fetchall()
