"""`compare data` and `compare schema` with real servers and real tasks."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures import create_museum_roles, load_museum
from tests.fixtures.processes.program import MILLRACE

from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare import run as compare_run
from millrace.compare import task as compare
from millrace.compare.rows import RowsTask, compare_rows
from millrace.compare.run import CompareSettings, compare_data, compare_schema
from millrace.compare.task import (
    CompareTask,
    RowDifference,
    TableComparison,
    compare_parts,
    plan_compare,
)
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, InvariantError, ServerError
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.compared import read_compared_relations
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.snapshot.export import open_snapshot
from millrace.spark.session import TASK_ATTEMPTS, Engine


def run(uri: str, *statements: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def settings_for(source: str, target: str) -> CompareSettings:
    return CompareSettings(Route(Dsn.parse(source), Dsn.parse(target)), rows=True)


def compared(source: str, target: str, engine: Engine) -> dict[str, TableComparison]:
    return {one.label: one for one in compare_data(settings_for(source, target), engine)}


def differing(source: str, target: str, engine: Engine) -> list[str]:
    found = compared(source, target, engine)
    return sorted(label for label, one in found.items() if not one.is_equal)


def test_cloned_museum_has_no_difference_in_schema_and_data(
    source_db: str, target_db: str, engine: Engine, reporter: object, tmp_path: Path
) -> None:
    load_museum(source_db)
    create_museum_roles(target_db)
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    clone(CloneSettings(Route(source, target, tmp_path / "work")), engine, reporter)  # type: ignore[arg-type]

    schema = compare_schema(Route(source, target))
    assert (schema.differences, schema.notes) == ((), ())
    assert sum(schema.objects.values()) > 2500
    data = compared(source_db, target_db, engine)
    assert [label for label, one in data.items() if not one.is_equal] == []
    assert len(data) > 100
    # Stored generated columns are compared; partitions that may be dealt otherwise, at their root.
    assert data["museum.by_enum_hash"].source is not None
    assert "museum.by_enum_hash_0" not in data

    run(
        target_db,
        "ALTER TABLE museum.generated ALTER middle DROP EXPRESSION",
        "UPDATE museum.generated SET middle = 'other' WHERE id = 77",
        "DELETE FROM museum.by_enum_hash WHERE id = 5",
    )
    data = compared(source_db, target_db, engine)
    assert {label: one.rows for label, one in data.items() if not one.is_equal} == {
        "museum.generated": (RowDifference(("77",), "different"),),
        "museum.by_enum_hash": (
            RowDifference(data["museum.by_enum_hash"].rows[0].key, "missing on target"),
        ),
    }


ORDERS = """
CREATE TABLE orders (id bigint PRIMARY KEY, t text, j json);
INSERT INTO orders SELECT i, 'order ' || i, '{"a": 1,  "b": 2}' FROM generate_series(1, 50000) AS i;
CREATE TABLE pairs (a text COLLATE "C", b date, n int, UNIQUE (b, a), UNIQUE (n));
ALTER TABLE pairs ALTER a SET NOT NULL, ALTER b SET NOT NULL;
INSERT INTO pairs SELECT 'é' || i % 100, date '2024-01-01' + i, i
FROM generate_series(1, 3000) AS i;
"""


def test_rows_that_differ_are_named_by_their_keys(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(source_db, ORDERS)
    run(target_db, ORDERS)
    assert differing(source_db, target_db, engine) == []
    run(
        target_db,
        "DELETE FROM orders WHERE id = 31415",
        "UPDATE orders SET t = 'changed' WHERE id = 27182",
        "INSERT INTO orders VALUES (99999, 'new')",
        """UPDATE orders SET j = '{"a": 1, "b": 2}' WHERE id = 1""",
        "DELETE FROM pairs WHERE n = 5",
    )
    found = compared(source_db, target_db, engine)
    orders, pairs = found["public.orders"], found["public.pairs"]
    assert orders.rows == (
        RowDifference(("1",), "different"),
        RowDifference(("27182",), "different"),
        RowDifference(("31415",), "missing on target"),
        RowDifference(("99999",), "extra on target"),
    )
    assert (orders.key, orders.rows_complete) == (("id",), True)
    assert pairs.key == ("b", "a")
    assert pairs.rows == (RowDifference(("2024-01-06", "é5"), "missing on target"),)


def test_no_more_rows_are_named_than_asked_for(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(source_db, ORDERS)
    run(target_db, ORDERS, "UPDATE orders SET t = t || '!'")
    settings = replace(settings_for(source_db, target_db), most_rows=7, tables=("public.orders",))
    (found,) = compare_data(settings, engine)
    assert (len(found.rows), found.rows_complete) == (7, False)
    assert {row.kind for row in found.rows} == {"different"}


def test_parts_of_one_table_name_their_own_rows(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(source_db, ORDERS)
    run(target_db, ORDERS, "DELETE FROM orders WHERE id IN (10, 40000)")
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    with connect(source, "test") as connection:
        tables = [t for t in catalog.read_tables(connection) if t.name == "orders"]
        here = {(r.schema, r.name): r for r in read_compared_relations(connection)}
    (part,), _ = plan_compare(tables, {}, here, here)
    low, high = (replace(part, condition=f"id {sign} 25000") for sign in ("<", ">="))
    task = CompareTask(source, target, None, True, (low, high))
    sums = compare_parts(task)
    assert [one.is_equal for one in sums] == [False, False]
    named = [
        compare_rows(RowsTask(replace(task, parts=(half,)), one, 10))
        for half, one in zip(task.parts, sums, strict=True)
    ]
    assert [row.key for one in named for row in one.rows] == [("10",), ("40000",)]


def test_rows_of_the_target_without_a_key_are_in_one_of_the_parts(
    source_db: str, target_db: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = "CREATE TABLE cut (id int UNIQUE {}, filler text)"
    rows = "INSERT INTO cut SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i; ANALYZE"
    run(source_db, table.format("NOT NULL"), rows)
    run(target_db, table.format(""), rows, "INSERT INTO cut VALUES (NULL, 'more')")
    small = replace(compare.SPLIT, larger_than_bytes=500_000)
    for module in (compare, compare_run):
        monkeypatch.setattr(module, "SPLIT", small)
    (found,) = compare_data(settings_for(source_db, target_db), engine)
    assert found.source is not None
    assert found.target is not None
    assert (found.source.rows, found.target.rows) == (20000, 20001)


KEYLESS = """
CREATE TABLE keyless (a int, b json);
INSERT INTO keyless SELECT i % 7, '{"k": null}' FROM generate_series(1, 700) AS i;
CREATE TABLE nothing ();
INSERT INTO nothing SELECT FROM generate_series(1, 10);
CREATE TABLE floats (id int PRIMARY KEY, f float8, r real, n numeric);
INSERT INTO floats VALUES (1, 0, 0, 0), (2, 'NaN', 'NaN', 'NaN'), (3, '-0', '-0', 1.5),
    (4, 'Infinity', '-Infinity', 1e100), (5, 0.1::float8 + 0.2, 1e-40, NULL);
"""


def test_rows_without_a_key_are_counted_by_their_hash(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(source_db, KEYLESS)
    run(
        target_db,
        KEYLESS,
        "DELETE FROM keyless WHERE ctid IN (SELECT ctid FROM keyless WHERE a = 3 LIMIT 2)",
        "INSERT INTO keyless VALUES (99), (99), (99)",
        "INSERT INTO nothing DEFAULT VALUES",
    )
    found = compared(source_db, target_db, engine)
    keyless, nothing = found["public.keyless"], found["public.nothing"]
    assert keyless.key == ()
    assert sorted((row.kind, row.count) for row in keyless.rows) == [
        ("extra on target", 3),
        ("missing on target", 2),
    ]
    assert all(len(row.key[0]) == 16 for row in keyless.rows)
    assert [side and side.rows for side in (nothing.source, nothing.target)] == [10, 11]
    assert (nothing.is_equal, nothing.rows) == (False, ())


def test_floats_differ_by_the_sign_of_zero_and_nan_is_equal_to_nan(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(source_db, KEYLESS)
    run(target_db, KEYLESS)
    assert differing(source_db, target_db, engine) == []
    run(target_db, "UPDATE floats SET f = '-0' WHERE id = 1; UPDATE floats SET r = 0 WHERE id = 3")
    assert [row.key for row in compared(source_db, target_db, engine)["public.floats"].rows] == [
        ("1",),
        ("3",),
    ]


def test_tables_of_one_side_only_and_other_columns_are_differences(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(
        source_db,
        "CREATE TABLE here (id int); CREATE TABLE shape (a int, b int, c int);"
        "CREATE TABLE turned (a int, b text); INSERT INTO turned VALUES (1, 'x');"
        "CREATE TABLE cut (id int, n int);"
        "INSERT INTO cut SELECT i, i FROM generate_series(1, 9) i",
    )
    run(
        target_db,
        "CREATE TABLE there (id int); CREATE TABLE shape (a int, d int, c int);"
        "CREATE TABLE turned (b text, a int); INSERT INTO turned VALUES ('x', 1);"
        "CREATE TABLE cut (id int, n int) PARTITION BY LIST (id);"
        "CREATE TABLE cut_all PARTITION OF cut DEFAULT;"
        "INSERT INTO cut SELECT i, i FROM generate_series(1, 9) i",
    )
    found = compared(source_db, target_db, engine)
    assert {label: one.problem for label, one in found.items() if not one.is_equal} == {
        "public.here": "missing on target",
        "public.there": "missing on source",
        "public.cut_all": "missing on source",
        "public.shape": "columns missing on target: b; columns extra on target: d",
    }
    assert found["public.turned"].is_equal
    assert found["public.cut"].is_equal


def test_other_encodings_and_collations_make_no_difference(
    source_cluster: Cluster, target_db: str, engine: Engine
) -> None:
    source = source_cluster.create_database("latin_compared", encoding="LATIN1")
    table = "CREATE TABLE names (name text {} PRIMARY KEY, b bytea)"
    rows = (
        "INSERT INTO names SELECT chr(192 + i % 60) || i, decode('ff00', 'hex')"
        " FROM generate_series(1, 2000) i"
    )
    try:
        run(source, table.format(""), rows)
        run(target_db, table.format("COLLATE pg_c_utf8"), rows)
        assert differing(source, target_db, engine) == []
        run(target_db, "DELETE FROM names WHERE name LIKE '%77'")
        found = compared(source, target_db, engine)["public.names"]
        assert len(found.rows) == 20
        assert {row.kind for row in found.rows} == {"missing on target"}
        assert ("ñ1777",) not in [row.key for row in found.rows]
        assert (chr(192 + 77 % 60) + "77",) in [row.key for row in found.rows]
    finally:
        source_cluster.drop_database("latin_compared")


def test_only_the_chosen_tables_are_compared(
    source_db: str, target_db: str, engine: Engine
) -> None:
    tree = """
    CREATE TABLE a (id int); CREATE TABLE b (id int);
    CREATE TABLE p (id int) PARTITION BY RANGE (id);
    CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10) PARTITION BY LIST (id);
    CREATE TABLE p1_all PARTITION OF p1 DEFAULT"""
    run(source_db, tree)
    run(target_db, tree, "CREATE TABLE c (id int)")

    def labels(*tables: str) -> list[str]:
        settings = replace(settings_for(source_db, target_db), tables=tables)
        return sorted(one.label for one in compare_data(settings, engine))

    assert labels("public.a", "public.p") == ["public.a", "public.p1_all"]
    assert labels("public.c") == ["public.c"]
    with pytest.raises(ConfigError, match=r"public\.nowhere"):
        labels("public.a", "public.nowhere")


def test_the_source_is_read_under_the_snapshot(
    source_db: str, target_db: str, engine: Engine
) -> None:
    run(source_db, "CREATE TABLE a (id int PRIMARY KEY); INSERT INTO a VALUES (1)")
    run(target_db, "CREATE TABLE a (id int PRIMARY KEY); INSERT INTO a VALUES (1)")
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        run(source_db, "INSERT INTO a VALUES (2)")
        settings = settings_for(source_db, target_db)
        assert [one.is_equal for one in compare_data(settings, engine)] == [False]
        settings = replace(settings, snapshot=snapshot.id)
        assert [one.is_equal for one in compare_data(settings, engine)] == [True]


def millrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MILLRACE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "MILLRACE_CONFIG": os.devnull},
    )


@pytest.mark.slow
def test_a_difference_ends_the_program_with_exit_code_9(source_db: str, target_db: str) -> None:
    sides = ["--source", source_db, "--target", target_db]
    for uri in (source_db, target_db):
        run(uri, "CREATE TABLE a (id int PRIMARY KEY, t text); INSERT INTO a VALUES (1, 'secret')")
    equal = millrace("compare", "schema", *sides)
    assert (equal.returncode, equal.stdout[:5]) == (0, "equal")

    run(
        target_db,
        "UPDATE a SET t = 'x'; INSERT INTO a VALUES (2); ALTER TABLE a ADD CHECK (id > 0)",
    )
    schema = millrace("compare", "schema", "--json", *sides)
    assert schema.returncode == 9
    found = json.loads(schema.stdout.splitlines()[0])
    assert [one["name"] for one in found["differences"]] == ["public.a.a_id_check"]
    data = millrace("compare", "data", "--rows", "--jobs", "1", *sides)
    assert data.returncode == 9
    assert "id=2" in data.stdout
    assert "1 of 1 tables differ" in data.stdout
    assert "secret" not in data.stdout + data.stderr


def _refuse(argument: str, attempt: int) -> str:
    raise ServerError(f"{argument} at attempt {attempt}", hint="look there", sqlstate="58000")


def test_an_error_of_a_task_is_told_as_it_is_and_not_tried_again(engine: Engine) -> None:
    with pytest.raises(ServerError, match=r"^gone at attempt 0$") as caught:
        engine.call(_refuse, "gone", "refuse")
    assert (caught.value.hint, caught.value.facts["sqlstate"]) == ("look there", "58000")


def _stumble(argument: str, attempt: int) -> str:
    return {"known": ""}[f"{argument} {attempt}"]


def _find_no_file(path: str, attempt: int) -> str:
    if attempt < TASK_ATTEMPTS - 1:
        Path(f"{path}.{attempt}").touch()
    return Path(path, "none").read_text()


def test_a_bug_in_a_task_is_told_as_one_and_not_as_a_crash_of_spark(engine: Engine) -> None:
    with pytest.raises(InvariantError, match=r"^stumble: unexpected KeyError at ") as caught:
        engine.call(_stumble, "a row of somebody's", "stumble")
    assert "somebody" not in str(caught.value)
    assert "spark.log" in caught.value.hint


def test_what_the_machine_refuses_a_task_is_tried_again_and_then_told(
    engine: Engine, tmp_path: Path
) -> None:
    place = tmp_path / "gone"
    with pytest.raises(ServerError, match=r"^read: No such file or directory: .*gone/none$"):
        engine.call(_find_no_file, str(place), "read")
    assert len(list(tmp_path.iterdir())) == TASK_ATTEMPTS - 1
