"""Pieces of WAL that can be read again.

Invariant: a piece read again gives the same records in the same order, so that a record's number
within its piece is a lasting reference. Only a few pieces are held at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from millrace.wal.read.files import WalFiles
from millrace.wal.read.reader import WINDOW_BYTES, iter_records, read_records
from millrace.wal.read.record import Records

# Of 16 MB and what was found in it; more only while a transaction spans them.
_HELD = 4


class Pieces:
    """The windows of a stretch of WAL, numbered by where they begin."""

    def __init__(
        self, files: WalFiles, bounds: dict[int, int] | None = None, *, check_crc: bool = True
    ) -> None:
        self._files = files
        self._check_crc = check_crc
        # Where each ends; those of an earlier run can be read again, too.
        self.bounds = dict(bounds or {})
        self._held: OrderedDict[int, Records] = OrderedDict()

    def read(self, start_lsn: int, end_lsn: int | None) -> Iterator[tuple[int, Records]]:
        """The pieces one after the other; each has the position of its first record as number."""
        for records in iter_records(
            self._files,
            start_lsn,
            end_lsn,
            check_crc=self._check_crc,
            window_bytes=WINDOW_BYTES,
        ):
            if len(records):
                piece = int(records.lsn[0])
                self.bounds[piece] = int(records.lsn[-1]) + 1
                self._hold(piece, records)
                yield piece, records

    def get(self, piece: int) -> Records:
        """A piece that was read before."""
        found = self._held.get(piece)
        if found is None:
            # Its checksums were checked when it was read for the first time.
            end = self.bounds[piece]
            found = read_records(self._files, piece, end, check_crc=False)
            self._hold(piece, found)
        else:
            self._held.move_to_end(piece)
        return found

    def forget(self, horizon: int) -> None:
        for piece in [p for p, end in self.bounds.items() if end <= horizon]:
            del self.bounds[piece]

    def _hold(self, piece: int, records: Records) -> None:
        self._held[piece] = records
        self._held.move_to_end(piece)
        while len(self._held) > _HELD:
            self._held.popitem(last=False)
