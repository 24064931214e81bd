"""Filters on a real source: what they decide and refuse, and what is left of its catalog."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.filtering import decide, read_catalog

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError
from millrace.filter.decide import PG_CLASS_OID
from millrace.filter.exclusions import Exclusions
from millrace.filter.rules import parse_filters
from millrace.follow.setup import read_left
from millrace.relation import Table

HAS_WHERE = "where" in {field.name for field in fields(Table)}


def test_index_of_a_partition_alone_is_refused(filter_source: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2: index app\.measure_2025_sensor_idx is part of"):
        decide(filter_source, "[exclude-index]\napp.measure_2025_sensor_idx\n")


def test_table_that_needs_what_is_left_out_is_refused(filter_source: str) -> None:
    with pytest.raises(ConfigError, match=r"table log\.event depends on type types\.mood"):
        decide(filter_source, "[exclude-schema]\ntypes\n")


def test_sequence_of_an_excluded_schema_that_a_table_needs_is_refused(filter_source: str) -> None:
    with psycopg.connect(filter_source, autocommit=True) as connection:
        connection.execute("CREATE TABLE app.counted (n int DEFAULT nextval('log.event_id_seq'))")
    with pytest.raises(ConfigError, match=r"app\.counted depends on sequence log\.event_id_seq"):
        decide(filter_source, "[exclude-schema]\nlog\n")


def test_included_materialized_view_needs_what_it_reads(filter_source: str) -> None:
    with pytest.raises(ConfigError, match=r"app\.lead_copy depends on table app\.lead"):
        decide(filter_source, "[include-only-table]\napp.lead_copy\n")


def test_included_name_must_exist_and_an_excluded_one_should(filter_source: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.ini, line 3: the source has no table app\.nothing"):
        decide(filter_source, "[include-only-table]\napp.lead\napp.nothing\n")
    with pytest.raises(ConfigError, match="line 2: the source has no schema nothing"):
        decide(filter_source, "[include-only-schema]\nnothing\n")
    decision = decide(filter_source, "[exclude-table]\napp.nothing\napp.~/^nothing/\n")
    assert decision.excluded == {}
    assert decision.warnings == (
        "f.ini, line 2: the source has no table app.nothing, so [exclude-table] has no effect",
    )


def test_bad_regular_expression_is_the_users_mistake(filter_source: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.ini, line 2: invalid regular expression"):
        decide(filter_source, "[exclude-table]\napp.~/(/\n")


def test_bad_predicate_is_refused_before_anything_is_copied(filter_source: str) -> None:
    with pytest.raises(ConfigError, match=r"\[table-where\] of app\.lead: column .* not exist"):
        decide(filter_source, "[table-where]\napp.lead = nothing > 3\n")
    with pytest.raises(ConfigError, match="invalid input syntax"):
        decide(filter_source, "[table-where]\napp.lead = id > 'x'\n")
    with pytest.raises(ConfigError, match=r"no table app\.lead_copied with rows"):
        decide(filter_source, "[table-where]\napp.lead_copied = true\n")


def test_catalog_holds_only_what_is_kept(filter_source: str) -> None:
    found, decision = read_catalog(
        filter_source, "[exclude-table]\napp.customer\napp.measure\n[exclude-schema]\nlog\n"
    )
    assert {table.label for table in found.tables} == {
        "app.lead",
        "app.purchase",
        "app.remark",
        "app.parent",
        "app.child",
        'Odd "S" x.a b',
        'Odd "S" x.a',
        'Odd "S" x.a\nb; 1 2 TABLE',
    }
    assert {key.name for key in found.foreign_keys} == {"purchase_lead_id_fkey"}
    assert {index.name for index in found.indexes if index.schema == "app"} == {
        "lead_pkey",
        "purchase_pkey",
    }
    assert {s.name for s in found.sequences if s.schema == "app"} == {
        "customer_id_seq",
        "purchase_id_seq",
        "free_sequence",
    }
    assert found.partitioned_tables == ()
    assert "log" not in found.schemas.values()
    assert all((PG_CLASS_OID, table.oid) not in decision.excluded for table in found.tables)


@pytest.mark.skipif(not HAS_WHERE, reason="Table has no field `where` yet")
def test_rows_and_columns_are_left_out_of_tables_that_stay(filter_source: str) -> None:
    found, _ = read_catalog(
        filter_source,
        "[table-where]\napp.lead = email = 'a = b'\napp.measure = sensor = 1\n"
        "app.measure_2025 = at > '2025-02-01'\n"
        "[exclude-column]\napp.customer.secret\napp.customer.region\napp.measure.sensor\n"
        "[exclude-table-data]\nlog.event\n",
    )
    tables = {table.label: table for table in found.tables}
    assert tables["app.lead"].where == "email = 'a = b'"
    assert tables["app.measure_2024_1"].where == "sensor = 1"
    assert tables["app.measure_2025"].where == "(sensor = 1) AND (at > '2025-02-01')"
    assert tables["log.event"].where == "false"
    assert tables["log.event"].total_bytes == 0
    assert [c.name for c in tables["app.customer"].columns] == ["id", "email"]
    assert [c.name for c in tables["app.measure_2025"].columns] == ["at"]
    assert tables["app.purchase"].where is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("app.lead.nothing", "f.ini, line 2: table app.lead has no column nothing"),
        ("app.purchase.doubled", "table app.purchase has no column doubled"),
        ("app.lead.id\napp.lead.email", "table app.lead has no other column"),
    ],
)
def test_columns_that_can_not_be_left_out_are_refused(
    filter_source: str, entries: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_catalog(filter_source, f"[exclude-column]\n{entries}\n")


@pytest.mark.skipif(shutil.which("pgcopydb") is None, reason="pgcopydb is not installed")
@pytest.mark.parametrize(
    "text",
    [
        "[exclude-schema]\nlog\n",
        "[exclude-table]\napp.customer\n; app.lead\nlog.tmp_1\n",
        "[exclude-schema]\nlog\n\n[exclude-table]\napp.lead\n",
        "[include-only-table]\napp.customer\napp.purchase\nlog.tmp_1\n",
        '[exclude-table]\n"A b"."C d"\n"app"."lead"\n',
        "[exclude-schema]\napp\npublic\n",
        "[include-only-table]\napp.measure_2025\napp.lead\n",
    ],
)
def test_pgcopydb_copies_the_same_tables(filter_source: str, tmp_path: Path, text: str) -> None:
    with psycopg.connect(filter_source, autocommit=True) as connection:
        connection.execute(
            'CREATE SCHEMA "A b"; CREATE TABLE "A b"."C d" (); CREATE TABLE "A b".e ()'
        )
        # Its listing has no answer to names with quotes and line feeds.
        connection.execute('DROP SCHEMA "Odd ""S"" x" CASCADE')
    (tmp_path / "f.ini").write_text(text)
    listed = subprocess.run(
        ["pgcopydb", "list", "tables", "--filter", "f.ini", "--source", filter_source],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    ).stdout
    rows = [line.split("|") for line in listed.splitlines() if line.count("|") >= 4]
    theirs = {f"{row[1].strip()}.{row[2].strip()}" for row in rows[1:]}
    found, _ = read_catalog(filter_source, text)
    # It lists partitioned tables, too; they have no rows.
    assert {table.label for table in found.tables} == theirs - {"app.measure", "app.measure_2024"}


PARTED = """
CREATE TABLE parted (id int, at date, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_2 PARTITION OF parted DEFAULT PARTITION BY LIST (at);
CREATE TABLE parted_2_a PARTITION OF parted_2 DEFAULT;
CREATE TABLE plain (id int, v text);
"""


def test_filters_of_a_partitioned_table_are_those_of_its_changes(source_db: str) -> None:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(PARTED)

    def left_by(text: str) -> Exclusions:
        return read_left(Dsn.parse(source_db), parse_filters(text, name="f"))

    text = "[table-where]\npublic.parted = id > 3\n[exclude-column]\npublic.parted.v\n"
    left = left_by(text + "[exclude-table-data]\npublic.plain\n")
    assert left.where == {("public", "parted"): "id > 3"}
    assert left.columns == {("public", "parted"): frozenset({"v"})}
    assert left.tables == {("public", "plain")}
    left = left_by("[exclude-table]\npublic.parted\n")
    assert left.tables == {("public", "parted")}
    for one in ("[exclude-table]\npublic.parted_1", "[table-where]\npublic.parted_2_a = id > 3"):
        with pytest.raises(ConfigError, match=r"the partitions of public\.parted differently"):
            left_by(one + "\n")
