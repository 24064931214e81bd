"""What was emitted of a range of WAL, and what was not.

Invariant: every commit of the range that belongs to the database is counted once, as emitted,
as not selected, or as withheld with its reason. A report with something withheld or not covered is
not complete, and the program does not end with success.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal.transaction import Withheld


@dataclass(slots=True)
class Report:
    """The account of one run."""

    # Commits at or after this position were to be emitted; None: as early as possible.
    from_lsn: int | None = None
    to_lsn: int | None = None
    # From where on transactions were emitted, and up to where WAL was read.
    first_lsn: int = 0
    end_lsn: int = 0
    transactions: int = 0
    changes: int = 0
    not_selected: int = 0
    withheld: list[Withheld] = field(default_factory=list)

    @property
    def uncovered(self) -> str:
        """The part of the range that could not be decoded at all; empty if there is none."""
        if not self.first_lsn:
            return "no position was found at which decoding can start"
        if self.from_lsn is not None and self.first_lsn > self.from_lsn + 1:
            return (
                f"commits from {render_lsn(self.from_lsn)} to {render_lsn(self.first_lsn)}: "
                "transactions that began before the base were still running"
            )
        return ""

    @property
    def is_complete(self) -> bool:
        return not self.withheld and not self.uncovered

    def to_dict(self) -> dict[str, Any]:
        return {
            "from_lsn": None if self.from_lsn is None else render_lsn(self.from_lsn),
            "to_lsn": None if self.to_lsn is None else render_lsn(self.to_lsn),
            "first_lsn": render_lsn(self.first_lsn),
            "end_lsn": render_lsn(self.end_lsn),
            "transactions": self.transactions,
            "changes": self.changes,
            "not_selected": self.not_selected,
            "uncovered": self.uncovered,
            "withheld": [
                {
                    "xid": w.xid,
                    "commit_lsn": render_lsn(w.commit_lsn),
                    "end_lsn": render_lsn(w.end_lsn),
                    "reason": w.reason,
                }
                for w in self.withheld
            ],
            "complete": self.is_complete,
        }

    def require_complete(self) -> None:
        """Raise if something is missing."""
        if self.withheld:
            first = self.withheld[0]
            raise FormatError(
                f"{len(self.withheld)} transactions could not be decoded; the first is "
                f"{first.xid}, committed at {render_lsn(first.commit_lsn)}: {first.reason}",
                hint="the report names all of them; everything else was emitted",
                report=self.to_dict(),
            )
        if self.uncovered:
            raise FormatError(
                f"the range is not covered: {self.uncovered}",
                hint="use an older base, or a later --from",
                report=self.to_dict(),
            )
