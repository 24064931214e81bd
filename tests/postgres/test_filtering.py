"""Filters on a real source: what is left of a schema restores without an error."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import psycopg
import pytest

from millrace.clone.decision import PG_CLASS_OID, Decision
from millrace.clone.filter import FilterRules, parse_filters
from millrace.clone.filtering import filter_catalog, filter_entries, read_decision
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError
from millrace.postgres import catalog
from millrace.postgres.binaries import Installation, installations
from millrace.postgres.connect import connect
from millrace.postgres.depend import read_entry_depends
from millrace.postgres.dump import dump_schema
from millrace.postgres.embedded import Cluster
from millrace.postgres.script import run_script
from millrace.relation import SourceCatalog, Table
from millrace.stream.begin import read_left
from millrace.stream.settings import Left

SCHEMA = """
CREATE SCHEMA app;
CREATE SCHEMA log;
CREATE SCHEMA "Odd ""S"" x";
CREATE SCHEMA types;
COMMENT ON SCHEMA log IS 'a schema with a comment';
GRANT USAGE ON SCHEMA log TO pg_monitor;
CREATE TYPE types.mood AS ENUM ('sad', 'ok');
CREATE TYPE types.base;
CREATE FUNCTION types.base_in(cstring) RETURNS types.base LANGUAGE internal IMMUTABLE STRICT
    AS 'int4in';
CREATE FUNCTION types.base_out(types.base) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT
    AS 'int4out';
CREATE TYPE types.base (INPUT = types.base_in, OUTPUT = types.base_out, LIKE = int4);
CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';

CREATE TABLE app.customer (
    id bigserial PRIMARY KEY, email text UNIQUE, region int, secret text DEFAULT 'none'
);
CREATE INDEX customer_region ON app.customer (region);
COMMENT ON TABLE app.customer IS 'a table with a comment';
COMMENT ON COLUMN app.customer.email IS 'a column with a comment';
COMMENT ON INDEX app.customer_region IS 'an index with a comment';
COMMENT ON CONSTRAINT customer_pkey ON app.customer IS 'a constraint with a comment';
GRANT SELECT ON app.customer TO pg_monitor;
GRANT SELECT (email) ON app.customer TO pg_monitor;
CREATE STATISTICS app.customer_stats ON email, region FROM app.customer;
CREATE TRIGGER customer_touch BEFORE UPDATE ON app.customer
    FOR EACH ROW EXECUTE FUNCTION app.touch();
COMMENT ON TRIGGER customer_touch ON app.customer IS 'a trigger with a comment';
ALTER TABLE app.customer ENABLE ROW LEVEL SECURITY;
CREATE POLICY customer_all ON app.customer USING (id > 0);
CREATE RULE customer_no_delete AS ON DELETE TO app.customer DO INSTEAD NOTHING;

-- Uses the sequence that customer owns.
CREATE TABLE app.lead (
    id bigint PRIMARY KEY DEFAULT nextval('app.customer_id_seq'), email text
);
CREATE TABLE app.purchase (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id bigint NOT NULL REFERENCES app.customer,
    lead_id bigint REFERENCES app.lead,
    amount int CHECK (amount > 0),
    doubled int GENERATED ALWAYS AS (amount * 2) STORED
);
CREATE POLICY purchase_own ON app.purchase
    USING (EXISTS (SELECT FROM app.customer c WHERE c.id = customer_id));
CREATE RULE purchase_log AS ON UPDATE TO app.purchase DO ALSO
    INSERT INTO app.lead (email) SELECT email FROM app.customer LIMIT 1;

CREATE VIEW app.customer_names AS SELECT id, email FROM app.customer;
COMMENT ON VIEW app.customer_names IS 'a view with a comment';
CREATE VIEW app.customer_short AS SELECT email FROM app.customer_names;
CREATE MATERIALIZED VIEW app.customer_copy AS SELECT * FROM app.customer_short;
CREATE INDEX customer_copy_email ON app.customer_copy (email);
CREATE MATERIALIZED VIEW app.lead_copy AS SELECT * FROM app.lead;
CREATE VIEW app.lead_copied AS SELECT * FROM app.lead_copy;
CREATE MATERIALIZED VIEW app.lead_copy_copy AS SELECT * FROM app.lead_copied;
CREATE VIEW app.purchase_sums AS SELECT lead_id, sum(amount) FROM app.purchase GROUP BY lead_id;
CREATE VIEW app.purchase_by_key AS SELECT p.*, count(*) FROM app.purchase p GROUP BY p.id;
CREATE FUNCTION app.name_of(app.customer) RETURNS text LANGUAGE sql AS 'SELECT $1.email';
CREATE FUNCTION app.count_customers() RETURNS bigint LANGUAGE sql
    BEGIN ATOMIC SELECT count(*) FROM app.customer; END;
CREATE VIEW app.customer_count AS SELECT app.count_customers();

CREATE TABLE app.measure (at date, sensor int, PRIMARY KEY (at, sensor)) PARTITION BY RANGE (at);
CREATE TABLE app.measure_2024 PARTITION OF app.measure
    FOR VALUES FROM ('2024-01-01') TO ('2025-01-01') PARTITION BY LIST (sensor);
CREATE TABLE app.measure_2024_1 PARTITION OF app.measure_2024 FOR VALUES IN (1);
CREATE TABLE app.measure_2025 PARTITION OF app.measure
    FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE INDEX measure_sensor ON app.measure (sensor);
COMMENT ON TABLE app.measure_2024_1 IS 'a partition with a comment';
CREATE TABLE app.remark (at date, sensor int, FOREIGN KEY (at, sensor) REFERENCES app.measure);
CREATE TABLE app.parent (id int);
CREATE TABLE app.child (extra text) INHERITS (app.parent);

CREATE TABLE log.event (id serial PRIMARY KEY, feeling types.mood);
CREATE TABLE log.tmp_1 (id int);
CREATE TABLE log.tmp_2 (id int);
CREATE VIEW log.all_tmp AS SELECT * FROM log.tmp_1 UNION ALL SELECT * FROM log.tmp_2;
ALTER DEFAULT PRIVILEGES IN SCHEMA log GRANT SELECT ON TABLES TO pg_monitor;
CREATE TABLE "Odd ""S"" x"."a b" (id serial PRIMARY KEY, "c d" text);
CREATE TABLE "Odd ""S"" x"."a" (id serial PRIMARY KEY);
CREATE TABLE "Odd ""S"" x"."a
b; 1 2 TABLE" (id int PRIMARY KEY);
COMMENT ON TABLE "Odd ""S"" x"."a b" IS 'x';
COMMENT ON TABLE "Odd ""S"" x"."a" IS 'x';
COMMENT ON COLUMN "Odd ""S"" x"."a b"."c d" IS 'x';
CREATE PUBLICATION few FOR TABLE app.customer, app.purchase, TABLES IN SCHEMA log;
CREATE SEQUENCE app.free_sequence;
"""

HAS_WHERE = "where" in {field.name for field in fields(Table)}


@dataclass
class Filtered:
    """A source, its decision, and the target made from what is left."""

    decision: Decision
    source: psycopg.Connection[tuple[object, ...]]
    target: psycopg.Connection[tuple[object, ...]]

    def relations(self) -> set[str]:
        return _relations(self.target)

    def missing(self) -> set[str]:
        return _relations(self.source) - self.relations()

    def why(self) -> dict[str, str]:
        return {self.decision.labels[key]: why for key, why in self.decision.dependents.items()}

    def kept(self) -> dict[str, str]:
        return {self.decision.labels[key]: why for key, why in self.decision.kept.items()}

    def skipped(self) -> set[str]:
        return {self.decision.labels[key] for key in self.decision.data_skipped}


def _relations(connection: psycopg.Connection[tuple[object, ...]]) -> set[str]:
    rows = connection.execute(
        "SELECT n.nspname || '.' || c.relname FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'"
        " AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S', 'i', 'I')"
    )
    return {str(name) for (name,) in rows}


class Filtering:
    """Filters a source's schema and restores what is left."""

    def __init__(self, source: str, target: str, target_version: int, folder: Path) -> None:
        self.source, self.target = Dsn.parse(source), Dsn.parse(target)
        self.target_version = target_version
        self.folder = folder

    def __call__(self, text: str, tools: Installation) -> Filtered:
        rules = parse_filters(text, name="f.ini")
        source = connect(self.source, "test")
        decision = read_decision(source, rules)
        archive = dump_schema(tools, self.source, None, self.folder / "schema.dump")
        depends = read_entry_depends(archive)
        for section in ("pre-data", "post-data"):
            entries = filter_entries(archive.entries(section), decision, depends)
            run_script(self.target, archive.script(entries, section), section, role="test")
        return Filtered(decision, source, connect(self.target, "test"))


def tools_of(version: int) -> Installation:
    return next(i for i in installations() if i.version == version and i.has("pg_dump", "psql"))


TOOLS = pytest.mark.parametrize("tools", [tools_of(16), tools_of(18)], ids=["16", "18"])


@pytest.fixture
def source(source_cluster: Cluster, source_db: str) -> str:
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(SCHEMA)
    return source_db


@pytest.fixture
def filtering(source: str, target_db: str, tmp_path: Path) -> Iterator[Filtering]:
    opened: list[Filtered] = []

    class Remembering(Filtering):
        def __call__(self, text: str, tools: Installation | None = None) -> Filtered:
            opened.append(super().__call__(text, tools or tools_of(18)))
            return opened[-1]

    yield Remembering(source, target_db, 180000, tmp_path)
    for filtered in opened:
        filtered.source.close()
        filtered.target.close()


def decide(source: str, text: str) -> Decision:
    with connect(Dsn.parse(source), "test") as connection:
        return read_decision(connection, parse_filters(text, name="f.ini"))


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


def test_index_of_a_partition_alone_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2: index app\.measure_2025_sensor_idx is part of"):
        decide(source, "[exclude-index]\napp.measure_2025_sensor_idx\n")


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


def test_table_that_needs_what_is_left_out_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"table log\.event depends on type types\.mood"):
        decide(source, "[exclude-schema]\ntypes\n")


def test_sequence_of_an_excluded_schema_that_a_table_needs_is_refused(source: str) -> None:
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("CREATE TABLE app.counted (n int DEFAULT nextval('log.event_id_seq'))")
    with pytest.raises(ConfigError, match=r"app\.counted depends on sequence log\.event_id_seq"):
        decide(source, "[exclude-schema]\nlog\n")


def test_included_materialized_view_needs_what_it_reads(source: str) -> None:
    with pytest.raises(ConfigError, match=r"app\.lead_copy depends on table app\.lead"):
        decide(source, "[include-only-table]\napp.lead_copy\n")


def test_included_name_must_exist_and_an_excluded_one_should(source: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.ini, line 3: the source has no table app\.nothing"):
        decide(source, "[include-only-table]\napp.lead\napp.nothing\n")
    with pytest.raises(ConfigError, match="line 2: the source has no schema nothing"):
        decide(source, "[include-only-schema]\nnothing\n")
    decision = decide(source, "[exclude-table]\napp.nothing\napp.~/^nothing/\n")
    assert decision.excluded == {}
    assert decision.warnings == (
        "f.ini, line 2: the source has no table app.nothing, so [exclude-table] has no effect",
    )


def test_bad_regular_expression_is_the_users_mistake(source: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.ini, line 2: invalid regular expression"):
        decide(source, "[exclude-table]\napp.~/(/\n")


def test_bad_predicate_is_refused_before_anything_is_copied(source: str) -> None:
    with pytest.raises(ConfigError, match=r"\[table-where\] of app\.lead: column .* not exist"):
        decide(source, "[table-where]\napp.lead = nothing > 3\n")
    with pytest.raises(ConfigError, match="invalid input syntax"):
        decide(source, "[table-where]\napp.lead = id > 'x'\n")
    with pytest.raises(ConfigError, match=r"no table app\.lead_copied with rows"):
        decide(source, "[table-where]\napp.lead_copied = true\n")


@TOOLS
def test_extension_is_left_out_and_nothing_that_uses_it(
    source: str, target_db: str, filtering: Filtering, tools: Installation
) -> None:
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext")
        connection.execute("CREATE TABLE app.item (v ext.vector(3)); CREATE TABLE ext.t (id int)")
    with psycopg.connect(target_db, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext")
    filtered = filtering("[exclude-extension]\nvector\n[exclude-schema]\next\n", tools)
    assert "app.item" in filtered.relations()
    assert "ext.t" not in filtered.relations()


@TOOLS
def test_excluded_extension_is_not_made(
    source: str, filtering: Filtering, tools: Installation
) -> None:
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE app.item (v vector(3))")
    filtered = filtering("[exclude-extension]\n~/^vec/\n[exclude-table]\napp.item\n", tools)
    found = filtered.target.execute("SELECT extname FROM pg_extension").fetchall()
    assert found == [("plpgsql",)]


def test_schema_of_a_kept_extension_is_kept(source: str, filtering: Filtering) -> None:
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA ext; CREATE EXTENSION vector SCHEMA ext")
        connection.execute("CREATE TABLE app.item (v ext.vector(3)); CREATE TABLE ext.t (id int)")
    filtered = filtering("[exclude-schema]\next\n[include-only-extension]\nvector\n")
    assert "app.item" in filtered.relations()
    assert "ext.t" not in filtered.relations()
    assert filtered.kept() == {"schema ext": "extension vector is in it"}


def read_catalog(source: str, text: str) -> tuple[SourceCatalog, Decision]:
    rules: FilterRules = parse_filters(text, name="f.ini")
    with connect(Dsn.parse(source), "test") as connection:
        whole = SourceCatalog(
            tables=tuple(catalog.read_tables(connection)),
            indexes=tuple(catalog.read_indexes(connection)),
            foreign_keys=tuple(catalog.read_foreign_keys(connection)),
            sequences=tuple(catalog.read_sequences(connection)),
            extensions=tuple(catalog.read_extensions(connection)),
            partitioned_tables=tuple(catalog.read_relations_of_kind(connection, "p")),
            materialized_views=tuple(catalog.read_relations_of_kind(connection, "m")),
            schemas=catalog.read_schemas(connection),
        )
        decision = read_decision(connection, rules)
    return filter_catalog(whole, decision, rules), decision


def test_catalog_holds_only_what_is_kept(source: str) -> None:
    found, decision = read_catalog(
        source, "[exclude-table]\napp.customer\napp.measure\n[exclude-schema]\nlog\n"
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
def test_rows_and_columns_are_left_out_of_tables_that_stay(source: str) -> None:
    found, _ = read_catalog(
        source,
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
    source: str, entries: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_catalog(source, f"[exclude-column]\n{entries}\n")


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
def test_pgcopydb_copies_the_same_tables(source: str, tmp_path: Path, text: str) -> None:
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute(
            'CREATE SCHEMA "A b"; CREATE TABLE "A b"."C d" (); CREATE TABLE "A b".e ()'
        )
        # Its listing has no answer to names with quotes and line feeds.
        connection.execute('DROP SCHEMA "Odd ""S"" x" CASCADE')
    (tmp_path / "f.ini").write_text(text)
    listed = subprocess.run(
        ["pgcopydb", "list", "tables", "--filter", "f.ini", "--source", source],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    ).stdout
    rows = [line.split("|") for line in listed.splitlines() if line.count("|") >= 4]
    theirs = {f"{row[1].strip()}.{row[2].strip()}" for row in rows[1:]}
    found, _ = read_catalog(source, text)
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

    def left_by(text: str) -> Left:
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
