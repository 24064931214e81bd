"""Catalog queries, each on tables made for the purpose: the server says what is there."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.fixtures.sql import execute

from millrace.clone.copy import part_statements
from millrace.clone.index import build_index, finish_index
from millrace.clone.split import Sampled, plan_cuts, plan_parts
from millrace.config.dsn import Dsn
from millrace.postgres import catalog
from millrace.postgres.compared import read_compared_relations
from millrace.postgres.connect import connect
from millrace.postgres.embedded import Cluster
from millrace.relation import Index, SplitKey, Table
from millrace.snapshot.export import open_snapshot

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def source(source_db: str) -> Iterator[Connection]:
    with connect(Dsn.parse(source_db), "test") as connection:
        yield connection


@pytest.fixture
def target(target_db: str) -> Iterator[Connection]:
    with connect(Dsn.parse(target_db), "test") as connection:
        yield connection


def create(connection: Connection, script: str) -> None:
    """Names in the script are in schema public, as they would be for a user."""
    with connection.transaction():
        connection.execute("SET LOCAL search_path = public")
        connection.execute(script.encode())


def tables_of(connection: Connection, **how: Any) -> dict[str, Table]:
    return {table.name: table for table in catalog.read_tables(connection, **how)}


def indexes_of(connection: Connection) -> dict[str, Index]:
    return {index.name: index for index in catalog.read_indexes(connection)}


def rows(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    return connection.execute(query.encode()).fetchall()


SPLIT_KEYS = """
CREATE TABLE small_key (id int2 PRIMARY KEY);
CREATE TABLE int_key (id int4 PRIMARY KEY);
CREATE TABLE big_key (id int8 PRIMARY KEY);
CREATE TABLE "Odd Table" ("odd ""column" int PRIMARY KEY);
CREATE TABLE composite_key (a int, b int, PRIMARY KEY (a, b));
CREATE TABLE text_key (id text PRIMARY KEY);
CREATE TABLE numeric_key (id numeric PRIMARY KEY);
CREATE DOMAIN int_domain AS int;
CREATE TABLE no_key (id int);
CREATE TABLE only_indexed (id int);
CREATE INDEX ON only_indexed (id);
CREATE TABLE nullable_unique (id int UNIQUE);
CREATE TABLE not_null_unique (id int NOT NULL UNIQUE);
CREATE TABLE deferrable_unique (id int UNIQUE DEFERRABLE);
CREATE TABLE deferrable_key (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE partial_unique (id int);
CREATE UNIQUE INDEX ON partial_unique (id) WHERE id > 0;
CREATE TABLE expression_unique (id int);
CREATE UNIQUE INDEX ON expression_unique (abs(id));
CREATE TABLE covering_unique (id int NOT NULL, v text);
CREATE UNIQUE INDEX ON covering_unique (id) INCLUDE (v);
CREATE TABLE several (a int UNIQUE, b int NOT NULL UNIQUE, z int PRIMARY KEY);
CREATE TABLE unique_ones (a int UNIQUE, b int NOT NULL UNIQUE);
CREATE TABLE primary_key_of_text (id text PRIMARY KEY, n int NOT NULL UNIQUE);
CREATE TABLE nulls_equal (id int UNIQUE NULLS NOT DISTINCT);
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child () INHERITS (parent);
CREATE TABLE partitioned (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE leaf PARTITION OF partitioned FOR VALUES FROM (0) TO (10);
CREATE TABLE invalid_unique (id int);
CREATE UNIQUE INDEX invalid_index ON invalid_unique (id);
UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'invalid_index'::regclass;
"""


def test_split_key_is_an_integer_with_an_immediate_unique_index_over_all_rows(
    source: Connection,
) -> None:
    create(source, SPLIT_KEYS)
    found = {name: table.split_key for name, table in tables_of(source).items()}
    key = SplitKey("id", nullable=False)
    assert found == {
        "small_key": key,
        "int_key": key,
        "big_key": key,
        "Odd Table": SplitKey('odd "column', nullable=False),
        "composite_key": None,
        "text_key": None,
        "numeric_key": None,
        "no_key": None,
        "only_indexed": None,
        "nullable_unique": SplitKey("id", nullable=True),
        "not_null_unique": key,
        "deferrable_unique": None,
        "deferrable_key": None,
        "partial_unique": None,
        "expression_unique": None,
        "covering_unique": key,
        "several": SplitKey("z", nullable=False),
        "unique_ones": SplitKey("b", nullable=False),
        "primary_key_of_text": SplitKey("n", nullable=False),
        "nulls_equal": SplitKey("id", nullable=True),
        "parent": key,
        "child": None,
        "leaf": key,
        "invalid_unique": None,
    }


def test_not_null_that_is_not_valid_may_have_nulls(target: Connection) -> None:
    """18 marks such a column like any other that is NOT NULL."""
    create(
        target,
        "CREATE TABLE t (id int UNIQUE); INSERT INTO t SELECT generate_series(1, 1000);"
        " INSERT INTO t VALUES (NULL), (NULL); ALTER TABLE t ADD NOT NULL id NOT VALID;"
        " CREATE TABLE valid (a int UNIQUE, b int UNIQUE); ALTER TABLE valid"
        " ADD NOT NULL a NOT VALID, ADD NOT NULL b NOT VALID, VALIDATE CONSTRAINT valid_b_not_null",
    )
    found = tables_of(target)
    assert found["t"].split_key == SplitKey("id", nullable=True)
    assert found["valid"].split_key == SplitKey("b", nullable=False)
    counts = [
        rows(target, f"SELECT count(*) FROM public.t WHERE {part.condition}")[0][0]
        for part in plan_parts(found["t"], [100, 500])
    ]
    assert counts == [101, 400, 501]
    keys = {relation.name: relation.key for relation in read_compared_relations(target)}
    assert keys == {"t": (), "valid": ("b",)}


TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TYPE pair AS (a int, b text);
CREATE TYPE floats AS RANGE (subtype = float8);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN moods AS mood;
CREATE DOMAIN many_moods AS mood[];
CREATE DOMAIN place AS regclass;
CREATE EXTENSION vector;
CREATE TABLE types (
    c_int int, c_text text, c_bytea bytea, c_json json, c_jsonb jsonb, c_numeric numeric(10, 2),
    c_int_array int[], c_range int4range, c_timestamptz timestamptz, c_inet inet, c_name name,
    c_tsvector tsvector, c_bit bit(3), c_money money, c_oid oid, c_point point, c_interval interval,
    c_multirange int4multirange, c_uuid_array uuid[], c_enum mood, c_domain positive,
    c_enum_domain moods,
    t_enum_array mood[], t_composite pair, t_composite_array pair[], t_user_range floats,
    t_many_moods many_moods, t_regclass regclass, t_regtype regtype, t_regproc regprocedure,
    t_regrole regrole, t_reg_array regclass[], t_reg_domain place, t_vector vector(3), t_xml xml
);
"""


def test_type_travels_as_text_if_its_binary_form_means_something_else_elsewhere(
    source: Connection,
) -> None:
    create(source, TYPES)
    columns = tables_of(source)["types"].columns
    assert len(columns) == 35
    wrong = [c for c in columns if bool(c.text_reason) != c.name.startswith("t_")]
    assert wrong == []
    assert all("built in" in c.text_reason or "differs" in c.text_reason for c in columns[22:])


def test_table_says_which_column_makes_it_text(source: Connection) -> None:
    create(source, "CREATE TYPE mood AS ENUM ('sad'); CREATE TABLE t (id int, moods mood[])")
    create(source, "CREATE TABLE no_columns (); CREATE TABLE plain (id int, m mood)")
    found = tables_of(source)
    assert "moods" in found["t"].text_reason
    assert found["no_columns"].text_reason == "no columns"
    assert found["plain"].text_reason == ""


def test_columns_are_those_that_copy_carries_in_their_order(source: Connection) -> None:
    create(
        source,
        "CREATE TABLE t (z int, gone int, g int GENERATED ALWAYS AS (z * 2) STORED,"
        " i int GENERATED ALWAYS AS IDENTITY, a varchar(7)); ALTER TABLE t DROP gone",
    )
    columns = tables_of(source)["t"].columns
    assert [(c.name, c.type_name) for c in columns] == [
        ("z", "integer"),
        ("i", "integer"),
        ("a", "character varying(7)"),
    ]


def test_virtual_columns_are_computed_by_the_target(target: Connection) -> None:
    create(target, "CREATE TABLE t (a int, v int GENERATED ALWAYS AS (a * 2) VIRTUAL)")
    assert [c.name for c in tables_of(target)["t"].columns] == ["a"]


def test_only_tables_with_rows_of_their_own_are_tables(source: Connection) -> None:
    create(
        source,
        """CREATE TABLE plain (id int); CREATE UNLOGGED TABLE unlogged (id int);
        CREATE TEMP TABLE temporary (id int); CREATE VIEW v AS SELECT 1 AS a;
        CREATE MATERIALIZED VIEW m AS SELECT 1 AS a;
        CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);
        CREATE TABLE p (id int) PARTITION BY RANGE (id);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id);
        CREATE TABLE p11 PARTITION OF p1 FOR VALUES FROM (0) TO (5);
        CREATE SCHEMA millrace; CREATE TABLE millrace.run (id int);
        CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;
        CREATE FOREIGN TABLE f (id int) SERVER s""",
    )
    assert set(tables_of(source)) == {"plain", "unlogged", "parent", "child", "p11"}
    assert [name for _, _, name in catalog.read_relations_of_kind(source, "p")] == ["p", "p1"]
    assert [name for _, _, name in catalog.read_relations_of_kind(source, "m")] == ["m"]


def test_sizes_and_rows_are_those_of_the_server(source: Connection) -> None:
    create(
        source,
        """CREATE TABLE t (id int PRIMARY KEY, v text);
        ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
        INSERT INTO t SELECT g, repeat('x', 10000) FROM generate_series(1, 100) g;
        CREATE TABLE never_analyzed (id int)""",
    )
    assert tables_of(source)["t"].estimated_rows == 0, "unknown is not minus one"
    source.execute("ANALYZE public.t")
    table = tables_of(source)["t"]
    assert table.estimated_rows == 100
    ((heap, whole),) = rows(
        source, "SELECT pg_relation_size('public.t'), pg_table_size('public.t')"
    )
    assert (table.heap_bytes, table.total_bytes) == (heap, whole)
    assert table.total_bytes > 100 * 10_000 > table.heap_bytes


def test_two_reads_are_equal_and_survive_pickle(source: Connection) -> None:
    create(source, SPLIT_KEYS)
    once, again = catalog.read_tables(source), catalog.read_tables(source)
    assert once == again == pickle.loads(pickle.dumps(once))


PARTITIONED = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE by_int (id int) PARTITION BY HASH (id);
CREATE TABLE by_int_0 PARTITION OF by_int FOR VALUES WITH (MODULUS 1, REMAINDER 0);
CREATE TABLE by_text (t text) PARTITION BY HASH (t);
CREATE TABLE by_text_0 PARTITION OF by_text FOR VALUES WITH (MODULUS 1, REMAINDER 0);
CREATE TABLE by_enum (m mood) PARTITION BY HASH (m);
CREATE TABLE by_enum_0 PARTITION OF by_enum FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE by_enum_1 PARTITION OF by_enum FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TABLE list_of_enum (m mood) PARTITION BY LIST (m);
CREATE TABLE list_of_enum_0 PARTITION OF list_of_enum FOR VALUES IN ('sad');
CREATE TABLE by_expression (id int) PARTITION BY HASH ((id + 1));
CREATE TABLE by_expression_0 PARTITION OF by_expression FOR VALUES WITH (MODULUS 1, REMAINDER 0);
CREATE TABLE upper_range (id int, m mood) PARTITION BY RANGE (id);
CREATE TABLE middle_hash PARTITION OF upper_range FOR VALUES FROM (0) TO (10) PARTITION BY HASH (m);
CREATE TABLE lower_leaf PARTITION OF middle_hash FOR VALUES WITH (MODULUS 1, REMAINDER 0);
CREATE TABLE upper_hash (id int, m mood) PARTITION BY HASH (m);
CREATE TABLE middle_too PARTITION OF upper_hash FOR VALUES WITH (MODULUS 1, REMAINDER 0)
    PARTITION BY HASH (m, id);
CREATE TABLE lower_too PARTITION OF middle_too FOR VALUES WITH (MODULUS 1, REMAINDER 0);
"""


def test_leaf_below_a_hash_of_an_enum_is_loaded_via_the_topmost_such_table(
    source: Connection,
) -> None:
    create(source, PARTITIONED)
    found = {name: t.load_via and t.load_via[2] for name, t in tables_of(source).items()}
    assert found == {
        "by_int_0": None,
        "by_text_0": None,
        "by_enum_0": "by_enum",
        "by_enum_1": "by_enum",
        "list_of_enum_0": None,
        "by_expression_0": "by_expression",
        "lower_leaf": "middle_hash",
        "lower_too": "upper_hash",
    }


def test_every_hash_is_loaded_via_its_root_if_the_encoding_changes(source: Connection) -> None:
    create(source, PARTITIONED)
    found = tables_of(source, same_encoding=False)
    assert found["by_text_0"].load_via == (
        rows(source, "SELECT 'public.by_text'::regclass::oid::int8")[0][0],
        "public",
        "by_text",
    )
    assert found["list_of_enum_0"].load_via is None


@pytest.mark.parametrize(
    "rewrite",
    [
        "TRUNCATE public.t",
        "ALTER TABLE public.t ALTER v TYPE varchar(99) USING v || '!'",
        "VACUUM FULL public.t",
    ],
)
def test_table_rewritten_after_the_snapshot_is_told(
    source: Connection, source_db: str, rewrite: str
) -> None:
    create(
        source, "CREATE TABLE t (v text); INSERT INTO t VALUES ('x'); CREATE TABLE other (id int)"
    )
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        snapshot.connection.execute("SELECT 1")
        source.execute(rewrite.encode())
        tables = catalog.read_tables(snapshot.connection)
        catalog.lock_tables(snapshot.connection, tables)
        assert catalog.read_rewritten(snapshot.connection, tables) == ["public.t"]


def test_table_that_was_only_written_to_is_not_told(source: Connection, source_db: str) -> None:
    create(source, "CREATE TABLE t (v text); INSERT INTO t VALUES ('x')")
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        create(
            source,
            "INSERT INTO t VALUES ('y'); DELETE FROM t WHERE v = 'x'; ALTER TABLE t ADD w int",
        )
        source.execute("VACUUM ANALYZE public.t")
        tables = catalog.read_tables(snapshot.connection)
        catalog.lock_tables(snapshot.connection, tables)
        assert catalog.read_rewritten(snapshot.connection, tables) == []


@pytest.mark.parametrize(
    "statement", ["DROP TABLE {}", "TRUNCATE {}", "ALTER TABLE {} ADD c int", "VACUUM FULL {}"]
)
def test_locked_tables_can_be_written_but_not_dropped(
    source: Connection, source_db: str, statement: str
) -> None:
    create(source, 'CREATE TABLE t (id int); CREATE TABLE "Odd ""one" (id int)')
    create(source, "CREATE TABLE child () INHERITS (t)")
    names = ("public.t", 'public."Odd ""one"', "public.child")
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        catalog.lock_tables(snapshot.connection, catalog.read_tables(snapshot.connection))
        source.execute("SET lock_timeout = 1")
        for name in names:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                source.execute(statement.format(name).encode())
            source.execute(f"INSERT INTO {name} VALUES (1)".encode())
    source.execute("SET lock_timeout = '30s'")
    for name in reversed(names):
        source.execute(statement.format(name).encode())


def test_more_tables_than_one_statement_locks_are_all_locked(
    source: Connection, source_db: str
) -> None:
    create(source, "".join(f"CREATE TABLE t{n} ();" for n in range(450)))
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        catalog.lock_tables(snapshot.connection, catalog.read_tables(snapshot.connection))
        ((locked,),) = rows(
            source,
            "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
            " WHERE c.relname ~ '^t[0-9]+$' AND l.mode = 'AccessShareLock' AND l.pid ="
            f" {snapshot.connection.info.backend_pid}",
        )
        assert locked == 450


def test_no_tables_need_no_lock(source: Connection) -> None:
    catalog.lock_tables(source, [])
    assert catalog.read_rewritten(source, []) == []


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


def test_indexes_are_read_with_the_constraints_that_rest_on_them(source: Connection) -> None:
    create(source, INDEXES)
    found = indexes_of(source)
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
    source: Connection, target: Connection
) -> None:
    """pg_get_indexdef and pg_get_constraintdef are the oracles."""
    create(source, INDEXES)
    create(
        target,
        "CREATE EXTENSION vector; CREATE TABLE t (id int NOT NULL, code text, late int,"
        " place int4range, v vector(3))",
    )
    table = tables_of(source)["t"]
    indexes = catalog.read_indexes(source)
    for _ in range(2):  # a second time nothing is left to do
        for index in indexes:
            build_index(target, index, table)
        for index in indexes:
            finish_index(target, index, table)
    for query in (
        "SELECT i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid), i.indisclustered,"
        " i.indisreplident, i.indisvalid, i.indimmediate, (SELECT max(attstattarget) FROM"
        " pg_attribute WHERE attrelid = i.indexrelid AND attstattarget >= 0)"
        " FROM pg_index i WHERE i.indrelid = 'public.t'::regclass ORDER BY 1",
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint"
        " WHERE conrelid = 'public.t'::regclass AND contype IN ('p', 'u', 'x') ORDER BY 1",
    ):
        assert rows(source, query) == rows(target, query)


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
    tablespace: str, sibling: Connection, target: Connection, tablespaces: bool
) -> None:
    create(sibling, PLACED)
    create(target, "CREATE TABLE t (a int, active bool, room int4range, during tsrange)")
    table = tables_of(sibling)["t"]
    indexes = catalog.read_indexes(sibling)
    for _ in range(2):
        for index in indexes:
            build_index(target, index, table, tablespaces=tablespaces)
        for index in indexes:
            finish_index(target, index, table)
    expected = rows(sibling, PLACES.format("t.spcname" if tablespaces else "NULL"))
    assert rows(target, PLACES.format("t.spcname")) == expected
    placed = [name for name, space, *_ in expected if space == tablespace]
    assert placed == (["apart", "of_active", "once", "other"] if tablespaces else [])
    assert rows(target, "SHOW default_tablespace") == [("",)]


def test_invalid_indexes_and_those_of_partitioned_tables_are_left_out(source: Connection) -> None:
    create(
        source,
        """CREATE TABLE t (id int); CREATE INDEX good ON t (id); CREATE INDEX bad ON t (id);
        UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'bad'::regclass;
        CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE leaf PARTITION OF p FOR VALUES FROM (0) TO (10);
        CREATE MATERIALIZED VIEW m AS SELECT 1 AS a; CREATE INDEX on_view ON m (a)""",
    )
    assert set(indexes_of(source)) == {"good", "leaf_pkey"}


def test_foreign_keys_are_read_as_they_were_declared(source: Connection) -> None:
    create(
        source,
        """CREATE TABLE a (id int PRIMARY KEY);
        CREATE TABLE b (id int, a int CONSTRAINT to_a REFERENCES a ON DELETE CASCADE);
        ALTER TABLE b ADD CONSTRAINT unchecked FOREIGN KEY (id) REFERENCES a NOT VALID;
        CREATE TABLE p (id int PRIMARY KEY, a int CONSTRAINT of_parent REFERENCES a)
            PARTITION BY RANGE (id);
        CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (10);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (10) TO (20);
        CREATE TABLE c (p int CONSTRAINT to_parent REFERENCES p)""",
    )
    found = {key.name: key for key in catalog.read_foreign_keys(source)}
    assert set(found) == {"to_a", "unchecked", "of_parent", "to_parent"}
    assert found["unchecked"].definition.endswith("NOT VALID")
    assert "ON DELETE CASCADE" in found["to_a"].definition
    assert found["of_parent"].is_partitioned
    assert not found["to_parent"].is_partitioned


def test_sequences_are_read_with_where_they_stand(source: Connection) -> None:
    create(
        source,
        """CREATE SEQUENCE untouched START 7; CREATE SEQUENCE used; SELECT nextval('used');
        SELECT nextval('used');
        CREATE SEQUENCE "Odd ""one"; SELECT setval('"Odd ""one"', 99, false);
        CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY, s serial);
        INSERT INTO t DEFAULT VALUES; CREATE SEQUENCE down INCREMENT -1; SELECT nextval('down')""",
    )
    found = {s.name: (s.last_value, s.is_called) for s in catalog.read_sequences(source)}
    assert found == {
        "untouched": (7, False),
        "used": (2, True),
        'Odd "one': (99, False),
        "t_id_seq": (1, True),
        "t_s_seq": (1, True),
        "down": (-1, True),
    }


def test_more_sequences_than_one_query_reads_are_all_read(source: Connection) -> None:
    create(source, "".join(f"CREATE SEQUENCE s{n} START {n};" for n in range(1, 1102)))
    found = catalog.read_sequences(source)
    assert [(s.name, s.last_value) for s in found] == [(f"s{n}", n) for n in range(1, 1102)]


def test_large_objects_are_cut_into_ranges_that_hold_each_once(source: Connection) -> None:
    assert catalog.read_large_object_ranges(source, bytes_per_range=1, objects_per_range=1) == (
        [],
        0,
    )
    create(source, "SELECT lo_from_bytea(0, repeat('x', g)::bytea) FROM generate_series(1, 105) g")
    ranges, size = catalog.read_large_object_ranges(
        source, bytes_per_range=10**9, objects_per_range=10
    )
    assert size > 0
    assert [r.number for r in ranges] == list(range(1, 12))
    assert sum(r.count for r in ranges) == 105
    assert all(r.count <= 10 for r in ranges)
    assert all(a.last_oid < b.first_oid for a, b in itertools.pairwise(ranges))


def test_extensions_are_read_without_plpgsql(source: Connection) -> None:
    create(source, "CREATE SCHEMA e; CREATE EXTENSION vector SCHEMA e")
    assert [(e.name, e.schema) for e in catalog.read_extensions(source)] == [("vector", "e")]


def test_database_settings_can_be_set_as_they_were_read(
    source: Connection, target: Connection
) -> None:
    values = {
        "search_path": '"$user", public, "Odd One"',
        "work_mem": "'5MB'",
        "app.motto": "'it''s \\ fine'",
        "temp_tablespaces": "''",
        "datestyle": "'ISO, DMY'",
    }
    for name, value in values.items():
        source.execute(f"ALTER DATABASE {source.info.dbname} SET {name} TO {value}".encode())
    ((role, found),) = catalog.read_database_settings(source)
    assert role is None
    for setting in found:
        rendered = catalog.render_setting(setting)
        target.execute(f"ALTER DATABASE {target.info.dbname} SET {rendered}".encode())
    assert catalog.read_database_settings(target) == [(None, found)]


@pytest.mark.parametrize("key", ["id int PRIMARY KEY", "id int UNIQUE", "id int"])
def test_parts_cut_by_a_sample_hold_every_row_exactly_once(source: Connection, key: str) -> None:
    """PostgreSQL evaluates the conditions."""
    create(
        source,
        f"""CREATE TABLE t ({key}, v text);
        INSERT INTO t SELECT CASE WHEN g < 900 THEN g ELSE g * 1000000 END, repeat('x', 100)
            FROM generate_series(1, 2000) g;
        INSERT INTO t VALUES (-2147483648), (2147483647)""",
    )
    if "PRIMARY" not in key:
        create(source, "INSERT INTO t SELECT NULL, 'null' FROM generate_series(1, 5)")
    table = tables_of(source)["t"]
    samples = [Sampled(*row) for row in catalog.sample_keys(source, table, 100.0)]
    parts = plan_parts(table, plan_cuts(samples, 7), samples)
    assert len(parts) == 7
    ((total,),) = rows(source, "SELECT count(*) FROM public.t")
    counted = [
        rows(source, f"SELECT count(*) FROM ONLY public.t WHERE {part.condition}")[0][0]
        for part in parts
    ]
    assert sum(counted) == total
    assert max(counted) <= total / 7 * 1.3
    either = " OR ".join(f"({part.condition})" for part in parts)
    assert rows(source, f"SELECT count(*) FROM ONLY public.t WHERE ({either}) IS TRUE") == [
        (total,)
    ]


def test_sample_weighs_out_of_line_values_and_is_the_same_each_time(source: Connection) -> None:
    create(
        source,
        """CREATE TABLE t (id int PRIMARY KEY, v text);
        ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
        INSERT INTO t SELECT g, repeat('x', CASE WHEN g % 100 = 0 THEN 100000 ELSE 10 END)
            FROM generate_series(1, 1000) g""",
    )
    table = tables_of(source)["t"]
    sample = catalog.sample_keys(source, table, 100.0)
    assert sorted(key for key, _ in sample) == list(range(1, 1001))
    weights = dict(sample)
    assert weights[100] > 100_000 > 1000 > weights[101]
    half = catalog.sample_keys(source, table, 50.0)
    assert half == catalog.sample_keys(source, table, 50.0)


def test_extension_configuration_is_copied_by_its_own_condition(source: Connection) -> None:
    create(source, "CREATE TABLE t (id int, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    (table,) = catalog.read_tables(source)
    mine = dataclasses.replace(table, extension_condition="WHERE id > 1 OR v = 'z'")
    (part,) = plan_parts(mine, [])
    statements = part_statements(mine, part)
    assert "TRUNCATE" not in statements.copy_in
    with source.cursor() as cursor, cursor.copy(statements.copy_out.encode()) as copy:
        copy.set_types(["int4", "text"])
        assert list(copy.rows()) == [(2, "b")]
