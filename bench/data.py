"""The data sets of the benchmarks, and the proof that a copy of one is right.

Invariant: every value is a function of its row number, so two builds of a data set at the same
scale hold the same rows, and their figures can be compared.

The proof is a count and an exclusive-or of row hashes for each table, and the definitions of the
indexes. It reads the target once and sorts nothing; 1.0 and 1.00 hash alike as numeric.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

# Two builders saturate two cores; more would only make the order of the heap files less even.
BUILD_JOBS = 2


@dataclass(frozen=True)
class Table:
    """One table: `values` is a select list over the row number `i`, a bigint from 1."""

    name: str
    rows: int
    columns: str
    values: str
    indexes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    name: str
    title: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Fingerprint:
    """What a right copy has in common with its source."""

    tables: Mapping[str, tuple[int, int]]
    indexes: Mapping[str, str]


def _at(step: str, start: str = "2024-01-01") -> str:
    return f"timestamptz '{start}' + i * interval '{step}'"


def _primary_key(table: str, columns: str = "id") -> str:
    return f"ALTER TABLE {table} ADD CONSTRAINT {table}_pkey PRIMARY KEY ({columns})"


# Forty columns and a key: a wide row of short values, many of them null.
_PROFILE_COLUMNS = "id int not null" + "".join(
    f", flag_{n} boolean, count_{n} int, label_{n} text, seen_{n}_at timestamptz"
    for n in range(1, 11)
)
_PROFILE_VALUES = "i" + "".join(
    f", i % {n + 2} = 0, i * {n} % 100000, "
    f"CASE WHEN i % {n + 1} = 0 THEN 'label ' || i % {n * 1000} END, "
    + _at(f"{n} minutes", "2020-01-01")
    for n in range(1, 11)
)

UNEVEN = DataSet(
    "A",
    "twelve tables of uneven size, twenty indexes",
    (
        Table(
            "event",
            4_600_000,
            "id bigint not null, at timestamptz not null, kind int, account_id int, payload jsonb",
            f"""i, {_at("1 second")}, i % 40, i * 7919 % 300000,
                jsonb_build_object('path', '/v1/' || md5((i % 5000)::text), 'status', 200 + i % 5,
                                   'elapsed', i % 977 / 10.0, 'request', md5(i::text))""",
            (
                _primary_key("event"),
                "CREATE INDEX event_at_idx ON event (at)",
                "CREATE INDEX event_account_id_at_idx ON event (account_id, at)",
            ),
        ),
        Table(
            "measurement",
            10_000_000,
            "sensor_id int not null, at timestamptz not null, value numeric(12,3), grade smallint",
            f"i * 31 % 20000, {_at('0.3 seconds')}, i % 1000003 / 97.0, i % 4",
            ("CREATE INDEX measurement_sensor_id_at_idx ON measurement (sensor_id, at)",),
        ),
        Table(
            "order_line",
            5_600_000,
            """id int not null, order_id int not null, product_id int not null, quantity int,
               price numeric(10,2), note text""",
            """i, i / 4, i * 7919 % 90000, 1 + i % 9, i % 99991 / 7.0,
               CASE WHEN i % 3 = 0 THEN 'leave at the door ' || md5(i::text) END""",
            (
                _primary_key("order_line"),
                "CREATE INDEX order_line_order_id_idx ON order_line (order_id)",
                "CREATE INDEX order_line_product_id_idx ON order_line (product_id)",
            ),
        ),
        Table(
            "document",
            200_000,
            "id uuid not null, title text, body text, tags jsonb",
            # One body in ten is too long for its page and goes to TOAST.
            """md5(i::text)::uuid, 'Document ' || i,
               CASE WHEN i % 10 = 0
                    THEN (SELECT string_agg(md5((i * 200 + k)::text), ' ')
                            FROM generate_series(1, 120) AS k)
                    ELSE repeat(md5(i::text) || ' ', 40) END,
               jsonb_build_array('t' || i % 50, 't' || i % 70, i % 12)""",
            (
                _primary_key("document"),
                "CREATE INDEX document_title_idx ON document (title)",
            ),
        ),
        Table(
            "session",
            1_900_000,
            "id uuid not null, user_id int, began_at timestamptz, ended_at timestamptz, agent text",
            f"""md5('s' || i)::uuid, i * 104729 % 400000, {_at("5 seconds")},
                CASE WHEN i % 7 > 0 THEN {_at("6 seconds")} END,
                'Mozilla/5.0 (X11; Linux x86_64; rv:' || i % 90 || ')'""",
            (
                _primary_key("session"),
                "CREATE INDEX session_user_id_idx ON session (user_id)",
            ),
        ),
        Table(
            "orders",
            1_300_000,
            """id int not null, customer_id int, placed_at timestamptz, total numeric(12,2),
               status text, shipping jsonb""",
            f"""i, i * 7919 % 250000, {_at("30 seconds")}, i % 1000003 / 13.0,
                (ARRAY['open', 'paid', 'sent', 'returned'])[1 + i % 4],
                jsonb_build_object('city', 'City ' || i % 3000, 'zip', 10000 + i % 89999)""",
            (
                _primary_key("orders"),
                "CREATE INDEX orders_customer_id_idx ON orders (customer_id)",
                "CREATE INDEX orders_placed_at_idx ON orders (placed_at)",
            ),
        ),
        Table(
            "audit_log",
            700_000,
            "at timestamptz, actor text, action text, detail jsonb",
            f"""{_at("40 seconds")}, 'user' || i % 5000,
                (ARRAY['create', 'update', 'delete'])[1 + i % 3],
                jsonb_build_object('object', md5(i::text), 'n', i)""",
        ),
        Table(
            "profile",
            280_000,
            _PROFILE_COLUMNS,
            _PROFILE_VALUES,
            (_primary_key("profile"),),
        ),
        Table(
            "customer",
            250_000,
            """id int not null, email text not null, name text, created_at timestamptz,
               balance numeric, preferences jsonb""",
            f"""i, md5(i::text) || '@example.com', 'Customer ' || i,
                {_at("20 minutes", "2015-01-01")}, i % 10007 / 3.0,
                jsonb_build_object('language', 'l' || i % 3, 'mail', i % 2 = 0)""",
            (
                _primary_key("customer"),
                "ALTER TABLE customer ADD CONSTRAINT customer_email_key UNIQUE (email)",
            ),
        ),
        Table(
            "product",
            90_000,
            """id int not null, sku text not null, title text, price numeric(10,2),
               attributes jsonb""",
            """i, 'SKU-' || lpad(i::text, 8, '0'), 'Product ' || md5(i::text), i % 9973 / 3.0,
               jsonb_build_object('color', i % 12, 'text', repeat('x', (i % 100)::int))""",
            (
                _primary_key("product"),
                "CREATE UNIQUE INDEX product_sku_idx ON product (sku)",
            ),
        ),
        Table(
            "price_history",
            180_000,
            "product_id int not null, valid_from date not null, price numeric(10,2)",
            "i / 4, date '2024-01-01' + (i % 4 * 90)::int, i % 9973 / 3.0",
            (_primary_key("price_history", "product_id, valid_from"),),
        ),
        Table(
            "import_batch",
            2_000,
            "batch int, at timestamptz, origin text",
            f"i, {_at('4 hours')}, 'ftp'",
        ),
    ),
)

SINGLE = DataSet(
    "B",
    "one table, three indexes",
    (
        Table(
            "ledger",
            17_000_000,
            """id int not null, account_id int not null, at timestamptz not null,
               amount numeric(12,2), kind text, reference text, detail jsonb""",
            f"""i, i * 7919 % 500000, {_at("2 seconds")}, i % 1000003 / 11.0,
                (ARRAY['debit', 'credit', 'fee'])[1 + i % 3], md5(i::text),
                jsonb_build_object('n', i % 1000)""",
            (
                _primary_key("ledger"),
                "CREATE INDEX ledger_account_id_idx ON ledger (account_id)",
                "CREATE INDEX ledger_at_idx ON ledger (at)",
            ),
        ),
    ),
)


def build(uri: str, data_set: DataSet, scale: float) -> None:
    """Fill the empty database at `uri`; the server is quiet and its caches are warm afterwards."""
    largest_first = sorted(data_set.tables, key=lambda table: -table.rows)
    with ThreadPoolExecutor(BUILD_JOBS) as pool:
        for _ in pool.map(lambda table: _build_table(uri, table, scale), largest_first):
            pass
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("CHECKPOINT")


def fingerprint(uri: str) -> Fingerprint:
    """Count and hash every table of schema public and list its indexes."""
    with psycopg.connect(uri, autocommit=True) as connection:
        names = [name for (name,) in connection.execute(_TABLE_NAMES)]
        tables = {name: _count_and_hash(connection, name) for name in names}
        return Fingerprint(tables, dict(connection.execute(_INDEXES).fetchall()))


def differences(expected: Fingerprint, found: Fingerprint, *, indexes: bool = True) -> list[str]:
    """Say what is not as it should be, one phrase for each table or index."""
    wrong = [
        f"table {name}: {_render_table(found.tables.get(name))}, not {_render_table(wanted)}"
        for name, wanted in expected.tables.items()
        if found.tables.get(name) != wanted
    ]
    wrong += [f"table {n}: not on the source" for n in found.tables if n not in expected.tables]
    if indexes:
        wrong += [
            f"index {name}: absent, invalid or of another definition"
            for name, definition in expected.indexes.items()
            if found.indexes.get(name) != definition
        ]
    return wrong


def sizes(uri: str) -> dict[str, Any]:
    """Rows, heap and index bytes of the data set as built, the largest table first."""
    with psycopg.connect(uri, autocommit=True) as connection:
        rows = connection.execute(_SIZES).fetchall()
    return {
        "heap_bytes": sum(row[2] for row in rows),
        "index_bytes": sum(row[3] for row in rows),
        "tables": {
            name: {"rows": count, "heap_bytes": heap, "index_bytes": index}
            for name, count, heap, index in rows
        },
    }


_TABLE_NAMES = """
    SELECT relname FROM pg_class
     WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
     ORDER BY 1
"""
_INDEXES = """
    SELECT c.relname, concat_ws(' ', pg_get_indexdef(i.indexrelid), k.contype, i.indisvalid)
      FROM pg_index i
      JOIN pg_class c ON c.oid = i.indexrelid
      LEFT JOIN pg_constraint k ON k.conindid = i.indexrelid
     WHERE c.relnamespace = 'public'::regnamespace
"""
_SIZES = """
    SELECT relname, reltuples::bigint, pg_table_size(oid), pg_indexes_size(oid)
      FROM pg_class
     WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
     ORDER BY 3 DESC
"""


def _build_table(uri: str, table: Table, scale: float) -> None:
    rows = max(1, round(table.rows * scale))
    statements = [
        "SET synchronous_commit = off",
        f"CREATE TABLE {table.name} ({table.columns})",
        f"INSERT INTO {table.name} SELECT {table.values} FROM generate_series(1, {rows}::bigint) i",
        *table.indexes,
        # Frozen, so that no contestant pays for the hint bits of the first reader.
        f"VACUUM (FREEZE, ANALYZE) {table.name}",
    ]
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def _count_and_hash(connection: psycopg.Connection[Any], table: str) -> tuple[int, int]:
    query = sql.SQL("SELECT count(*), bit_xor(hash_record_extended(r, 0)) FROM public.{} AS r")
    count, hashes = connection.execute(query.format(sql.Identifier(table))).fetchone() or (0, None)
    return count, hashes or 0


def _render_table(count_and_hash: tuple[int, int] | None) -> str:
    return f"{count_and_hash[0]} rows, hash {count_and_hash[1]}" if count_and_hash else "absent"
