"""`python -m tests.torture.wal_fuzz --seconds 600`: WAL files with changed bytes, one by one.

With checksums, every answer is an error or exact. With `--no-crc` the kernels check the bounds of
their arrays (NUMBA_BOUNDSCHECK, in a process of its own), and a damaged file may give other
records, but no other exception, nothing that takes long, and no more memory than its bytes ask for.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.fixtures.decode.wal_writer import PAGE, SEGMENT, WalWriter, block_record, main_fragment

from millrace.errors import FormatError
from millrace.wal.read.files import open_wal
from millrace.wal.read.reader import read_records
from millrace.wal.read.record import Records

# A file is a megabyte; nothing that is made of it may come near this.
MOST_BYTES = 4 << 30
# What one damaged file may take, on a machine that is busy with other things.
MOST_SECONDS = 30.0


@dataclass
class Counts:
    files: int = 0
    changed_bytes: int = 0
    errors: int = 0
    exact: int = 0
    others: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


class Fuzz:
    """One stream of records, damaged again and again."""

    def __init__(self, seed: int, *, check_crc: bool) -> None:
        self.draw = random.Random(seed)
        self.check_crc = check_crc
        self.counts = Counts()
        self.folder = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))
        self.wal = _stream(self.draw)
        self.paths = self.wal.save(self.folder)
        self.originals = [path.read_bytes() for path in self.paths]
        self.expected = _contents(read_records(open_wal([self.folder])))

    def once(self) -> None:
        for path, original in zip(self.paths, self.originals, strict=True):
            path.write_bytes(self._damaged(original))
        self.counts.files += 1
        begin = time.monotonic()
        try:
            found = _contents(read_records(open_wal([self.folder]), check_crc=self.check_crc))
        except FormatError as error:
            self.counts.errors += 1
            kind = str(error).rsplit(": ", 1)[-1].split(" at ")[0].split(" with address")[0]
            self.counts.kinds[kind] = self.counts.kinds.get(kind, 0) + 1
        else:
            is_exact = found == self.expected
            self.counts.exact += is_exact
            self.counts.others += not is_exact
            if self.check_crc and not is_exact:
                raise AssertionError(f"an answer that is neither an error nor exact: {self.folder}")
        if time.monotonic() - begin > MOST_SECONDS:
            raise AssertionError(f"took {time.monotonic() - begin:.0f} seconds: {self.folder}")

    def _damaged(self, original: bytes) -> bytes:
        content = bytearray(original)
        used = min(len(self.wal.data) + 2 * PAGE, len(content))
        for _ in range(self.draw.choice((0, 1, 1, 2, 5, 40))):
            at = self.draw.randrange(used)
            match self.draw.randrange(5):
                case 0:
                    content[at] ^= 1 << self.draw.randrange(8)
                case 1:
                    content[at] = self.draw.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:  # in the header of a page
                    content[at - at % PAGE + self.draw.randrange(24)] = self.draw.randrange(256)
                case 3:  # in the header of a record
                    lsn = self.draw.choice(self.wal.lsns) - self.wal.base
                    content[(lsn + self.draw.randrange(40)) % len(content)] = self.draw.randrange(
                        256
                    )
                case _:
                    other = self.draw.randrange(used)
                    size = self.draw.randrange(1, 64)
                    content[at : at + size] = content[other : other + size]
            del content[len(original) :]
            content += bytes(len(original) - len(content))
        self.counts.changed_bytes += int(
            np.count_nonzero(np.frombuffer(original, np.uint8) != np.frombuffer(content, np.uint8))
        )
        return bytes(content)


def _stream(draw: random.Random) -> WalWriter:
    wal = WalWriter(first_number=draw.randrange(1, 9))
    while len(wal.data) < SEGMENT + 40 * PAGE:
        size = draw.choice((0, 3, 30, 100, 300, 3000, 9000, 60_000))
        xid = draw.randrange(3, 2000)
        if draw.randrange(3):
            data, main = draw.randbytes(size % 60_000), draw.randbytes(draw.randrange(20))
            wal.add(block_record(data, main, top_xid=draw.randrange(2)), xid=xid)
        else:
            wal.add(main_fragment(draw.randbytes(size)), xid=xid)
    return wal


def _contents(records: Records) -> list[tuple[int, int, bytes]]:
    begin, end = records.start, records.start + records.total_length
    return [
        (int(records.lsn[i]), int(records.end_lsn[i]), records.data[begin[i] : end[i]].tobytes())
        for i in range(len(records))
    ]


def fuzz(seed: int, seconds: float, *, check_crc: bool) -> Counts:
    """Damage files for that long; raises at the first wrong answer."""
    run = Fuzz(seed, check_crc=check_crc)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or not run.counts.files:
        run.once()
    for path in run.paths:
        path.unlink()
    run.folder.rmdir()
    return run.counts


def fuzz_without_checksums(seed: int, seconds: float) -> str:
    """In a process whose kernels check bounds; what it has printed."""
    with tempfile.TemporaryDirectory(prefix="millrace-numba-") as cache:
        bounds = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-m", "tests.torture.wal_fuzz", "--inner", "--no-crc",
                   "--seed", str(seed), "--seconds", str(seconds)]  # fmt: skip
        done = subprocess.run(
            command, env=os.environ | bounds, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise AssertionError(f"ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--no-crc", action="store_true")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.no_crc and not options.inner:
        sys.stdout.write(fuzz_without_checksums(options.seed, options.seconds))
        return 0
    if options.inner:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    counts = fuzz(options.seed, options.seconds, check_crc=not options.no_crc)
    sys.stdout.write(f"seed {options.seed}: {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
