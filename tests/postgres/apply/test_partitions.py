"""Changes of partitions: by way of their root, whatever the target is partitioned by."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fixtures.stream.receiving import Source, received_messages, receiving
from tests.fixtures.stream.stream_pair import StreamPair
from tests.fixtures.wait import wait_for

from millrace.apply.prepare import Share
from millrace.errors import ApplyError, PreflightError
from millrace.postgres.pgoutput.messages import decode_relation
from millrace.receive.partitions import Partitions
from millrace.spool.writer import SpoolWriter


@pytest.fixture
def text_pair(source_db: str, target_db: str, tmp_path: Path) -> Iterator[StreamPair]:
    opened = StreamPair(source_db, target_db, tmp_path, binary=False)
    yield opened
    opened.close()


@dataclass(frozen=True)
class Scheme:
    """One way to partition a table m (id, at, region, v)."""

    by: str
    leaves: str
    # What one TRUNCATE takes.
    truncated: str
    key: str = "id, at, region"

    def root(self, by: str, name: str = "m") -> str:
        columns = f"id int, at date, region text, v text, PRIMARY KEY ({self.key})"
        return f"CREATE TABLE {name} ({columns}) {by}"

    @property
    def as_it_is(self) -> str:
        return f"{self.root(self.by)}; {self.leaves}"


YEARS = (
    "CREATE TABLE m1 PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01');"
    "CREATE TABLE m2 PARTITION OF m FOR VALUES FROM ('2021-01-01') TO ('2022-01-01');"
    "CREATE TABLE m3 PARTITION OF m DEFAULT"
)
REGIONS = (
    "CREATE TABLE m1 PARTITION OF m FOR VALUES IN ('a');"
    "CREATE TABLE m2 PARTITION OF m FOR VALUES IN ('b', 'it''s');"
    "CREATE TABLE m3 PARTITION OF m DEFAULT"
)
CLOSED_YEARS = YEARS.replace("DEFAULT", "FOR VALUES FROM ('2022-01-01') TO ('2030-01-01')")
HASHES = (
    "CREATE TABLE m1 PARTITION OF m FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
    "CREATE TABLE m2 PARTITION OF m FOR VALUES WITH (MODULUS 4, REMAINDER 1);"
    "CREATE TABLE m3 PARTITION OF m FOR VALUES WITH (MODULUS 4, REMAINDER 3)"
)
TWO_LEVELS = (
    "CREATE TABLE m1 PARTITION OF m FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')"
    " PARTITION BY LIST (region);"
    "CREATE TABLE m1a PARTITION OF m1 FOR VALUES IN ('a');"
    "CREATE TABLE m1b PARTITION OF m1 DEFAULT;"
    "CREATE TABLE m2 PARTITION OF m DEFAULT PARTITION BY HASH (id);"
    "CREATE TABLE m2a PARTITION OF m2 FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
    "CREATE TABLE m2b PARTITION OF m2 FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
)
RANGE = Scheme("PARTITION BY RANGE (at)", YEARS, "m2")
CLOSED = Scheme(RANGE.by, CLOSED_YEARS, "")
LIST = Scheme("PARTITION BY LIST (region)", REGIONS, "m2")
HASH = Scheme("PARTITION BY HASH (id)", HASHES, "m2", key="id")
SCHEMES = {
    "range": RANGE,
    "list": LIST,
    "default of a range": Scheme(RANGE.by, YEARS, "m3"),
    "default of a list": Scheme(LIST.by, REGIONS, "m1, m3"),
    "two levels, a leaf": Scheme(RANGE.by, TWO_LEVELS, "m1b"),
    "two levels, all leaves of one": Scheme(RANGE.by, TWO_LEVELS, "m2"),
    "only a default": Scheme(RANGE.by, "CREATE TABLE m1 PARTITION OF m DEFAULT", "m1"),
}
SHAPES = ("same", "other partitions", "no partitions")
# Names as on the source, but other rows in them.
OTHER = (
    "CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (MINVALUE) TO (20);"
    "CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (20) TO (60);"
    "CREATE TABLE m3 PARTITION OF m DEFAULT"
)
FILL = (
    "INSERT INTO m SELECT i, date '2020-01-01' + 15 * i,"
    " (ARRAY['a', 'b', 'it''s', 'd'])[1 + i % 4], 'v' || i FROM generate_series(1, 90) i"
)


def begin(pair: StreamPair, scheme: Scheme, shape: str) -> None:
    on_target = {
        "same": scheme.as_it_is,
        "other partitions": f"{scheme.root('PARTITION BY RANGE (id)')}; {OTHER}",
        "no partitions": scheme.root(""),
    }[shape]
    pair.begin(on_source=scheme.as_it_is, on_target=on_target)
    pair.run(FILL)
    pair.follow()
    pair.assert_equal()


def count(pair: StreamPair, table: str = "m") -> int:
    row = pair.target.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_truncate_of_some_partitions(text_pair: StreamPair, scheme: Scheme, shape: str) -> None:
    pair = text_pair
    begin(pair, scheme, shape)
    pair.run(
        "UPDATE m SET v = 'before'",
        f"TRUNCATE {scheme.truncated}",
        "INSERT INTO m (id, at, region) VALUES (1000, '2021-06-01', 'it''s')",
        # Twice in one batch: what is known of the target must not wait for what is done to it.
        [f"TRUNCATE {scheme.truncated}", "UPDATE m SET v = 'after' WHERE id < 50"],
    )
    pair.follow()
    pair.assert_equal()
    assert 0 < count(pair) < 91 or scheme.truncated == "m1"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", [RANGE, HASH], ids=["range", "hash"])
def test_truncate_of_the_whole_table(pair: StreamPair, scheme: Scheme, shape: str) -> None:
    begin(pair, scheme, shape)
    pair.target.execute("CREATE SEQUENCE s OWNED BY m.id; SELECT nextval('s')")
    pair.run("TRUNCATE m RESTART IDENTITY", "INSERT INTO m (id, at, region) VALUES (1, now(), 'x')")
    pair.follow()
    pair.assert_equal()
    assert pair.target.execute("SELECT nextval('s')").fetchone() == (1,)


def test_truncate_of_one_hash_partition(pair: StreamPair) -> None:
    begin(pair, HASH, "same")
    pair.run("TRUNCATE m2")
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_truncate_of_one_hash_partition_that_the_target_has_not_stops(
    text_pair: StreamPair, shape: str
) -> None:
    pair = text_pair
    begin(pair, HASH, shape)
    pair.run("TRUNCATE m2")
    with pytest.raises(
        ApplyError, match=r"TRUNCATE of public\.m2 .* cannot be identified on the target"
    ):
        pair.follow()
    assert count(pair) == 90
    # As the hint says.
    pair.target.execute("DROP TABLE m")
    pair.target.execute(HASH.as_it_is)
    pair.target.execute(FILL)
    assert pair.apply().error is None
    pair.assert_equal()


def test_truncate_of_a_hash_partition_whose_rows_lie_elsewhere_on_the_target(
    text_pair: StreamPair,
) -> None:
    """Hashes of enums differ from server to server."""
    pair = text_pair
    moods = ", ".join(f"'{n}'" for n in range(20))
    # Other OIDs for the same type.
    pair.target.execute("CREATE TYPE unused AS ENUM ('x')")
    pair.begin(
        f"CREATE TYPE mood AS ENUM ({moods})",
        "CREATE TABLE m (id mood PRIMARY KEY) PARTITION BY HASH (id)",
        HASHES,
    )
    fill = "INSERT INTO m SELECT unnest(enum_range(NULL::mood))"
    pair.run(fill)
    pair.follow()
    pair.run("TRUNCATE m", fill)
    pair.follow()
    pair.assert_equal()
    pair.run("TRUNCATE m1")
    with pytest.raises(ApplyError, match=r"TRUNCATE of public\.m1"):
        pair.follow()
    assert count(pair) == 20


def test_a_partition_that_came_later_keeps_its_rows(pair: StreamPair) -> None:
    """The server describes the others no second time."""
    begin(pair, CLOSED, "no partitions")
    pair.run("UPDATE m SET v = 'described'")
    pair.source.execute(
        "CREATE TABLE m4 PARTITION OF m FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')"
    )
    pair.run(
        "INSERT INTO m (id, at, region) VALUES (1, '2030-05-05', 'late')",
        "TRUNCATE m1, m2, m3",
    )
    pair.follow()
    pair.assert_equal()
    assert count(pair) == 1


def test_a_default_partition_that_holds_less_than_before(pair: StreamPair) -> None:
    begin(pair, RANGE, "no partitions")
    pair.source.execute(
        "CREATE TABLE m4 PARTITION OF m FOR VALUES FROM ('2030-01-01') TO ('2031-01-01')"
    )
    pair.run("INSERT INTO m VALUES (1, '2030-05-05', 'late')", "TRUNCATE m3")
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("referencing", ["PARTITION BY RANGE (id)", ""], ids=["same", "plain"])
def test_truncate_of_tables_that_reference_each_other(pair: StreamPair, referencing: str) -> None:
    leaves = (
        "CREATE TABLE b1 PARTITION OF b FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE b2 PARTITION OF b DEFAULT"
    )
    tables = (
        "CREATE TABLE a (id int PRIMARY KEY);"
        "CREATE TABLE b (id int PRIMARY KEY, a int REFERENCES a) "
    )
    pair.begin(
        on_source=f"{tables} PARTITION BY RANGE (id); {leaves}",
        on_target=f"{tables} {referencing}; {leaves if referencing else ''}",
    )
    pair.run(["INSERT INTO a VALUES (1)", "INSERT INTO b VALUES (1, 1), (20, 1)"])
    pair.follow()
    pair.run("TRUNCATE a CASCADE", "INSERT INTO a VALUES (2)")
    pair.follow()
    pair.assert_equal()


def test_workers_share_roots_and_not_partitions(text_pair: StreamPair) -> None:
    pair = text_pair
    begin(pair, RANGE, "other partitions")
    pair.run("UPDATE m SET at = at + 365", "TRUNCATE m2", "DELETE FROM m WHERE id < 5")
    pair.receive()
    mine = Share(zlib.crc32(b"public.m") % 3, 3)
    assert pair.apply(share=mine).error is None
    pair.assert_equal()


def test_rows_move_between_partitions(pair: StreamPair) -> None:
    """A key of the target that has no date: a row must be gone before it is there again."""
    pair.begin(
        on_source=RANGE.as_it_is,
        on_target=Scheme("", "", "", key="id").root(""),
    )
    pair.run(FILL)
    pair.follow()
    pair.run(
        # To the partition with the smaller OID and back, in one transaction and in several.
        ["UPDATE m SET at = at - 365 WHERE id > 45", "UPDATE m SET at = at + 700 WHERE id > 60"],
        "UPDATE m SET at = at - 600 WHERE id > 50",
        "UPDATE m SET at = at + 900, v = 'moved' WHERE id % 2 = 0",
        "UPDATE m SET id = id + 500, at = at - 365 WHERE id % 5 = 0",
        "DELETE FROM m WHERE id % 7 = 0",
    )
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("is_first", [True, False])
def test_partitions_with_another_order_of_columns(pair: StreamPair, is_first: bool) -> None:
    other = (
        "CREATE TABLE m4 (v text, gone int, region text NOT NULL, at date NOT NULL,"
        " id int NOT NULL); ALTER TABLE m4 DROP gone;"
        "ALTER TABLE m ATTACH PARTITION m4 FOR VALUES FROM ('2030-01-01') TO ('2040-01-01')"
    )
    leaves = (other, CLOSED.leaves) if is_first else (CLOSED.leaves, other)
    pair.begin(CLOSED.root(CLOSED.by), *leaves)
    pair.run(
        FILL,
        "INSERT INTO m SELECT -i, '2031-01-01', i FROM generate_series(1, 40) i",
    )
    pair.run(
        "UPDATE m SET v = 'all'",
        "UPDATE m SET at = '2035-01-01' WHERE id BETWEEN 10 AND 30",
        "UPDATE m SET at = '2021-01-01', region = 'back' WHERE id BETWEEN -20 AND -1",
        "UPDATE m SET id = id - 1000 WHERE id < 0",
        "DELETE FROM m WHERE id % 3 = 0",
    )
    pair.follow()
    pair.assert_equal()
    pair.run("DELETE FROM m WHERE id % 2 = 0", "UPDATE m SET v = 'end', at = '2032-02-02'")
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("full", ["m1", "m2", "m1, m2, m3"])
def test_partitions_with_different_replica_identities(pair: StreamPair, full: str) -> None:
    # With no key there, the source's must do.
    keyless = "CREATE TABLE m (id int, at date, region text, v text)"
    pair.begin(on_source=RANGE.as_it_is, on_target=keyless)
    for name in full.split(", "):
        pair.source.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL".encode())
    pair.run(FILL)
    pair.follow()
    pair.run(
        "UPDATE m SET v = 'all'",
        "UPDATE m SET at = at - 365 WHERE id > 40",
        "UPDATE m SET id = id + 1000, region = 'b' WHERE id % 4 = 0",
        "DELETE FROM m WHERE id % 3 = 0",
    )
    pair.follow()
    pair.assert_equal()


def test_keys_of_partitions_that_are_none_of_the_root(pair: StreamPair) -> None:
    """Equal keys in two partitions are two rows."""
    pair.begin(
        "CREATE TABLE m (id int, at date, v text) PARTITION BY RANGE (at)",
        YEARS,
        "ALTER TABLE m REPLICA IDENTITY FULL",
        *(f"ALTER TABLE m{n} ADD PRIMARY KEY (id)" for n in (1, 2, 3)),
    )
    # Described in a batch of their own: a new description would keep them apart.
    pair.run("INSERT INTO m VALUES (1, '2020-01-01', 'a'), (1, '2021-01-01', 'b')")
    pair.follow()
    pair.run(
        [
            "INSERT INTO m VALUES (5, '2020-01-01', 'a'), (5, '2021-01-01', 'b')",
            "UPDATE m2 SET v = 'c' WHERE id = 5",
            "DELETE FROM m2 WHERE id = 5",
        ],
        "INSERT INTO m VALUES (5, '2021-01-01', 'd'), (6, '2021-01-01', 'e')",
    )
    pair.follow()
    pair.assert_equal()
    pair.run("DELETE FROM m2 WHERE id = 6")
    pair.follow()
    pair.assert_equal()
    pair.run("DELETE FROM m2 WHERE id = 5")
    with pytest.raises(ApplyError, match="expected to delete 1 rows, matched 2 "):
        pair.follow()


@pytest.mark.parametrize("shape", SHAPES)
def test_partition_added_in_mid_stream(pair: StreamPair, shape: str) -> None:
    begin(pair, CLOSED, shape)
    new = "CREATE TABLE m4 PARTITION OF m FOR VALUES FROM ('2030-01-01') TO ('2040-01-01')"
    pair.source.execute(new)
    if shape == "same":
        pair.target.execute(new)
    pair.run(
        "INSERT INTO m SELECT i, '2031-01-01', 'a' FROM generate_series(100, 120) i",
        "UPDATE m SET at = '2020-05-05' WHERE id > 110",
        "UPDATE m SET at = '2031-05-05' WHERE id < 10",
    )
    pair.follow()
    pair.assert_equal()
    pair.run("TRUNCATE m4")
    pair.follow()
    pair.assert_equal()
    assert count(pair) == 91


def test_a_table_of_its_own_that_is_attached_later(pair: StreamPair) -> None:
    """Its changes before and after go to the same table of the target, attached there or not."""
    pair.begin(CLOSED.as_it_is, CLOSED.root("", "old"))
    pair.run("INSERT INTO old SELECT i, '2030-01-01', 'o' FROM generate_series(1, 9) i")
    attach = "ALTER TABLE m ATTACH PARTITION old FOR VALUES FROM ('2030-01-01') TO ('2040-01-01')"
    pair.source.execute(attach)
    pair.run(
        "UPDATE m SET v = 'attached' WHERE id < 5",
        "UPDATE m SET at = '2020-01-01' WHERE id < 3",
        "INSERT INTO m (id, at, region) VALUES (77, '2031-01-01', 'o')",
    )
    pair.follow()
    pair.target.execute(attach)
    pair.assert_equal()
    pair.run("TRUNCATE old")
    pair.follow()
    pair.assert_equal()


@pytest.mark.parametrize("gone", ["DETACH PARTITION {0}", "DETACH PARTITION {0}; DROP TABLE {0}"])
@pytest.mark.parametrize("shape", SHAPES)
def test_partitions_that_are_gone_before_their_changes_are_received(
    text_pair: StreamPair, shape: str, gone: str
) -> None:
    pair = text_pair
    begin(pair, RANGE, shape)
    pair.run("UPDATE m SET v = 'late'", "UPDATE m SET at = at + 90", "TRUNCATE m2")
    expected = pair.source.execute("SELECT id, at, region, v FROM m ORDER BY id").fetchall()
    for name in ("m1", "m2"):
        pair.source.execute(f"ALTER TABLE m {gone.format(name)}".encode())
    pair.follow()
    found = pair.target.execute("SELECT id, at, region, v FROM m ORDER BY id").fetchall()
    assert found == expected


def test_partitions_that_are_gone_before_anybody_knew_them(text_pair: StreamPair) -> None:
    pair = text_pair
    begin(pair, RANGE, "same")
    pair.run("UPDATE m SET v = 'late'", "UPDATE m SET at = at + 90", "TRUNCATE m2")
    expected = pair.source.execute("SELECT id, at, region, v FROM m ORDER BY id").fetchall()
    for name in ("m1", "m2"):
        pair.source.execute(f"DROP TABLE {name}".encode())
    pair.partitions = Partitions("UTF8")
    pair.follow()
    found = pair.target.execute("SELECT id, at, region, v FROM m ORDER BY id").fetchall()
    assert found == expected


def test_a_publication_that_hides_partitions_is_refused(text_pair: StreamPair) -> None:
    pair = text_pair
    pair.begin(RANGE.as_it_is)
    name = pair.slot
    alter = f"ALTER PUBLICATION {name} SET (publish_via_partition_root = "
    pair.source.execute(f"{alter} true)".encode())
    with pytest.raises(PreflightError, match="would not be sent") as refused:
        pair.receive()
    pair.run(FILL)
    assert refused.value.hint is not None
    pair.source.execute(refused.value.hint.encode())
    pair.run("TRUNCATE m2", "UPDATE m SET v = 'new'")
    pair.follow()
    pair.assert_equal()


def test_a_receiver_remembers_partitions_from_one_connection_to_the_next(
    source_db: str, tmp_path: Path
) -> None:
    source = Source(source_db, RANGE.as_it_is, FILL)
    try:
        with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
            source.execute("UPDATE m SET v = 'known'")
            wait_for(lambda: spool.last_end_lsn)
            # The receiver waits before it comes back.
            source.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = '{source.slot}'; UPDATE m SET v = 'gone'; TRUNCATE m2;"
                " DROP TABLE m1; ALTER TABLE m DETACH PARTITION m2"
            )
            end = source.lsn()
            wait_for(lambda: spool.complete_lsn >= end)
        relations = [decode_relation(m) for m in received_messages(tmp_path) if m[:1] == b"R"]
    finally:
        source.close()
    assert {relation.name for relation in relations} == {"m"}
    conditions = {r.partition.condition for r in relations if r.partition and r.partition.condition}
    assert len(conditions) == 1


def test_partitions_that_come_and_move_while_a_receiver_is_connected(
    source_db: str, tmp_path: Path
) -> None:
    source = Source(source_db, CLOSED.as_it_is, CLOSED.root(CLOSED.by, "other"), FILL)
    bounds = "FOR VALUES FROM ('2030-01-01') TO ('2040-01-01')"
    try:
        with SpoolWriter(tmp_path) as spool, receiving(source.settings(), spool):
            for then in (
                "UPDATE m SET v = 'connected'",
                f"CREATE TABLE m4 PARTITION OF m {bounds}",
                "INSERT INTO m VALUES (1, '2031-01-01', 'new')",
                "ALTER TABLE m DETACH PARTITION m4",
                f"ALTER TABLE other ATTACH PARTITION m4 {bounds}",
                "INSERT INTO other VALUES (2, '2031-01-01', 'moved')",
            ):
                last = spool.last_end_lsn
                source.execute(then)
                if not then.startswith(("CREATE", "ALTER")):
                    wait_for(lambda last=last: spool.last_end_lsn > last)
        found = {}
        rows = []
        for message in received_messages(tmp_path):
            if message[:1] == b"R":
                relation = decode_relation(message)
                found[relation.oid] = relation
            if message[:1] == b"I":
                relation = found[int.from_bytes(message[1:5], "big")]
                assert relation.partition is not None
                rows.append((relation.name, relation.partition.name))
    finally:
        source.close()
    assert rows == [("m", "m4"), ("other", "m4")]
