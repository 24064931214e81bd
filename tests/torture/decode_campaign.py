"""Workload after workload, decoded from files and by the server itself; the first different line
ends the campaign.

Prepared transactions are compared where they end: of one that was rolled back before its turn the
server emits only what it could still look up.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from tests.fixtures.decode.decode_cases import CASES
from tests.fixtures.decode.decode_workload import run_cases
from tests.fixtures.decode.decoding import DecodedSource, open_source
from tests.fixtures.decode.oracle_servers import VERSIONS, open_oracle
from tests.torture.decode_workload import SETUP, run_sessions
from tests.torture.figures import Figures
from tests.torture.interrupt import CampaignFailed

from millrace.decode.outputs import TextOutput
from millrace.decode.run import DecodeSettings, Decoding
from millrace.lsn import parse_lsn

SESSIONS = 4
SECONDS = 15.0
_CHECKPOINT_SECONDS = 2.0
# (resource manager, operation) that decoding acts on, each of which has to have occurred.
REQUIRED = {
    "heap insert": (10, 0x00), "heap delete": (10, 0x10), "heap update": (10, 0x20),
    "heap truncate": (10, 0x30), "heap hot update": (10, 0x40), "heap confirm": (10, 0x50),
    "heap inplace": (10, 0x70), "multi insert": (9, 0x50), "new cid": (9, 0x70),
    "commit": (1, 0x00), "prepare": (1, 0x10), "abort": (1, 0x20), "commit prepared": (1, 0x30),
    "abort prepared": (1, 0x40), "invalidations": (1, 0x60), "running xacts": (8, 0x10),
    "message": (21, 0x00), "relation map": (7, 0x00),
}  # fmt: skip


@dataclass
class DecodeFigures(Figures):
    """Of decoding."""

    workloads: Counter[str] = field(default_factory=Counter)
    lines_compared: int = 0
    statements: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)

    def missing(self) -> list[str]:
        """What should have occurred and did not."""
        never = [name for name in REQUIRED if not self.records[name]]
        return never + [case for case in CASES if not self.cases[case]]


class DecodeCampaign:
    """One server after the other, each with a random workload and all tricky cases."""

    def __init__(self, directory: Path, seed: int, say: Callable[[str], None]) -> None:
        self.figures = DecodeFigures(seed)
        self._directory = directory
        self._seed = seed
        self._say = say
        self._number = 0

    def run(self) -> None:
        """One workload on the next version."""
        version = VERSIONS[self._number % len(VERSIONS)]
        folder = self._directory / f"{self._number}-{version}"
        folder.mkdir(parents=True)
        with open_oracle(version, allow_in_place_tablespaces="on") as cluster:
            cluster.create_database("d")
            source = open_source(cluster, "d", folder / "base")
            source.execute(*SETUP)
            self._work(source)
            self._compare(source, folder)
        shutil.rmtree(folder)
        self.figures.workloads[str(version)] += 1
        self._number += 1

    def _work(self, source: DecodedSource) -> None:
        over = threading.Event()
        keeper = threading.Thread(target=_keep_house, args=(source, over))
        keeper.start()
        try:
            seed = self._seed * 1000 + self._number
            self.figures.statements.update(run_sessions(source.uri, seed, SESSIONS, SECONDS))
        finally:
            over.set()
            keeper.join()
        run_cases(source, CASES)
        self.figures.cases.update(CASES)
        source.execute("SELECT pg_switch_wal()")

    def _compare(self, source: DecodedSource, folder: Path) -> None:
        expected = source.peek("text_d")
        found = self._decode(source)
        self.figures.lines_compared += expected.count(b"\n")
        if found == expected:
            self._say(f"{source.cluster.version}: {expected.count(10):,} equal lines")
            return
        self.figures.differences += 1
        shutil.copytree(source.wal, folder / "wal")
        (folder / "expected").write_bytes(expected)
        (folder / "found").write_bytes(found)
        raise CampaignFailed(f"the server decodes something else: see {folder}")

    def _decode(self, source: DecodedSource) -> bytes:
        start = parse_lsn(source.slots["text_d"])
        decoding = Decoding(DecodeSettings([source.wal], source.base, "d", from_lsn=start))
        stream = io.BytesIO()
        report = decoding.run([TextOutput(stream, decoding.renderers, drops_empty=False)])
        report.require_complete()
        self._count_records(decoding)
        return stream.getvalue()

    def _count_records(self, decoding: Decoding) -> None:
        for _, records in decoding.pieces.read(decoding.label.start_lsn, None):
            for name, (rmid, op) in REQUIRED.items():
                is_one = (records.rmid == rmid) & (records.info & 0x70 == op)
                self.figures.records[name] += int(is_one.sum())


def _keep_house(source: DecodedSource, over: threading.Event) -> None:
    """Checkpoints, so that pages come as images, and vacuum, so that places are used again."""
    with psycopg.connect(source.uri, autocommit=True) as connection:
        while not over.wait(_CHECKPOINT_SECONDS):
            connection.execute("CHECKPOINT")
            connection.execute("VACUUM pg_class")
            connection.execute("VACUUM pg_attribute")
