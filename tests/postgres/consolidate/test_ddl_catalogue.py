"""Two hundred statements, each among rows of its table: structure and rows are equal at the end."""

from __future__ import annotations

from pathlib import Path

import psycopg
from tests.fixtures.ddl.ddl_catalogue import CASES, SHARED, Case
from tests.fixtures.ddl.ddl_structure import find_differences
from tests.fixtures.ddl.ddl_warehouse import open_warehouse

from millrace.ddl.history import Status
from millrace.name import Naming
from millrace.postgres.program.embedded import Cluster

TABLE = "CREATE TABLE {t} (id int PRIMARY KEY, a int, b text DEFAULT 'd', c timestamptz);"
FILL = "INSERT INTO {t} SELECT i, i, 'b' || i, '2020-01-01' FROM generate_series(1, 5) i;"
SCHEMAS = ("public", "other")


def test_every_statement_of_the_catalogue_is_replayed_among_its_rows(
    source_cluster: Cluster, target_db: str, receivers: None, tmp_path: Path
) -> None:
    with open_warehouse(source_cluster, target_db, tmp_path, SHARED) as warehouse:
        with warehouse.running():
            warehouse.wait()
            with psycopg.connect(warehouse.source, autocommit=True) as connection:
                for number, one in enumerate(CASES):
                    for text in transactions(one, f"t{number}"):
                        connection.execute(text.encode())
            warehouse.wait()
        statuses = {one.status for one in warehouse.history()}
        assert statuses == {Status.REPLAYED, Status.LEFT_OUT}
        with psycopg.connect(warehouse.source) as connection:
            rows = connection.execute("SELECT nspname FROM pg_namespace").fetchall()
        naming = Naming({name: f"shop_{name}" for (name,) in rows if not name.startswith("pg_")})
        found = find_differences(warehouse.source, target_db, naming)
        # The source keeps the bounds of what it detached CONCURRENTLY as a check.
        assert [one for one in found if "_p_a_check" not in one] == []


def transactions(one: Case, table: str) -> list[str]:
    """What is sent to the source for a case, one string after the other."""
    first = one.first.replace("{t}", table)
    statement = one.statement.replace("{t}", table).replace("{{", "{").replace("}}", "}")
    then = one.then.replace("{t}", table)
    texts = [(TABLE + FILL).replace("{t}", table)]
    texts += [first] if first else []
    texts.append(f"INSERT INTO {table} (id) VALUES (10)")
    inside = f"INSERT INTO {then} (id) VALUES (11);" if then else ""
    if one.is_alone:
        texts.append(statement)
    else:
        texts.append(
            f"BEGIN; UPDATE {table} SET b = 'u' WHERE id = 1; {statement}; {inside} COMMIT"
        )
    texts += [f"INSERT INTO {then} (id) VALUES (12)"] if then else []
    return texts
