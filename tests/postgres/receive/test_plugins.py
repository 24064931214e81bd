"""One behaviour, all plugins: the spool holds what pgoutput would have sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.stream.receiving import (
    BATCHES,
    NO_BATCHES,
    ReceiveChild,
    Source,
    commit_ends_of,
    received_messages,
    without_relations,
)

from millrace.errors import PreflightError
from millrace.postgres.pgoutput.messages import (
    RelationVersion,
    decode_begin,
    decode_commit,
    decode_relation,
    decode_truncate,
)
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.slot_batch import BatchSizes
from millrace.receive.loop import receive
from millrace.spool.change_batch import iter_changes
from millrace.spool.reader import SpoolReader
from millrace.spool.writer import SpoolWriter

PLUGINS = ("pgoutput", "test_decoding", "wal2json")
# No numeric or floating-point columns: see test_old_wal2json_is_refused_where_it_would_lose_values.
SCHEMA = """
CREATE TYPE mood AS ENUM ('a b', 'c');
CREATE TYPE pair AS (a int, b text);
CREATE TABLE t (
    id int PRIMARY KEY, v varchar(50), b bool, bits bit(3), vb varbit, by bytea, arr int[],
    tarr text[], j json, m mood, p pair, ts timestamptz, "Odd [x]:" text, big text,
    g int GENERATED ALWAYS AS (id * 2) STORED
);
ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
CREATE TABLE "Fu, ll" (a int, "b ""q" text, big text);
ALTER TABLE "Fu, ll" REPLICA IDENTITY FULL;
ALTER TABLE "Fu, ll" ALTER big SET STORAGE EXTERNAL;
CREATE TABLE nokey (a int, b text);
CREATE TABLE by_index (a int, b int NOT NULL UNIQUE, c text);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b_key;
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 (v text, id int NOT NULL);
ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (30) PARTITION BY HASH (id);
CREATE TABLE parted_2a PARTITION OF parted_2 FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE parted_2b PARTITION OF parted_2 FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TABLE covered (id int, v text, PRIMARY KEY (id) INCLUDE (v));
CREATE TABLE fk (id serial PRIMARY KEY, t int REFERENCES t);
CREATE MATERIALIZED VIEW mv AS SELECT id FROM t;
CREATE UNIQUE INDEX ON mv (id);
"""
CHANGES = (
    r"""INSERT INTO t VALUES (1, 'it''s \ ', true, '101', '1', '\xdeadbeef', '{1,NULL}',
        '{"a,''b"}', '{"a": "x\ny"}', 'a b', '(1,"x y")', '2026-01-02 03:04:05.678+00', 'odd',
        repeat('x', 3000))""",
    "INSERT INTO t (id, v, b) VALUES (2, '', false)",
    "UPDATE t SET v = E'line\nbreak' WHERE id = 1",
    "UPDATE t SET v = 'ünï€ 😀 '' new-tuple: '",
    "UPDATE t SET id = 3 WHERE id = 1",
    "UPDATE t SET id = id",
    "DELETE FROM t WHERE id = 2",
    """INSERT INTO "Fu, ll" VALUES (1, NULL, NULL), (1, 'x', repeat('y', 3000))""",
    """UPDATE "Fu, ll" SET a = 2""",
    """DELETE FROM "Fu, ll" """,
    "INSERT INTO nokey VALUES (1, 'x')",
    "UPDATE nokey SET a = 2",
    "DELETE FROM nokey",
    "INSERT INTO by_index VALUES (NULL, 1, 'c')",
    "UPDATE by_index SET c = NULL",
    "UPDATE by_index SET b = 2",
    "DELETE FROM by_index",
    "INSERT INTO parted VALUES (1, 'x')",
    "UPDATE parted SET v = 'y'",
    "UPDATE parted SET id = 2",
    "UPDATE parted SET id = 12",
    "DELETE FROM parted",
    "TRUNCATE parted",
    "TRUNCATE parted_1, nokey",
    "TRUNCATE parted_2",
    "INSERT INTO fk (t) VALUES (3)",
    "REFRESH MATERIALIZED VIEW CONCURRENTLY mv",
    "TRUNCATE t, fk",
    "BEGIN; INSERT INTO t (id) VALUES (7); SAVEPOINT s; INSERT INTO t (id) VALUES (8);"
    " ROLLBACK TO s; INSERT INTO t (id) VALUES (9); COMMIT",
    "ALTER TABLE t ADD added text DEFAULT 'd'",
    "INSERT INTO t (id, v) VALUES (10, 'with a new column')",
    "UPDATE t SET added = NULL WHERE id = 10",
    "ALTER TABLE t DROP v",
    "INSERT INTO t (id) VALUES (11)",
    "CREATE TABLE unpublished (id int PRIMARY KEY)",
    # What applications write into the WAL themselves.
    "BEGIN; INSERT INTO t (id) VALUES (12); SELECT pg_logical_emit_message(true, 'p', 'x'); COMMIT",
    "SELECT pg_logical_emit_message(false, 'p', 'y')",
)


@pytest.fixture(params=PLUGINS)
def source(request: pytest.FixtureRequest, system_cluster: Cluster) -> Iterator[Source]:
    name = f"plugin_{request.param}"
    uri = system_cluster.create_database(name)
    try:
        source = Source(uri, SCHEMA, plugin=request.param)
    except Exception as error:
        system_cluster.drop_database(name)
        if isinstance(error, PreflightError) or "could not access file" in str(error):
            pytest.skip(f"the server of the system has no {request.param}")
        raise
    yield source
    source.close()
    system_cluster.drop_database(name)


def _rows(messages: list[bytes]) -> list[bytes]:
    return [message for message in messages if message[:1] in b"IUD"]


@pytest.mark.parametrize("batches", [NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def test_rows_are_those_of_pgoutput(source: Source, tmp_path: Path, batches: BatchSizes) -> None:
    source.execute(*CHANGES)
    source.receive(tmp_path, binary=False, batches=batches)
    found, expected = received_messages(tmp_path), source.expected()
    assert _rows(found) == _rows(expected)
    # The source's transactions that changed something that is followed, in order.
    assert [m[:1] for m in without_relations(found) if m[:1] in b"IUDT"] == [
        m[:1] for m in without_relations(expected) if m[:1] in b"IUDT"
    ]
    ours = [end for end in commit_ends_of(found) if end in commit_ends_of(expected)]
    assert ours == commit_ends_of(expected)
    commits = [decode_commit(m) for m in found if m[:1] == b"C"]
    truth = {c.end_lsn: c for c in (decode_commit(m) for m in expected if m[:1] == b"C")}
    before = 0
    for commit in commits:
        assert before <= commit.commit_lsn <= commit.end_lsn
        before = commit.end_lsn
        if commit.end_lsn in truth:
            known = truth[commit.end_lsn]
            assert commit.committed_at_microseconds == known.committed_at_microseconds
            assert commit.commit_lsn <= known.commit_lsn
    xids = {decode_begin(m).xid for m in expected if m[:1] == b"B"}
    assert xids <= {decode_begin(m).xid for m in found if m[:1] == b"B"}
    tables = [decode_truncate(m).relations for m in found if m[:1] == b"T"]
    assert tables == [decode_truncate(m).relations for m in expected if m[:1] == b"T"]


def test_relations_are_those_of_pgoutput(source: Source, tmp_path: Path) -> None:
    # Before any change of the schema the catalog is the one of the rows.
    source.execute(*(change for change in CHANGES[:27]))
    source.receive(tmp_path, binary=False)
    found = {_as_sent(relation) for relation in _relations(received_messages(tmp_path))}
    assert found == set(_relations(source.expected()))


def test_columns_that_the_keys_index_only_includes_are_no_key(
    source: Source, tmp_path: Path
) -> None:
    source.execute(
        "INSERT INTO covered VALUES (1, 'a')", "UPDATE covered SET v = 'b'", "DELETE FROM covered"
    )
    source.receive(tmp_path, binary=False)
    found, expected = received_messages(tmp_path), source.expected()
    assert _rows(found) == _rows(expected)
    relations = {_as_sent(relation) for relation in _relations(found)}
    assert relations == set(_relations(expected))


def test_tables_of_extensions_are_not_followed(source: Source, tmp_path: Path) -> None:
    source.execute(
        "CREATE TABLE own (id int PRIMARY KEY)",
        "ALTER EXTENSION plpgsql ADD TABLE own",
        "INSERT INTO own VALUES (1)",
        "INSERT INTO nokey VALUES (1, 'x')",
    )
    source.receive(tmp_path, binary=False)
    assert [r.name for r in _relations(received_messages(tmp_path))] == ["nokey"]


def test_each_transaction_has_its_own_place_and_time(source: Source, tmp_path: Path) -> None:
    source.execute(*CHANGES[:10])
    source.receive(tmp_path, binary=False)
    reader = SpoolReader(tmp_path)
    found = reader.plan(0, 1 << 30, None)
    assert found is not None
    # The Commit of a transaction is in its own chunk, or in a later one.
    for chunk_bytes in (1 << 20, 1):
        changes = [
            change
            for batch in iter_changes(reader, found, "utf-8", chunk_bytes=chunk_bytes)
            for change in batch.to_pylist()
        ]
        places = [(change["commit_lsn"], change["position"]) for change in changes]
        assert sorted(set(places)) == places
        assert len({change["commit_lsn"] for change in changes}) == 10
        assert all(0 < c["commit_lsn"] < c["end_lsn"] for c in changes)
        assert all(change["committed_at"].year >= 2025 for change in changes)


def _relations(messages: list[bytes]) -> list[RelationVersion]:
    return [decode_relation(message) for message in messages if message[:1] == b"R"]


def _as_sent(relation: RelationVersion) -> RelationVersion:
    """As the server describes a partition: it knows of no root, and names no types."""
    columns = tuple(replace(column, type_name=None) for column in relation.columns)
    relation = replace(relation, columns=columns)
    own = relation.partition
    if own is None:
        return relation
    assert (relation.schema, relation.name) == ("public", "parted")
    return replace(relation, schema=own.schema, name=own.name, partition=None)


def test_truncated_partitions_come_with_their_bounds(source: Source, tmp_path: Path) -> None:
    source.execute(
        "INSERT INTO parted VALUES (1), (10), (11), (12), (13)",
        "TRUNCATE parted_1",
        "TRUNCATE parted_2, parted_1",
        "INSERT INTO parted VALUES (1), (10), (11), (12), (13)",
    )
    source.receive(tmp_path, binary=False)
    known: dict[int, RelationVersion] = {}
    truncated = []
    for message in received_messages(tmp_path):
        if message[:1] == b"R":
            known |= {relation.oid: relation for relation in _relations([message])}
        if message[:1] == b"T":
            truncated.append([known[oid].partition for oid in decode_truncate(message).relations])
    for partition in (one for each in truncated for one in each):
        assert partition is not None
        assert partition.keys == (frozenset({"id"}),)
        assert partition.condition == source.scalar(
            f"SELECT pg_get_partition_constraintdef('{partition.name}'::regclass)"
        )
        assert partition.root_oid == source.scalar("SELECT 'parted'::regclass::oid::int8")
    names = [sorted(one.name for one in each if one is not None) for each in truncated]
    assert names == [["parted_1"], ["parted_1", "parted_2a", "parted_2b"]]


def test_a_killed_receiver_goes_on(source: Source, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    directory = tmp_path / "dir"
    for point in ("receive.before_sync", "receive.after_sync"):
        source.execute("INSERT INTO nokey SELECT generate_series(1, 1000)")
        marker.touch()
        child = ReceiveChild(
            source.uri,
            source.slot,
            directory,
            endpos=source.lsn(),
            failpoints=f"{point}=kill@{marker}",
            plugin=source.plugin,
        )
        assert child.exit_status() == -9
    source.execute("INSERT INTO nokey SELECT generate_series(1, 10)")
    source.receive(directory, binary=False)
    # The killed child received in binary, where it could.
    found = received_messages(directory)
    assert commit_ends_of(found) == commit_ends_of(source.expected())
    assert len(_rows(found)) == 2010


def test_endpos_between_transactions(source: Source, tmp_path: Path) -> None:
    source.execute(*(f"INSERT INTO nokey VALUES ({n})" for n in range(6)))
    ends = commit_ends_of(source.expected())
    for end, count in ((ends[1], 2), (ends[3] - 1, 3), (ends[3], 4), (ends[5], 6)):
        with SpoolWriter(tmp_path) as spool:
            settings = source.settings(endpos=end, plugin=source.plugin)
            assert receive(settings, spool).reached_endpos
        assert commit_ends_of(received_messages(tmp_path)) == ends[:count]


def test_old_wal2json_is_refused_where_it_would_lose_values(
    system_cluster: Cluster, tmp_path: Path
) -> None:
    """With a wal2json of 2.6 or later nothing is refused, and nothing lost."""
    uri = system_cluster.create_database("numbers")
    try:
        source = Source(uri, "CREATE TABLE n (id int PRIMARY KEY, n numeric)", plugin="wal2json")
    except PreflightError as error:
        system_cluster.drop_database("numbers")
        if "older than 2.6" in error.message:
            return
        pytest.skip(str(error))
    try:
        source.execute("INSERT INTO n VALUES (1, 'NaN')")
        source.receive(tmp_path)
        assert _rows(received_messages(tmp_path)) == _rows(source.expected())
    finally:
        source.close()
        system_cluster.drop_database("numbers")


def test_another_encoding_is_converted(system_cluster: Cluster, tmp_path: Path) -> None:
    uri = system_cluster.create_database("latin", encoding="LATIN1")
    source = Source(uri, "CREATE TABLE n (id int PRIMARY KEY, v text)", plugin="test_decoding")
    try:
        with psycopg.connect(uri, client_encoding="UTF8", autocommit=True) as connection:
            connection.execute("SET synchronous_commit = on")
            connection.execute("INSERT INTO n VALUES (1, 'é')")
        source.receive(tmp_path, encoding="UTF8")
        (row,) = _rows(received_messages(tmp_path))
        assert row.endswith("é".encode())
    finally:
        source.close()
        system_cluster.drop_database("latin")
