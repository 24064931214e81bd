"""How rows of the target are found, and what else is known of a table before it is changed."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import ACCOUNT, StreamPair
from tests.fixtures.wait import wait_for

from millrace.apply.target_table import read_target_table
from millrace.config.dsn import Dsn
from millrace.postgres.wire.connect import connect


def test_rows_are_looked_up_by_key(pair: StreamPair) -> None:
    """Also where the planner would read the whole table."""
    rows = "INSERT INTO account SELECT i, 'o' || i, 0 FROM generate_series(1, 20000) i"
    pair.begin(ACCOUNT, rows, "ANALYZE account", on_target=_no_autovacuum("account"))
    row = _scans(pair, "account")
    pair.run("UPDATE account SET balance = 1 WHERE id % 4 = 0", "DELETE FROM account WHERE id < 9")
    pair.follow()
    wait_for(lambda: _scans(pair, "account")[1] >= row[1] + 5006)
    assert _scans(pair, "account") == (row[0], row[1] + 5006)
    pair.assert_equal()


@pytest.mark.parametrize("kind", ["smallint", "int", "bigint"])
def test_keys_that_lie_close_are_found_by_one_walk_of_the_index(
    pair: StreamPair, kind: str
) -> None:
    pair.begin(f"CREATE TABLE t (id {kind} PRIMARY KEY, v text)", on_target=_no_autovacuum("t"))
    pair.run("INSERT INTO t SELECT i, i FROM generate_series(-3000, 3000) AS i")
    pair.follow()
    loaded = "SELECT FROM pg_stat_user_tables WHERE relname = 't' AND n_tup_ins = 6001"
    wait_for(lambda: pair.target.execute(loaded).fetchone() is not None)
    row = _scans(pair, "t")
    pair.run(
        "UPDATE t SET v = 'x' WHERE id BETWEEN -1500 AND 1500 AND id % 2 = 0",
        "UPDATE t SET id = id + 5000, v = 'moved' WHERE id BETWEEN 2000 AND 3000",
        "DELETE FROM t WHERE id BETWEEN -3000 AND -2000",
    )
    outcome = pair.follow()
    assert (outcome.applied.updated, outcome.applied.deleted) == (2502, 1001)
    wait_for(lambda: _scans(pair, "t")[1] >= row[1] + 2)
    assert _scans(pair, "t") == (row[0], row[1] + 2)
    pair.assert_equal()


def _no_autovacuum(table: str) -> str:
    """Planning for an analyzed table reads both ends of its index: two more scans."""
    return f"ALTER TABLE {table} SET (autovacuum_enabled = off)"


def _scans(pair: StreamPair, table: str) -> tuple[int, int]:
    """How often the table was read as a whole, and by an index, by sessions that have ended.

    Our own session made the index, which reads the table; it would tell a second later.
    """
    pair.target.execute("SELECT pg_stat_force_next_flush()")
    row = pair.target.execute(
        "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = %s", (table,)
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def test_indexes_that_find_rows(target_db: str) -> None:
    with connect(Dsn.parse(target_db), "test") as connection:
        connection.execute("""
            CREATE TABLE public.item
                (id int PRIMARY KEY, code text, name varchar(9), tag text, at int);
            CREATE UNIQUE INDEX ON public.item (code COLLATE "C");
            CREATE UNIQUE INDEX ON public.item (name text_pattern_ops);
            CREATE UNIQUE INDEX ON public.item (tag, at) INCLUDE (name);
            CREATE UNIQUE INDEX ON public.item (at) WHERE at > 0;
            CREATE UNIQUE INDEX ON public.item (abs(at))
        """)
        table = read_target_table(connection, "public", "item")
    assert table is not None
    assert table.lookup_keys == (("id",), ("tag", "at"))
    assert set(table.unique_keys) == {("id",), ("code",), ("name",), ("tag", "at")}


@pytest.mark.parametrize("kind", ["", "PARTITION BY RANGE (id)"])
def test_triggers_that_fire_for_replicated_changes_are_known(target_db: str, kind: str) -> None:
    with connect(Dsn.parse(target_db), "test") as connection:
        connection.execute(f"CREATE TABLE public.item (id int) {kind}".encode())
        name = "public.item"
        if kind:
            name = "public.leaf"
            connection.execute("CREATE TABLE public.leaf PARTITION OF public.item DEFAULT")
        connection.execute(
            f"CREATE TRIGGER one BEFORE UPDATE ON {name} FOR EACH ROW"
            " EXECUTE FUNCTION suppress_redundant_updates_trigger()".encode()
        )
        for state, is_known in (("ENABLE", False), ("ENABLE REPLICA", True), ("DISABLE", False)):
            connection.execute(f"ALTER TABLE {name} {state} TRIGGER one".encode())
            table = read_target_table(connection, "public", "item")
            assert table is not None
            assert table.has_triggers == is_known
