"""A disk that is full stops what writes to it, loses nothing, and is gone on with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures.small_disk import KINDS, SmallDisk, fill, open_small_disk
from tests.fixtures.stream.changes import Transaction, append
from tests.fixtures.stream.receiving import (
    BATCHES,
    NO_BATCHES,
    Source,
    received_messages,
    without_relations,
)

from millrace.config.dsn import Dsn
from millrace.errors import WorkDirError
from millrace.postgres.wire.slot_batch import BatchSizes
from millrace.snapshot.holder import hold
from millrace.spool.writer import SpoolWriter
from millrace.workdir.lock import open_lock
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.store import Store

SIZE_BYTES = 4 << 20
SCHEMA = "CREATE TABLE t (id serial PRIMARY KEY, v text)"
# Random text, so that nothing is smaller on its way.
INSERT = """
INSERT INTO t (v) SELECT string_agg(md5(random()::text), '')
  FROM generate_series(1, 100) i, generate_series(1, 300) GROUP BY i
"""


@pytest.fixture(params=[NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def source(request: pytest.FixtureRequest, source_db: str) -> Iterator[Source]:
    batches: BatchSizes = request.param
    source = Source(source_db, SCHEMA, batches=batches)
    yield source
    source.close()


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    with open_small_disk(tmp_path / "disk", SIZE_BYTES, request.param) as disk:
        yield disk


def test_full_disk_of_the_spool_loses_nothing_that_was_confirmed(
    source: Source, disk: SmallDisk
) -> None:
    source.execute(INSERT)
    source.receive(disk.folder)
    source.execute(*[INSERT] * 6)
    with pytest.raises(WorkDirError) as raised:
        source.receive(disk.folder)
    path = raised.value.facts["path"]
    assert path.startswith(str(disk.folder))
    assert "are free there" in raised.value.message
    assert "at least 64 MB" in raised.value.hint
    assert "same command again" in raised.value.hint
    # Nothing was confirmed that is not there.
    with SpoolWriter(disk.folder) as spool:
        assert 0 < source.confirmed_lsn() <= spool.complete_lsn
    # Once more, still without room: it ends in the same way, and harms nothing.
    with pytest.raises(WorkDirError):
        source.receive(disk.folder)
    disk.make_room()
    source.receive(disk.folder)
    # Relations are described again on each connection.
    received = without_relations(received_messages(disk.folder))
    assert received == without_relations(source.expected(binary=True))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with open_small_disk(tmp_path / "disk", 1 << 20) as disk:
        yield disk.folder


def write_spool(folder: Path) -> None:
    with SpoolWriter(folder) as spool:
        append(spool, Transaction(1).frames())
        spool.sync()


def set_often(setter: Callable[[int], object]) -> None:
    for lsn in range(8, 100_000):
        setter(lsn)


def test_full_disk_is_told_by_whatever_writes_there_first(full_disk: Path, source_db: str) -> None:
    filler = fill(full_disk)
    dsn = Dsn.parse(source_db)
    for number, write in enumerate(
        (
            lambda folder: Sentinel(folder).close(),
            lambda folder: Store(folder / "schema" / "source.db").close(),
            write_spool,
            lambda folder: open_lock(folder).__enter__(),
            lambda folder: hold(folder, dsn, slot="full").__enter__(),
        )
    ):
        with pytest.raises(WorkDirError) as raised:
            write(full_disk / str(number))
        assert os.strerror(28) in raised.value.message or "full" in raised.value.message
        assert raised.value.hint
    filler.unlink()
    for name in ("0", "later"):
        with Sentinel(full_disk / name) as sentinel:
            assert sentinel.read().endpos is None


def test_row_of_a_stream_on_a_full_disk_stays_as_it_was(full_disk: Path) -> None:
    with Sentinel(full_disk) as sentinel:
        sentinel.set_endpos(7)
        filler = fill(full_disk)
        with pytest.raises(WorkDirError, match="free there"):
            set_often(sentinel.set_endpos)
        endpos = sentinel.read().endpos
        with pytest.raises(WorkDirError, match="free there"):
            set_often(sentinel.choose_endpos)
        filler.unlink()
        assert endpos is not None
        assert endpos <= (sentinel.read().endpos or 0)
        assert sentinel.choose_endpos(200_000) == 200_000
