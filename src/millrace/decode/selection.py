"""Which transactions and changes are wanted.

Invariant: what is not selected is left out whole: of a transaction whose changes are all of other
tables nothing is emitted, not even its beginning and its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from millrace.errors import ConfigError
from millrace.wal.output.row_change import RowChange
from millrace.wal.row.rows import Event, Truncation
from millrace.wal.transaction import Transaction

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Selection:
    """The conditions; without any, everything is wanted."""

    # schema.name, as in the catalog.
    tables: frozenset[str] = frozenset()
    xids: frozenset[int] = frozenset()
    # By commit time, microseconds since 2000-01-01.
    since: int | None = None
    until: int | None = None

    def takes(self, transaction: Transaction) -> bool:
        if self.xids and transaction.xid not in self.xids:
            return False
        if self.since is not None and transaction.committed_at < self.since:
            return False
        return self.until is None or transaction.committed_at <= self.until

    def filter(self, events: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
        for lsn, event in events:
            chosen = self._choose(event)
            if chosen is not None:
                yield lsn, chosen

    def _choose(self, event: Event) -> Event | None:
        if not self.tables:
            return event
        if isinstance(event, RowChange):
            name = f"{event.relation.namespace}.{event.relation.name}"
            return event if name in self.tables else None
        if isinstance(event, Truncation):
            rows = tuple(r for r in event.relations if f"{r.namespace}.{r.name}" in self.tables)
            return Truncation(rows, event.cascade, event.restart_identity) if rows else None
        return None

    @property
    def drops_empty(self) -> bool:
        return bool(self.tables)


def parse_moment(text: str) -> int:
    """A time as ISO 8601; without an offset it is in UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"invalid time: {text!r}", hint="write it as 2026-01-31T12:00:00+00:00"
        ) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    delta = moment - _EPOCH
    return (delta.days * 86400 + delta.seconds) * 1_000_000 + delta.microseconds
