"""Tables that are not at the stream's end position, because they are copied again.

Invariant: at an end position, a table that was asked for and is not followed, and one whose copy is
newer than that position, are named; nobody claims that they equal the source there.

For the audit at the end of a stream. What it needs of a table that was copied again is its state:
`copied_lsn` and `source_oid` are what its rows and its counters are held against.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace.apply.table_state import SyncState, TableState, TableStates
from millrace.errors import MismatchError
from millrace.lsn import render_lsn
from millrace.workdir.sync_request import SyncRequest


@dataclass(frozen=True)
class UnsyncedTable:
    """A table of which nothing can be said at the end position."""

    schema: str
    name: str
    reason: str

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"


def find_unsynced(
    states: TableStates, requests: Iterable[SyncRequest], endpos: int | None
) -> list[UnsyncedTable]:
    """Those tables, by name; `endpos` is where the stream ended, None if nobody said where."""
    found = {}
    for request in requests:
        if request.is_unfinished:
            why = f": {request.error}" if request.error else ""
            name = (request.schema, request.name)
            found[name] = f"its copy, requested because {request.reason}, is not done{why}"
    for name, state in states.items():
        if reason := _reason(state, endpos):
            found[name] = reason
    return [UnsyncedTable(*name, reason) for name, reason in sorted(found.items())]


def require_synced(unsynced: Sequence[UnsyncedTable], endpos: int) -> None:
    """Raise if there are such tables."""
    if not unsynced:
        return
    told = "; ".join(f"{one.label}: {one.reason}" for one in unsynced[:5])
    more = f"; and {len(unsynced) - 5} more" if len(unsynced) > 5 else ""
    raise MismatchError(
        f"everything up to {render_lsn(endpos)} is applied, except to these tables: {told}{more}",
        hint="remove the end position (`millrace stream sentinel set endpos --none`) and follow: "
        "the copies are made; `millrace cutover` waits for them, and then chooses an end position",
        tables=[one.label for one in unsynced],
    )


def _reason(state: TableState, endpos: int | None) -> str:
    if state.state is SyncState.ABANDONED:
        return "its copy was cancelled, and its changes are not applied since"
    if state.is_unfinished:
        return "its copy is not done"
    if endpos is not None and (state.copied_lsn or 0) > endpos:
        return (
            f"it was copied at {render_lsn(state.copied_lsn or 0)}, which is after the end position"
            f" {render_lsn(endpos)}"
        )
    return ""
