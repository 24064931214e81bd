"""What every sink of documents has to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.fixtures.tube.documents import DOCUMENT_KINDS, documents
from tests.fixtures.wait import wait_for

from millrace import failpoint
from millrace.errors import ConfigError, MillraceError, SinkError
from millrace.retry import is_transient
from millrace.sink import postgres_table
from millrace.sink.document import JSON_KEY, DocumentOrigin
from millrace.sink.protocol import ComparableSink, DocumentSink, ListingSink, ShardChoice
from millrace.sink.registry import open_document_sink
from millrace.sink.tantivy_index import TantivySink

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("title", pa.string()),
        ("stars", pa.int64()),
        ("weight", pa.float64()),
        ("is_open", pa.bool_()),
        pa.field("tags", pa.string(), metadata={JSON_KEY: b""}),
    ]
)
ORIGIN = DocumentOrigin("shop", "public.article", ("id",))


def body(id_: str, title: str | None = "a title", **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"stars": 3, "weight": 0.25, "is_open": True, "tags": '["x"]'}
    return {"id": id_, "title": title} | values | more


@dataclass(frozen=True)
class Kind:
    """A place for documents, and how to read the newest version of each back."""

    uri: str
    read: Callable[[], dict[str, dict[str, Any]]]

    def open(self) -> DocumentSink:
        sink = open_document_sink(self.uri)
        sink.begin_documents(ORIGIN, SCHEMA)
        return sink


@pytest.fixture(params=sorted(DOCUMENT_KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "jsonl":
        return Kind(f"jsonl:{tmp_path / 'documents'}", lambda: read_lines(tmp_path / "documents"))
    if request.param == "tantivy":
        return Kind(f"tantivy:{tmp_path / 'index'}", lambda: read_index(tmp_path / "index"))
    return table_kind(request.getfixturevalue("target_db"))


def table_kind(uri: str) -> Kind:
    with psycopg.connect(uri) as connection:
        connection.execute('CREATE SCHEMA "Odd one"')
        connection.execute(
            'CREATE TABLE "Odd one".docs (mine int DEFAULT 7, tags jsonb, stars int4,'
            " weight float8, is_open bool, title text, id text PRIMARY KEY)"
        )
    return Kind(f'{uri}&table="Odd one".docs', lambda: read_table(uri))


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    newest: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        if one["version"] >= newest.get(one["id"], one)["version"]:
            newest[one["id"]] = one
    return {id_: one["body"] for id_, one in newest.items() if not one["deleted"]}


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    import tantivy

    index = tantivy.Index.open(str(folder))
    searcher = index.searcher()
    query = tantivy.Query.term_query(index.schema, "_deleted", 0)
    found = (searcher.doc(address).to_dict() for _, address in searcher.search(query, 999).hits)
    rows = {
        one["_id"][0]: {name: one.get(name, [None])[0] for name in SCHEMA.names} for one in found
    }
    return {id_: row | {"tags": json.loads(row["tags"])} for id_, row in rows.items()}


def read_table(uri: str) -> dict[str, dict[str, Any]]:
    with psycopg.connect(uri) as connection:
        rows = connection.execute(
            "SELECT id, to_jsonb(d) - 'mine' FROM \"Odd one\".docs d WHERE mine = 7"
        ).fetchall()
    return dict(rows)


def expected(id_: str, title: str | None = "a title", **more: Any) -> dict[str, Any]:
    return body(id_, title, tags=["x"]) | more


def deliver(kind: Kind, version: tuple[int, int], *rows: Any) -> None:
    with closing(kind.open()) as sink:
        sink.write_documents(documents(version, *rows, schema=SCHEMA))
        sink.commit(0)


def test_what_was_committed_is_there_with_its_values(kind: Kind) -> None:
    odd = 'one, "two"\n\\.\nthree; ü'
    rows = [
        ("a", 1, body("a", odd)),
        ("b", 1, body("b", stars=None, weight=-1.5)),
        ("c", -2, None),
    ]
    deliver(kind, (0, 5), *rows)
    assert kind.read() == {
        "a": expected("a", odd),
        "b": expected("b", stars=None, weight=-1.5),
    }


def test_later_versions_replace_and_delete(kind: Kind) -> None:
    deliver(kind, (0, 5), ("a", 1, body("a")), ("b", 1, body("b")), ("c", 1, body("c")))
    deliver(kind, (0, 6), ("a", 1, body("a", "newer")), ("b", 2, None))
    assert kind.read() == {"a": expected("a", "newer"), "c": expected("c")}
    deliver(kind, (1, 1), ("b", 2, body("b", "back")))
    assert kind.read()["b"] == expected("b", "back")


def test_a_late_delivery_of_an_older_version_changes_nothing(kind: Kind) -> None:
    deliver(kind, (1, 5), ("a", 1, body("a", "new")), ("gone", 1, None))
    rows = [("a", 1, body("a", "old")), ("gone", 1, body("gone")), ("other", 1, body("other"))]
    deliver(kind, (0, 9), *rows)
    deliver(kind, (1, 4), ("a", 1, None))
    assert kind.read() == {"a": expected("a", "new"), "other": expected("other")}


def test_a_large_batch_may_be_new_known_newer_and_deleted(kind: Kind) -> None:
    ids = [f"k{n:03}" for n in range(130)]
    deliver(kind, (0, 5), *((one, 1, body(one)) for one in ids[:100]))
    deliver(kind, (0, 9), (ids[0], 1, body(ids[0], "newest")), (ids[1], 1, None))
    rows = [(one, 2, None if one in ids[10:20] else body(one, "newer")) for one in ids]
    for _ in range(2):
        deliver(kind, (0, 7), *rows)
        wanted = {one: expected(one, "newer") for one in [*ids[2:10], *ids[20:]]}
        assert kind.read() == wanted | {ids[0]: expected(ids[0], "newest")}


def test_the_same_delivery_twice_is_one(kind: Kind) -> None:
    for _ in range(2):
        deliver(kind, (0, 5), ("a", 1, body("a")), ("b", 1, None))
    assert kind.read() == {"a": expected("a")}


def test_what_was_not_committed_is_not_taken_for_delivered(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(kind, (0, 1), ("a", 1, body("a")))
    with closing(kind.open()) as sink:
        sink.write_documents(documents((0, 2), ("a", 1, None), schema=SCHEMA))
        monkeypatch.setenv(failpoint.VARIABLE, "sink.before_commit=error")
        with pytest.raises(MillraceError):
            sink.commit(0)
        monkeypatch.delenv(failpoint.VARIABLE)
    assert kind.read() == {"a": expected("a")}
    deliver(kind, (0, 3), ("a", 1, None))
    assert kind.read() == {}


def test_documents_of_a_shard_are_listed_by_their_age(kind: Kind) -> None:
    with closing(kind.open()) as sink:
        if not sink.capabilities.lists_ids_by_shard:
            assert not isinstance(sink, ListingSink)
            return
        assert isinstance(sink, ListingSink)
        for number in range(4):
            rows = [
                (f"{number}.{shard}", shard, body("x") | {"id": f"{number}.{shard}"})
                for shard in (-1, 2)
            ]
            sink.write_documents(
                documents((1, number), *rows, (f"d{number}", 2, None), schema=SCHEMA)
            )
            sink.commit(0)
        assert sorted(sink.list_ids(ShardChoice(2), (1, 2), 10)) == ["0.2", "1.2"]
        assert sorted(sink.list_ids(ShardChoice(-1), (2, 0), 10)) == [
            "0.-1",
            "1.-1",
            "2.-1",
            "3.-1",
        ]
        assert (
            sink.list_ids(ShardChoice(2), (1, 0), 10)
            == sink.list_ids(ShardChoice(2), (0, 99), 10)
            == {}
        )
        assert len(sink.list_ids(ShardChoice(2), (2, 0), 3)) == 3
        odd = sink.list_ids(ShardChoice(None, 3, 2), (2, 0), 10)
        assert odd == {f"{n}.{shard}": shard for n in range(4) for shard in (-1, 2)}
        assert sink.list_ids(ShardChoice(None, 3, 1), (2, 0), 10) == {}


@pytest.mark.parametrize("choice", [ShardChoice(2), ShardChoice(None, 3, 2)])
def test_what_is_older_than_collected_garbage_is_refused(kind: Kind, choice: ShardChoice) -> None:
    deliver(kind, (1, 5), ("a", 2, body("a")), ("gone", 2, None), ("late", 2, None))
    with closing(kind.open()) as sink:
        if not isinstance(sink, ListingSink):
            return
        sink.forget_deleted(choice, (1, 6))
    for version in ((0, 9), (1, 4)):
        with pytest.raises(SinkError, match="older than what was collected") as caught:
            deliver(kind, version, ("gone", 2, body("gone")))
        assert is_transient(caught.value)
    deliver(kind, (1, 4), ("elsewhere", 1, body("elsewhere")))
    deliver(kind, (1, 6), ("late", 2, body("late")))
    assert set(kind.read()) == {"a", "elsewhere", "late"}


def test_documents_are_listed_for_their_own_origin(kind: Kind) -> None:
    deliver(kind, (0, 5), ("a", 1, body("a")))
    with closing(open_document_sink(kind.uri)) as sink:
        if isinstance(sink, ListingSink):
            sink.begin_documents(DocumentOrigin("shop", "public.other", ("id",)), SCHEMA)
            assert sink.list_ids(ShardChoice(1), (9, 9), 10) == {}
            assert sink.list_ids(ShardChoice(None), (9, 9), 10) == {}


def test_a_deletion_that_waited_for_a_frozen_writer_deletes_what_that_wrote(
    target_db: str,
) -> None:
    kind = table_kind(target_db)
    with closing(kind.open()) as frozen, closing(kind.open()) as other:
        frozen.write_documents(documents((0, 5), ("a", 1, body("a")), schema=SCHEMA))
        thread = threading.Thread(
            target=other.write_documents, args=[documents((0, 6), ("a", 1, None), schema=SCHEMA)]
        )
        thread.start()
        with psycopg.connect(target_db, autocommit=True) as watch:
            wait_for(
                lambda: watch.execute(
                    "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                    " AND datname = current_database()"
                ).fetchall(),
                "it waits",
            )
        frozen.commit(0)
        thread.join()
        other.commit(0)
    assert kind.read() == {}


def test_a_writer_that_froze_in_mid_transaction_lets_go(
    target_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = table_kind(target_db)
    monkeypatch.setattr(postgres_table, "_IDLE_SECONDS", 1)
    with closing(kind.open()) as frozen:
        frozen.write_documents(documents((0, 5), ("a", 1, body("a")), schema=SCHEMA))
        deliver(kind, (0, 6), ("a", 1, body("a", "newer")))
        with pytest.raises(MillraceError) as caught:
            frozen.commit(0)
        assert is_transient(caught.value)
    assert kind.read() == {"a": expected("a", "newer")}


def test_a_document_that_comes_back_while_deletions_are_forgotten_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(f"tantivy:{tmp_path}", lambda: read_index(tmp_path))
    deliver(kind, (0, 5), ("a", 0, None), ("b", 0, None))
    with closing(kind.open()) as sink:
        assert isinstance(sink, TantivySink)
        opened = sink._open_writer

        def bring_back_first() -> Any:
            monkeypatch.undo()
            deliver(kind, (0, 7), ("a", 1, body("a")))
            return opened()

        monkeypatch.setattr(sink, "_open_writer", bring_back_first)
        sink.forget_deleted(ShardChoice(None, 2, 0), (0, 6))
    assert set(kind.read()) == {"a"}


def test_what_a_sink_holds_is_compared_with_what_it_should_hold(kind: Kind) -> None:
    """A sink that can't list what it holds says so by its type."""
    with closing(kind.open()) as sink:
        if not isinstance(sink, ComparableSink):
            assert kind.uri.startswith("jsonl:")
            return
        assert sink.newest_version() is None
        assert list(sink.iter_held(2)) == []
    rows = [(str(n), 1, body(str(n), f"it's {n}")) for n in range(5)]
    rows += [("empty", 1, body("empty", "")), ("null", 1, body("null", None, weight=None))]
    deliver(kind, (7, 30), *rows)
    deliver(kind, (7, 31), ("4", 1, None))
    with closing(kind.open()) as sink:
        assert isinstance(sink, ComparableSink)
        assert sink.newest_version() == (7, 31)
        pages = list(sink.iter_held(2))
        assert max(map(len, pages)) == 2
        held = [id_ for page in pages for id_ in page]
        assert sorted(held) == ["0", "1", "2", "3", "empty", "null"]
        # The version does not matter.
        assert sink.find_unequal(documents((1, 1), *rows[:4], *rows[5:], schema=SCHEMA)) == {}
        found = sink.find_unequal(
            documents(
                (1, 1),
                ("0", 1, body("0", "another")),
                ("1", 1, body("1", "it's 1", stars=None)),
                ("2", 1, None),
                ("3", 1, body("3", "it's 3", weight=0.5)),
                ("4", 1, body("4", "it's 4")),
                ("empty", 1, body("empty", None)),
                ("null", 1, body("null", "", weight=None)),
                ("never", 1, None),
                schema=SCHEMA,
            )
        )
        assert found == dict.fromkeys(["0", "1", "3", "empty", "null"], "different") | {
            "2": "surplus",
            "4": "missing",
        }


def test_two_writers_take_turns(kind: Kind) -> None:
    with closing(kind.open()) as one, closing(kind.open()) as other:
        one.write_documents(documents((0, 2), ("a", 1, body("a", "second")), schema=SCHEMA))
        one.commit(0)
        other.write_documents(
            documents((0, 1), ("a", 1, body("a", "first")), ("b", 1, body("b")), schema=SCHEMA)
        )
        other.commit(0)
        one.write_documents(documents((0, 3), ("b", 1, None), schema=SCHEMA))
        one.commit(0)
    assert kind.read() == {"a": expected("a", "second")}


def test_an_address_that_leads_nowhere_is_one_clear_error(tmp_path: Path, target_db: str) -> None:
    for address in ("jsonl:", "tantivy:", target_db):
        with pytest.raises(ConfigError):
            open_document_sink(address)
    with pytest.raises(ConfigError, match="takes changes"):
        open_document_sink(f"parquet:{tmp_path}")
    with pytest.raises(SinkError, match="opening"):
        open_document_sink(f"jsonl:{tmp_path}/none/file")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("SELECT 1", "no table docs"),
        ("CREATE TABLE docs (id text PRIMARY KEY, title text)", "no column stars, weight"),
        (
            "CREATE TABLE docs (id text, title text, stars int, weight float8, is_open bool,"
            " tags text, UNIQUE (id, title))",
            "no unique index on",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(target_db: str, made: str, said: str) -> None:
    with psycopg.connect(target_db) as connection:
        connection.execute(made)
    with (
        closing(open_document_sink(f"{target_db}&table=docs")) as sink,
        pytest.raises(SinkError, match=said),
    ):
        sink.begin_documents(ORIGIN, SCHEMA)


def test_an_index_of_other_columns_is_refused(tmp_path: Path) -> None:
    Kind(f"tantivy:{tmp_path}", dict).open().close()
    with (
        closing(open_document_sink(f"tantivy:{tmp_path}")) as sink,
        pytest.raises(SinkError, match="other columns"),
    ):
        sink.begin_documents(ORIGIN, pa.schema([("id", pa.string())]))


def test_a_line_that_a_killed_process_left_is_cut(tmp_path: Path) -> None:
    kind = Kind(f"jsonl:{tmp_path / 'lines'}", lambda: read_lines(tmp_path / "lines"))
    deliver(kind, (0, 1), ("a", 1, body("a")))
    with (tmp_path / "lines").open("a") as file:
        file.write('{"id": "b", ' + "x" * 100_000)
    deliver(kind, (0, 2), ("c", 1, body("c")))
    assert set(kind.read()) == {"a", "c"}
