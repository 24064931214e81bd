"""Databases in other encodings: every character arrives, or the clone says where it can't."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import CloneResult, clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.spark.session import Engine

# In the order of the parameters: of the source, of the target.
Databases = Callable[[str, str], tuple[str, str]]
Cloner = Callable[[str, str], CloneResult]


_numbers = itertools.count(1)


@pytest.fixture
def databases(source_cluster: Cluster, target_cluster: Cluster) -> Iterator[Databases]:
    made = []

    def create(source_encoding: str, target_encoding: str) -> tuple[str, str]:
        uris = []
        for cluster, encoding in (
            (source_cluster, source_encoding),
            (target_cluster, target_encoding),
        ):
            name = f"encoded_{next(_numbers)}"
            uris.append(cluster.create_database(name, encoding=encoding))
            made.append((cluster, name))
        return uris[0], uris[1]

    yield create
    for cluster, name in made:
        cluster.drop_database(name)


@pytest.fixture
def cloner(engine: Engine, reporter: Reporter, tmp_path: Path) -> Cloner:
    def run(source: str, target: str) -> CloneResult:
        settings = CloneSettings(Route(Dsn.parse(source), Dsn.parse(target), tmp_path / "work"))
        return clone(settings, engine, reporter)

    return run


def formats(result: CloneResult) -> dict[str, str]:
    assert result.summary is not None
    return {table.name: table.format for table in result.summary.tables}


def assert_equal_data(source: str, target: str, engine: Engine) -> None:
    compared = compare_data(CompareSettings(Route(Dsn.parse(source), Dsn.parse(target))), engine)
    assert [one.label for one in compared if not one.is_equal] == []


# Every character of LATIN1 above ASCII, in every place that holds text.
LATIN1 = """
CREATE TYPE "Größe" AS ENUM ('klein', 'groß');
CREATE TYPE paar AS (a text, "ß" "Größe");
CREATE TABLE "Straßen" (
    id int PRIMARY KEY, "Länge" text, v varchar(20), c char(5), n name, j json, jb jsonb,
    e "Größe", a text[], t tsvector, r tsquery, b bytea, q "char"
);
INSERT INTO "Straßen"
SELECT i, 'Zeichen ' || chr(i), chr(i) || 'ü', chr(i), 'n' || chr(i),
    json_build_object(chr(i), 'é'), jsonb_build_object(chr(i), 'é'),
    'groß', ARRAY[chr(i), NULL, 'ö'], to_tsvector('simple', 'Müller ' || chr(i)),
    plainto_tsquery('simple', 'Müller'), decode(to_hex(i), 'hex'), chr(i % 128)::"char"
FROM generate_series(161, 255) AS i;
CREATE TABLE "Text" (id int PRIMARY KEY, p paar, ps paar[]);
INSERT INTO "Text"
SELECT i, ROW(chr(i), 'groß'::"Größe")::paar, ARRAY[ROW(chr(i), 'klein'::"Größe")::paar]
FROM generate_series(161, 255) AS i;
CREATE TABLE zerteilt (t text PRIMARY KEY) PARTITION BY HASH (t);
CREATE TABLE zerteilt_0 PARTITION OF zerteilt FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE zerteilt_1 PARTITION OF zerteilt FOR VALUES WITH (MODULUS 2, REMAINDER 1);
INSERT INTO zerteilt SELECT 'é' || chr(i) || i FROM generate_series(161, 255) AS i;
CREATE INDEX "Länge zuerst" ON "Straßen" ("Länge") WHERE "Länge" <> 'ü';
CREATE FUNCTION "grüße"() RETURNS text LANGUAGE sql AS $$ SELECT 'Grüße'::text $$;
COMMENT ON TABLE "Straßen" IS 'für jede Straße ein Maß';
SELECT lo_from_bytea(6001, '\\xe9ff00');
"""


def test_latin1_becomes_utf8(databases: Databases, cloner: Cloner, engine: Engine) -> None:
    source, target = databases("LATIN1", "UTF8")
    execute(source, LATIN1)
    result = cloner(source, target)
    assert [warning.what for warning in result.warnings if "encoding" in warning.what]
    assert {"Straßen": "binary", "Text": "text"}.items() <= formats(result).items()
    # Here psycopg is the judge: both servers give it their values in UTF-8.
    for query in (
        'SELECT * FROM "Straßen" ORDER BY id',
        'SELECT id, p::text, ps::text FROM "Text" ORDER BY id',
        'SELECT t FROM zerteilt ORDER BY t COLLATE "C"',
        'SELECT "grüße"(), obj_description(\'"Straßen"\'::regclass), lo_get(6001)',
        "SELECT indexdef FROM pg_indexes WHERE tablename = 'Straßen' ORDER BY 1",
    ):
        found = rows(source, query)
        assert found
        assert sorted(rows(target, query), key=str) == sorted(found, key=str)
    assert_equal_data(source, target, engine)
    # Each row is where the target looks for it, whatever its hash was on the source.
    for number in (0, 1):
        strays = f"FROM zerteilt_{number} WHERE NOT satisfies_hash_partition"
        query = f"SELECT count(*) {strays}('zerteilt'::regclass, 2, {number}, t)"
        assert rows(target, query) == [(0,)]


# Bytes that are valid in no encoding we could name.
BYTES = [bytes([n]) + b" and " + bytes([255 - n % 100]) for n in range(128, 256)]


def test_sql_ascii_bytes_stay_as_they_are(
    databases: Databases, cloner: Cloner, engine: Engine
) -> None:
    source, target = databases("SQL_ASCII", "SQL_ASCII")
    execute(
        source,
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE bin (id int PRIMARY KEY, t text, a text[])",
        "CREATE TABLE txt (id int PRIMARY KEY, p pair)",
        client_encoding="SQL_ASCII",
    )
    with psycopg.connect(source, client_encoding="SQL_ASCII") as connection:
        for number, value in enumerate(BYTES):
            text = b"'" + value + b"'"
            connection.execute(
                b"INSERT INTO bin VALUES (%d, %s, ARRAY[%s, NULL])" % (number, text, text)
            )
            connection.execute(b"INSERT INTO txt VALUES (%d, (1, %s))" % (number, text))
    assert formats(cloner(source, target)) == {"bin": "binary", "txt": "text"}
    query = "SELECT id, t, a[1], (p).b FROM bin JOIN txt USING (id) ORDER BY id"
    found = rows(target, query, "SQL_ASCII")
    assert found == [(number, value, value, value) for number, value in enumerate(BYTES)]
    assert_equal_data(source, target, engine)


UTF8_TEXTS = ["plain", "é", "Straße", "日本", "🐘", "a\tb\\n\n'\""]


def test_sql_ascii_that_is_valid_utf8_becomes_utf8(
    databases: Databases, cloner: Cloner, engine: Engine
) -> None:
    source, target = databases("SQL_ASCII", "UTF8")
    execute(
        source,
        "CREATE TYPE pair AS (a int, b text)",
        'CREATE TABLE "Bücher" (id int PRIMARY KEY, t text, j jsonb)',
        "CREATE TABLE txt (id int PRIMARY KEY, p pair)",
    )
    with psycopg.connect(source, client_encoding="UTF8") as connection:
        for number, text in enumerate(UTF8_TEXTS):
            connection.execute(
                'INSERT INTO "Bücher" VALUES (%s, %s, jsonb_build_array(%s::text))',
                (number, text, text),
            )
            connection.execute("INSERT INTO txt VALUES (%s, (1, %s))", (number, text))
    assert formats(cloner(source, target)) == {"Bücher": "binary", "txt": "text"}
    query = 'SELECT id, t, j ->> 0, (p).b FROM "Bücher" JOIN txt USING (id) ORDER BY id'
    assert rows(target, query) == [(number, t, t, t) for number, t in enumerate(UTF8_TEXTS)]
    assert_equal_data(source, target, engine)


@pytest.mark.parametrize("column", ["text", "pair"], ids=["binary", "text"])
@pytest.mark.parametrize(
    ("source_encoding", "target_encoding", "sqlstate"),
    [("UTF8", "LATIN1", "22P05"), ("SQL_ASCII", "UTF8", "22021")],
)
def test_character_that_the_target_lacks_is_an_error_that_names_the_table(
    databases: Databases,
    cloner: Cloner,
    source_encoding: str,
    target_encoding: str,
    sqlstate: str,
    column: str,
) -> None:
    source, target = databases(source_encoding, target_encoding)
    execute(
        source,
        "CREATE TYPE pair AS (a int, b text)",
        f"CREATE TABLE refused (id int, v {column})",
        "CREATE TABLE accepted (id int PRIMARY KEY, v text)",
        "INSERT INTO accepted SELECT i, 'fine' FROM generate_series(1, 100) AS i",
        "INSERT INTO refused SELECT i FROM generate_series(1, 5000) AS i",
    )
    value = b"'secret \xe2\x82\xac'" if source_encoding == "UTF8" else b"'secret \xff\xfe'"
    if column == "pair":
        value = b"ROW(1, " + value + b")::pair"
    client_encoding = source_encoding
    execute(
        source,
        b"INSERT INTO refused VALUES (5001, " + value + b")",
        client_encoding=client_encoding,
    )
    with pytest.raises(ServerError, match=r"^public\.refused: ") as raised:
        cloner(source, target)
    assert raised.value.exit_code == 5
    assert raised.value.facts["sqlstate"] == sqlstate
    assert "create the target database" in raised.value.hint
    assert "secret" not in str(raised.value)
    # The other table is whole, this one is empty: no row without its neighbours.
    assert rows(target, "SELECT count(*) FROM accepted") == [(100,)]
    assert rows(target, "SELECT count(*) FROM refused") == [(0,)]
    sessions = "SELECT application_name FROM pg_stat_activity WHERE application_name ~ '^millrace'"
    wait_for(lambda: rows(source, sessions) == rows(target, sessions) == [])


def test_sql_ascii_names_that_are_not_utf8_are_refused_before_anything_is_touched(
    databases: Databases, cloner: Cloner
) -> None:
    source, target = databases("SQL_ASCII", "SQL_ASCII")
    execute(source, b'CREATE TABLE "Stra\xdfe" (id int)', client_encoding="SQL_ASCII")
    with pytest.raises(ServerError, match=r"catalog.*invalid byte sequence") as raised:
        cloner(source, target)
    assert raised.value.exit_code == 5
    assert rows(target, "SELECT count(*) FROM pg_namespace WHERE oid >= 16384") == [(0,)]
