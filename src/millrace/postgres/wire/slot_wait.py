"""What the creation of a logical slot waits for.

Invariant: reads only, and no value of a row is passed on: literals of a query are left out.

A slot's consistent point comes when every transaction has ended that ran when it was asked for, of
all databases. The walsender waits for them one after the other, each by a lock on its id.

Facts: snapbuild.c, SnapBuildFindSnapshot() and SnapBuildWaitSnapshot().
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

QUERY_CHARACTERS: Final = 80

# The transaction that is waited for: of a session, or a prepared one.
_BLOCKER = """
SELECT w.transactionid::text, h.pid, a.application_name, a.usename, a.datname, a.state,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8, a.query,
       p.gid, extract(epoch FROM clock_timestamp() - p.prepared)::float8
  FROM pg_locks w
  JOIN pg_locks h ON h.locktype = w.locktype AND h.transactionid = w.transactionid AND h.granted
  LEFT JOIN pg_stat_activity a ON a.pid = h.pid
  LEFT JOIN pg_prepared_xacts p ON h.pid IS NULL AND p.transaction = w.transactionid
 WHERE w.pid = %s AND w.locktype = 'transactionid' AND NOT w.granted
"""
# Any transaction with an id may be waited for next.
_OTHERS = """
SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> %s)
       + (SELECT count(*) FROM pg_prepared_xacts), pg_is_in_recovery()
"""
_LITERAL = re.compile(r"[eE]?'(?:[^']|'')*'?|\$(\w*)\$.*?(?:\$\1\$|$)|\b\d[\d.]*\b", re.S)


@dataclass(frozen=True)
class Blocker:
    """A transaction that a slot's creation waits for."""

    # Of its session; None for a prepared transaction.
    pid: int | None
    gid: str | None
    application: str
    user: str
    database: str
    state: str
    age_seconds: float
    query: str

    def describe(self) -> str:
        age = _render_age(self.age_seconds)
        if self.pid is None:
            return (
                f"prepared transaction {self.gid!r}, prepared {age} ago; end it with COMMIT "
                "PREPARED or ROLLBACK PREPARED"
            )
        known = [
            f"application {self.application!r}" if self.application else "",
            f"user {self.user}" if self.user else "",
            f"database {self.database}" if self.database else "",
            f"open for {age}",
            self.state,
        ]
        text = f"process {self.pid} ({', '.join(filter(None, known))})"
        return f"{text}: {self.query}" if self.query else text


@dataclass(frozen=True)
class SlotWait:
    """What a slot's creation waits for now."""

    blockers: tuple[Blocker, ...]
    # Other transactions with an id, which may be waited for next.
    others: int
    is_standby: bool

    def describe(self) -> str:
        """One sentence, without its beginning."""
        if self.blockers:
            text = "; ".join(one.describe() for one in self.blockers)
            left = self.others - len(self.blockers)
            more = f"; {left} more transactions are open" if left > 0 else ""
            return f"for a transaction that is open on the source: {text}{more}"
        if self.is_standby:
            return (
                "for its primary to log which transactions run; to have that at once: "
                "SELECT pg_log_standby_snapshot() there"
            )
        return "for the source to reach a consistent point"


def read_slot_wait(connection: Connection, pid: int) -> SlotWait:
    """What the walsender `pid`, which creates a slot, waits for."""
    with translated("asking what the slot's creation waits for"):
        rows = connection.execute(_BLOCKER, (pid,)).fetchall()
        row = connection.execute(_OTHERS, (pid,)).fetchone()
    assert row is not None
    blockers = tuple(
        Blocker(
            holder,
            gid,
            application or "",
            user or "",
            database or "",
            state or "",
            float(age if age is not None else prepared_age or 0),
            shorten_query(query or ""),
        )
        for _, holder, application, user, database, state, age, query, gid, prepared_age in rows
    )
    return SlotWait(blockers, int(row[0]), bool(row[1]))


def shorten_query(query: str) -> str:
    """The beginning of a statement on one line, with ? for its literals."""
    text = " ".join(_LITERAL.sub("?", query).split())
    return text if len(text) <= QUERY_CHARACTERS else text[: QUERY_CHARACTERS - 1] + "…"


def _render_age(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest} s"
