"""Catalog queries, each on tables made for the purpose: the server says what is there."""

from __future__ import annotations

import dataclasses
import pickle

import psycopg
import pytest
from tests.fixtures.catalog_reading import Connection, create, rows, tables_of

from millrace.clone.copy_task import part_statements
from millrace.config.dsn import Dsn
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.compared import read_compared_relations
from millrace.postgres.own_schema import create_sql
from millrace.postgres.run_record import INSTALL
from millrace.relation import SplitKey
from millrace.snapshot.export import open_snapshot
from millrace.split.plan import SampledRow, plan_cuts, plan_parts

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
    source_session: Connection,
) -> None:
    create(source_session, SPLIT_KEYS)
    found = {name: table.split_key for name, table in tables_of(source_session).items()}
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


def test_not_null_that_is_not_valid_may_have_nulls(target_session: Connection) -> None:
    """18 marks such a column like any other that is NOT NULL."""
    create(
        target_session,
        "CREATE TABLE t (id int UNIQUE); INSERT INTO t SELECT generate_series(1, 1000);"
        " INSERT INTO t VALUES (NULL), (NULL); ALTER TABLE t ADD NOT NULL id NOT VALID;"
        " CREATE TABLE valid (a int UNIQUE, b int UNIQUE); ALTER TABLE valid"
        " ADD NOT NULL a NOT VALID, ADD NOT NULL b NOT VALID, VALIDATE CONSTRAINT valid_b_not_null",
    )
    found = tables_of(target_session)
    assert found["t"].split_key == SplitKey("id", nullable=True)
    assert found["valid"].split_key == SplitKey("b", nullable=False)
    counts = [
        rows(target_session, f"SELECT count(*) FROM public.t WHERE {part.condition}")[0][0]
        for part in plan_parts(found["t"], [100, 500])
    ]
    assert counts == [101, 400, 501]
    keys = {relation.name: relation.key for relation in read_compared_relations(target_session)}
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
    source_session: Connection,
) -> None:
    create(source_session, TYPES)
    columns = tables_of(source_session)["types"].columns
    assert len(columns) == 35
    wrong = [c for c in columns if bool(c.text_reason) != c.name.startswith("t_")]
    assert wrong == []
    assert all("built in" in c.text_reason or "differs" in c.text_reason for c in columns[22:])


def test_table_says_which_column_makes_it_text(source_session: Connection) -> None:
    create(
        source_session, "CREATE TYPE mood AS ENUM ('sad'); CREATE TABLE t (id int, moods mood[])"
    )
    create(source_session, "CREATE TABLE no_columns (); CREATE TABLE plain (id int, m mood)")
    found = tables_of(source_session)
    assert "moods" in found["t"].text_reason
    assert found["no_columns"].text_reason == "no columns"
    assert found["plain"].text_reason == ""


def test_columns_are_those_that_copy_carries_in_their_order(source_session: Connection) -> None:
    create(
        source_session,
        "CREATE TABLE t (z int, gone int, g int GENERATED ALWAYS AS (z * 2) STORED,"
        " i int GENERATED ALWAYS AS IDENTITY, a varchar(7)); ALTER TABLE t DROP gone",
    )
    columns = tables_of(source_session)["t"].columns
    assert [(c.name, c.type_name) for c in columns] == [
        ("z", "integer"),
        ("i", "integer"),
        ("a", "character varying(7)"),
    ]


def test_virtual_columns_are_computed_by_the_target(target_session: Connection) -> None:
    create(target_session, "CREATE TABLE t (a int, v int GENERATED ALWAYS AS (a * 2) VIRTUAL)")
    assert [c.name for c in tables_of(target_session)["t"].columns] == ["a"]


def test_only_tables_with_rows_of_their_own_are_tables(source_session: Connection) -> None:
    create(
        source_session,
        """CREATE TABLE plain (id int); CREATE UNLOGGED TABLE unlogged (id int);
        CREATE TEMP TABLE temporary (id int); CREATE VIEW v AS SELECT 1 AS a;
        CREATE MATERIALIZED VIEW m AS SELECT 1 AS a;
        CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);
        CREATE TABLE p (id int) PARTITION BY RANGE (id);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id);
        CREATE TABLE p11 PARTITION OF p1 FOR VALUES FROM (0) TO (5);
        CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;
        CREATE FOREIGN TABLE f (id int) SERVER s""",
    )
    source_session.execute(create_sql())
    source_session.execute(INSTALL)  # our records
    assert set(tables_of(source_session)) == {"plain", "unlogged", "parent", "child", "p11"}
    assert [name for _, _, name in catalog.read_relations_of_kind(source_session, "p")] == [
        "p",
        "p1",
    ]
    assert [name for _, _, name in catalog.read_relations_of_kind(source_session, "m")] == ["m"]


def test_sizes_and_rows_are_those_of_the_server(source_session: Connection) -> None:
    create(
        source_session,
        """CREATE TABLE t (id int PRIMARY KEY, v text);
        ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
        INSERT INTO t SELECT g, repeat('x', 10000) FROM generate_series(1, 100) g;
        CREATE TABLE never_analyzed (id int)""",
    )
    assert tables_of(source_session)["t"].estimated_rows == 0, "unknown is not minus one"
    source_session.execute("ANALYZE public.t")
    table = tables_of(source_session)["t"]
    assert table.estimated_rows == 100
    ((heap, whole),) = rows(
        source_session, "SELECT pg_relation_size('public.t'), pg_table_size('public.t')"
    )
    assert (table.heap_bytes, table.total_bytes) == (heap, whole)
    assert table.total_bytes > 100 * 10_000 > table.heap_bytes


def test_two_reads_are_equal_and_survive_pickle(source_session: Connection) -> None:
    create(source_session, SPLIT_KEYS)
    once, again = catalog.read_tables(source_session), catalog.read_tables(source_session)
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
    source_session: Connection,
) -> None:
    create(source_session, PARTITIONED)
    found = {name: t.load_via and t.load_via[2] for name, t in tables_of(source_session).items()}
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


def test_every_hash_is_loaded_via_its_root_if_the_encoding_changes(
    source_session: Connection,
) -> None:
    create(source_session, PARTITIONED)
    found = tables_of(source_session, same_encoding=False)
    assert found["by_text_0"].load_via == (
        rows(source_session, "SELECT 'public.by_text'::regclass::oid::int8")[0][0],
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
    source_session: Connection, source_db: str, rewrite: str
) -> None:
    create(
        source_session,
        "CREATE TABLE t (v text); INSERT INTO t VALUES ('x'); CREATE TABLE other (id int)",
    )
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        snapshot.connection.execute("SELECT 1")
        source_session.execute(rewrite.encode())
        tables = catalog.read_tables(snapshot.connection)
        catalog.lock_tables(snapshot.connection, tables)
        assert catalog.read_rewritten(snapshot.connection, tables) == ["public.t"]


def test_table_that_was_only_written_to_is_not_told(
    source_session: Connection, source_db: str
) -> None:
    create(source_session, "CREATE TABLE t (v text); INSERT INTO t VALUES ('x')")
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        create(
            source_session,
            "INSERT INTO t VALUES ('y'); DELETE FROM t WHERE v = 'x'; ALTER TABLE t ADD w int",
        )
        source_session.execute("VACUUM ANALYZE public.t")
        tables = catalog.read_tables(snapshot.connection)
        catalog.lock_tables(snapshot.connection, tables)
        assert catalog.read_rewritten(snapshot.connection, tables) == []


@pytest.mark.parametrize(
    "statement", ["DROP TABLE {}", "TRUNCATE {}", "ALTER TABLE {} ADD c int", "VACUUM FULL {}"]
)
def test_locked_tables_can_be_written_but_not_dropped(
    source_session: Connection, source_db: str, statement: str
) -> None:
    create(source_session, 'CREATE TABLE t (id int); CREATE TABLE "Odd ""one" (id int)')
    create(source_session, "CREATE TABLE child () INHERITS (t)")
    names = ("public.t", 'public."Odd ""one"', "public.child")
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        catalog.lock_tables(snapshot.connection, catalog.read_tables(snapshot.connection))
        source_session.execute("SET lock_timeout = 1")
        for name in names:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                source_session.execute(statement.format(name).encode())
            source_session.execute(f"INSERT INTO {name} VALUES (1)".encode())
    source_session.execute("SET lock_timeout = '30s'")
    for name in reversed(names):
        source_session.execute(statement.format(name).encode())


def test_more_tables_than_one_statement_locks_are_all_locked(
    source_session: Connection, source_db: str
) -> None:
    create(source_session, "".join(f"CREATE TABLE t{n} ();" for n in range(450)))
    with open_snapshot(Dsn.parse(source_db)) as snapshot:
        catalog.lock_tables(snapshot.connection, catalog.read_tables(snapshot.connection))
        ((locked,),) = rows(
            source_session,
            "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
            " WHERE c.relname ~ '^t[0-9]+$' AND l.mode = 'AccessShareLock' AND l.pid ="
            f" {snapshot.connection.info.backend_pid}",
        )
        assert locked == 450


def test_no_tables_need_no_lock(source_session: Connection) -> None:
    catalog.lock_tables(source_session, [])
    assert catalog.read_rewritten(source_session, []) == []


@pytest.mark.parametrize("key", ["id int PRIMARY KEY", "id int UNIQUE", "id int"])
def test_parts_cut_by_a_sample_hold_every_row_exactly_once(
    source_session: Connection, key: str
) -> None:
    """PostgreSQL evaluates the conditions."""
    create(
        source_session,
        f"""CREATE TABLE t ({key}, v text);
        INSERT INTO t SELECT CASE WHEN g < 900 THEN g ELSE g * 1000000 END, repeat('x', 100)
            FROM generate_series(1, 2000) g;
        INSERT INTO t VALUES (-2147483648), (2147483647)""",
    )
    if "PRIMARY" not in key:
        create(source_session, "INSERT INTO t SELECT NULL, 'null' FROM generate_series(1, 5)")
    table = tables_of(source_session)["t"]
    samples = [SampledRow(*row) for row in catalog.sample_keys(source_session, table, 100.0)]
    parts = plan_parts(table, plan_cuts(samples, 7), samples)
    assert len(parts) == 7
    ((total,),) = rows(source_session, "SELECT count(*) FROM public.t")
    counted = [
        rows(source_session, f"SELECT count(*) FROM ONLY public.t WHERE {part.condition}")[0][0]
        for part in parts
    ]
    assert sum(counted) == total
    assert max(counted) <= total / 7 * 1.3
    either = " OR ".join(f"({part.condition})" for part in parts)
    assert rows(source_session, f"SELECT count(*) FROM ONLY public.t WHERE ({either}) IS TRUE") == [
        (total,)
    ]


def test_sample_weighs_out_of_line_values_and_is_the_same_each_time(
    source_session: Connection,
) -> None:
    create(
        source_session,
        """CREATE TABLE t (id int PRIMARY KEY, v text);
        ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
        INSERT INTO t SELECT g, repeat('x', CASE WHEN g % 100 = 0 THEN 100000 ELSE 10 END)
            FROM generate_series(1, 1000) g""",
    )
    table = tables_of(source_session)["t"]
    sample = catalog.sample_keys(source_session, table, 100.0)
    assert sorted(key for key, _ in sample) == list(range(1, 1001))
    weights = dict(sample)
    assert weights[100] > 100_000 > 1000 > weights[101]
    half = catalog.sample_keys(source_session, table, 50.0)
    assert half == catalog.sample_keys(source_session, table, 50.0)


def test_extension_configuration_is_copied_by_its_own_condition(source_session: Connection) -> None:
    create(
        source_session, "CREATE TABLE t (id int, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b')"
    )
    (table,) = catalog.read_tables(source_session)
    mine = dataclasses.replace(table, extension_condition="WHERE id > 1 OR v = 'z'")
    (part,) = plan_parts(mine, [])
    statements = part_statements(mine, part)
    assert "TRUNCATE" not in statements.copy_in
    with source_session.cursor() as cursor, cursor.copy(statements.copy_out.encode()) as copy:
        copy.set_types(["int4", "text"])
        assert list(copy.rows()) == [(2, "b")]
