"""A spool in the target itself, for executors that share no file system with the receiver.

Invariant: one source transaction is one target transaction, which also moves the replication
origin; so what the origin says is exactly what the table holds, and a transaction that is not
whole is never seen.

Commits do not wait for the disk; `sync` waits once for all of them. A target that went down may
have lost what was not synced: after that the writer continues from what the table has. The
relations that a transaction describes are kept beside it, since a range must be readable without
what was pruned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import InvariantError, WorkDirError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.origin import TAKE_OVER_SECONDS, drop_origin
from millrace.postgres.own_schema import RAW_MESSAGES, RAW_RELATIONS, has_table, install_table
from millrace.postgres.pgoutput.messages import (
    FRAME_HEADER_BYTES,
    Bytes,
    Messages,
    RelationVersion,
    decode_begin,
    decode_commit,
    decode_relation,
    scan,
    whole_frames,
)
from millrace.postgres.wire.connect import connect, session_owner, translated
from millrace.spool.interface import Range, SpoolExtent

Connection = psycopg.Connection[tuple[Any, ...]]
# Where a property has the name of the type.
Raw = bytes

_MESSAGES: Final = """(
    stream text NOT NULL,
    -- Of the transaction, in commit order.
    number bigint NOT NULL,
    block int NOT NULL,
    frames bytea NOT NULL,
    -- In the last block of a transaction.
    end_lsn pg_lsn, commit_lsn pg_lsn, previous_lsn pg_lsn, committed_at bigint, xid bigint,
    changes bigint, bytes bigint,
    -- Bytes of this and all earlier transactions, pruned ones included.
    total bigint,
    PRIMARY KEY (stream, number, block)
)"""
_INDEX: Final = """
CREATE UNIQUE INDEX IF NOT EXISTS raw_messages_end_lsn
    ON replication.raw_messages (stream, end_lsn) WHERE end_lsn IS NOT NULL
"""
_RELATIONS: Final = """(
    stream text NOT NULL, number bigint NOT NULL, oid bigint NOT NULL, frame bytea NOT NULL,
    PRIMARY KEY (stream, oid, number)
)"""
# What one row holds: bytea ends at 1 GB, and its reader needs it in memory.
BLOCK_BYTES: Final = 16 * 1024 * 1024
_PLANNED = 10_000
_SUFFIX = "_spool"
_BEGIN, _COMMIT, _RELATION = ord("B"), ord("C"), ord("R")
_IS_CHANGE = np.isin(np.arange(256), list(b"IUDT"))


def origin_name(stream: str) -> str:
    """The origin of the spool, which is not the applier's."""
    return stream + _SUFFIX


def spooled_stream(origin: str) -> str | None:
    """The stream whose spool has this origin; None for another kind of origin."""
    return origin.removesuffix(_SUFFIX) if origin.endswith(_SUFFIX) else None


def install(connection: Connection, stream: str) -> None:
    """Make the tables and the origin, if they are not there."""
    with translated("making the spool on the target"), connection.transaction():
        install_table(connection, RAW_MESSAGES, _MESSAGES)
        connection.execute(_INDEX)
        install_table(connection, RAW_RELATIONS, _RELATIONS)
        connection.execute(
            "SELECT pg_replication_origin_create(%(name)s) WHERE NOT EXISTS"
            " (SELECT FROM pg_replication_origin WHERE roname = %(name)s)",
            {"name": origin_name(stream)},
        )


def uninstall(connection: Connection, stream: str) -> None:
    """Remove a stream's spool, and the tables if no other stream has a spool on this server."""
    with translated("removing the spool on the target"):
        own = [table for table in (RAW_MESSAGES, RAW_RELATIONS) if has_table(connection, table)]
        for table in own:
            connection.execute(f"DELETE FROM {table.label} WHERE stream = %s", (stream,))
        drop_origin(connection, origin_name(stream))
        others = connection.execute(
            "SELECT FROM pg_replication_origin WHERE right(roname, %s) = %s",
            (len(_SUFFIX), _SUFFIX),
        ).fetchone()
        if others is None:
            for table in own:
                connection.execute(f"DROP TABLE IF EXISTS {table.label}")


class TableSpoolWriter:
    """The one session that adds to a stream's spool."""

    def __init__(self, dsn: Dsn, stream: str) -> None:
        self._dsn = dsn
        self._stream = stream
        self._connection = self._open()
        self._number = 0
        self._block = 0
        self._is_open = False
        self._xid = 0
        self._changes = 0
        self._size = 0
        self.last_end_lsn = 0
        self.complete_lsn = 0
        self.durable_lsn = 0
        self._durable_end_lsn = 0
        self.unsynced_bytes = 0
        self._total = 0
        try:
            install(self._connection, stream)
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _open(self) -> Connection:
        return connect(self._dsn, f"spool {session_owner(self._stream)}", synchronous_commit="off")

    def __enter__(self) -> TableSpoolWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def is_in_transaction(self) -> bool:
        return self._is_open

    @property
    def bytes(self) -> int:
        """What is not pruned."""
        with translated("reading the spool on the target"):
            row = self._connection.execute(
                "SELECT total - bytes FROM replication.raw_messages WHERE stream = %s"
                " AND end_lsn IS NOT NULL ORDER BY end_lsn LIMIT 1",
                (self._stream,),
            ).fetchone()
        return self._total - row[0] if row else 0

    def append(self, frames: memoryview, messages: Messages) -> None:
        """Add whole frames; each source transaction is committed when its Commit comes."""
        if not len(messages):
            return
        commits = np.flatnonzero(messages.kind == _COMMIT).tolist()
        with self._writing() as connection, connection.pipeline():
            first, start = 0, 0
            for at in commits:
                end = int(messages.offset[at] + messages.length[at])
                self._append_part(frames, messages, first, at + 1, start, end)
                first, start = at + 1, end
            if first < len(messages):
                self._append_part(frames, messages, first, len(messages), start, messages.consumed)
        self.unsynced_bytes += messages.consumed

    def mark_idle(self, lsn: int) -> None:
        """Move the origin without a transaction of the source."""
        if self._is_open or lsn <= self.complete_lsn:
            return
        with self._writing() as connection, connection.pipeline():
            self._connection.execute("BEGIN")
            self._write_something()
            self._move_origin(lsn, 0)
            self._connection.execute("COMMIT")
        self.complete_lsn = lsn
        self.unsynced_bytes += 1

    def sync(self) -> int:
        """Wait until everything committed is on the target's disk."""
        if self.unsynced_bytes and not self._is_open:
            with self._writing() as connection, connection.transaction():
                self._connection.execute("SET LOCAL synchronous_commit = on")
                self._write_something()
                # The origin would move with this transaction, to nowhere.
                self._move_origin(self.complete_lsn, 0)
            self.durable_lsn = self.complete_lsn
            self._durable_end_lsn = self.last_end_lsn
            self.unsynced_bytes = 0
        return self._durable_end_lsn

    def _write_something(self) -> None:
        """A transaction that wrote nothing moves no origin, and waits for no disk."""
        self._connection.execute("SELECT pg_logical_emit_message(true, 'millrace', '')")

    @property
    def is_syncing(self) -> bool:
        return False

    def sync_soon(self) -> None:
        self.sync()

    def cut_unfinished(self) -> None:
        """Roll back what has come of a transaction; after a lost connection, open another."""
        if self._connection.closed:
            self._is_open = False
            self._connection = self._open()
            self._take_over()
        if self._is_open:
            with translated("rolling back on the target"):
                self._connection.execute("ROLLBACK")
            self._is_open = False
        self.sync()

    def _append_part(
        self, frames: memoryview, messages: Messages, first: int, end: int, start: int, stop: int
    ) -> None:
        """A piece of one transaction, perhaps with its Begin, perhaps with its Commit."""
        part = messages.slice(first, end, stop)
        if part.kind[0] == _BEGIN:
            if self._is_open:
                raise InvariantError("a transaction begins inside another")
            self._begin(_message(frames, part, 0))
        elif not self._is_open:
            raise InvariantError("a change outside of a transaction")
        self._changes += int(_IS_CHANGE[part.kind].sum())
        self._size += stop - start
        for at in np.flatnonzero(part.kind == _RELATION):
            self._put_relation(frames, part, int(at))
        for begin in range(start, stop, BLOCK_BYTES):
            piece = bytes(frames[begin : min(stop, begin + BLOCK_BYTES)])
            is_last = part.kind[-1] == _COMMIT and begin + BLOCK_BYTES >= stop
            if is_last:
                self._commit(piece, _message(frames, part, len(part) - 1))
            else:
                self._connection.execute(
                    "INSERT INTO replication.raw_messages (stream, number, block, frames)"
                    " VALUES (%s, %s, %s, %b)",
                    (self._stream, self._number, self._block, piece),
                )
                self._block += 1

    def _begin(self, message: Raw) -> None:
        self._connection.execute("BEGIN")
        self._is_open = True
        self._number += 1
        self._block = self._changes = self._size = 0
        self._xid = decode_begin(message).xid

    def _commit(self, piece: Raw, message: Raw) -> None:
        commit = decode_commit(message)
        self._total += self._size
        self._connection.execute(
            "INSERT INTO replication.raw_messages (stream, number, block, frames, end_lsn,"
            " commit_lsn, previous_lsn, committed_at, xid, changes, bytes, total)"
            " VALUES (%s, %s, %s, %b, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                self._stream,
                self._number,
                self._block,
                piece,
                render_lsn(commit.end_lsn),
                render_lsn(commit.commit_lsn),
                render_lsn(self.last_end_lsn),
                commit.committed_at_microseconds,
                self._xid,
                self._changes,
                self._size,
                self._total,
            ),
        )
        self._move_origin(commit.end_lsn, commit.committed_at_microseconds)
        self._connection.execute("COMMIT")
        self._is_open = False
        self.last_end_lsn = commit.end_lsn
        self.complete_lsn = max(self.complete_lsn, commit.end_lsn)

    def _put_relation(self, frames: memoryview, messages: Messages, at: int) -> None:
        end = int(messages.offset[at] + messages.length[at])
        frame = bytes(frames[int(messages.offset[at]) - FRAME_HEADER_BYTES : end])
        self._connection.execute(
            "INSERT INTO millrace.raw_relations (stream, number, oid, frame)"
            " VALUES (%s, %s, %s, %b) ON CONFLICT (stream, oid, number)"
            " DO UPDATE SET frame = excluded.frame",
            (self._stream, self._number, int(messages.relation[at]), frame),
        )

    def _move_origin(self, lsn: int, committed_at: int) -> None:
        self._connection.execute(
            "SELECT pg_replication_origin_xact_setup(%s,"
            " timestamptz '2000-01-01 00:00:00+00' + %s * interval '1 microsecond')",
            (render_lsn(lsn), committed_at),
        )

    def _take_over(self) -> None:
        """Hold the origin, and continue after what the table has."""
        name = origin_name(self._stream)
        with self._writing():
            self._hold_origin(name)
            row = self._connection.execute(
                "SELECT coalesce(pg_replication_origin_session_progress(true), '0/0')::text,"
                " (SELECT coalesce(max(number), 0) FROM replication.raw_messages"
                "   WHERE stream = %(stream)s),"
                " (SELECT coalesce(max(end_lsn), '0/0')::text FROM replication.raw_messages"
                "   WHERE stream = %(stream)s),"
                " (SELECT coalesce(max(total), 0)::int8 FROM replication.raw_messages"
                "   WHERE stream = %(stream)s)",
                {"stream": self._stream},
            ).fetchone()
        assert row is not None
        self.complete_lsn = self.durable_lsn = parse_lsn(row[0])
        self._number = row[1]
        self.last_end_lsn = self._durable_end_lsn = parse_lsn(row[2])
        self._total = row[3]
        self.unsynced_bytes = 0

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """After an error nobody knows what was committed, or whether the origin is held: the
        session is closed, and the next one asks the target."""
        try:
            with translated("writing the spool on the target"):
                yield self._connection
        except BaseException:
            self._connection.close()
            raise

    def _hold_origin(self, name: str) -> None:
        """From a session of ours that was left behind, if need be: there is one receiver."""
        until = time.monotonic() + TAKE_OVER_SECONDS
        while True:
            try:
                self._connection.execute("SELECT pg_replication_origin_session_setup(%s)", (name,))
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > until:
                    raise
                self._connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <>"
                    " pg_backend_pid() AND application_name = current_setting('application_name')"
                    " AND datname = current_database()"
                )
                time.sleep(0.05)


class TableSpoolReader:
    """Reads a stream's spool from the target."""

    def __init__(self, dsn: Dsn, stream: str, encoding: str = "utf-8") -> None:
        """`encoding` is Python's name of the names' encoding."""
        self._dsn = dsn
        self._stream = stream
        self._encoding = encoding
        self._kept: Connection | None = None
        # Several workers ask at once.
        self._opening = threading.Lock()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def extent(self) -> SpoolExtent:
        with self._session() as connection:
            row = connection.execute(
                "SELECT coalesce((array_agg(previous_lsn ORDER BY end_lsn))[1], '0/0')::text,"
                " coalesce(max(end_lsn), '0/0')::text,"
                " coalesce(pg_replication_origin_progress(%s, true), '0/0')::text"
                " FROM replication.raw_messages WHERE stream = %s AND end_lsn IS NOT NULL",
                (origin_name(self._stream), self._stream),
            ).fetchone()
        assert row is not None
        oldest, last_end, complete = map(parse_lsn, row)
        return SpoolExtent(oldest, last_end, max(last_end, complete))

    def last_end_lsn(self) -> int:
        """The end of the last transaction there is; 0 if there is none."""
        with self._session() as connection:
            row = connection.execute(
                "SELECT coalesce(max(end_lsn), '0/0')::text FROM replication.raw_messages"
                " WHERE stream = %s",
                (self._stream,),
            ).fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def plan(self, after_lsn: int, max_bytes: int, until_lsn: int | None = None) -> Range | None:
        """The next whole transactions: at least one, then as many as fit; None if there is none
        yet."""
        until = render_lsn(until_lsn) if until_lsn is not None else None
        with self._session() as connection:
            rows = connection.execute(
                "SELECT number, end_lsn::text, commit_lsn::text, previous_lsn::text,"
                " committed_at, changes, bytes FROM replication.raw_messages"
                " WHERE stream = %s AND end_lsn > %s AND (%s::pg_lsn IS NULL OR end_lsn <= %s)"
                " ORDER BY raw_messages.end_lsn LIMIT %s",
                (self._stream, render_lsn(after_lsn), until, until, _PLANNED),
            ).fetchall()
            if not rows:
                return None
            self._check_pruned(connection, after_lsn, parse_lsn(rows[0][3]))
        taken, size = 1, rows[0][6]
        while taken < len(rows) and size + rows[taken][6] <= max_bytes:
            size += rows[taken][6]
            taken += 1
        last = rows[taken - 1]
        return Range(
            after_lsn,
            parse_lsn(last[1]),
            parse_lsn(last[2]),
            last[4],
            taken,
            sum(row[5] for row in rows[:taken]),
            size,
            begin=rows[0][0],
            end=last[0],
        )

    def chunks(self, range_: Range, max_chunk_bytes: int) -> Iterator[Bytes]:
        """The frames from the first Begin to the last Commit, in buffers of whole frames."""
        rest = np.empty(0, np.uint8)
        with (
            connect(self._dsn, "read spool") as connection,
            translated("reading the spool on the target"),
        ):
            self._check_there(connection, range_)
            for (frames,) in connection.cursor(binary=True).stream(
                "SELECT frames FROM replication.raw_messages WHERE stream = %s"
                " AND number BETWEEN %s AND %s ORDER BY number, block",
                (self._stream, range_.begin, range_.end),
            ):
                block: Bytes = np.frombuffer(frames, np.uint8)
                rest = np.concatenate((rest, block)) if len(rest) else block
                if len(rest) < max_chunk_bytes:
                    continue
                whole = scan(rest, len(rest)).consumed
                ready, rest = rest[:whole], rest[whole:]
                while len(ready):
                    size = whole_frames(ready, max_chunk_bytes)
                    yield ready[:size]
                    ready = ready[size:]
        while len(rest):
            size = whole_frames(rest, max_chunk_bytes)
            yield rest[:size]
            rest = rest[size:]

    def relations(self, range_: Range) -> dict[int, RelationVersion]:
        """The relations as they were known where the range begins."""
        with self._session() as connection:
            rows = connection.execute(
                "SELECT DISTINCT ON (oid) oid, frame FROM millrace.raw_relations"
                " WHERE stream = %s AND number < %s ORDER BY oid, number DESC",
                (self._stream, range_.begin),
            ).fetchall()
        return {
            oid: decode_relation(bytes(frame)[FRAME_HEADER_BYTES:], self._encoding)
            for oid, frame in rows
        }

    def bytes_after(self, lsn: int) -> int:
        """How much there is to read after a position."""
        with self._session() as connection:
            row = connection.execute(
                "SELECT coalesce(sum(bytes), 0)::int8 FROM replication.raw_messages"
                " WHERE stream = %s AND end_lsn > %s",
                (self._stream, render_lsn(lsn)),
            ).fetchone()
        assert row is not None
        return int(row[0])

    @contextmanager
    def _session(self) -> Iterator[Connection]:
        """A session for short questions: they are asked several times a second."""
        with self._opening:
            if self._kept is None or self._kept.closed:
                self._kept = connect(self._dsn, "read spool")
            kept = self._kept
        with translated("reading the spool on the target"):
            yield kept

    def _check_pruned(self, connection: Connection, after_lsn: int, previous_lsn: int) -> None:
        """The first transaction found must be the next one."""
        row = connection.execute(
            "SELECT min(end_lsn)::text FROM replication.raw_messages WHERE stream = %s",
            (self._stream,),
        ).fetchone()
        is_first = row is not None and parse_lsn(row[0]) > after_lsn
        if is_first and previous_lsn > after_lsn:
            raise _pruned(after_lsn, previous_lsn)

    def _check_there(self, connection: Connection, range_: Range) -> None:
        row = connection.execute(
            "SELECT count(*) FROM replication.raw_messages WHERE stream = %s AND end_lsn IS NOT"
            " NULL AND number BETWEEN %s AND %s",
            (self._stream, range_.begin, range_.end),
        ).fetchone()
        if row is None or row[0] != range_.transactions:
            raise _pruned(range_.after_lsn, range_.end_lsn)


def prune(connection: Connection, stream: str, applied_lsn: int, *, dry_run: bool = False) -> int:
    """Remove the transactions that end at or before `applied_lsn`, but the newest; the bytes."""
    with translated("pruning the spool on the target"), connection.transaction():
        row = connection.execute(
            "SELECT max(number), coalesce(sum(bytes), 0)::int8 FROM replication.raw_messages"
            " WHERE stream = %(stream)s AND end_lsn <= %(lsn)s AND number <"
            " (SELECT max(number) FROM replication.raw_messages WHERE stream = %(stream)s)",
            {"stream": stream, "lsn": render_lsn(applied_lsn)},
        ).fetchone()
        assert row is not None
        if row[0] is None or dry_run:
            return int(row[1])
        connection.execute(
            "DELETE FROM replication.raw_messages WHERE stream = %s AND number <= %s",
            (stream, row[0]),
        )
        connection.execute(
            "DELETE FROM millrace.raw_relations r WHERE stream = %(stream)s"
            " AND number <= %(number)s AND EXISTS (SELECT FROM millrace.raw_relations n"
            " WHERE n.stream = r.stream AND n.oid = r.oid AND n.number > r.number"
            " AND n.number <= %(number)s)",
            {"stream": stream, "number": row[0]},
        )
    return int(row[1])


def _message(frames: memoryview, messages: Messages, at: int) -> bytes:
    offset = int(messages.offset[at])
    return bytes(frames[offset : offset + int(messages.length[at])])


def _pruned(after_lsn: int, known_lsn: int) -> WorkDirError:
    return WorkDirError(
        f"the spool on the target was pruned: changes after {render_lsn(after_lsn)} are requested, "
        f"it begins after {render_lsn(known_lsn)}",
        hint="the target is behind the position that was recorded as applied: make a new clone",
    )
