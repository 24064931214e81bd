"""`millrace list ...` on a database with everything in it; PostgreSQL says what is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures import load_museum
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.clone.schema.requirements import read_requirements
from millrace.errors import ConfigError
from millrace.postgres.program.embedded import Cluster

# The program runs in this process.
pytestmark = pytest.mark.usefixtures("in_this_process")

Lister = Callable[..., Any]

MORE = """
CREATE EXTENSION vector SCHEMA public;
CREATE SCHEMA shop;
CREATE TABLE shop.customer (id serial PRIMARY KEY, email text UNIQUE, region text COLLATE "C");
CREATE INDEX customer_region ON shop.customer (region) WHERE id > 10;
CREATE TABLE shop.purchase (id int PRIMARY KEY, customer_id int REFERENCES shop.customer);
CREATE VIEW shop.emails AS SELECT email FROM shop.customer;
CREATE VIEW shop.first_email AS SELECT min(email) FROM shop.emails;
INSERT INTO shop.customer (email) SELECT 'mail ' || i FROM generate_series(1, 30000) AS i;
INSERT INTO shop.purchase SELECT i, i FROM generate_series(1, 20000) AS i;
ANALYZE shop.customer, shop.purchase;
"""

FILTERS = """
[exclude-schema]
~/^(museum|table|user|select|we)/
[exclude-table]
shop.customer
[table-where]
shop.purchase = id <= 10000
"""


@pytest.fixture(scope="module")
def museum(source_cluster: Cluster) -> Iterator[str]:
    """One database for all of these tests: nothing here writes to it."""
    uri = source_cluster.create_database("listed")
    load_museum(uri)
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(MORE)
    yield uri
    source_cluster.drop_database("listed")


@pytest.fixture
def filters(tmp_path: Path) -> str:
    path = tmp_path / "f.ini"
    path.write_text(FILTERS)
    return str(path)


@pytest.fixture
def listed(museum: str) -> Lister:
    """Runs `millrace list`: the text, or with as_json what the JSON holds."""

    def run(*arguments: str, as_json: bool = True) -> Any:
        command = ["list", *arguments, "--source", museum, *(["--json"] if as_json else [])]
        ended = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout) if as_json else ended.stdout

    return run


def rows(uri: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(uri, options="-c search_path=pg_catalog") as connection:
        return connection.execute(query.encode()).fetchall()


def cells(text: str, first: str) -> list[str]:
    """The row of a table whose first cell is this."""
    found = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    (row,) = [row for row in found if row and row[0] == first]
    return row


def test_databases_are_those_of_the_server(listed: Lister, museum: str) -> None:
    found = {one["name"]: one for one in listed("databases")}
    known = "SELECT datname, pg_encoding_to_char(encoding), pg_get_userbyid(datdba)"
    known += " FROM pg_database WHERE NOT datistemplate AND datallowconn"
    assert {(n, o["encoding"], o["owner"]) for n, o in found.items()} == set(rows(museum, known))
    (size,) = rows(museum, "SELECT pg_database_size('postgres')")[0]
    assert found["postgres"]["bytes"] == size
    assert found["listed"]["bytes"] > size
    assert "template0" not in found
    text = listed("databases", as_json=False)
    oid = str(found["listed"]["oid"])
    assert cells(text, oid)[1] == "listed"
    assert cells(text, oid)[4] == "UTF8"


def test_size_of_a_database_one_may_not_enter_is_not_shown(
    listed: Lister, museum: str, source_cluster: Cluster
) -> None:
    source_cluster.execute("CREATE ROLE stranger LOGIN")
    closed = source_cluster.create_database("closed_to_strangers")
    try:
        source_cluster.execute("REVOKE CONNECT ON DATABASE closed_to_strangers FROM PUBLIC")
        uri = museum.replace("user=postgres", "user=stranger")
        assert uri != museum
        ended = CliRunner().invoke(app, ["list", "databases", "--source", uri, "--json"])
        found = {one["name"]: one["bytes"] for one in json.loads(ended.stdout)}
        assert found["closed_to_strangers"] is None
        assert found["listed"] > 0
    finally:
        assert closed
        source_cluster.drop_database("closed_to_strangers")
        source_cluster.execute("DROP ROLE stranger")


def test_extensions_with_their_versions_on_both_sides(
    listed: Lister, museum: str, target_db: str
) -> None:
    (version,) = rows(museum, "SELECT extversion FROM pg_extension WHERE extname = 'vector'")[0]
    (found,) = listed("extensions")
    assert (found["name"], found["version"], found["schema"]) == ("vector", version, "public")
    assert "target" not in found

    (found,) = listed("extensions", "--target", target_db)
    assert found["target"]["installed_version"] is None
    assert found["target"]["default_version"] in found["target"]["versions"]
    with psycopg.connect(target_db, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
    (found,) = listed("extensions", "--target", target_db)
    there = found["target"]["default_version"]
    assert found["target"]["installed_version"] == there
    text = listed("extensions", "--target", target_db, as_json=False)
    assert cells(text, "vector") == ["vector", version, "public", there, there]


def test_extensions_as_a_file_of_requirements(museum: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["list", "extensions", "--source", museum, "--requirements"])
    file = tmp_path / "requirements.json"
    file.write_text(ended.stdout)
    (version,) = rows(museum, "SELECT extversion FROM pg_extension WHERE extname = 'vector'")[0]
    assert read_requirements(file) == {"vector": version}


def test_collations_are_those_in_use_and_those_defined(listed: Lister) -> None:
    found = {f"{one['schema']}.{one['name']}": one for one in listed("collations")}
    assert found["pg_catalog.default"]["is_default"]
    assert "column region of table shop.customer" in found["pg_catalog.C"]["used_by"]
    assert "index shop.customer_region" in found["pg_catalog.C"]["used_by"]
    assert "type museum.code" in found["pg_catalog.C"]["used_by"]
    assert not found["pg_catalog.C"]["is_defined"]
    bytewise = found["museum.bytewise"]
    assert (bytewise["provider"], bytewise["locale"], bytewise["is_defined"]) == ("libc", "C", True)
    assert found["select.Upper Collation"]["used_by"] == []
    # There are many more that nothing names.
    assert "pg_catalog.ucs_basic" not in found
    text = listed("collations", as_json=False)
    assert cells(text, "pg_catalog.default")[5] == "the database"
    assert cells(text, "select.Upper Collation")[5] == "nothing"
    assert "and" in cells(text, "pg_catalog.C")[5]


def test_collations_are_listed_by_every_version(
    target_cluster: Cluster, system_cluster: Cluster
) -> None:
    for cluster in (target_cluster, system_cluster):
        uri = cluster.create_database("collated")
        try:
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute('CREATE TABLE t (a text COLLATE "POSIX")')
            ended = CliRunner().invoke(app, ["list", "collations", "--source", uri, "--json"])
            names = [one["name"] for one in json.loads(ended.stdout)]
            assert names == ["default", "POSIX"]
        finally:
            cluster.drop_database("collated")


def test_sequences_with_where_they_stand_and_whom_they_belong_to(
    listed: Lister, museum: str, filters: str
) -> None:
    found = {(one["schema"], one["name"]): one for one in listed("sequences")}
    known = rows(
        museum,
        "SELECT schemaname, sequencename, last_value FROM pg_sequences",
    )
    assert set(found) == {(schema, name) for schema, name, _ in known}
    called = {(s, n): value for s, n, value in known if value is not None}
    assert {key: one["last_value"] for key, one in found.items() if one["is_called"]} == called
    assert found["shop", "customer_id_seq"]["owned_by"] == "shop.customer.id"
    assert found["museum", "at_max"]["owned_by"] is None
    text = listed("sequences", as_json=False)
    oid = str(found["shop", "customer_id_seq"]["oid"])
    assert cells(text, oid)[1:] == ["shop.customer_id_seq", "shop.customer.id", "30000", "yes"]
    # That of shop goes with its table.
    left = [one["name"] for one in listed("sequences", "--filters", filters)]
    assert left == [name for schema, name in found if schema == "Ünïcode Schéma 🐘"] != []


def test_indexes_with_their_constraints(listed: Lister, museum: str, filters: str) -> None:
    found = {(one["schema"], one["name"]): one for one in listed("indexes")}
    known = rows(
        museum,
        "SELECT n.nspname, x.relname, pg_relation_size(x.oid), pg_get_indexdef(x.oid),"
        " i.indisunique, i.indisprimary FROM pg_index AS i JOIN pg_class AS x ON x.oid = indexrelid"
        " JOIN pg_class AS c ON c.oid = indrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE c.relkind = 'r' AND i.indisvalid AND n.nspname !~ '^(pg_|information_)'",
    )
    assert set(found) == {row[:2] for row in known}
    for schema, name, size, definition, unique, primary in known:
        one = found[schema, name]
        assert (one["bytes"], one["definition"]) == (size, definition)
        assert (one["is_unique"], one["is_primary"]) == (unique, primary)
    assert found["shop", "customer_email_key"]["constraint_name"] == "customer_email_key"
    assert found["shop", "customer_region"]["constraint_name"] is None

    chosen = listed("indexes", "--schema-name", "shop", "--table-name", "customer")
    assert {one["name"] for one in chosen} == {
        "customer_pkey",
        "customer_email_key",
        "customer_region",
    }
    text = listed("indexes", "--schema-name", "shop", as_json=False)
    assert "primary key" in text
    assert "unique" in text
    assert "WHERE (id > 10)" in text
    left = {one["name"] for one in listed("indexes", "--schema-name", "shop", "--filters", filters)}
    assert left == {"purchase_pkey"}


def test_tables_and_parts_are_those_that_filters_leave(listed: Lister, filters: str) -> None:
    everything = listed("tables")
    assert len(everything) > 100
    (purchase,) = [one for one in listed("tables", "--filters", filters) if one["schema"] == "shop"]
    assert (purchase["name"], purchase["where"]) == ("purchase", "id <= 10000")
    text = listed("tables", "--filters", filters, as_json=False)
    assert cells(text, str(purchase["oid"]))[-1] == "id <= 10000"

    split = ["--split-tables-larger-than", "100 kB", "--filters", filters]
    parts = [one for one in listed("table-parts", *split) if one["schema"] == "shop"]
    assert {one["table"] for one in parts} == {"purchase"}
    assert len(parts) > 1
    # The bounds are cut from the rows that are copied.
    assert all(int(n) <= 10000 for one in parts for n in one["bounds"].split() if n.isdigit())
    with pytest.raises(ConfigError, match=r"shop\.customer, or --filters leaves it out"):
        listed("table-parts", "--schema-name", "shop", "--table-name", "customer", *split)


def test_depends_are_what_no_rule_names(listed: Lister, tmp_path: Path) -> None:
    assert listed("depends") == []
    path = tmp_path / "g.ini"
    path.write_text("[exclude-table]\nshop.customer\n")
    found = {one["object"]: one["reason"] for one in listed("depends", "--filters", str(path))}
    assert found == {
        "foreign key shop.purchase.purchase_customer_id_fkey": "depends on table shop.customer",
        "view shop.emails": "depends on table shop.customer",
        "view shop.first_email": "depends on view shop.emails",
    }
    text = listed("depends", "--filters", str(path), as_json=False)
    assert cells(text, "view shop.first_email")[1] == "depends on view shop.emails"


def test_schema_has_every_object(listed: Lister, museum: str) -> None:
    found = listed("schema", "--split-tables-larger-than", "500 kB")
    tables = {(one["schema"], one["name"]): one for one in found["tables"]}
    relations = (
        "SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n"
        " ON n.oid = relnamespace WHERE relkind = '{}' AND nspname !~ '^(pg_|information_)'"
    )
    for key, kind in (
        ("tables", "r"),
        ("partitioned_tables", "p"),
        ("materialized_views", "m"),
        ("sequences", "S"),
    ):
        listed_names = {(one["schema"], one["name"]) for one in found[key]}
        assert listed_names == set(rows(museum, relations.format(kind))), key
    assert len(tables["shop", "customer"]["parts"]) > 1
    assert [column["name"] for column in tables["shop", "customer"]["columns"]] == [
        "id",
        "email",
        "region",
    ]
    large = "SELECT count(*) FROM pg_largeobject_metadata"
    assert found["large_objects"]["count"] == rows(museum, large)[0][0]
    objects = {(one["kind"], one["name"]): one for one in found["objects"]}
    assert objects["view", "shop.emails"]["inside"] == ["schema", "shop"]
    assert "email" in objects["view", "shop.emails"]["properties"]["definition"]
    assert found["left_out"] == found["kept"] == []
    (functions,) = rows(
        museum,
        "SELECT count(*) FROM pg_proc WHERE prokind IN ('f', 'w') AND pronamespace NOT IN"
        " ('pg_catalog'::regnamespace, 'information_schema'::regnamespace) AND oid NOT IN"
        " (SELECT objid FROM pg_depend WHERE deptype IN ('e', 'i')"
        " AND classid = 'pg_proc'::regclass)",
    )[0]
    assert sum(kind == "function" for kind, _ in objects) == functions
    assert cells(listed("schema", as_json=False), "function") == ["function", str(functions)]


def test_schema_says_what_filters_leave_out(listed: Lister, tmp_path: Path) -> None:
    path = tmp_path / "g.ini"
    path.write_text(
        "[exclude-table]\nshop.customer\nshop.nothing\n[exclude-table-data]\nshop.purchase\n"
    )
    whole = listed("schema", as_json=False)
    found = listed("schema", "--filters", str(path))
    left_out = {one["object"]: one["reason"] for one in found["left_out"]}
    assert left_out["table shop.customer"] == "[exclude-table], line 2"
    assert left_out["view shop.emails"] == "depends on table shop.customer"
    assert left_out["index shop.customer_region"] == "depends on table shop.customer"
    assert [one["object"] for one in found["data_skipped"]] == ["table shop.purchase"]
    assert "shop.nothing" in found["warnings"][0]
    names = {(one["kind"], one["name"]) for one in found["objects"]}
    assert ("table", "shop.purchase") in names
    for gone in (("table", "shop.customer"), ("column", "shop.customer.id")):
        assert gone not in names
    text = listed("schema", "--filters", str(path), as_json=False)
    assert cells(text, "view") == ["view", str(int(cells(whole, "view")[1]) - 2), "2"]
    assert "warning: " in text
