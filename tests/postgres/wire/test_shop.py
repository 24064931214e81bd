"""The shop of the demo: what it holds, that it is always the same, and its writers."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.demo.shop import Writers, create_shop
from millrace.errors import ServerError

# The oids of large objects are the server's choice, so a table that holds them is left out.
_CHECKSUM = """
SELECT md5(string_agg(md5(x::text), '' ORDER BY x::text)) FROM {table} AS x
"""

_TABLES = """
SELECT c.oid::regclass::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace
WHERE nspname IN ('shop', 'audit', 'Sales Reports') AND relkind IN ('r', 'm')
    AND relname <> 'product_images'
ORDER BY 1
"""

_KINDS = {
    "enum": "SELECT count(*) FROM pg_enum",
    "domain": (
        "SELECT count(*) FROM pg_type WHERE typnamespace = 'shop'::regnamespace AND typtype = 'd'"
    ),
    "partition": "SELECT count(*) FROM pg_class WHERE relispartition",
    "sub-partition": "SELECT count(*) FROM pg_class WHERE relispartition AND relkind = 'p'",
    "large object": "SELECT count(*) FROM pg_largeobject_metadata",
    "comment on a large object": (
        "SELECT count(*) FROM pg_description WHERE classoid = 'pg_largeobject'::regclass"
    ),
    "value out of line": (
        "SELECT count(*) FROM shop.product_documents WHERE pg_column_size(scan) > 50000"
    ),
    "exclusion constraint": "SELECT count(*) FROM pg_constraint WHERE contype = 'x'",
    "deferrable unique": "SELECT count(*) FROM pg_constraint WHERE contype = 'u' AND condeferrable",
    "deferrable foreign key": (
        "SELECT count(*) FROM pg_constraint WHERE contype = 'f' AND condeferrable"
    ),
    "foreign key to itself": (
        "SELECT count(*) FROM pg_constraint WHERE contype = 'f' AND conrelid = confrelid"
    ),
    "circular foreign keys": (
        "SELECT count(*) FROM pg_constraint AS a JOIN pg_constraint AS b"
        " ON a.conrelid = b.confrelid AND b.conrelid = a.confrelid WHERE a.conrelid <> a.confrelid"
    ),
    "generated column": "SELECT count(*) FROM pg_attribute WHERE attgenerated = 's'",
    "identity column": "SELECT count(*) FROM pg_attribute WHERE attidentity = 'a'",
    "unlogged table": (
        "SELECT count(*) FROM shop.cart_views, pg_class"
        " WHERE oid = 'shop.cart_views'::regclass AND relpersistence = 'u'"
    ),
    "partial index": "SELECT count(*) FROM pg_index WHERE indpred IS NOT NULL",
    "expression index": "SELECT count(*) FROM pg_index WHERE indexprs IS NOT NULL",
    "clustered index": "SELECT count(*) FROM pg_index WHERE indisclustered",
    "replica identity index": "SELECT count(*) FROM pg_index WHERE indisreplident",
    "extended statistics": "SELECT count(*) FROM pg_statistic_ext",
    "policy": "SELECT count(*) FROM pg_policy",
    "rule": "SELECT count(*) FROM pg_rules WHERE schemaname = 'audit'",
    "trigger": "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal",
    "materialized view over another": 'SELECT count(*) FROM "Sales Reports"."Best Months"',
}


def test_shop_has_the_size_that_was_asked_for(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    total_bytes = _value(
        source_db,
        """
        SELECT sum(pg_total_relation_size(c.oid)) + pg_total_relation_size('pg_largeobject')
        FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace
        WHERE nspname IN ('shop', 'audit', 'Sales Reports') AND relkind IN ('r', 'm')
        """,
    )
    # Small tables and empty partitions take a page for each index, whatever the size asked for.
    assert 4 < total_bytes / 2**20 < 10


def test_order_lines_are_the_largest_table(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    largest = _value(
        source_db,
        """
        SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r'
        AND relnamespace IN ('shop'::regnamespace, 'audit'::regnamespace)
        ORDER BY pg_total_relation_size(oid) DESC LIMIT 1
        """,
    )
    assert largest == "shop.order_lines"


def test_shop_holds_one_of_every_kind_a_clone_must_carry(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    counts = {name: _value(source_db, query) for name, query in _KINDS.items()}
    assert [name for name, count in counts.items() if not count] == []


def test_two_shops_of_one_size_are_equal(source_db: str, target_db: str) -> None:
    create_shop(source_db, megabytes=5)
    create_shop(target_db, megabytes=5)
    assert _checksums(source_db) == _checksums(target_db)


def test_sequences_stand_where_the_shop_left_them(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    assert _value(source_db, "SELECT nextval('shop.invoice_number')") == 123457
    assert _value(source_db, "SELECT nextval('shop.batch_number')") == 701
    assert _value(source_db, "SELECT nextval('shop.return_number')") == 5000


def test_writers_commit_until_closed(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    before = _checksums(source_db)
    with Writers(source_db) as writers:
        _wait_for(writers, transactions=200)
    after = _checksums(source_db)
    changed = {table for table in after if after[table] != before[table]}
    assert {
        "audit.log",
        "shop.carts",
        "shop.inventory",
        "shop.order_lines",
        "shop.orders_other",
        "shop.payments",
        "shop.product_documents",
        "shop.products",
    } <= changed
    # Its changes could not be followed.
    assert "shop.cart_views" not in changed


def test_writers_change_nothing_after_they_are_closed(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    with Writers(source_db, count=3) as writers:
        _wait_for(writers, transactions=20)
    # A server process ends a moment after its client has left.
    _wait_for_end_of_writers(source_db)
    committed = writers.committed
    before = _checksums(source_db)
    assert (writers.committed, _checksums(source_db)) == (committed, before)


def test_writers_keep_to_their_pace(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    started_at = time.monotonic()
    with Writers(source_db, per_second=50) as writers:
        _wait_for(writers, transactions=25)
    # One more of each writer may be on its way when the block ends.
    assert writers.committed <= 50 * (time.monotonic() - started_at) + 2


def test_error_of_a_writer_is_raised_at_close(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    with pytest.raises(ServerError, match="shop writer failed") as caught:
        _let_writers_fail(source_db)
    assert isinstance(caught.value.__cause__, psycopg.errors.UndefinedTable)


def test_error_of_the_block_is_not_hidden_by_that_of_a_writer(source_db: str) -> None:
    create_shop(source_db, megabytes=5)
    with pytest.raises(KeyError):
        _let_writers_fail(source_db, block_raises=KeyError())


def _value(uri: str, query: str) -> Any:
    with psycopg.connect(uri, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def _execute(uri: str, statement: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(statement.encode())


def _checksums(uri: str) -> dict[str, str]:
    with psycopg.connect(uri) as connection:
        tables = [name for (name,) in connection.execute(_TABLES)]
        return {
            table: connection.execute(_CHECKSUM.format(table=table).encode()).fetchone()[0]  # type: ignore[index]
            for table in tables
        }


def _let_writers_fail(uri: str, *, block_raises: Exception | None = None) -> None:
    with Writers(uri) as writers:
        _wait_for(writers, transactions=1)
        _execute(uri, "ALTER TABLE shop.carts RENAME TO carts_of_yesterday")
        _wait_for_end_of_writers(uri)
        if block_raises is not None:
            raise block_raises


def _wait_for(writers: Writers, *, transactions: int) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while writers.committed < transactions:
        assert time.monotonic() < deadline, f"only {writers.committed} transactions"
        time.sleep(0.01)


def _wait_for_end_of_writers(uri: str) -> None:
    query = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE '%shop writer'
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while _value(uri, query):
        assert time.monotonic() < deadline, "the writers do not end"
        time.sleep(0.01)
