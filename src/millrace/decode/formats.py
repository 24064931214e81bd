"""The output formats by name.

Invariant: a destination is opened before anything is decoded, so that a bad one costs nothing.

JSON and Parquet are made from a spool: a given one, which then serves further formats, or a
temporary one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from millrace.decode.outputs import Output, SpoolOutput, TextOutput
from millrace.decode.tables import write_json, write_parquet
from millrace.errors import ConfigError, WorkDirError
from millrace.spool.writer import SpoolWriter

if TYPE_CHECKING:
    from millrace.decode.run import Decoding

FORMATS = ("test_decoding", "pgoutput", "json", "parquet")


@dataclass(frozen=True)
class Destination:
    """A format and where it goes; None is standard output."""

    format: str
    path: Path | None

    def check(self, *, checkpoint: bool = False) -> None:
        if self.format not in FORMATS:
            raise ConfigError(
                f"unknown format {self.format}", hint=f"it is one of {', '.join(FORMATS)}"
            )
        if self.format in ("pgoutput", "parquet") and self.path is None:
            raise ConfigError(f"the format {self.format} needs --output")
        if checkpoint and (self.path is None or self.format not in ("test_decoding", "pgoutput")):
            raise ConfigError(
                "--checkpoint needs --output and the format test_decoding or pgoutput",
                hint="other formats are made from the spool of the format pgoutput",
            )


@contextmanager
def open_output(
    decoding: Decoding, destination: Destination, stdout: IO[bytes]
) -> Iterator[Output]:
    """What takes the transactions; it is complete when the block has ended."""
    path = destination.path
    if destination.format == "test_decoding":
        drops_empty = decoding.settings.selection.drops_empty
        with _open_stream(path, stdout, decoding.output_bytes) as stream:
            text = TextOutput(stream, decoding.renderers, drops_empty=drops_empty)
            with closing(text):
                yield text
    elif destination.format == "pgoutput" and path is not None:
        with _open_spool(decoding, path) as output:
            yield output
    else:
        with tempfile.TemporaryDirectory(prefix="millrace-decode-") as folder:
            with _open_spool(decoding, Path(folder)) as output:
                yield output
            encoding = decoding.output_settings.encoding
            convert_spool(Path(folder), encoding, destination, stdout)


def convert_spool(
    directory: Path, encoding: str, destination: Destination, stdout: IO[bytes]
) -> None:
    """A spool of decoded changes in another format; no WAL is read."""
    if destination.format == "parquet" and destination.path is not None:
        write_parquet(directory, encoding, destination.path)
    else:
        with _open_stream(destination.path, stdout) as stream:
            write_json(directory, encoding, stream)


@contextmanager
def _open_spool(decoding: Decoding, directory: Path) -> Iterator[Output]:
    directory.mkdir(parents=True, exist_ok=True)
    with SpoolWriter(directory) as spool:
        yield SpoolOutput(spool, decoding.renderers)


@contextmanager
def _open_stream(path: Path | None, stdout: IO[bytes], kept_bytes: int = 0) -> Iterator[IO[bytes]]:
    """A file, of which what a checkpoint knows of stays, or standard output."""
    if path is None:
        yield stdout
        stdout.flush()
        return
    with path.open("r+b" if kept_bytes else "wb") as stream:
        if stream.seek(0, os.SEEK_END) < kept_bytes:
            raise WorkDirError(
                f"{path} is shorter than its checkpoint says: {kept_bytes} bytes were written",
                hint="remove the checkpoint, and decode from the base again",
            )
        stream.truncate(kept_bytes)
        stream.seek(kept_bytes)
        yield stream
