"""Several clients that write to the source whatever a stream has to carry.

Invariant: the same seed gives each client the same transactions to try, in the same order. What
becomes of each is the server's business: a deadlock, a taken key or a restart may end it, and
its client goes on with the next. A client fails only by an error that nobody expects.

Every transaction counts itself in `counter`, so that both sides can tell how many they have.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors
from tests.fixtures.wait import DEADLINE_SECONDS
from tests.torture.ingredients import HARD_ACTIONS, OF_ACTION, Ingredient, write_domained

CLIENTS = 4
# All clients together, about: two cores have three servers' worth of other things to do.
TRANSACTIONS_PER_SECOND = 40
BIG_ROWS = 20_000
SCHEMA = Path(__file__).with_suffix(".sql")
ACCOUNTS_SUM = 100_000

Connection = psycopg.Connection[tuple[Any, ...]]
Action = Callable[[Connection, random.Random], int]

# What random transactions do to each other.
EXPECTED = (
    errors.DeadlockDetected,
    errors.UniqueViolation,
    errors.ExclusionViolation,
    errors.ForeignKeyViolation,
    errors.LockNotAvailable,
    errors.QueryCanceled,
)
_TYPED = '"Odd one"."Typed ""rows"""'
_INSERT_TYPED = f"""
INSERT INTO {_TYPED} (flag, small, amount, ratio, share, note, code, fixed, raw, doc, plain, day,
       at, here, span, tags, numbers, who, address, width, bits, place)
SELECT h %% 2 = 0, (h %% 30000)::int2, (h %% 1000000000)::numeric / 7, h / 3.0, (h %% 100000) / 7.0,
       CASE WHEN h %% 5 = 0 THEN NULL ELSE E'tab\\t, new\\nline, back\\\\slash, ''quote'', ü€ ' || h END,
       left(t, 40), left(t, 3), decode(t, 'hex'), jsonb_build_object('h', h, 't', left(t, 4)),
       json_build_array(h, NULL, 'x'), date '2000-01-01' + (h %% 20000)::int,
       CASE WHEN h %% 11 = 0 THEN 'infinity' ELSE timestamptz '2000-01-01 UTC' + h * interval '1 s' END,
       timestamp '2000-01-01' + h * interval '1 ms', h %% 1000 * interval '1 day 3 seconds',
       ARRAY[left(t, 5), NULL, '{{"', ''], ARRAY[h, NULL, -h]::int[], t::uuid,
       ('10.0.' || h %% 250 || '.1')::inet, int4range((h %% 100)::int, (h %% 100)::int + 5),
       (h %% 65536)::int::bit(16), point(h %% 90, h %% 45)
  FROM (SELECT abs(hashint4(i # %(seed)s)::int8) AS h, md5(i || '/' || %(seed)s) AS t
          FROM generate_series(1, %(rows)s) i) made
"""  # noqa: E501


def create_tables(uri: str) -> None:
    """The clients' tables, with a few rows."""
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(SCHEMA.read_text().encode())
        if connection.info.server_version < 180000:
            connection.execute("ALTER TABLE generated_key REPLICA IDENTITY FULL")
        connection.execute(
            "INSERT INTO counter SELECT i, 0 FROM generate_series(0, %s) i", (CLIENTS,)
        )


# What a client may do. Each returns the number of rows it changed.


def insert_typed(connection: Connection, dice: random.Random) -> int:
    rows = dice.choice((1, 1, 3, 50, 300))
    return _do(connection, _INSERT_TYPED, seed=dice.randrange(2**31), rows=rows)


def update_typed(connection: Connection, dice: random.Random) -> int:
    change = dice.choice(
        (
            "note = md5(note), amount = -amount",
            "doc = doc || '{\"again\": [1, null]}', at = at + interval '1 day', tags = NULL",
            "raw = raw || '\\x00ff'::bytea, plain = '{\"a\": 1}', code = NULL",
        )
    )
    return _do(
        connection, f"UPDATE {_TYPED} SET {change} WHERE id %% 23 = %(rest)s",
        rest=dice.randrange(23),
    )  # fmt: skip


def delete_typed(connection: Connection, dice: random.Random) -> int:
    return _do(connection, f"DELETE FROM {_TYPED} WHERE id %% 7 = %(rest)s", rest=dice.randrange(7))


def transfer(connection: Connection, dice: random.Random) -> int:
    changed = 0
    # In the order of their ids, or the clients would lock each other all day.
    for account, amount in zip(
        sorted(dice.sample(range(1, 101), 2)), dice.choice(((-7, 7), (3, -3))), strict=True
    ):
        changed += _do(
            connection, "UPDATE account SET balance = balance + %(amount)s WHERE id = %(id)s",
            amount=amount, id=account,
        )  # fmt: skip
    return changed


def trade_seats(connection: Connection, dice: random.Random) -> int:
    """By way of a free place, as one has to with a constraint that is checked at once."""
    one, other = sorted(dice.sample(range(1, 41), 2))
    places: dict[int, int] = dict(
        connection.execute(
            "SELECT id, place FROM seat WHERE id IN (%s, %s) ORDER BY id FOR UPDATE", (one, other)
        ).fetchall()
    )
    steps = ((one, -one), (other, places[one]), (one, places[other]))
    query = "UPDATE seat SET place = %(place)s WHERE id = %(id)s"
    return sum(_do(connection, query, id=seat, place=place) for seat, place in steps)


def trade_chairs(connection: Connection, dice: random.Random) -> int:
    """All at once: everyone moves on by one place."""
    return _do(
        connection,
        "UPDATE chair c SET place = o.place FROM chair o WHERE c.id BETWEEN %(first)s AND %(last)s"
        " AND o.id = CASE WHEN c.id = %(last)s THEN %(first)s ELSE c.id + 1 END",
        first=dice.randrange(1, 20), last=dice.randrange(20, 41),
    )  # fmt: skip


def trade_ranges(connection: Connection, dice: random.Random) -> int:
    """An exclusion constraint is checked at once, row by row: lift one out of the way."""
    one, other = sorted(dice.sample(range(1, 41), 2))
    ranges: dict[int, str] = dict(
        connection.execute(
            "SELECT id, taken::text FROM chair WHERE id IN (%s, %s) ORDER BY id FOR UPDATE",
            (one, other),
        ).fetchall()
    )
    steps = ((one, None), (other, ranges[one]), (one, ranges[other]))
    query = "UPDATE chair SET taken = %(taken)s::int4range WHERE id = %(id)s"
    return sum(_do(connection, query, id=chair, taken=taken) for chair, taken in steps)


def change_keys(connection: Connection, dice: random.Random) -> int:
    """Keys move up by some, over the places of others; and one to another second column."""
    low, by = dice.randrange(1, 180), dice.randrange(1, 4)
    chosen = "a BETWEEN %(low)s AND %(low)s + 12"
    changed = _do(connection, f"UPDATE keyed SET a = -a WHERE {chosen}", low=low)
    changed += _do(
        connection,
        "UPDATE keyed SET a = (-a - %(low)s + %(by)s) %% 13 + %(low)s, value = value || '.'"
        " WHERE a < 0",
        low=low, by=by,
    )  # fmt: skip
    return changed + _do(
        connection, "UPDATE keyed SET b = 'k' || left(md5(b), 3) WHERE a = %(a)s",
        a=dice.randrange(1, 200),
    )  # fmt: skip


def replace_key(connection: Connection, dice: random.Random) -> int:
    """The same key, deleted and inserted again."""
    a = dice.randrange(1, 200)
    deleted = connection.execute("DELETE FROM keyed WHERE a = %s RETURNING b", (a,)).fetchall()
    return len(deleted) + sum(
        _do(connection, "INSERT INTO keyed VALUES (%(a)s, %(b)s, 'again')", a=a, b=b)
        for (b,) in deleted
    )


def write_loose(connection: Connection, dice: random.Random) -> int:
    values = {"a": dice.randrange(3), "n": dice.randrange(1, 6)}
    statement = dice.choice(
        (
            "INSERT INTO loose SELECT %(a)s, '[1, 2]', 'same', 'NaN' FROM generate_series(1,"
            " 2 * %(n)s)",
            "INSERT INTO loose VALUES (%(a)s, NULL, NULL, NULL), (NULL, '{}', '', -0.0)",
            "DELETE FROM loose WHERE ctid = ANY (ARRAY(SELECT ctid FROM loose LIMIT 3 * %(n)s))",
            "UPDATE loose SET a = a + 1, c = 'other' WHERE ctid = ANY (ARRAY(SELECT ctid FROM"
            " loose WHERE a = %(a)s LIMIT %(n)s))",
        )
    )
    return _do(connection, statement, **values)


def write_by_index(connection: Connection, dice: random.Random) -> int:
    values = {"n": dice.randrange(1000), "code": dice.choice("abcdefgh")}
    statement = dice.choice(
        (
            "INSERT INTO by_index VALUES (%(code)s, %(n)s, repeat('n', %(n)s))",
            "UPDATE by_index SET note = 'changed' WHERE number %% 13 = %(n)s %% 13",
            "UPDATE by_index SET number = number + 1000 WHERE number %% 31 = %(n)s %% 31",
            "DELETE FROM by_index WHERE number %% 17 = %(n)s %% 17",
        )
    )
    return _do(connection, statement, **values)


def write_parted(connection: Connection, dice: random.Random) -> int:
    """Most of all, rows that move between partitions."""
    values = {
        "to": dice.choice(("north", "south", "west")),
        "from": dice.choice(("north", "south", "west")),
        "id": dice.randrange(2000),
    }
    statement = dice.choice(
        (
            "INSERT INTO parted SELECT %(to)s, %(id)s + i, 'new' FROM generate_series(1, 5) i"
            " ON CONFLICT DO NOTHING",
            "UPDATE parted SET region = %(to)s WHERE region = %(from)s AND id %% 9 = %(id)s %% 9",
            "UPDATE parted SET value = value || '+' WHERE region = %(from)s"
            " AND id %% 9 = %(id)s %% 9",
            "DELETE FROM parted WHERE id %% 19 = %(id)s %% 19",
        )
    )
    return _do(connection, statement, **values)


def write_toasted(connection: Connection, dice: random.Random) -> int:
    values = {"id": dice.randrange(60), "size": dice.randrange(100, 1500)}
    long = (
        "(SELECT string_agg(md5(i::text || %(id)s::text), '') FROM generate_series(1, %(size)s) i)"
    )
    statement = dice.choice(
        (
            f"INSERT INTO toasted VALUES (%(id)s, 0, {long}, {long}) ON CONFLICT (id) DO UPDATE"
            " SET turns = toasted.turns + 1",
            "UPDATE toasted SET turns = turns + 1 WHERE id %% 5 = %(id)s %% 5",
            f"UPDATE toasted SET other = {long} || 'x' WHERE id = %(id)s",
            "UPDATE toasted SET id = id + 1000 * (1 + %(size)s) WHERE id = %(id)s",
            "DELETE FROM toasted WHERE id >= 1000 AND id %% 3 = %(id)s %% 3",
        )
    )
    return _do(connection, statement, **values)


def write_moody(connection: Connection, dice: random.Random) -> int:
    """Types that are another server's own; the table is not always there."""
    values = {"n": dice.randrange(1, 100), "mood": dice.choice(("low", "fair", "high"))}
    statement = dice.choice(
        (
            "INSERT INTO moody (mood, size) VALUES (%(mood)s, %(n)s)",
            "UPDATE moody SET mood = %(mood)s WHERE id %% 7 = %(n)s %% 7",
            "DELETE FROM moody WHERE size %% 5 = %(n)s %% 5",
        )
    )
    return _do(connection, statement, **values)


def write_family(connection: Connection, dice: random.Random) -> int:
    values = {"rest": dice.randrange(11)}
    statement = dice.choice(
        (
            "WITH p AS (INSERT INTO parent (name) SELECT 'p' || i FROM generate_series(1, 3) i"
            " RETURNING id) INSERT INTO child (parent_id, note)"
            " SELECT id, 'c' || n FROM p, generate_series(1, 3) n",
            "UPDATE child SET note = note || '.' WHERE id %% 11 = %(rest)s",
            "DELETE FROM parent WHERE id %% 11 = %(rest)s",
        )
    )
    return _do(connection, statement, **values)


def copy_in(connection: Connection, dice: random.Random) -> int:
    first, rows = dice.randrange(10**9), dice.choice((1, 20, 500))
    with connection.cursor() as cursor:
        with cursor.copy("COPY big (id, payload) FROM STDIN") as copy:
            for number in range(rows):
                copy.write_row((first + number, f"copied\t{number}" if number % 7 else None))
        return cursor.rowcount


def write_much(connection: Connection, dice: random.Random) -> int:
    """A transaction of many rows, some of which are not there any more at its end."""
    first = dice.randrange(10**9)
    changed = _do(
        connection,
        "INSERT INTO big SELECT %(first)s + i, 0, repeat('x', i %% 60)"
        " FROM generate_series(1, %(rows)s) i",
        first=first, rows=BIG_ROWS,
    )  # fmt: skip
    chosen = "id BETWEEN %(first)s AND %(first)s + 20000"
    changed += _do(
        connection, f"UPDATE big SET version = 1 WHERE {chosen} AND id %% 3 = 0", first=first
    )
    return changed + _do(
        connection, f"DELETE FROM big WHERE {chosen} AND id %% 5 <> 0", first=first
    )


def thin_out(connection: Connection, dice: random.Random) -> int:
    """Or the tables would grow."""
    return _do(
        connection, "DELETE FROM big WHERE id %% 3 = %(rest)s", rest=dice.randrange(3)
    ) + _do(connection, "UPDATE big SET version = version + 1 WHERE id %% 50 = 0")


def truncate(connection: Connection, dice: random.Random) -> int:
    tables = dice.choice(
        ("parent, child RESTART IDENTITY", "loose", "parted", "bare, big", "by_index, toasted",
         f"{_TYPED} RESTART IDENTITY", "bare")
    )  # fmt: skip
    connection.execute(f"TRUNCATE {tables}".encode())
    # Rows may come back in the same transaction.
    return 1 + (write_family if "parent" in tables else write_loose)(connection, dice)


ACTIONS: dict[Action, int] = {
    insert_typed: 12, update_typed: 8, delete_typed: 4, transfer: 15, trade_seats: 6,
    trade_chairs: 4, trade_ranges: 3, change_keys: 8, replace_key: 4, write_loose: 10,
    write_by_index: 8, write_parted: 12, write_toasted: 12, write_family: 8,
    write_moody: 3, copy_in: 5, thin_out: 1, **HARD_ACTIONS,
}  # fmt: skip
# Of tables that are not always there.
WITH_MOODS = (write_moody, write_domained)
# One transaction in so many.
ONE_IN_TRUNCATES = 60
ONE_IN_MUCH = 250
# When the clients have stopped.
LAST_COMMITS = 50


class Workload:
    """The clients, each on a thread and a connection of its own."""

    def __init__(
        self,
        uri: str,
        seed: int,
        *,
        clients: int = CLIENTS,
        per_second: float = TRANSACTIONS_PER_SECOND,
    ) -> None:
        self._uri = uri
        self._seed = seed
        self._pause_seconds = clients / per_second
        self._stopping = threading.Event()
        self._paused = threading.Event()
        # While a snapshot is being copied, no TRUNCATE may go past it.
        self.is_gentle = True
        # With the table `moody` values can't be sent in binary.
        self.has_moods = True
        self._busy = [threading.Lock() for _ in range(clients)]
        self._connections: list[Connection | None] = [None] * clients
        self._failures: list[BaseException] = []
        self.rows_changed = 0
        self.committed = 0
        self.rolled_back = 0
        self.refused = 0
        self.ingredients: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._paused.set()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"client {number}")
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def resume(self, *, gentle: bool) -> None:
        self.check()
        self.is_gentle = gentle
        self._paused.clear()

    def pause(self) -> None:
        """Returns when nobody writes or is connected, and nothing prepared is left."""
        self._paused.set()
        for number, lock in enumerate(self._busy):
            with lock:
                connection = self._connections[number]
                if connection is not None:
                    connection.close()
                self._connections[number] = None
        self.check()
        with patiently(self._uri) as connection:
            self._finish_prepared(connection, "%")

    def commit_asynchronously(self) -> None:
        """The last transactions for now, none of which is on the source's disk for certain."""
        with patiently(self._uri) as connection:
            connection.execute("SET synchronous_commit = off")
            for _ in range(LAST_COMMITS):
                connection.execute(
                    "WITH counted AS (UPDATE counter SET transactions = transactions + 1"
                    " WHERE client = 0) INSERT INTO parent (name) VALUES ('last')"
                )
        self.ingredients[Ingredient.ASYNCHRONOUS] += LAST_COMMITS

    def check(self) -> None:
        """Raises what went wrong in a client."""
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self.check()

    def _run(self, number: int) -> None:
        dice = random.Random(self._seed * 1000 + number)
        connections = self._connections
        try:
            while not self._stopping.is_set():
                with self._busy[number]:
                    if not self._paused.is_set():
                        connections[number] = self._write(connections[number], dice, number)
                time.sleep(self._pause_seconds)
        except BaseException as error:
            self._failures.append(error)
        finally:
            connection = connections[number]
            if connection is not None:
                connection.close()

    def _write(
        self, connection: Connection | None, dice: random.Random, number: int
    ) -> Connection | None:
        """One transaction; None instead of a connection that is lost."""
        try:
            if connection is None:
                connection = self._connect(number)
            try:
                self._transact(connection, dice, number)
            except EXPECTED:
                connection.execute("ROLLBACK")
                self.refused += 1
        except (psycopg.OperationalError, psycopg.InterfaceError):
            # The server is away, or was just now: what became of the transaction, it knows.
            if connection is not None:
                connection.close()
            return None
        return connection

    def _connect(self, number: int) -> Connection:
        connection = psycopg.connect(
            self._uri, autocommit=True, application_name=f"client {number}", connect_timeout=10
        )
        connection.execute("SET lock_timeout = '5s'")
        self._finish_prepared(connection, f"client {number}/%")
        return connection

    def _transact(self, connection: Connection, dice: random.Random, number: int) -> None:
        connection.execute("BEGIN")
        if dice.random() < 0.2:
            # Lost when the source crashes; then the target must not have it either.
            connection.execute("SET LOCAL synchronous_commit = off")
        changed = 0
        used: Counter[str] = Counter()
        for _ in range(dice.choice((1, 1, 2, 4))):
            action = dice.choices(tuple(ACTIONS), tuple(ACTIONS.values()))[0]
            if action in WITH_MOODS and not self.has_moods:
                action = transfer
            rows = self._in_savepoint(connection, dice, action)
            changed += rows
            if action in OF_ACTION:
                used[OF_ACTION[action]] += rows
        prepares = dice.random() < 0.05
        if dice.randrange(ONE_IN_TRUNCATES) == 0 and not self.is_gentle and not prepares:
            changed += truncate(connection, dice)
        if dice.randrange(ONE_IN_MUCH) == 0:
            changed += write_much(connection, dice)
        changed += _do(
            connection,
            "UPDATE counter SET transactions = transactions + 1 WHERE client = %(client)s",
            client=number,
        )
        commits = dice.random() > 0.1
        if prepares:
            name = f"client {number}/{dice.randrange(10**9)}"
            connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
            time.sleep(dice.random() / 5)
            connection.execute(f"{'COMMIT' if commits else 'ROLLBACK'} PREPARED '{name}'".encode())
        else:
            connection.execute("COMMIT" if commits else "ROLLBACK")
        self._count(changed, used, committed=commits)

    def _in_savepoint(self, connection: Connection, dice: random.Random, action: Action) -> int:
        """The action; every so often in a subtransaction, of which every other is undone."""
        if dice.random() > 0.3:
            return action(connection, dice)
        connection.execute("SAVEPOINT here")
        changed = action(connection, dice)
        if dice.random() < 0.5:
            connection.execute("ROLLBACK TO here")
            return 0
        connection.execute("RELEASE here")
        return changed

    def _count(self, changed: int, used: Counter[str], *, committed: bool) -> None:
        with self._lock:
            if committed:
                self.committed += 1
                self.rows_changed += changed
                self.ingredients += used
            else:
                self.rolled_back += 1

    def _finish_prepared(self, connection: Connection, pattern: str) -> None:
        """Undo what a client that lost its connection had prepared."""
        found = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE %s",
            (pattern,),
        ).fetchall()
        for (gid,) in found:
            connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())


def patiently(uri: str, seconds: float = DEADLINE_SECONDS) -> Connection:
    """A connection, as soon as the server takes one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return psycopg.connect(uri, autocommit=True, connect_timeout=10)
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _do(connection: Connection, statement: str, **values: object) -> int:
    return max(0, connection.execute(statement.encode(), values).rowcount)
