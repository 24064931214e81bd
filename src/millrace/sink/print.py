"""The sink `print`: changes as SQL statements or JSON lines, documents as JSON lines.

Invariant: a line is printed once it is whole, and everything before a commit is flushed by it. A
stream of text has no position: whoever starts again decides where.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import BinaryIO

import pyarrow as pa

from millrace.change import check_schema
from millrace.errors import ConfigError
from millrace.sink.document import DocumentBatch, DocumentOrigin, render_lines
from millrace.sink.failure import FailureGuard
from millrace.sink.print_format import OutputFormat
from millrace.sink.protocol import Capabilities
from millrace.sink.render import open_renderer


def open_sink(address: str) -> PrintSink:
    """`print`, `print:sql` or `print:json`, to stdout."""
    try:
        form = OutputFormat(address) if address else OutputFormat.SQL
    except ValueError:
        raise ConfigError(
            f"the sink print has no format {address!r}",
            hint=f"known are: {', '.join(OutputFormat)}",
        ) from None
    return PrintSink(form, sys.stdout.buffer)


class PrintSink:
    """Prints to a stream that somebody else closes."""

    capabilities = Capabilities()
    position = 0

    def __init__(self, form: OutputFormat, stream: BinaryIO) -> None:
        self._stream = stream
        self._renderer = open_renderer(form)
        self._guard = FailureGuard("the output")

    def begin(self, origin: str) -> None:
        """Text is of whatever comes."""

    def write_changes(self, batch: pa.RecordBatch) -> None:
        with self._guard.step("writing"):
            check_schema(batch.schema)
            self._print(self._renderer.render(batch))

    def begin_documents(self, origin: DocumentOrigin, body: pa.Schema) -> None:
        """Text is of whatever comes."""

    def write_documents(self, batch: DocumentBatch) -> None:
        with self._guard.step("writing"):
            self._print(render_lines(batch))

    def commit(self, position: int) -> None:
        with self._guard.step("writing"):
            self._print(self._renderer.end())
            self._stream.flush()

    def close(self) -> None:
        """Every line was flushed by its commit, or is to be given up."""

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._stream.write(line.encode() + b"\n")
