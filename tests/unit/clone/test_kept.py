"""What is kept of the source comes back as it was."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.clone.kept_view import decode_plain, keep, read_kept
from millrace.filter.decide import Decision
from millrace.relation import (
    Column,
    Extension,
    ForeignKey,
    Index,
    LargeObjectRange,
    Sequence,
    SourceCatalog,
    SplitKey,
    Table,
)
from millrace.workdir.store import Store
from millrace.workdir.stream_binding import StreamBinding, bind_copy, read_binding

CATALOG = SourceCatalog(
    tables=(
        Table(1, "s", "t", (Column("a", "integer"), Column("b", "x", "odd")), 1, 2, 3),
        Table(
            2,
            "s",
            'ü"',
            (),
            0,
            0,
            -1,
            SplitKey("a", True),
            load_via=(9, "s", "root"),
            where="a > 1",
        ),
    ),
    indexes=(Index(3, 1, "s", "i", "CREATE INDEX", True, after=("ALTER INDEX", "x")),),
    foreign_keys=(ForeignKey(4, "fk", "s", "t", 1, 2, "FOREIGN KEY", False),),
    sequences=(Sequence(5, "s", "q", -(2**63), True),),
    extensions=(Extension(6, "e", "1.0", "public"),),
    partitioned_tables=((7, "s", "p"),),
    view_indexes=frozenset((8, 9)),
    own_publications=frozenset(((1, 2, "p"),)),
    own_event_triggers=frozenset(((3, 4, "t"),)),
    schemas={10: "s"},
    families={1: 2},
    large_object_ranges=(LargeObjectRange(1, 2, 3, 4),),
)
DECISION = Decision(
    excluded={(1259, 5): "rule"},
    labels={(1259, 5): "table s.t"},
    predicates={1: "a > 1"},
    columns={1: frozenset(("b",))},
    warnings=("w",),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "source.db")
    yield opened
    opened.close()


def test_catalog_and_decision_come_back_equal(store: Store) -> None:
    assert read_kept(store) is None
    keep(store, CATALOG, DECISION)
    assert read_kept(store) == (CATALOG, DECISION)
    keep(store, SourceCatalog(), Decision())
    assert read_kept(store) == (SourceCatalog(), Decision())


def test_what_another_release_kept_can_be_read() -> None:
    found = decode_plain(SourceCatalog, '{"schemas": [[1, "s"]], "unheard_of": 3}')
    assert found == SourceCatalog(schemas={1: "s"})


def test_setup_has_the_names_that_pgcopydb_has(store: Store, tmp_path: Path) -> None:
    store.write_setup(
        run_id="r",
        millrace_version="0",
        source="postgresql://a@h:5/db",
        target="postgresql://b/db",
        split_tables_larger_than=0,
        split_max_parts=0,
        slot_name="shop",
        plugin="wal2json",
    )
    with sqlite3.connect(tmp_path / "source.db") as database:
        database.row_factory = sqlite3.Row
        row = dict(database.execute("SELECT * FROM setup").fetchone())
    database.close()
    assert row["source_pg_uri"] == "postgresql://a@h:5/db"
    assert row["target_pg_uri"] == "postgresql://b/db"
    assert (row["slot_name"], row["plugin"]) == ("shop", "wal2json")


def test_a_directory_of_an_older_release_gets_the_new_columns(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "source.db") as database:
        database.execute("CREATE TABLE setup (id INTEGER, source TEXT, target TEXT)")
        database.execute("INSERT INTO setup VALUES (1, 'here', 'there')")
    database.close()
    store = Store(tmp_path / "source.db")
    setup = store.setup()
    assert setup is not None
    assert (setup["source_pg_uri"], setup["target_pg_uri"]) == ("here", "there")
    store.close()
    Store(tmp_path / "source.db").close()


def test_binding_of_a_stream_that_an_older_release_began(tmp_path: Path) -> None:
    assert read_binding(tmp_path) is None
    with sqlite3.connect(tmp_path / "stream.db") as database:
        assert read_binding(tmp_path) is None
        database.execute("CREATE TABLE sentinel (applied_lsn TEXT)")
        database.execute("CREATE TABLE stream (source, slot_name, plugin, encoding)")
        database.execute("INSERT INTO stream VALUES ('s', 'shop', 'pgoutput', '')")
        database.commit()
        assert read_binding(tmp_path) == StreamBinding("s", "shop", "pgoutput", "", "", False)
        bind_copy(tmp_path, "run1", "UTF8")
        bind_copy(tmp_path, "run2", "LATIN1")
        found = read_binding(tmp_path)
        assert found is not None
        assert found.run_id == "run2"
        assert database.execute("SELECT encoding FROM stream").fetchone() == ("UTF8",)
    database.close()
