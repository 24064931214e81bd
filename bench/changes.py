"""What is written on the source for `bench follow`: starting rows, then changes to them.

Invariant: a load ends with a row in bench.mark, in a transaction of its own. Who sees that row on
the target sees every change before it. The end position lies behind it, and one more transaction
behind the end position, so that nobody has to wait for the server to say that it is idle.

The tables of schema bench are no part of the comparison of both sides, which reads schema public.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

ROWS_PER_TRANSACTION = 1_000
FEW_KEYS = 100
# A transaction of pgbench updates three rows and inserts one.
ROWS_PER_PGBENCH = 4
PGBENCH_CLIENTS = 2
PGBENCH_SCALE = 10

_ACCOUNT = """
    CREATE TABLE account (id int PRIMARY KEY, owner text, balance numeric(12,2), at timestamptz,
                          filler text)
"""
_ROWS = """
    SELECT i, 'owner ' || i, i % 1000003 / 100.0, timestamptz '2024-01-01' + i * interval '1 s',
           repeat('x', 40)
      FROM generate_series({first}, {last}) AS i
"""
# For pgbench: one transaction of LAG_BULK, on a table that `_start_growing` made.
BULK_SCRIPT = f"""\
SELECT nextval('first_id') AS first \\gset
INSERT INTO account {" ".join(_ROWS.format(first=":first", last=":first + 999").split())};
"""
_MARKS = (
    "CREATE SCHEMA bench",
    "CREATE TABLE bench.mark (id int PRIMARY KEY)",
    "CREATE TABLE bench.tail (id int PRIMARY KEY)",
    "CREATE TABLE bench.beat (id int PRIMARY KEY)",
)


@dataclass(frozen=True)
class Place:
    """A database of the source, for programs and for statements."""

    bindir: Path
    uri: str
    connection: Connection


@dataclass(frozen=True)
class Load:
    """`rows` are changed rows at full scale; `start` and `change` get the number at this one."""

    name: str
    title: str
    rows: int
    start: Callable[[Place, int], None]
    # Gives the number of rows that were changed.
    change: Callable[[Place, int], int]


def scaled_rows(load: Load, scale: float) -> int:
    """Whole transactions, at least one."""
    return max(1, round(load.rows * scale / ROWS_PER_TRANSACTION)) * ROWS_PER_TRANSACTION


def build_start(place: Place, load: Load, rows: int) -> None:
    for statement in _MARKS:
        place.connection.execute(statement.encode())
    load.start(place, rows)


def write_mark(connection: Connection, number: int = 1) -> str:
    """The end of a load; returns the end position."""
    connection.execute("INSERT INTO bench.mark VALUES (%s)", (number,))
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    connection.execute("INSERT INTO bench.tail VALUES (%s)", (number,))
    assert row is not None
    return str(row[0])


def see_mark(connection: Connection, number: int = 1) -> bool:
    found = connection.execute("SELECT FROM bench.mark WHERE id = %s", (number,))
    return found.fetchone() is not None


def wait_for_mark(connection: Connection, number: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not see_mark(connection, number):
        if time.monotonic() > deadline:
            raise TimeoutError(f"mark {number} is not on the target after {seconds:.0f} s")
        time.sleep(0.02)


def transaction_ranges(rows: int) -> Iterator[tuple[int, int]]:
    """First and last id of each transaction."""
    for first in range(1, rows + 1, ROWS_PER_TRANSACTION):
        yield first, min(first + ROWS_PER_TRANSACTION - 1, rows)


def pgbench_command(place: Place, *options: str) -> list[str]:
    return [str(place.bindir / "pgbench"), *options, place.uri]


def parse_tps(output: str) -> float:
    """What pgbench says it reached, without connecting."""
    found = re.search(r"^tps = ([\d.]+)", output, re.MULTILINE)
    if not found:
        raise ValueError(f"no tps in what pgbench says: {output!r}")
    return float(found[1])


def run_pgbench(place: Place, *options: str) -> float:
    """Transactions a second. Nothing is vacuumed and no table truncated before."""
    command = pgbench_command(place, "-n", "-c", str(PGBENCH_CLIENTS), *options)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return parse_tps(done.stdout)


def _empty(place: Place, rows: int) -> None:
    place.connection.execute(_ACCOUNT.encode())


def _start_growing(place: Place, rows: int) -> None:
    _empty(place, rows)
    place.connection.execute("CREATE SEQUENCE first_id INCREMENT BY 1000")


def _filled(place: Place, rows: int) -> None:
    _empty(place, rows)
    statement = f"INSERT INTO account {_ROWS.format(first=1, last=rows)}"
    place.connection.execute(statement.encode())
    place.connection.execute("VACUUM (FREEZE, ANALYZE) account")


def _insert(place: Place, rows: int) -> int:
    for first, last in transaction_ranges(rows):
        _insert_range(place.connection, first, last)
    return rows


def _insert_at_once(place: Place, rows: int) -> int:
    _insert_range(place.connection, 1, rows)
    return rows


def _insert_range(connection: Connection, first: int, last: int) -> None:
    connection.execute(f"INSERT INTO account {_ROWS.format(first=first, last=last)}".encode())


def _update(place: Place, rows: int) -> int:
    for between in transaction_ranges(rows):
        place.connection.execute(
            "UPDATE account SET balance = balance + 1 WHERE id BETWEEN %s AND %s", between
        )
    return rows


def _update_few(place: Place, rows: int) -> int:
    transactions = rows // FEW_KEYS
    for _ in range(transactions):
        place.connection.execute("UPDATE account SET balance = balance + 1")
    return transactions * FEW_KEYS


def _start_pgbench(place: Place, rows: int) -> None:
    options = ("-i", "-q", "-s", str(PGBENCH_SCALE))
    subprocess.run(pgbench_command(place, *options), check=True, capture_output=True)


def _pgbench(place: Place, rows: int) -> int:
    each = max(1, rows // ROWS_PER_PGBENCH // PGBENCH_CLIENTS)
    run_pgbench(place, "-t", str(each))
    return each * PGBENCH_CLIENTS * ROWS_PER_PGBENCH


def _nothing(place: Place, rows: int) -> int:
    return 0


BULK = Load("bulk", "transactions of 1,000 inserted rows", 2_000_000, _empty, _insert)
UPDATES = Load("updates", "transactions of 1,000 updated rows", 1_000_000, _filled, _update)
OLTP = Load("oltp", "pgbench, 2 clients", 400_000, _start_pgbench, _pgbench)
ONE = Load("one", "one transaction of inserts", 2_000_000, _empty, _insert_at_once)
FEW = Load(
    "few keys",
    "100 rows updated in each transaction",
    1_000_000,
    lambda place, rows: _filled(place, FEW_KEYS),
    _update_few,
)
LAG_BULK = Load(
    "lag bulk",
    "transactions of 1,000 inserted rows, at half of the rate of catching up with such",
    0,
    _start_growing,
    _nothing,
)
LAG_OLTP = Load(
    "lag oltp",
    "pgbench, 2 clients, at half of the rate that they reach",
    0,
    _start_pgbench,
    _nothing,
)
