"""Pieces of WAL that tasks have parsed, for the sequential pass and for whoever decodes rows.

Invariant: the pieces come in the order of the WAL, whichever task was first, and are linked to each
other without a gap. Only names of files come back from the tasks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from millrace.engine import Engine
from millrace.lsn import render_lsn
from millrace.wal.read.files import WalFiles
from millrace.wal.read.parse_task import Parsed, Stretch, check_joins, parse_stretch, plan_stretches
from millrace.wal.read.pieces import Pieces
from millrace.wal.read.record import Records
from millrace.wal.read.record_file import read_record_file, write_record_file

# Mapped at once.
_HELD = 8


class ParsedPieces(Pieces):
    """Pieces that the tasks of an engine have parsed; each is a file of records."""

    def __init__(
        self,
        files: WalFiles,
        bounds: dict[int, int] | None,
        engine: Engine,
        folder: Path,
        jobs: int,
        *,
        check_crc: bool = True,
    ) -> None:
        super().__init__(files, bounds, check_crc=check_crc)
        self._engine = engine
        self._folder = folder
        self._jobs = jobs
        # By number, which is where a piece begins.
        self._paths: dict[int, Path] = {}
        self._mapped: OrderedDict[int, Records] = OrderedDict()

    def read(self, start_lsn: int, end_lsn: int | None) -> Iterator[tuple[int, Records]]:
        """Parse, a few stretches ahead of whoever reads; each piece in its turn."""
        stretches = plan_stretches(
            self._files, start_lsn, end_lsn, self._folder, check_crc=self._check_crc
        )
        before: list[Parsed] = []
        for stretch, parsed in self._parse(stretches):
            check_joins([*before, parsed])
            if parsed.first_lsn:
                before = [parsed]
            self._paths[stretch.start_lsn] = parsed.path
            records = self.get(stretch.start_lsn)
            if len(records):
                yield stretch.start_lsn, records

    def get(self, piece: int) -> Records:
        """A piece that was parsed before, or read in an earlier run."""
        if piece not in self._paths:
            return super().get(piece)
        found = self._mapped.pop(piece, None) or read_record_file(self._paths[piece])
        self._mapped[piece] = found
        while len(self._mapped) > _HELD:
            self._mapped.popitem(last=False)
        return found

    def path(self, piece: int) -> Path:
        """The file of a piece, for tasks."""
        if piece not in self._paths:
            path = self._folder / f"{piece:016X}.earlier"
            write_record_file(path, super().get(piece))
            self._paths[piece] = path
        return self._paths[piece]

    def forget(self, horizon: int) -> None:
        """Nothing: the files are wanted as long as rows are decoded."""

    def _parse(self, stretches: list[Stretch]) -> Iterator[tuple[Stretch, Parsed]]:
        """In order, with at most twice as many under way or done as there are tasks at once."""
        running: deque[tuple[Stretch, Future[Parsed]]] = deque()
        with ThreadPoolExecutor(self._jobs) as threads:
            try:
                for stretch in stretches:
                    name = f"parse WAL from {render_lsn(stretch.start_lsn)}"
                    call = threads.submit(self._engine.call, parse_stretch, stretch, name)
                    running.append((stretch, call))
                    if len(running) >= 2 * self._jobs:
                        first, done = running.popleft()
                        yield first, done.result()
                while running:
                    first, done = running.popleft()
                    yield first, done.result()
            finally:
                for _, waiting in running:
                    waiting.cancel()
