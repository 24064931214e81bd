"""A shop database that is filled by the server, and writers that keep it busy.

Invariant: two shops of the same size hold the same rows, until a writer is let in.
A writer changes only logged tables that have a replica identity, so whatever it
commits can be followed by logical replication.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import date, timedelta
from importlib import resources
from types import TracebackType
from typing import Any, NamedTuple

import psycopg

from millrace.errors import ServerError
from millrace.log import fields

log = logging.getLogger(__name__)

# Transactions per second of all writers together: visible on a chart, and a small
# part of one core, so that a demo on two cores measures the clone and not the shop.
MAX_TRANSACTIONS_PER_SECOND = 200

# A busy machine may keep a writer waiting; longer than this and it is stuck.
CLOSE_TIMEOUT_SECONDS = 30

# Orders of writers spread over two months: hash partitions first, then the default one.
_FIRST_DAY = date(2025, 12, 1)


def create_shop(uri: str, *, megabytes: int = 300) -> None:
    """Fill an empty database; tables and indexes take about `megabytes` when done."""
    script = resources.files(__package__).joinpath("shop.sql").read_bytes()
    started_at = time.monotonic()
    with psycopg.connect(uri, application_name="millrace demo") as connection:
        connection.execute("SELECT set_config('shop.megabytes', %s, false)", [str(megabytes)])
        connection.execute(script)
    # As in a database of some age: statistics are there and no autovacuum is due.
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    seconds = round(time.monotonic() - started_at, 1)
    log.info("shop created", extra=fields(megabytes=megabytes, seconds=seconds))


class _Ids(NamedTuple):
    """The highest id of what writers refer to; all of them start at 1, without gaps."""

    customer: int
    product: int
    stocked: int
    document: int


class Writers:
    """Customers who order, pay and leave carts behind until the block ends.

    `committed` grows while they run. What goes wrong in a writer is raised at the end
    of the block, unless the block itself ends with an error.
    """

    def __init__(
        self, uri: str, *, count: int = 2, per_second: float = MAX_TRANSACTIONS_PER_SECOND
    ) -> None:
        self._uri = uri
        self._pause_seconds = count / per_second
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._committed = 0
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._write, args=(n,), name=f"shop-writer-{n}", daemon=True)
            for n in range(count)
        ]

    @property
    def committed(self) -> int:
        """Transactions committed so far, by all writers."""
        return self._committed

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ServerError as writer_error:
            if error is None:
                raise
            log.warning("a shop writer failed as well", exc_info=writer_error)

    def close(self) -> None:
        """Let the transactions in progress end, then report what went wrong."""
        self._closing.set()
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise ServerError(
                f"a shop writer failed: {self._error}",
                hint="Look at the log of the source server.",
                committed=self._committed,
            ) from self._error
        if any(thread.is_alive() for thread in self._threads):
            raise ServerError(
                "a shop writer does not stop",
                hint="Look in pg_stat_activity of the source for what it waits for.",
                committed=self._committed,
            )

    def _write(self, number: int) -> None:
        try:
            with psycopg.connect(self._uri, application_name="millrace shop writer") as connection:
                self._write_until_closing(connection, random.Random(number))
        except Exception as error:
            with self._lock:
                self._error = self._error or error
            # One writer less is a broken demo; the others need not continue.
            self._closing.set()

    def _write_until_closing(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        with connection.transaction():
            ids = _read_ids(connection)
        due_at = time.monotonic()
        while not self._closing.is_set():
            with connection.transaction():
                _write_one(connection, rng, ids)
            with self._lock:
                self._committed += 1
            # A late writer does not hurry afterwards: the rate is a limit, not a promise.
            due_at = max(due_at + self._pause_seconds, time.monotonic())
            self._closing.wait(max(0.0, due_at - time.monotonic()))


def _write_one(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    (action,) = rng.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))
    action(connection, rng, ids)


def _read_ids(connection: psycopg.Connection[Any]) -> _Ids:
    row = connection.execute(
        """
        SELECT (SELECT max(id) FROM shop.customers), (SELECT max(id) FROM shop.products),
               (SELECT max(product_id) FROM shop.inventory),
               (SELECT max(id) FROM shop.product_documents)
        """
    ).fetchone()
    assert row is not None
    return _Ids(*row)


def _order(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    """An order of one to four lines, paid at once."""
    ordered_on = _FIRST_DAY + timedelta(days=rng.randrange(60))
    row = connection.execute(
        "INSERT INTO shop.orders (ordered_on, customer_id, note) VALUES (%s, %s, %s) RETURNING id",
        [ordered_on, rng.randint(1, ids.customer), rng.choice((None, "A gift \\ it's fragile"))],
    ).fetchone()
    assert row is not None
    products = [rng.randint(1, ids.product) for _ in range(rng.randint(1, 4))]
    connection.execute(
        """
        INSERT INTO shop.order_lines (order_id, ordered_on, line, product_id, quantity, price)
        SELECT %s, %s, line, p.id, 1, p.price
        FROM unnest(%s::int[]) WITH ORDINALITY AS chosen (id, line)
        JOIN shop.products AS p USING (id)
        """,
        [row[0], ordered_on, products],
    )
    _insert_payment(connection, rng, row[0], ordered_on)


def _pay_late(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    """The payment of an order that waited for it."""
    row = connection.execute(
        """
        SELECT id, ordered_on FROM shop.orders
        WHERE status = 'new' AND ordered_on = %s LIMIT 1 FOR UPDATE SKIP LOCKED
        """,
        [_FIRST_DAY + timedelta(days=rng.randrange(60))],
    ).fetchone()
    if row is not None:
        _insert_payment(connection, rng, *row)


def _insert_payment(
    connection: psycopg.Connection[Any], rng: random.Random, order_id: int, ordered_on: date
) -> None:
    connection.execute(
        """
        INSERT INTO shop.payments (order_id, ordered_on, amount, reference)
        VALUES (%s, %s, %s, gen_random_uuid())
        """,
        [order_id, ordered_on, rng.randrange(100, 100000) / 100],
    )
    connection.execute(
        "UPDATE shop.orders SET status = 'paid' WHERE id = %s AND ordered_on = %s",
        [order_id, ordered_on],
    )


def _count_stock(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    # One row in a transaction: two writers that lock two rows could wait for each other.
    connection.execute(
        "UPDATE shop.inventory SET quantity = greatest(0, quantity + %s) WHERE product_id = %s",
        [rng.randint(-5, 5), rng.randint(1, ids.stocked)],
    )


def _change_price(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    connection.execute(
        "UPDATE shop.products SET price = %s WHERE id = %s",
        [rng.randrange(100, 20000) / 100, rng.randint(1, ids.product)],
    )


def _rename_document(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    """An update that leaves long values alone: they are not in the WAL record."""
    connection.execute(
        "UPDATE shop.product_documents SET title = %s WHERE id = %s",
        [f"Edition {rng.randrange(1000)}", rng.randint(1, ids.document)],
    )


def _fill_cart(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    connection.execute(
        """
        INSERT INTO shop.carts (customer_id, items)
        VALUES (%s, jsonb_build_array(jsonb_build_object('product', %s::int, 'quantity', 1)))
        """,
        [rng.randint(1, ids.customer), rng.randint(1, ids.product)],
    )


def _abandon_cart(connection: psycopg.Connection[Any], rng: random.Random, ids: _Ids) -> None:
    connection.execute(
        """
        DELETE FROM shop.carts
        WHERE id = (SELECT id FROM shop.carts ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
        """
    )


# How often a writer does what, relative to the others.
_WEIGHTS: dict[Callable[[psycopg.Connection[Any], random.Random, _Ids], None], int] = {
    _order: 6,
    _pay_late: 2,
    _count_stock: 4,
    _change_price: 1,
    _rename_document: 1,
    _fill_cart: 3,
    _abandon_cart: 2,
}
