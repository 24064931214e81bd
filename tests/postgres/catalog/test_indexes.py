"""Catalog queries for indexes, constraints and what else is made after the rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.fixtures.catalog_reading import Connection, create, indexes_of, rows, tables_of
from tests.fixtures.sql import execute

from millrace.clone.finish.index import build_index, finish_index
from millrace.config.dsn import Dsn
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect

INDEXES = """
CREATE EXTENSION vector;
CREATE TABLE t (
    id int CONSTRAINT "The Key" PRIMARY KEY, code text CONSTRAINT unique_code UNIQUE,
    late int CONSTRAINT late_key UNIQUE DEFERRABLE INITIALLY DEFERRED,
    place int4range, CONSTRAINT apart EXCLUDE USING gist (place WITH &&), v vector(3)
);
CREATE INDEX "Odd ""index" ON t (lower(code)) WHERE code <> ' WHERE (x)';
CREATE INDEX with_statistics ON t ((id + 1), (id * 2));
ALTER INDEX with_statistics ALTER COLUMN 2 SET STATISTICS 777;
CREATE UNIQUE INDEX identity ON t (id) INCLUDE (late);
ALTER TABLE t REPLICA IDENTITY USING INDEX identity;
ALTER TABLE t CLUSTER ON "The Key";
"""


def test_indexes_are_read_with_the_constraints_that_rest_on_them(
    source_session: Connection,
) -> None:
    create(source_session, INDEXES)
    found = indexes_of(source_session)
    kinds = {name: index.constraint_type for name, index in found.items()}
    assert kinds == {
        "The Key": "p",
        "unique_code": "u",
        "late_key": "u",
        "apart": "x",
        'Odd "index': None,
        "with_statistics": None,
        "identity": None,
    }
    assert (found["late_key"].deferrable, found["late_key"].deferred) == (True, True)
    assert found["apart"].built_whole
    assert found["The Key"].after == ('ALTER TABLE ONLY "public"."t" CLUSTER ON "The Key"',)
    assert "SET STATISTICS 777" in found["with_statistics"].after[0]
    assert "REPLICA IDENTITY USING INDEX" in found["identity"].after[0]


def test_indexes_built_from_what_was_read_are_the_same(
    source_session: Connection, target_session: Connection
) -> None:
    """pg_get_indexdef and pg_get_constraintdef are the oracles."""
    create(source_session, INDEXES)
    create(
        target_session,
        "CREATE EXTENSION vector; CREATE TABLE t (id int NOT NULL, code text, late int,"
        " place int4range, v vector(3))",
    )
    table = tables_of(source_session)["t"]
    indexes = catalog.read_indexes(source_session)
    for _ in range(2):  # a second time nothing is left to do
        for index in indexes:
            build_index(target_session, index, table)
        for index in indexes:
            finish_index(target_session, index, table)
    for query in (
        "SELECT i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid), i.indisclustered,"
        " i.indisreplident, i.indisvalid, i.indimmediate, (SELECT max(attstattarget) FROM"
        " pg_attribute WHERE attrelid = i.indexrelid AND attstattarget >= 0)"
        " FROM pg_index i WHERE i.indrelid = 'public.t'::regclass ORDER BY 1",
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE conrelid = 'public.t'::regclass AND contype IN ('p', 'u', 'x') ORDER BY 1",
    ):
        assert rows(source_session, query) == rows(target_session, query)


SPACE = "Odd space"


@pytest.fixture
def tablespace(target_cluster: Cluster) -> Iterator[str]:
    """Asked for before the databases, it goes after them."""
    execute(
        target_cluster.uri(),
        "SET allow_in_place_tablespaces = on",
        f"CREATE TABLESPACE \"{SPACE}\" LOCATION ''",
    )
    yield SPACE
    execute(target_cluster.uri(), f'DROP TABLESPACE "{SPACE}"')


@pytest.fixture
def sibling(target_cluster: Cluster) -> Iterator[Connection]:
    """A source with everything that 18 knows."""
    uri = target_cluster.create_database("sibling")
    with connect(Dsn.parse(uri), "test") as connection:
        yield connection
    target_cluster.drop_database("sibling")


PLACED = f"""
CREATE TABLE t (
    a int, active bool, room int4range, during tsrange,
    CONSTRAINT apart EXCLUDE USING gist (room WITH &&) WITH (fillfactor = 60)
        USING INDEX TABLESPACE "{SPACE}" WHERE (active),
    CONSTRAINT once PRIMARY KEY (room, during WITHOUT OVERLAPS)
        WITH (fillfactor = 70, buffering = off) USING INDEX TABLESPACE "{SPACE}",
    CONSTRAINT other UNIQUE (a) WITH (fillfactor = 80) USING INDEX TABLESPACE "{SPACE}"
);
CREATE INDEX of_active ON t (a) TABLESPACE "{SPACE}" WHERE active;
CREATE INDEX elsewhere ON t (a);
ALTER INDEX elsewhere DEPENDS ON EXTENSION plpgsql;
"""


PLACES = """
SELECT c.relname, {}, c.reloptions, pg_get_indexdef(c.oid),
       (SELECT array_agg(e.extname::text) FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
         WHERE d.objid = c.oid AND d.deptype = 'x')
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
  LEFT JOIN pg_tablespace t ON t.oid = c.reltablespace
 WHERE i.indrelid = 'public.t'::regclass ORDER BY 1"""


@pytest.mark.parametrize("tablespaces", [True, False])
def test_indexes_are_built_where_they_were_with_their_options(
    tablespace: str, sibling: Connection, target_session: Connection, tablespaces: bool
) -> None:
    create(sibling, PLACED)
    create(target_session, "CREATE TABLE t (a int, active bool, room int4range, during tsrange)")
    table = tables_of(sibling)["t"]
    indexes = catalog.read_indexes(sibling)
    for _ in range(2):
        for index in indexes:
            build_index(target_session, index, table, tablespaces=tablespaces)
        for index in indexes:
            finish_index(target_session, index, table)
    expected = rows(sibling, PLACES.format("t.spcname" if tablespaces else "NULL"))
    assert rows(target_session, PLACES.format("t.spcname")) == expected
    placed = [name for name, space, *_ in expected if space == tablespace]
    assert placed == (["apart", "of_active", "once", "other"] if tablespaces else [])
    assert rows(target_session, "SHOW default_tablespace") == [("",)]


def test_invalid_indexes_and_those_of_partitioned_tables_are_left_out(
    source_session: Connection,
) -> None:
    create(
        source_session,
        """CREATE TABLE t (id int); CREATE INDEX good ON t (id); CREATE INDEX bad ON t (id);
        UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'bad'::regclass;
        CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE leaf PARTITION OF p FOR VALUES FROM (0) TO (10);
        CREATE MATERIALIZED VIEW m AS SELECT 1 AS a; CREATE INDEX on_view ON m (a)""",
    )
    assert set(indexes_of(source_session)) == {"good", "leaf_pkey"}


def test_foreign_keys_are_read_as_they_were_declared(source_session: Connection) -> None:
    create(
        source_session,
        """CREATE TABLE a (id int PRIMARY KEY);
        CREATE TABLE b (id int, a int CONSTRAINT to_a REFERENCES a ON DELETE CASCADE);
        ALTER TABLE b ADD CONSTRAINT unchecked FOREIGN KEY (id) REFERENCES a NOT VALID;
        CREATE TABLE p (id int PRIMARY KEY, a int CONSTRAINT of_parent REFERENCES a)
            PARTITION BY RANGE (id);
        CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (10);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (10) TO (20);
        CREATE TABLE c (p int CONSTRAINT to_parent REFERENCES p)""",
    )
    found = {key.name: key for key in catalog.read_foreign_keys(source_session)}
    assert set(found) == {"to_a", "unchecked", "of_parent", "to_parent"}
    assert found["unchecked"].definition.endswith("NOT VALID")
    assert "ON DELETE CASCADE" in found["to_a"].definition
    assert found["of_parent"].is_partitioned
    assert not found["to_parent"].is_partitioned


def test_sequences_are_read_with_where_they_stand(source_session: Connection) -> None:
    create(
        source_session,
        """CREATE SEQUENCE untouched START 7; CREATE SEQUENCE used; SELECT nextval('used');
        SELECT nextval('used');
        CREATE SEQUENCE "Odd ""one"; SELECT setval('"Odd ""one"', 99, false);
        CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY, s serial);
        INSERT INTO t DEFAULT VALUES; CREATE SEQUENCE down INCREMENT -1; SELECT nextval('down')""",
    )
    found = {s.name: (s.last_value, s.is_called) for s in catalog.read_sequences(source_session)}
    assert found == {
        "untouched": (7, False),
        "used": (2, True),
        'Odd "one': (99, False),
        "t_id_seq": (1, True),
        "t_s_seq": (1, True),
        "down": (-1, True),
    }


def test_more_sequences_than_one_query_reads_are_all_read(source_session: Connection) -> None:
    create(source_session, "".join(f"CREATE SEQUENCE s{n} START {n};" for n in range(1, 1102)))
    found = catalog.read_sequences(source_session)
    assert [(s.name, s.last_value) for s in found] == [(f"s{n}", n) for n in range(1, 1102)]


def test_large_objects_are_cut_into_ranges_that_hold_each_once(source_session: Connection) -> None:
    assert catalog.read_large_object_ranges(
        source_session, bytes_per_range=1, objects_per_range=1
    ) == (
        [],
        0,
    )
    create(
        source_session,
        "SELECT lo_from_bytea(0, repeat('x', g)::bytea) FROM generate_series(1, 105) g",
    )
    ranges, size = catalog.read_large_object_ranges(
        source_session, bytes_per_range=10**9, objects_per_range=10
    )
    assert size > 0
    assert [r.number for r in ranges] == list(range(1, 12))
    assert sum(r.count for r in ranges) == 105
    assert all(r.count <= 10 for r in ranges)
    assert all(a.last_oid < b.first_oid for a, b in itertools.pairwise(ranges))


def test_extensions_are_read_without_plpgsql(source_session: Connection) -> None:
    create(source_session, "CREATE SCHEMA e; CREATE EXTENSION vector SCHEMA e")
    assert [(e.name, e.schema) for e in catalog.read_extensions(source_session)] == [
        ("vector", "e")
    ]


def test_database_settings_can_be_set_as_they_were_read(
    source_session: Connection, target_session: Connection
) -> None:
    values = {
        "search_path": '"$user", public, "Odd One"',
        "work_mem": "'5MB'",
        "app.motto": "'it''s \\ fine'",
        "temp_tablespaces": "''",
        "datestyle": "'ISO, DMY'",
    }
    for name, value in values.items():
        source_session.execute(
            f"ALTER DATABASE {source_session.info.dbname} SET {name} TO {value}".encode()
        )
    ((role, found),) = catalog.read_database_settings(source_session)
    assert role is None
    for setting in found:
        rendered = catalog.render_setting(setting)
        target_session.execute(
            f"ALTER DATABASE {target_session.info.dbname} SET {rendered}".encode()
        )
    assert catalog.read_database_settings(target_session) == [(None, found)]
