"""Filters on a real source: what is left of a schema restores without an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.filtering import Filtered, Filtering, tools_of

from millrace.filter.decide import Decision
from millrace.postgres.program.binaries import Installation

TOOLS = pytest.mark.parametrize("tools", [tools_of(16), tools_of(18)], ids=["16", "18"])


@pytest.fixture
def filtering(filter_source: str, target_db: str, tmp_path: Path) -> Iterator[Filtering]:
    opened: list[Filtered] = []

    class Remembering(Filtering):
        def __call__(self, text: str, tools: Installation | None = None) -> Filtered:
            opened.append(super().__call__(text, tools or tools_of(18)))
            return opened[-1]

    yield Remembering(filter_source, target_db, 180000, tmp_path)
    for filtered in opened:
        filtered.source.close()
        filtered.target.close()


@TOOLS
def test_nothing_is_left_out_without_rules(filtering: Filtering, tools: Installation) -> None:
    filtered = filtering("; nothing\n", tools)
    assert filtered.missing() == set()
    assert filtered.decision == Decision()


@TOOLS
def test_excluded_table_takes_along_what_reads_it(
    filtering: Filtering, tools: Installation
) -> None:
    filtered = filtering("[exclude-table]\napp.customer\n", tools)
    assert filtered.missing() == {
        "app.customer",
        "app.customer_pkey",
        "app.customer_email_key",
        "app.customer_region",
        "app.customer_names",
        "app.customer_short",
        "app.customer_copy",
        "app.customer_copy_email",
        "app.customer_count",
    }
    assert filtered.why() == {
        "view app.customer_names": "depends on table app.customer",
        "view app.customer_short": "depends on view app.customer_names",
        "materialized view app.customer_copy": "depends on view app.customer_short",
        "foreign key app.purchase.purchase_customer_id_fkey": "depends on table app.customer",
        "function app.name_of(app.customer)": "depends on table app.customer",
        "function app.count_customers()": "depends on table app.customer",
        "view app.customer_count": "depends on function app.count_customers()",
        "policy purchase_own on app.purchase": "depends on table app.customer",
        "rule purchase_log on app.purchase": "depends on table app.customer",
    }
    # It is owned by the table that is gone, and goes on counting for another.
    assert filtered.kept() == {
        "sequence app.customer_id_seq": "a default of table app.lead uses it"
    }
    row = filtered.target.execute("INSERT INTO app.lead DEFAULT VALUES RETURNING id").fetchone()
    assert row == (1,)


@TOOLS
def test_excluded_schema_goes_with_all_it_holds(filtering: Filtering, tools: Installation) -> None:
    filtered = filtering('[exclude-schema]\nlog\n"Odd ""S"" x"\n', tools)
    assert {name.split(".")[0] for name in filtered.missing()} == {"log", 'Odd "S" x'}
    assert not [name for name in filtered.relations() if not name.startswith("app.")]
    schemas = {row[0] for row in filtered.target.execute("SELECT nspname FROM pg_namespace")}
    assert not schemas & {"log", 'Odd "S" x'}
    assert {"app", "types"} <= schemas
    assert filtered.why() == {}


@TOOLS
def test_only_the_included_schemas_are_made(filtering: Filtering, tools: Installation) -> None:
    filtered = filtering("[include-only-schema]\nlog\n~/^typ/\n", tools)
    assert {name.split(".")[0] for name in filtered.relations()} == {"log"}
    assert "log.all_tmp" in filtered.relations()


def test_types_of_an_excluded_schema_go_with_their_shells(filtering: Filtering) -> None:
    filtered = filtering("[exclude-schema]\ntypes\n~/^log$/\n")
    schemas = {row[0] for row in filtered.target.execute("SELECT nspname FROM pg_namespace")}
    assert "types" not in schemas


@TOOLS
def test_only_included_tables_are_made(filtering: Filtering, tools: Installation) -> None:
    filtered = filtering(
        '[include-only-table]\napp.customer\napp.purchase\n"Odd ""S"" x"."a b"\n', tools
    )
    tables = {
        f"{row[0]}.{row[1]}"
        for row in filtered.target.execute("SELECT schemaname, tablename FROM pg_tables")
        if row[0] not in ("pg_catalog", "information_schema")
    }
    assert tables == {"app.customer", "app.purchase", 'Odd "S" x.a b'}
    assert {"app.customer_short", "app.purchase_sums", "app.free_sequence"} <= filtered.relations()
    assert "app.customer_copy" not in filtered.relations()
    assert "log.all_tmp" not in filtered.relations()
    comments = filtered.target.execute(
        'SELECT count(*) FROM pg_description WHERE objoid = \'"Odd ""S"" x"."a b"\'::regclass'
    ).fetchone()
    assert comments == (2,)


@TOOLS
def test_excluded_name_is_not_taken_for_one_that_begins_alike(
    filtering: Filtering, tools: Installation
) -> None:
    filtered = filtering('[exclude-table]\n"Odd ""S"" x".a\n', tools)
    assert filtered.missing() == {'Odd "S" x.a', 'Odd "S" x.a_pkey', 'Odd "S" x.a_id_seq'}
    assert 'Odd "S" x.a\nb; 1 2 TABLE' in filtered.relations()


@TOOLS
def test_partitions_go_with_their_table(filtering: Filtering, tools: Installation) -> None:
    filtered = filtering("[exclude-table]\napp.measure\n", tools)
    assert not [name for name in filtered.relations() if "measure" in name]
    assert filtered.why() == {
        "foreign key app.remark.remark_at_sensor_fkey": "depends on partitioned table app.measure"
    }


def test_table_that_inherits_from_one_that_is_left_out_is_told(filtering: Filtering) -> None:
    filtered = filtering("[exclude-table]\napp.parent\n")
    assert filtered.missing() == {"app.parent", "app.child"}
    assert filtered.why() == {"table app.child": "inherits from table app.parent"}


def test_one_partition_can_be_left_out(filtering: Filtering) -> None:
    filtered = filtering("[exclude-table]\napp.measure_2024\n")
    assert {name for name in filtered.missing() if name.endswith(("2024", "_1"))} == {
        "app.measure_2024",
        "app.measure_2024_1",
    }
    assert "app.measure_2025" in filtered.relations()
    invalid = filtered.target.execute("SELECT indexrelid FROM pg_index WHERE NOT indisvalid")
    assert invalid.fetchall() == []


def test_included_partitioned_table_brings_its_partitions(filtering: Filtering) -> None:
    filtered = filtering("[include-only-table]\napp.measure\n")
    assert {"app.measure_2024", "app.measure_2024_1", "app.measure_2025"} <= filtered.relations()
    assert filtered.kept() == {}


def test_included_partition_brings_the_tables_it_is_part_of(filtering: Filtering) -> None:
    filtered = filtering("[include-only-table]\napp.measure_2024_1\napp.child\n")
    assert {"app.measure", "app.measure_2024", "app.parent"} <= filtered.relations()
    assert "app.measure_2025" not in filtered.relations()
    assert filtered.kept() == {
        "partitioned table app.measure_2024": "parent of table app.measure_2024_1",
        "partitioned table app.measure": "parent of partitioned table app.measure_2024",
        "table app.parent": "parent of table app.child",
    }
    assert filtered.skipped() == {"table app.parent"}


@TOOLS
def test_excluded_key_takes_along_the_foreign_keys_to_it(
    filtering: Filtering, tools: Installation
) -> None:
    filtered = filtering(
        "[exclude-index]\napp.lead_pkey\napp.customer_region\napp.purchase_pkey\napp.~/^measure_s/\n",
        tools,
    )
    assert {
        "app.lead_pkey",
        "app.customer_region",
        "app.measure_sensor",
        "app.measure_2025_sensor_idx",
        "app.purchase_by_key",
    } <= filtered.missing()
    assert "app.measure_2025_pkey" in filtered.relations()
    assert filtered.why() == {
        "foreign key app.purchase.purchase_lead_id_fkey": "depends on index app.lead_pkey",
        "view app.purchase_by_key": "depends on primary key app.purchase.purchase_pkey",
    }


@TOOLS
def test_materialized_view_stays_empty_and_so_do_those_that_read_it(
    filtering: Filtering, tools: Installation
) -> None:
    filtered = filtering("[exclude-table-data]\napp.lead_copy\napp.measure\nlog.event\n", tools)
    assert filtered.missing() == set()
    populated = {
        str(row[0])
        for row in filtered.target.execute("SELECT matviewname FROM pg_matviews WHERE ispopulated")
    }
    assert populated == {"customer_copy"}
    assert filtered.skipped() == {
        "materialized view app.lead_copy",
        "materialized view app.lead_copy_copy",
        "partitioned table app.measure",
        "partitioned table app.measure_2024",
        "table app.measure_2024_1",
        "table app.measure_2025",
        "table log.event",
    }


@TOOLS
def test_extension_is_left_out_and_nothing_that_uses_it(
    filter_source: str, target_db: str, filtering: Filtering, tools: Installation
) -> None:
    with psycopg.connect(filter_source, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext")
        connection.execute("CREATE TABLE app.item (v ext.vector(3)); CREATE TABLE ext.t (id int)")
    with psycopg.connect(target_db, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext")
    filtered = filtering("[exclude-extension]\nvector\n[exclude-schema]\next\n", tools)
    assert "app.item" in filtered.relations()
    assert "ext.t" not in filtered.relations()


@TOOLS
def test_excluded_extension_is_not_made(
    filter_source: str, filtering: Filtering, tools: Installation
) -> None:
    with psycopg.connect(filter_source, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE app.item (v vector(3))")
    filtered = filtering("[exclude-extension]\n~/^vec/\n[exclude-table]\napp.item\n", tools)
    found = filtered.target.execute("SELECT extname FROM pg_extension").fetchall()
    assert found == [("plpgsql",)]


def test_schema_of_a_kept_extension_is_kept(filter_source: str, filtering: Filtering) -> None:
    with psycopg.connect(filter_source, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext")
        connection.execute("CREATE TABLE app.item (v ext.vector(3)); CREATE TABLE ext.t (id int)")
    filtered = filtering("[exclude-schema]\next\n[include-only-extension]\nvector\n")
    assert "app.item" in filtered.relations()
    assert "ext.t" not in filtered.relations()
    assert filtered.kept() == {"schema ext": "extension vector is in it"}
