"""Applying changes under filters: what is left out of the copy is left out of the changes."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import StreamPair

from millrace.errors import ApplyError
from millrace.filter.exclusions import Exclusions


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_filters_hold_for_changes(pair: StreamPair, identity: str) -> None:
    pair.begin(
        "CREATE TABLE kept (id int PRIMARY KEY, v1 int, secret text, n text)",
        f"ALTER TABLE kept REPLICA IDENTITY {identity}",
        "CREATE TABLE loose (a int, b text)",
        "ALTER TABLE loose REPLICA IDENTITY FULL",
        "CREATE TABLE gone (id int PRIMARY KEY)",
    )
    left = Exclusions(
        tables=frozenset({("public", "gone")}),
        columns={("public", "kept"): frozenset({"secret"})},
        where={("public", "kept"): "v1 > 10 AND n <> 'no'", ("public", "loose"): "a > 0"},
    )
    pair.target.execute("DROP TABLE gone")
    pair.run(
        "INSERT INTO kept SELECT i, i, 's', 'yes' FROM generate_series(1, 30) i",
        "INSERT INTO loose VALUES (1, 'x'), (1, 'x'), (0, 'y'), (NULL, 'z')",
        "INSERT INTO gone VALUES (1)",
    )
    pair.follow(left=left)
    pair.run(
        "UPDATE kept SET v1 = v1 + 5 WHERE id < 8",
        "UPDATE kept SET v1 = v1 - 20 WHERE id BETWEEN 20 AND 25",
        "UPDATE kept SET n = 'no' WHERE id = 28",
        "UPDATE kept SET id = id + 100 WHERE id IN (9, 15)",
        "DELETE FROM kept WHERE id IN (2, 18)",
        "DELETE FROM loose WHERE ctid = (SELECT min(ctid) FROM loose WHERE a = 1)",
        "UPDATE loose SET a = 2 WHERE a = 0",
        "UPDATE loose SET a = -1 WHERE a = 1",
        "TRUNCATE gone",
    )
    pair.follow(left=left)
    query = "SELECT id, v1, n FROM kept WHERE v1 > 10 AND n <> 'no' ORDER BY id"
    there = pair.target.execute("SELECT id, v1, n FROM kept ORDER BY id").fetchall()
    assert there == pair.source.execute(query).fetchall()
    assert pair.target.execute("SELECT count(secret) FROM kept").fetchone() == (0,)
    assert pair.target.execute("SELECT * FROM loose ORDER BY a").fetchall() == [(2, "y")]


def test_a_row_that_comes_into_the_filter_without_all_its_values_stops(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE document (id int PRIMARY KEY, size int, body text)",
        "ALTER TABLE document ALTER body SET STORAGE EXTERNAL",
    )
    left = Exclusions(where={("public", "document"): "size > 1"})
    pair.run("INSERT INTO document VALUES (1, 1, repeat('x', 9000)), (2, 0, repeat('y', 9000))")
    pair.follow(left=left)
    pair.run("UPDATE document SET size = 1 WHERE id = 2")
    pair.follow(left=left)
    pair.run("UPDATE document SET size = 2 WHERE id = 1")
    with pytest.raises(ApplyError, match="now matches the filter"):
        pair.follow(left=left)
