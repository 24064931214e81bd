"""What pg_logical_emit_message says reaches whoever waits for it, at its place in the stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.pq.abc import PGconn
from tests.fixtures.stream.receiving import BATCHES, NO_BATCHES, Source, received_messages
from tests.fixtures.stream.stream_pair import StreamPair

from millrace import failpoint
from millrace.apply.driver import Catchup
from millrace.apply.task import ApplyTask
from millrace.change import MESSAGE
from millrace.errors import ConfigError, ServerError
from millrace.lsn import parse_lsn
from millrace.postgres.pgoutput.messages import LogicalMessage, decode_message, encode_message
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.quote import literal
from millrace.postgres.wire.libpq import execute
from millrace.receive.loop import receive
from millrace.sink.print_format import OutputFormat
from millrace.sink.render import open_renderer
from millrace.spool.change_batch import iter_changes
from millrace.spool.selection import open_change_spool
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel


def emit(prefix: str, content: str, *, transactional: bool) -> str:
    return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', '{content}')"


def note(session: PGconn, message: LogicalMessage) -> None:
    """What the target's table looked like when the message was met."""
    text = literal(message.content.decode())
    execute(
        session,
        f"INSERT INTO public.noted (said, held) SELECT {text},"
        " coalesce(string_agg(id::text, ',' ORDER BY id), '') FROM public.t",
    )


SCHEMA = (
    "CREATE TABLE t (id int PRIMARY KEY)",
    "CREATE TABLE other (id int PRIMARY KEY)",
)
NOTED = "CREATE TABLE noted (n serial, said text, held text)"


def noted(pair: StreamPair) -> list[tuple[Any, ...]]:
    return pair.target.execute("SELECT said, held FROM noted ORDER BY n").fetchall()


@pytest.fixture(params=["15", "16", "18"])
def any_pair(
    request: pytest.FixtureRequest, target_db: str, tmp_path: Path
) -> Iterator[StreamPair]:
    """From each version, to 18."""
    names = {"15": "system_cluster", "16": "source_cluster", "18": "target_cluster"}
    cluster: Cluster = request.getfixturevalue(names[request.param])
    uri = cluster.create_database("logical_messages")
    try:
        with closing(StreamPair(uri, target_db, tmp_path, binary=True)) as pair:
            yield pair
    finally:
        cluster.drop_database("logical_messages")


def test_hooks_are_called_with_everything_before_applied_and_nothing_after(
    any_pair: StreamPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = any_pair
    pair.begin(*SCHEMA, on_target=NOTED)
    pair.run(
        [
            "INSERT INTO t VALUES (1)",
            emit("mine", "within", transactional=True),
            emit("other", "ignored", transactional=True),
            "INSERT INTO t VALUES (2)",
        ],
        emit("mine", "alone", transactional=True),
        "DELETE FROM t WHERE id = 1",
    )
    with psycopg.connect(pair.source.info.dsn, password=pair.source.info.password) as open_one:
        # Sent at once, before the transaction that it was written in, even if that never commits.
        open_one.execute("INSERT INTO t VALUES (3)")
        open_one.execute(emit("mine", "at once", transactional=False))
        pair.run("INSERT INTO t VALUES (4)")
        open_one.rollback()
        open_one.execute("INSERT INTO t VALUES (5)")
        open_one.execute(emit("mine", "rolled back", transactional=True))
        open_one.rollback()
    pair.run("UPDATE t SET id = id + 10", emit("mine", "at the end", transactional=False))
    pair.run("INSERT INTO other VALUES (1)")
    hooks = {"mine": note}
    # A hook and its batch are one: the second attempt finds nothing of the first.
    monkeypatch.setenv(failpoint.VARIABLE, "apply.before_commit=error*1")
    pair.follow(message_hooks=hooks)
    expected = [
        ("within", "1"),
        ("alone", "1,2"),
        ("at once", "2"),
        ("at the end", "12,14"),
    ]
    assert noted(pair) == expected
    assert pair.target.execute("SELECT count(*) FROM other").fetchone() == (1,)
    # Nor does the source send them again.
    assert pair.follow(message_hooks=hooks).batches == 0
    assert noted(pair) == expected


def test_messages_nobody_waits_for_are_passed_over(pair: StreamPair, tmp_path: Path) -> None:
    pair.begin(*SCHEMA)
    pair.run(
        ["INSERT INTO t VALUES (1)", emit("x", "é", transactional=True), "DELETE FROM t"],
        emit("x", "", transactional=False),
        "INSERT INTO other VALUES (1)",
    )
    pair.follow()
    pair.assert_equal()
    rows = read_changes(tmp_path)
    assert [(row["operation"], row["position"], row["prefix"]) for row in rows] == [
        ("insert", 0, None),
        (MESSAGE, 1, "x"),
        ("delete", 2, None),
        (MESSAGE, 0, "x"),
        ("insert", 0, None),
    ]
    assert [row["content"] for row in rows if row["prefix"]] == ["é".encode(), b""]
    assert (
        rows[1]["table"] is rows[1]["schema"] is rows[1]["relation_oid"] is rows[1]["key"] is None
    )
    assert rows[2]["end_lsn"] < rows[3]["end_lsn"] < rows[4]["end_lsn"]
    assert [row["table"] for row in read_changes(tmp_path, ("public", "t"))] == ["t", "t"]


def read_changes(directory: Path, *tables: tuple[str, str]) -> list[dict[str, Any]]:
    spool = open_change_spool(directory)
    wanted = frozenset(tables) or None
    with spool.opened() as reader:
        (range_,) = spool.ranges(0, spool.extent().last_end_lsn, 1 << 30)
        batches = list(iter_changes(reader, range_, spool.encoding, tables=wanted))
    for form in OutputFormat:
        printed = [line for batch in batches for line in open_renderer(form).render(batch)]
        assert len(printed) > len(batches)
    return [row for batch in batches for row in batch.to_pylist()]


def test_an_error_of_a_hook_ends_the_batch(pair: StreamPair) -> None:
    pair.begin(*SCHEMA)  # the target has no table `noted`
    pair.run(["INSERT INTO t VALUES (1)", emit("mine", "x", transactional=True)])
    with pytest.raises(ServerError, match="noted"):
        pair.follow(message_hooks={"mine": note})
    assert pair.target.execute("SELECT count(*) FROM t").fetchone() == (0,)
    pair.follow()
    pair.assert_equal()


def test_hooks_need_one_worker(pair: StreamPair, tmp_path: Path) -> None:
    pair.begin(*SCHEMA)
    task = pair.task
    assert isinstance(task, ApplyTask)
    with Sentinel(tmp_path) as sentinel, pytest.raises(ConfigError, match="--apply-jobs 2"):
        Catchup(replace(task, message_hooks={"mine": note}), 2, None, sentinel)  # type: ignore[arg-type]


def test_a_position_that_moves_is_no_change_for_whoever_follows_the_target(
    pair: StreamPair, target_db: str, tmp_path: Path
) -> None:
    """Else two databases that follow each other would never be at rest."""
    pair.begin(*SCHEMA)
    back = StreamPair(target_db, pair.source.info.dsn, tmp_path / "back", binary=True)
    with closing(back):
        back._target_uri = back._target_uri + f" password={pair.source.info.password}"
        back.begin()
        pair.run(emit("x", "", transactional=False), emit("x", "", transactional=True))
        outcome = pair.follow()
        assert outcome.transactions == 2
        assert outcome.batches == 1
        assert back.receive() >= 3  # Begin, Origin, Message, Commit: it was sent
        assert back.apply().transactions == 0
        pair.run("INSERT INTO t VALUES (1)")
        pair.follow()
        back.receive()
        assert [row["operation"] for row in read_changes(tmp_path / "back")] == ["insert"]


@pytest.mark.parametrize("place", ["begins", "within", "ends"])
def test_an_end_position_at_a_message_loses_nothing(
    place: str, source_db: str, tmp_path: Path
) -> None:
    """The server does not say where the message's record begins, and sends it again only from
    there or from before."""
    with closing(Source(source_db, *SCHEMA)) as source:
        source.execute("INSERT INTO t VALUES (1)")
        begins = source.insert_lsn()
        ends = parse_lsn(source.scalar("SELECT pg_logical_emit_message(false, 'p', 'x')::text"))
        # Both are flushed; the end position is before.
        source.execute("INSERT INTO t VALUES (2)")
        endpos = {"begins": begins, "within": ends - 8, "ends": ends}[place]
        with SpoolWriter(tmp_path) as spool:
            assert receive(source.settings(endpos=endpos), spool).reached_endpos
        found = [one[:1] for one in received_messages(tmp_path)]
        assert found.count(b"I") == 1
        assert (b"M" in found) == (place == "ends")
        source.receive(tmp_path)
        found = [one[:1] for one in received_messages(tmp_path)]
        assert [one for one in found if one in b"IM"] == [b"I", b"M", b"I"]


def test_a_commit_right_behind_a_message_is_sent_by_the_next_connection(
    source_db: str, tmp_path: Path
) -> None:
    with closing(Source(source_db, *SCHEMA)) as source:
        source.execute("BEGIN", "INSERT INTO t VALUES (1)", emit("p", "x", transactional=False))
        ends = source.insert_lsn()
        source.execute("COMMIT")
        with SpoolWriter(tmp_path) as spool:
            assert receive(source.settings(endpos=ends), spool).complete_lsn == ends
        source.receive(tmp_path)
        found = [one[:1] for one in received_messages(tmp_path)]
        assert [one for one in found if one in b"IM"] == [b"M", b"I"]


@pytest.mark.parametrize("batches", [NO_BATCHES, BATCHES], ids=["protocol", "batches"])
def test_a_receiver_takes_each_message_once(batches: Any, source_db: str, tmp_path: Path) -> None:
    with closing(Source(source_db, *SCHEMA, batches=batches)) as source:
        said = []
        for number in range(6):
            is_transactional = number % 2 == 1
            said.append((str(number), is_transactional))
            source.execute(emit("p", str(number), transactional=is_transactional))
            source.execute(f"INSERT INTO t VALUES ({number})")
            if number % 3 == 0:
                # What comes last, and where the next connection begins, is a message.
                source.execute(emit("p", f"last {number}", transactional=False))
                source.execute(f"INSERT INTO other VALUES ({number})" if number else "SELECT")
                said.append((f"last {number}", False))
            source.receive(tmp_path)
        source.execute("INSERT INTO t VALUES (100)")
        source.receive(tmp_path)
        found = [decode_message(one) for one in received_messages(tmp_path) if one[:1] == b"M"]
        assert [(one.content.decode(), one.is_transactional) for one in found] == said
        assert all(a.lsn < b.lsn for a, b in pairwise(found))
        assert [encode_message(one) for one in found] == [
            one for one in received_messages(tmp_path) if one[:1] == b"M"
        ]
        rows = np.array([one[:1] for one in received_messages(tmp_path)])
        assert (rows == b"I").sum() == 8
