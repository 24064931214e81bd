"""The sink `jsonl`: documents as JSON lines at the end of a file.

Invariant: a line in the file is whole. Several processes may write to one file: a commit appends
its lines at once, under a lock, after cutting what a killed process left of a line. The file has no
versions to compare: whoever reads it keeps the line with the largest version of each id.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from millrace import failpoint
from millrace.errors import ConfigError
from millrace.sink.document import DocumentBatch, DocumentOrigin, render_lines
from millrace.sink.failure import FailureGuard
from millrace.sink.protocol import Capabilities

_LOOK_BACK_BYTES = 1 << 16


def open_sink(address: str) -> JsonLinesSink:
    """`jsonl:FILE`."""
    if not address:
        raise ConfigError("the sink jsonl needs a file", hint="write jsonl:FILE")
    return JsonLinesSink(Path(address))


class JsonLinesSink:
    """Appends to one file."""

    capabilities = Capabilities()
    position = 0

    def __init__(self, path: Path) -> None:
        self._lines: list[str] = []
        self._guard = FailureGuard(str(path))
        with self._guard.step("opening"):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def begin_documents(self, origin: DocumentOrigin, body: pa.Schema) -> None:
        """Lines are of whatever comes."""

    def write_documents(self, batch: DocumentBatch) -> None:
        self._lines.extend(render_lines(batch))

    def commit(self, position: int) -> None:
        if not self._lines:
            return
        data = "".join(f"{line}\n" for line in self._lines).encode()
        with self._guard.step("writing"), self._alone():
            _cut_torn_line(self._file)
            end = os.fstat(self._file).st_size
            try:
                failpoint.hit("sink.before_commit")
                _write_all(self._file, data)
                os.fsync(self._file)
            except BaseException:
                os.ftruncate(self._file, end)
                raise
        self._lines = []

    def close(self) -> None:
        os.close(self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _cut_torn_line(file: int) -> None:
    """Up to the last line break, if the file does not end with one."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - _LOOK_BACK_BYTES)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            os.ftruncate(file, begin + found + 1)
            return
        end = begin
    os.ftruncate(file, 0)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
