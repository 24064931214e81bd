"""Decoding on many cores: tasks parse, one pass on the driver builds, tasks render.

Invariant: the output is that of `Decoding.run`, byte for byte, however many tasks there are and
whichever is first. Only names of files and numbers come back from tasks.

    segment ─► parse_stretch ─► records ─┐               ┌► render_transactions ─► lines ─┐
    segment ─► parse_stretch ─► records ─┼► Decoder.feed ┼► render_transactions ─► lines ─┼► output
    segment ─► parse_stretch ─► records ─┘   (in order)  └► render_transactions ─► lines ─┘
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO

from millrace.decode.outputs import TextOutput
from millrace.decode.parsing import ParsedPieces
from millrace.decode.report import Report
from millrace.decode.row_task import (
    Rendered,
    RowTask,
    needs_catalog,
    render_transactions,
    used_relations,
)
from millrace.decode.run import DecodeSettings, Decoding
from millrace.engine import Engine
from millrace.errors import ConfigError
from millrace.lsn import render_lsn
from millrace.wal.read.pieces import Pieces
from millrace.wal.transaction import Batch


class ParallelDecoding(Decoding):
    """A decoding whose parsing and rendering run in the tasks of an engine."""

    def __init__(self, settings: DecodeSettings, engine: Engine, folder: Path, jobs: int) -> None:
        """The folder is for files of tasks; it must be the same for all of them."""
        self._engine = engine
        self._folder = folder
        self._jobs = jobs
        if settings.checkpoint is not None:
            raise ConfigError("decoding by tasks writes no checkpoint", hint="use one process")
        super().__init__(settings)

    def _open_pieces(self, bounds: dict[int, int]) -> Pieces:
        self._parsed = ParsedPieces(
            self.wal, bounds, self._engine, self._folder, self._jobs,
            check_crc=self.settings.check_crc,
        )  # fmt: skip
        return self._parsed

    def write_text(self, stream: IO[bytes]) -> Report:
        """Lines of test_decoding, in commit order."""
        for done in self._render():
            self.report.transactions += done.transactions
            self.report.changes += done.changes
            self.report.withheld += done.withheld
            with done.path.open("rb") as lines:
                shutil.copyfileobj(lines, stream, 1 << 20)
            done.path.unlink()
        builder = self.decoder.builder
        self.report.first_lsn = builder.start_decoding_at if builder.is_consistent else 0
        stream.flush()
        return self.report

    def _render(self) -> Iterator[Rendered]:
        """Batch by batch, with at most twice as many under way or done as there are jobs."""
        running: deque[Future[Rendered]] = deque()
        with ThreadPoolExecutor(self._jobs) as threads:
            try:
                for number, batch in enumerate(self.batches()):
                    self.report.withheld += batch.withheld
                    if task := self._plan(number, batch):
                        running.append(self._submit(threads, task))
                    while len(running) >= 2 * self._jobs:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            finally:
                for waiting in running:
                    waiting.cancel()

    def _plan(self, number: int, batch: Batch) -> RowTask | None:
        chosen = [t for t in batch.transactions if self.settings.selection.takes(t)]
        self.report.not_selected += len(batch.transactions) - len(chosen)
        if not chosen:
            return None
        wanted = {r.piece for transaction in chosen for r in transaction.references}
        return RowTask(
            batch=replace(batch, transactions=chosen, withheld=[]),
            relations=used_relations(chosen, self.decoder.resolver.relations),
            pieces={piece: self._parsed.path(piece) for piece in sorted(wanted)},
            settings=self.output_settings,
            unknown_as_raw=self.settings.unknown_as_raw,
            selection=self.settings.selection,
            path=self._folder / f"{number:08d}.lines",
        )

    def _submit(self, threads: ThreadPoolExecutor, task: RowTask) -> Future[Rendered]:
        if needs_catalog(task.relations.values()):
            # Names are those of this moment, so now and here.
            done: Future[Rendered] = Future()
            done.set_result(self._render_here(task))
            return done
        name = f"decode up to {render_lsn(task.batch.end_lsn)}"
        return threads.submit(self._engine.call, render_transactions, task, name)

    def _render_here(self, task: RowTask) -> Rendered:
        """As `Decoding.run` does, which counts by itself."""
        drops_empty = self.settings.selection.drops_empty
        with (
            task.path.open("wb") as stream,
            closing(TextOutput(stream, self.renderers, drops_empty=drops_empty)) as output,
        ):
            for transaction in task.batch.transactions:
                self._emit(transaction, task.batch, [output])
        return Rendered(task.path)
