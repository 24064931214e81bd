"""Generated columns in keys: sent by some versions only, and never half of a key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.stream.receiving import Source
from tests.fixtures.stream.stream_pair import StreamPair

from millrace.apply.position import drop_position, setup_position
from millrace.apply.task import ApplyTask, apply_spool
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError
from millrace.filter.exclusions import Exclusions
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.program.embedded import Cluster
from millrace.spool.reader import SpoolReader

# a alone is no key: two rows have each of its values.
TABLES = """
CREATE TABLE made (a int, b int, g int GENERATED ALWAYS AS (b * 2) STORED NOT NULL, v text,
    PRIMARY KEY (a, g));
CREATE TABLE indexed (a int NOT NULL, b int, v text UNIQUE,
    g int GENERATED ALWAYS AS (b * 2) STORED NOT NULL, UNIQUE (a, g));
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_a_g_key;
CREATE TABLE parted (a int, b int, g int GENERATED ALWAYS AS (b * 2) STORED NOT NULL, v text,
    PRIMARY KEY (a, g)) PARTITION BY LIST (a);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
CREATE TABLE parted_rest PARTITION OF parted DEFAULT;
"""
NAMES = ("made", "indexed", "parted")
LEAVES = ("made", "indexed", "parted", "parted_1", "parted_rest")
FULL = "; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in LEAVES)
FILL = (
    "INSERT INTO {0} (a, b, v) SELECT a, b, format('%s %s', a, b) FROM generate_series(1, 4) a,"
    " generate_series(1, 4) b"
)
CHANGES = (
    # Rows that agree in a, and fold together by that alone.
    ("INSERT INTO {0} (a, b, v) VALUES (1, 9, 'n')", "DELETE FROM {0} WHERE (a, b) = (1, 2)"),
    ("UPDATE {0} SET v = 'x' || v WHERE a = 2",),
    # The key changes by its generated column, and rows take each other's.
    ("UPDATE {0} SET b = -b - 10 WHERE a = 3", "UPDATE {0} SET b = b + 15 WHERE a = 3"),
    ("UPDATE {0} SET a = 7, b = 7 WHERE (a, b) = (4, 4)", "DELETE FROM {0} WHERE a = 4 AND b < 3"),
)
VERSIONS = {"15": "system_cluster", "16": "source_cluster", "18": "target_cluster"}


@pytest.fixture(params=["18 to 15", "18 to 16", "15 to 18", "16 to 18"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[int, str, str]]:
    """(the source's version, source, target)."""
    ends = request.param.split(" to ")
    clusters: list[Cluster] = [request.getfixturevalue(VERSIONS[end]) for end in ends]
    uris = [
        cluster.create_database(f"{role}_made")
        for cluster, role in zip(clusters, "ft", strict=True)
    ]
    yield int(ends[0]), *uris  # type: ignore[misc]
    for cluster, role in zip(clusters, "ft", strict=True):
        cluster.drop_database(f"{role}_made")


@pytest.fixture(params=[True, False], ids=["binary", "text"])
def any_pair(
    request: pytest.FixtureRequest, sides: tuple[int, str, str], tmp_path: Path
) -> Iterator[tuple[int, StreamPair]]:
    version, source, target = sides
    opened = StreamPair(source, target, tmp_path, binary=request.param)
    yield version, opened
    opened.close()


def change_everything(pair: StreamPair) -> None:
    for name in NAMES:
        pair.run(FILL.format(name))
    pair.follow()
    for name in NAMES:
        for transaction in CHANGES:
            pair.run([statement.format(name) for statement in transaction])
    pair.follow()


def rows(pair: StreamPair, side: str, name: str) -> list[Any]:
    return getattr(pair, side).execute(f"SELECT a, b, g, v FROM {name} ORDER BY 1, 2").fetchall()


def test_rows_are_told_apart_by_the_whole_key_or_not_at_all(
    any_pair: tuple[int, StreamPair],
) -> None:
    version, pair = any_pair
    pair.begin(TABLES)
    change_everything(pair)
    if version >= 18:
        pair.assert_equal()
        return
    # The rest was not followed, and the user was told.
    for name in NAMES:
        inserted = [(a, b, 2 * b, f"{a} {b}") for a in range(1, 5) for b in range(1, 5)]
        assert rows(pair, "target", name) == sorted([*inserted, (1, 9, 18, "n")])


def test_with_the_whole_row_they_are_followed_by_any_version(
    any_pair: tuple[int, StreamPair],
) -> None:
    _, pair = any_pair
    pair.begin(TABLES, on_source=FULL)
    change_everything(pair)
    pair.assert_equal()


def test_a_publication_that_sends_half_a_key_is_not_applied(pair: StreamPair) -> None:
    """As earlier versions made them."""
    pair.begin(TABLES)
    pair.source.execute(f"ALTER PUBLICATION {publication_names(pair.slot)[0]} ADD TABLE made")
    pair.run(FILL.format("made"))
    pair.follow()
    pair.assert_equal()
    pair.run([statement.format("made") for statement in CHANGES[0]])
    with pytest.raises(ApplyError, match=r"public\.made: an update or delete has no key"):
        pair.follow()


def test_a_filter_on_a_table_with_a_generated_key(target_cluster: Cluster, tmp_path: Path) -> None:
    uris = [target_cluster.create_database(f"{role}_filtered") for role in "ft"]
    opened = StreamPair(*uris, tmp_path, binary=True)
    try:
        opened.begin(TABLES)
        left = Exclusions(where={("public", "made"): "g < 20"})
        opened.run(FILL.format("made"))
        opened.follow(left=left)
        for transaction in CHANGES:
            opened.run([statement.format("made") for statement in transaction])
        opened.follow(left=left)
        kept = [row for row in rows(opened, "source", "made") if row[2] < 20]
        assert rows(opened, "target", "made") == kept
    finally:
        opened.close()
        for role in "ft":
            target_cluster.drop_database(f"{role}_filtered")


def test_a_text_plugin_sends_generated_keys(
    system_cluster: Cluster, target_db: str, tmp_path: Path
) -> None:
    """By test_decoding, whatever is stored is sent."""
    uri = system_cluster.create_database("made_text")
    source = Source(uri, TABLES, plugin="test_decoding")
    query = b"SELECT a, b, g, v FROM made ORDER BY 1, 2"
    try:
        assert not source.created.warnings
        source.execute(FILL.format("made"), *(s.format("made") for t in CHANGES for s in t))
        source.receive(tmp_path)
        with psycopg.connect(target_db, autocommit=True) as target:
            target.execute(TABLES.encode())
            kind = setup_position(target, source.slot, source.created.start_lsn)
            spool = partial(SpoolReader, tmp_path)
            task = ApplyTask(Dsn.parse(target_db), source.slot, kind, spool, "UTF8", "utf-8")
            assert apply_spool(task).error is None
            assert target.execute(query).fetchall() == source.connection.execute(query).fetchall()
            drop_position(target, source.slot)
    finally:
        source.close()
        system_cluster.drop_database("made_text")
