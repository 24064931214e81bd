"""The spool on the target behaves as the one in files does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
import typer
from tests.fixtures.stream.changes import Transaction, append, join, relation_version
from tests.fixtures.stream.receiving import Source, messages_of, without_relations
from tests.fixtures.wait import wait_for
from typer.testing import CliRunner

from millrace.cli.stream_transform import transform
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, ConnectionLost, ServerError, WorkDirError
from millrace.postgres.pgoutput.messages import scan
from millrace.postgres.wire.connect import connect
from millrace.receive.loop import receive
from millrace.spool import table as table_spool
from millrace.spool.change_batch import iter_changes
from millrace.spool.interface import Reader, SpoolExtent, Writer
from millrace.spool.kind import SpoolKind
from millrace.spool.place import SpoolPlace, place_of
from millrace.spool.reader import SpoolReader
from millrace.spool.selection import ChangeSpool
from millrace.spool.table import TableSpoolReader, TableSpoolWriter
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel, StreamSetup

STREAM = "table_spool_test"


class Kind:
    """One kind of spool."""

    def __init__(
        self,
        write: Callable[[], Writer],
        read: Callable[[], Reader],
        place: SpoolPlace,
    ) -> None:
        self.write = write
        self.read = read
        self.place = place
        self.prune = place.prune


@pytest.fixture(params=["files", "table"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, target_db: str) -> Iterator[Kind]:
    if request.param == "files":
        yield Kind(
            lambda: SpoolWriter(tmp_path, segment_bytes=4096),
            lambda: SpoolReader(tmp_path),
            SpoolPlace(tmp_path, "utf-8", STREAM),
        )
        return
    dsn = Dsn.parse(target_db)
    readers: list[TableSpoolReader] = []

    def read() -> TableSpoolReader:
        readers.append(TableSpoolReader(dsn, STREAM))
        return readers[-1]

    place = SpoolPlace(tmp_path, "utf-8", STREAM, dsn)
    yield Kind(lambda: TableSpoolWriter(dsn, STREAM), read, place)
    for reader in readers:
        reader.close()
    with connect(dsn, "test") as connection:
        table_spool.uninstall(connection, STREAM)


def _write_again(kind: Kind) -> Writer:
    """The target takes a moment to end the session of a closed writer."""
    found: list[Writer] = []

    def opened() -> bool:
        with suppress(WorkDirError):
            found.append(kind.write())
        return bool(found)

    wait_for(opened)
    return found[0]


def _read_all(reader: Reader, after_lsn: int = 0, max_bytes: int = 1 << 30) -> bytes:
    parts = []
    while (found := reader.plan(after_lsn, max_bytes, None)) is not None:
        parts += [chunk.tobytes() for chunk in reader.chunks(found, 1000)]
        after_lsn = found.end_lsn
    return b"".join(parts)


def test_what_was_written_is_read(kind: Kind) -> None:
    transactions = [Transaction(n, rows=n % 7, relation=n) for n in range(1, 40)]
    stream = join(transactions)
    writer = kind.write()
    left = b""
    for at in range(0, len(stream), 701):
        left = append(writer, left + stream[at : at + 701])
    assert writer.sync() == transactions[-1].end_lsn
    assert writer.durable_lsn == writer.last_end_lsn == transactions[-1].end_lsn
    writer.close()
    reader = kind.read()
    assert reader.last_end_lsn() == transactions[-1].end_lsn
    for max_bytes in (1, 3000, 1 << 30):
        assert _read_all(reader, max_bytes=max_bytes) == stream
    found = reader.plan(1050, 1, None)
    assert found is not None
    assert (found.transactions, found.changes, found.end_lsn) == (1, 11 % 7, 1150)
    assert (found.commit_lsn, found.committed_at) == (1140, 11_000_000)
    assert reader.relations(found) == {16384: relation_version(10)}
    assert reader.plan(150, 1 << 30, 449).end_lsn == 350  # type: ignore[union-attr]
    assert reader.plan(150, 1 << 30, 249) is None
    assert reader.bytes_after(transactions[-1].end_lsn) == 0
    assert reader.bytes_after(3750) >= len(transactions[-1].frames())


def test_changes_are_read_from_either(kind: Kind, tmp_path: Path) -> None:
    writer = kind.write()
    for number in range(1, 40):
        relation = 0 if number == 1 else None
        append(writer, Transaction(number, rows=5, relation=relation).frames())
        writer.sync()
    writer.mark_idle(5000)
    writer.sync()
    writer.close()
    spool = ChangeSpool(kind.place)
    assert spool.extent() == SpoolExtent(0, 3950, 5000)
    spool.check_until(5000)
    with pytest.raises(WorkDirError, match=r"the spool in .* received them up to 0/1388 only"):
        spool.check_until(5001)
    ranges = spool.ranges(0, 3950, 1000)
    assert len(ranges) > 3
    again = pickle.loads(pickle.dumps(spool))
    with again.opened() as reader:
        rows = [
            (row["xid"], row["position"], dict(row["new"])["id"])
            for range_ in ranges
            for batch in iter_changes(reader, range_, again.encoding)
            for row in batch.to_pylist()
        ]
    assert [row[:2] for row in rows] == [(n, i) for n in range(1, 40) for i in range(5)]
    assert {row[2] for row in rows} == {str(i) for i in range(5)}
    assert kind.prune(2000) > 0
    oldest = spool.extent().oldest_lsn
    assert 0 < oldest <= 2000
    with pytest.raises(WorkDirError, match="was pruned and begins after 0/"):
        spool.ranges(oldest - 1, 3950, 1000)
    assert spool.ranges(oldest, 3950, 1 << 30)[0].end_lsn == 3950


@pytest.mark.usefixtures("in_this_process")
def test_changes_on_the_target_are_printed(tmp_path: Path, target_db: str) -> None:
    setup = StreamSetup("source", "printed", "pgoutput", "UTF8", 1, spool=SpoolKind.TABLE)
    with Sentinel(tmp_path) as sentinel:
        sentinel.write_setup(setup)
    place = place_of(setup, tmp_path, Dsn.parse(target_db))
    place.prepare()
    try:
        with place.open_writer() as writer:
            append(writer, Transaction(1, rows=3, relation=0).frames())
            writer.sync()
        app = typer.Typer()
        app.command()(transform)
        asked = ["--dir", str(tmp_path), "--format", "json"]
        assert isinstance(CliRunner().invoke(app, asked).exception, ConfigError)
        lines = CliRunner().invoke(app, [*asked, "--target", target_db]).stdout.splitlines()
        actions = [json.loads(line)["action"] for line in lines]
        assert actions == ["begin", *["insert"] * 3, "commit"]
    finally:
        with connect(Dsn.parse(target_db), "test") as connection:
            table_spool.uninstall(connection, place.stream)


def test_a_chunk_never_splits_a_frame(kind: Kind) -> None:
    writer = kind.write()
    append(writer, Transaction(1, rows=30, row_bytes=300).frames())
    writer.sync()
    writer.close()
    reader = kind.read()
    found = reader.plan(0, 1, None)
    assert found is not None
    for size in (1, 400, 5000, 1 << 20):
        chunks = list(reader.chunks(found, size))
        for chunk in chunks:
            messages = scan(chunk, len(chunk))
            assert messages.consumed == len(chunk)
            assert len(chunk) <= size or len(messages) == 1


def test_an_unfinished_transaction_is_never_seen(kind: Kind) -> None:
    writer = kind.write()
    append(writer, Transaction(1, relation=1).frames())
    append(writer, Transaction(2, relation=2).frames()[:-30])
    assert writer.is_in_transaction
    writer.sync()
    assert kind.read().last_end_lsn() == 150
    writer.cut_unfinished()
    assert not writer.is_in_transaction
    append(writer, Transaction(2, rows=3).frames())
    assert writer.sync() == 250
    append(writer, Transaction(3).frames()[:-30])
    writer.close()  # as a crash would
    again = _write_again(kind)
    assert again.last_end_lsn == 250
    append(again, Transaction(3).frames())
    again.sync()
    again.close()
    reader = kind.read()
    expected = (Transaction(1, relation=1), Transaction(2, rows=3), Transaction(3))
    assert _read_all(reader) == join(expected)
    found = reader.plan(150, 1, None)
    assert found is not None
    assert reader.relations(found) == {16384: relation_version(1)}


def test_idle_positions_are_kept(kind: Kind) -> None:
    writer = kind.write()
    writer.mark_idle(120)
    writer.sync()
    assert writer.durable_lsn == 120
    append(writer, Transaction(2).frames())
    writer.mark_idle(900)
    writer.sync()
    writer.close()
    again = _write_again(kind)
    assert (again.complete_lsn, again.durable_lsn, again.last_end_lsn) == (900, 900, 250)
    again.close()


def test_what_is_applied_is_pruned(kind: Kind) -> None:
    transactions = [Transaction(n, rows=3, relation=n) for n in range(1, 101)]
    writer = kind.write()
    append(writer, join(transactions[:50]))
    for transaction in transactions[50:]:
        append(writer, transaction.frames())
    writer.sync()
    reader = kind.read()
    first = reader.plan(0, 1, None)
    assert first is not None
    assert kind.prune(0) == 0
    assert kind.prune(8050) > 0
    assert _read_all(reader, after_lsn=8050) == join(transactions[80:])
    found = reader.plan(8050, 1, None)
    assert found is not None
    assert reader.relations(found) == {16384: relation_version(80)}
    with pytest.raises(WorkDirError, match="was pruned"):
        reader.plan(150, 1, None)
    with pytest.raises(WorkDirError, match="was pruned"):
        list(reader.chunks(first, 1000))
    kind.prune(10050)
    assert reader.last_end_lsn() == 10050
    append(writer, Transaction(101).frames())
    writer.sync()
    writer.close()
    assert _read_all(reader, after_lsn=10050) == Transaction(101).frames()


def test_one_writer_at_a_time(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.spool.writer.LOCK_SECONDS", 0.1)
    with (
        kind.place.open_writer(),
        pytest.raises(WorkDirError, match="writes the spool"),
        kind.place.open_writer(),
    ):
        pass


def test_what_would_be_pruned_is_told(kind: Kind) -> None:
    writer = kind.write()
    for number in range(1, 101):
        append(writer, Transaction(number, rows=3).frames())
    writer.sync()
    held = writer.bytes
    told = kind.prune(8050, dry_run=True)
    assert writer.bytes == held
    assert told == kind.prune(8050) > 0
    assert writer.bytes == held - told
    writer.close()


def test_a_session_that_was_left_behind_is_taken_over(target_db: str) -> None:
    dsn = Dsn.parse(target_db)
    with TableSpoolWriter(dsn, STREAM) as lost, TableSpoolWriter(dsn, STREAM) as writer:
        append(writer, Transaction(1).frames())
        assert writer.sync() == 150
        with pytest.raises(ConnectionLost):
            append(lost, Transaction(1).frames())
    with connect(dsn, "test") as other:
        table_spool.uninstall(other, STREAM)


def test_what_the_target_refused_is_not_taken_for_written(target_db: str) -> None:
    dsn = Dsn.parse(target_db)
    with connect(dsn, "test") as other, TableSpoolWriter(dsn, STREAM) as writer:
        append(writer, Transaction(1).frames())
        assert writer.sync() == 150
        other.execute("ALTER TABLE replication.raw_messages ADD CONSTRAINT no CHECK (number < 2)")
        with pytest.raises(ServerError, match="violates check constraint"):
            append(writer, Transaction(2).frames())
        other.execute("ALTER TABLE replication.raw_messages DROP CONSTRAINT no")
        writer.cut_unfinished()
        assert writer.complete_lsn == writer.durable_lsn == 150
        append(writer, Transaction(2).frames())
        assert writer.sync() == 250
    with connect(dsn, "test") as other:
        table_spool.uninstall(other, STREAM)
        row = other.execute("SELECT to_regclass('replication.raw_messages')").fetchone()
        assert row == (None,)


def test_the_writer_goes_on_after_its_session_was_ended(kind: Kind, target_db: str) -> None:
    writer = kind.write()
    append(writer, Transaction(1, relation=1).frames())
    writer.sync()
    frames = Transaction(2).frames()
    left = append(writer, frames[:-30])
    with psycopg.connect(target_db, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 600000) FROM pg_stat_activity"
            " WHERE application_name LIKE 'millrace spool%'"
        )
    if kind.place.target is not None:
        with pytest.raises(ConnectionLost):
            append(writer, left + frames[-30:])
    writer.cut_unfinished()
    assert writer.complete_lsn == writer.durable_lsn == 150
    append(writer, Transaction(2, rows=5).frames())
    assert writer.sync() == 250
    writer.close()
    assert _read_all(kind.read()) == join((Transaction(1, relation=1), Transaction(2, rows=5)))


def test_a_stream_is_received_into_it(kind: Kind, source_db: str) -> None:
    source = Source(source_db, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    try:
        for turn in range(2):
            source.execute(
                f"INSERT INTO t SELECT i, 'v' FROM generate_series({turn * 1000}, {turn * 1000}"
                " + 999) AS i",
                "UPDATE t SET v = 'w' WHERE id % 10 = 0",
                "DELETE FROM t WHERE id % 10 = 1",
            )
            writer = _write_again(kind)
            received = receive(source.settings(endpos=source.lsn()), writer)
            writer.close()
            assert received.reached_endpos
            assert source.confirmed_lsn() == received.complete_lsn
        found = messages_of(_read_all(kind.read()))
        expected = source.expected(binary=True)
        assert without_relations(found) == without_relations(expected)
    finally:
        source.close()


def test_a_transaction_of_the_target_is_one_of_the_source(target_db: str) -> None:
    dsn = Dsn.parse(target_db)
    with TableSpoolWriter(dsn, STREAM) as writer:
        append(writer, join(Transaction(n) for n in range(1, 6)))
        writer.sync()
    with psycopg.connect(target_db) as connection:
        rows = connection.execute(
            "SELECT count(*), count(DISTINCT xmin::text) FROM replication.raw_messages"
        ).fetchone()
        assert rows == (5, 5)
        position = connection.execute(
            "SELECT pg_replication_origin_progress(%s, true)::text",
            (table_spool.origin_name(STREAM),),
        ).fetchone()
        assert position == ("0/226",)
    with connect(dsn, "test") as other:
        table_spool.uninstall(other, STREAM)


def test_what_is_said_to_be_on_disk_is(target_db: str) -> None:
    """The source forgets what it is told of, so a crash of the target must not take it."""
    dsn = Dsn.parse(target_db)
    with connect(dsn, "test") as connection:
        try:
            with TableSpoolWriter(dsn, STREAM) as spool:
                for lsn in range(100, 110):
                    spool.mark_idle(lsn)
                    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
                    assert row is not None
                    spool.sync()
                    assert spool.durable_lsn == lsn
                    assert connection.execute(
                        "SELECT pg_current_wal_flush_lsn() >= %s", row
                    ).fetchone() == (True,)
        finally:
            table_spool.uninstall(connection, STREAM)
