"""Decoding WAL files gives what the server's own decoding gives, line by line.

For each version one server runs all tricky cases; its test_decoding is the oracle. Each case is a
test of its own, named after it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.fixtures.decode.decode_cases import CASES
from tests.fixtures.decode.decode_workload import run_cases, split_cases
from tests.fixtures.decode.decoding import DecodedSource, open_source
from tests.fixtures.decode.oracle_servers import VERSIONS, open_oracle

from millrace.config.dsn import Dsn
from millrace.decode.checkpoint import write_checkpoint
from millrace.decode.formats import Destination, open_output
from millrace.decode.outputs import TextOutput
from millrace.decode.prepare import prepare
from millrace.decode.report import Report
from millrace.decode.run import DecodeSettings, Decoding
from millrace.errors import ConfigError, FormatError
from millrace.lsn import parse_lsn
from millrace.wal.transaction import Batch


@dataclass
class Outcome:
    """What both sides say of one workload."""

    source: DecodedSource
    settings: DecodeSettings
    expected: dict[str, list[bytes]]
    found: dict[str, list[bytes]]
    report: Report


def decode_text(settings: DecodeSettings) -> tuple[bytes, Report]:
    decoding = Decoding(settings)
    stream = io.BytesIO()
    output = TextOutput(stream, decoding.renderers, drops_empty=settings.selection.drops_empty)
    report = decoding.run([output])
    return stream.getvalue(), report


@pytest.fixture(scope="module", params=VERSIONS)
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DecodedSource]:
    folder = tmp_path_factory.mktemp("decode") / "base"
    with open_oracle(request.param, allow_in_place_tablespaces="on") as cluster:
        cluster.create_database("d")
        yield open_source(cluster, "d", folder)


def settings_of(source: DecodedSource, slot: str = "text_d") -> DecodeSettings:
    return DecodeSettings(
        wal=[source.wal],
        base=source.base,
        database="d",
        from_lsn=parse_lsn(source.slots[slot]),
        two_phase="2pc" in slot,
    )


@pytest.fixture(scope="module")
def outcome(source: DecodedSource) -> Outcome:
    run_cases(source, CASES)
    settings = settings_of(source)
    text, report = decode_text(settings)
    expected = source.peek("text_d")
    return Outcome(source, settings, split_cases(expected), split_cases(text), report)


@pytest.mark.parametrize("case", CASES)
def test_case(outcome: Outcome, case: str) -> None:
    assert outcome.expected[case], "the server decoded nothing: the case tests nothing"
    assert outcome.found[case] == outcome.expected[case]


def test_every_transaction_is_accounted_for(outcome: Outcome) -> None:
    assert outcome.report.is_complete
    commits = sum(b"\tCOMMIT " in line for lines in outcome.expected.values() for line in lines)
    messages = sum(b"transactional: 0" in line for e in outcome.expected.values() for line in e)
    # One more message stands before each case.
    assert outcome.report.transactions == commits + messages + len(CASES)


def test_prepared_transactions_are_emitted_when_they_are_prepared(outcome: Outcome) -> None:
    text, report = decode_text(settings_of(outcome.source, "text_2pc_d"))
    assert text == outcome.source.peek("text_2pc_d")
    assert b"PREPARE TRANSACTION" in text
    assert report.is_complete


def test_smaller_pieces_give_the_same_bytes(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = decode_text(outcome.settings)
    monkeypatch.setattr("millrace.wal.read.pieces.WINDOW_BYTES", 256 << 10)
    pieces, _ = decode_text(outcome.settings)
    assert pieces == whole


def test_a_later_start_emits_the_later_commits(outcome: Outcome) -> None:
    whole, _ = decode_text(outcome.settings)
    lines = whole.splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b"\tCOMMIT " in line]
    middle = ends[len(ends) // 2]
    start = parse_lsn(lines[middle].split(b"\t")[0].decode())
    text, _ = decode_text(replace(outcome.settings, from_lsn=start))
    assert text == b"".join(lines[middle + 1 :])


def test_base_newer_than_what_is_asked_for_is_refused(outcome: Outcome) -> None:
    with pytest.raises(FormatError, match="base is newer"):
        Decoding(replace(outcome.settings, from_lsn=parse_lsn("0/1000000")))


def test_database_that_the_base_does_not_have_is_refused(outcome: Outcome) -> None:
    with pytest.raises(ConfigError, match="no database nowhere"):
        Decoding(replace(outcome.settings, database="nowhere"))


def test_base_of_another_server_is_refused(outcome: Outcome, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for entry in outcome.source.base.iterdir():
        if entry.name != "global":
            (base / entry.name).symlink_to(entry)
    (base / "global").mkdir()
    for entry in (outcome.source.base / "global").iterdir():
        data = entry.read_bytes()
        if entry.name == "pg_control":
            data = bytes([data[0] ^ 1]) + data[1:]
        (base / "global" / entry.name).write_bytes(data)
    with pytest.raises(FormatError):
        Decoding(replace(outcome.settings, base=base))


def test_image_of_a_running_server_serves_as_base(source: DecodedSource, tmp_path: Path) -> None:
    """Taken while a transaction with catalog changes is open."""
    image = tmp_path / "image.tar.gz"
    with source.session() as open_session, open_session.transaction():
        open_session.execute("CREATE TABLE before_image (id int, v text)")
        prepare(Dsn.parse(source.uri), image)
    # Decoding starts where no transaction is running that began before the image.
    source.execute("CHECKPOINT")
    slots = source.execute_row("SELECT count(*) FROM pg_replication_slots")
    source.execute(
        "CREATE TYPE image_mood AS ENUM ('glad')",
        "CREATE TABLE image_rows (id int PRIMARY KEY, m image_mood)",
        "INSERT INTO image_rows VALUES (1, 'glad')",
        "ALTER TYPE image_mood RENAME VALUE 'glad' TO 'merry'",
        "INSERT INTO image_rows VALUES (2, 'merry')",
        "INSERT INTO before_image VALUES (1, 'x')",
    )
    settings = replace(settings_of(source), base=image, from_lsn=None)
    text, report = decode_text(settings)
    assert text
    assert source.peek("text_d").endswith(text)
    assert b"before_image: INSERT" in text
    assert report.is_complete
    assert slots == (len(source.slots),)


def test_decoding_continues_from_its_last_checkpoint(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after every few pieces; each transaction is emitted once."""
    monkeypatch.setattr("millrace.wal.read.pieces.WINDOW_BYTES", 512 << 10)
    expected, _ = decode_text(outcome.settings)
    settings = replace(outcome.settings, checkpoint=tmp_path / "state")
    target = tmp_path / "text"
    for _ in range(100):
        decoding = Decoding(settings)
        destination = Destination("test_decoding", target)
        with open_output(decoding, destination, io.BytesIO()) as output:
            before = decoding.next_lsn
            pieces = _stopping_after(decoding, 3)
            monkeypatch.setattr(decoding, "batches", lambda pieces=pieces: pieces)
            decoding.run([output])
        if decoding.next_lsn == before:
            break
        with target.open("ab") as torn:
            torn.write(b"what a killed process had begun to write")
    assert target.read_bytes() == expected


def _stopping_after(decoding: Decoding, count: int) -> Iterator[Batch]:
    for number, batch in enumerate(Decoding.batches(decoding)):
        yield batch
        if number + 1 == count:
            return


def test_checkpoint_takes_the_place_of_the_base(outcome: Outcome, tmp_path: Path) -> None:
    whole, _ = decode_text(outcome.settings)
    lines = whole.splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b"\tCOMMIT " in line]
    middle = ends[len(ends) // 2]
    position = parse_lsn(lines[middle].split(b"\t")[0].decode())
    first = Decoding(replace(outcome.settings, to_lsn=position))
    first.run([])
    path = tmp_path / "checkpoint"
    write_checkpoint(path, first.checkpoint())
    text, _ = decode_text(replace(outcome.settings, base=path, from_lsn=position))
    assert text == b"".join(lines[middle + 1 :])
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(FormatError, match="damaged"):
        Decoding(replace(outcome.settings, base=path))


def test_transactions_that_a_crash_ended_leave_no_trace(source: DecodedSource) -> None:
    """The server is stopped at once, with rows and a table of an open transaction in the WAL."""
    source.execute("CREATE TABLE crashed (id int)")
    lost = source.session()
    lost.execute("BEGIN")
    lost.execute("INSERT INTO crashed VALUES (1)")
    lost.execute("CREATE TABLE crashed_too (id int)")
    lost.execute("INSERT INTO crashed_too VALUES (1)")
    source.execute("INSERT INTO crashed VALUES (2)")
    source.cluster.stop("immediate")
    lost.close()
    source.cluster.start()
    source.execute("CHECKPOINT", "INSERT INTO crashed VALUES (3)")
    text, report = decode_text(settings_of(source))
    assert text == source.peek("text_d")
    assert b"crashed: INSERT: id[integer]:3" in text
    assert b"crashed: INSERT: id[integer]:1\n" not in text
    assert b"crashed_too" not in text
    assert report.is_complete
