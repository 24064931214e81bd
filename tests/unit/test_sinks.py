"""What every sink has to do, and what each kind does besides."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fixtures.stream.change_rows import ROW, batch
from tests.fixtures.tube.documents import DOCUMENT_KINDS, documents
from tests.torture.failpoints import read_failpoints

from millrace import failpoint
from millrace.change import SCHEMA, VERSION_KEY
from millrace.errors import ConfigError, FormatError, SinkError
from millrace.lsn import parse_lsn
from millrace.sink.delivery import choose_start, deliver
from millrace.sink.parquet import ParquetSink
from millrace.sink.print import PrintSink
from millrace.sink.print_format import OutputFormat
from millrace.sink.protocol import ChangeSink
from millrace.sink.registry import OURS, find_sinks, open_change_sink, open_sink

# Transactions by number: transaction n ends at 100 * n and has n changes.
Change = tuple[int, int]


def transaction(number: int, **more: Any) -> pa.RecordBatch:
    commit = {"end_lsn": 100 * number, "commit_lsn": 100 * number - 8, "xid": number}
    rows = [commit | {"lsn": 100 * number - 50, "position": at} | more for at in range(number)]
    return batch(*rows)


def expected(*numbers: int) -> list[Change]:
    return [(100 * number, at) for number in numbers for at in range(number)]


@dataclass(frozen=True)
class Kind:
    """A sink, how to read back what it has, and how to make it fail."""

    name: str
    open: Callable[[Path], ChangeSink]
    read: Callable[[Path], list[Change]]
    # What a commit with something to write raises, of a sink on a device that takes nothing.
    break_: Callable[[Path, pytest.MonkeyPatch], ChangeSink]


class FilePrint(PrintSink):
    """Prints to the end of a file, which it owns."""

    def __init__(self, path: Path) -> None:
        self._own = path.open("ab")
        super().__init__(OutputFormat.JSON, self._own)

    def close(self) -> None:
        super().close()
        try:
            self._own.close()
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - Python tries to flush again


def read_printed(path: Path) -> list[Change]:
    """What a reader that knows committed transactions from others sees."""
    found: list[Change] = []
    pending: list[Change] = []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["action"] == "begin":
            pending, end = [], parse_lsn(event["end_lsn"])
        elif event["action"] == "commit":
            found += pending
        else:
            pending.append((end, event["position"]))
    return found


def read_parquet(path: Path) -> list[Change]:
    found: list[Change] = []
    for file in sorted(path.glob("*.parquet")):
        rows = pq.read_table(file, columns=["end_lsn", "position"]).to_pylist()
        found += [(row["end_lsn"], row["position"]) for row in rows]
    return found


def break_parquet(path: Path, patch: pytest.MonkeyPatch) -> ChangeSink:
    patch.setenv(failpoint.VARIABLE, "sink.before_commit=full")
    return ParquetSink(path)


KINDS = [
    Kind("print", FilePrint, read_printed, lambda *_: FilePrint(Path("/dev/full"))),
    Kind("parquet", ParquetSink, read_parquet, break_parquet),
]


@pytest.fixture(params=KINDS, ids=[kind.name for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "sink"


def test_every_sink_of_ours_is_in_this_suite_and_in_the_entry_points() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(project.read_text())["project"]["entry-points"]["millrace.sinks"]
    assert declared == OURS
    assert {kind.name for kind in KINDS} | DOCUMENT_KINDS == set(OURS)


def test_committed_changes_are_there_in_their_order(kind: Kind, place: Path) -> None:
    with closing(kind.open(place)) as sink:
        large = transaction(4)
        deliver(
            sink,
            [(200, [transaction(1), transaction(2)]), (400, [large.slice(0, 1), large.slice(1)])],
        )
        assert sink.position == (400 if sink.capabilities.commits_with_position else 0)
    assert kind.read(place) == expected(1, 2, 4)


def test_what_was_not_committed_is_delivered_again(kind: Kind, place: Path) -> None:
    with closing(kind.open(place)) as sink:
        deliver(sink, [(100, [transaction(1)])])
        sink.write_changes(transaction(2))
    with closing(kind.open(place)) as sink:
        start = choose_start(sink, None, 0)
        # A consumer that is not told where the sink is begins with what it is not sure of.
        again = [n for n in (1, 2, 3) if 100 * n > (start or 100)]
        deliver(sink, [(100 * n, [transaction(n)]) for n in again])
    found = kind.read(place)
    assert sorted(set(found)) == expected(1, 2, 3)
    if sink.capabilities.commits_with_position:
        assert found == expected(1, 2, 3)


def test_a_sink_with_a_position_drops_what_it_has(kind: Kind, place: Path) -> None:
    with closing(kind.open(place)) as sink:
        if not sink.capabilities.commits_with_position:
            pytest.skip("keeps no position")
        deliver(sink, [(200, [transaction(1), transaction(2)])])
        deliver(sink, [(100, [transaction(1)]), (300, [transaction(2), transaction(3)])])
    with closing(kind.open(place)) as sink:
        deliver(sink, [(200, [transaction(1), transaction(2)]), (300, [transaction(3)])])
        assert choose_start(sink, None, 0) == choose_start(sink, 100, 0) == 300
        with pytest.raises(ConfigError, match="would leave a gap"):
            choose_start(sink, 301, 0)
    assert kind.read(place) == expected(1, 2, 3)


CHILD = """
import sys
from pathlib import Path
from tests.unit.test_sinks import KINDS, transaction
from millrace.sink.delivery import choose_start, deliver

kind = next(one for one in KINDS if one.name == sys.argv[1])
sink = kind.open(Path(sys.argv[2]))
start = choose_start(sink, None, 0)
deliver(sink, [(100 * n, [transaction(n)]) for n in (1, 2, 3) if 100 * n > start])
sink.close()
"""


POINTS = ["sink.before_commit", "sink.after_commit"]


def test_every_failpoint_of_a_sink_is_killed_at() -> None:
    assert read_failpoints(("sink",)) == set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_around_a_commit_loses_nothing_and_doubles_nothing(
    point: str, kind: Kind, place: Path, tmp_path: Path
) -> None:
    if kind.name == "print":
        pytest.skip("has no step between write and commit")
    marker = tmp_path / "once"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        failpoint.VARIABLE: f"{point}=kill@{marker}",
        "PYTHONPATH": path,
    }

    def run() -> int:
        command = [sys.executable, "-c", CHILD, kind.name, str(place)]
        return subprocess.run(command, env=environment, check=False).returncode

    marker.touch()
    assert run() == -signal.SIGKILL
    assert kind.read(place) == (expected(1) if point == "sink.after_commit" else [])
    assert run() == 0
    assert kind.read(place) == expected(1, 2, 3)
    assert not [one for one in place.iterdir() if one.suffix != ".parquet"]


def test_batches_without_changes_and_commits_without_batches(kind: Kind, place: Path) -> None:
    with closing(kind.open(place)) as sink:
        deliver(sink, [(100, []), (200, [batch()])])
        sink.commit(200)
        deliver(sink, [(300, [transaction(3), batch()])])
    with closing(kind.open(place)) as sink:
        assert sink.position in (0, 300)
    assert kind.read(place) == expected(3)


ODD: list[dict[str, Any]] = [
    {"new": [("id", "1"), ("v", None), ("Odd \"name", "")], "key": []},
    {"operation": "update", "old": [("id", "1")], "new": [("id", "2"), ("v", "\U0001f600\n\0")]},
    {"operation": "update", "new": [("id", "1")], "unchanged": ["v"]},
    # A column that came in mid-stream.
    {"new": [("id", "3"), ("added", "x")], "relation_oid": 1 << 31},
    {"operation": "delete", "old": [("id", "1")], "new": None, "replica_identity": "index"},
    {"operation": "truncate", "new": None, "key": [], "options": ["cascade"]},
    {"new": [], "key": [], "replica_identity": "nothing"},
    {"operation": "message", "new": None, "prefix": "p", "content": b"\0\xff"}
    | dict.fromkeys(("schema", "table", "relation_oid", "key", "replica_identity")),
]  # fmt: skip


def test_every_kind_of_change_and_value_is_taken(kind: Kind, place: Path) -> None:
    rows = [row | {"position": at, "end_lsn": 100} for at, row in enumerate(ODD)]
    with closing(kind.open(place)) as sink:
        deliver(sink, [(100, [batch(*rows)])])
    assert kind.read(place) == [(100, at) for at in range(len(ODD))]
    if kind.name == "parquet":
        (file,) = place.glob("*.parquet")
        table = pq.read_table(file)
        assert table.schema.equals(SCHEMA, check_metadata=False)
        assert table.schema.metadata[VERSION_KEY] == b"1"
        assert table.to_pylist() == batch(*rows).to_pylist()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (SCHEMA.with_metadata(None), "no millrace.change_batch"),
        (SCHEMA.with_metadata({VERSION_KEY: b"2"}), "expected version 1 .* found 2"),
        (SCHEMA.append(pa.field("novel", pa.string())), "different are novel"),
        (SCHEMA.remove(SCHEMA.get_field_index("key")), "different are key"),
        (SCHEMA.set(0, pa.field("commit_lsn", pa.int32())), "types or order"),
    ],
)
def test_a_batch_of_another_layout_is_refused(
    schema: pa.Schema, said: str, kind: Kind, place: Path
) -> None:
    rows = [{name: value for name, value in ROW.items() if name in schema.names}]
    if schema.field(0).type == pa.int32():
        rows[0]["commit_lsn"] = 1
    with closing(kind.open(place)) as sink:
        with pytest.raises(FormatError, match=said):
            sink.write_changes(pa.RecordBatch.from_pylist(rows, schema))
        with pytest.raises(SinkError, match="failed earlier"):
            sink.commit(100)
    assert kind.read(place) == []


def test_a_failure_is_raised_and_nothing_is_taken_after_it(
    kind: Kind, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = kind.break_(place, monkeypatch)
    sink.write_changes(transaction(1))
    with pytest.raises(SinkError, match="No space left"):
        sink.commit(100)
    for step in (lambda: sink.write_changes(transaction(2)), lambda: sink.commit(200)):
        with pytest.raises(SinkError, match="failed earlier"):
            step()
    sink.close()
    sink.close()
    if place.exists():
        assert kind.read(place) == []


def test_a_directory_has_one_writer_and_leftovers_go(place: Path) -> None:
    with closing(ParquetSink(place)) as sink:
        with pytest.raises(SinkError, match="another process writes"):
            ParquetSink(place)
        sink.write_changes(transaction(1))
        assert (place / ".changes.tmp").exists()
        sink.commit(100)
        sink.write_changes(transaction(2))
    assert [one.name for one in place.iterdir()] == [f"changes-{0:016X}-{100:016X}.parquet"]
    (place / ".changes.tmp").write_bytes(b"torn")
    ParquetSink(place).close()
    assert len(list(place.iterdir())) == 1


def test_a_place_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SinkError, match=r"opening .* failed"):
        open_sink(f"parquet:{tmp_path / 'file'}")


def test_documents_are_printed_as_lines(place: Path) -> None:
    with closing(FilePrint(place)) as sink:
        sink.write_documents(documents((0, 17), ("a/1", 3, {"title": "é"}), ("b", 0, None)))
        sink.commit(0)
    assert [json.loads(line) for line in place.read_text().splitlines()] == [
        {"id": "a/1", "shard": 3, "version": [0, 17], "deleted": False, "body": {"title": "é"}},
        {"id": "b", "shard": 0, "version": [0, 17], "deleted": True},
    ]


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with two sinks of its own."""
    (tmp_path / "odd_sink.py").write_text(
        "class Only:\n"
        "    capabilities = None\n    position = 0\n    closed = False\n"
        "    def __init__(self, address): self.address = address\n"
        "    def commit(self, position): ...\n"
        "    def close(self): Only.closed = True\n"
        "    def write_documents(self, documents): ...\n"
        "def take_over(address): raise AssertionError\n"
    )
    facts = tmp_path / "odd_sink-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-sink\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[millrace.sinks]\nodd = odd_sink:Only\nprint = odd_sink:take_over\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("odd_sink", None)


@pytest.mark.usefixtures("other_package")
def test_other_packages_add_sinks_but_do_not_replace_ours() -> None:
    assert set(find_sinks()) == {"odd", *OURS}
    assert vars(open_sink("odd://host:1/x")) == {"address": "//host:1/x"}
    assert isinstance(open_sink("print:json"), PrintSink)
    with pytest.raises(ConfigError, match="takes documents, not changes"):
        open_change_sink("odd:")
    assert sys.modules["odd_sink"].Only.closed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere:x", "there is no sink 'nowhere'"),
        ("parquet", "needs a directory"),
        ("print:xml", "no format 'xml'"),
    ],
)
def test_a_sink_that_is_not_there_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        open_change_sink(text)
    assert raised.value.hint


def test_a_folder_takes_the_changes_of_one_origin_only(tmp_path: Path) -> None:
    """Its position would hide changes of any other."""
    for _ in range(2):
        with closing(ParquetSink(tmp_path)) as sink:
            sink.begin("stream a, all tables")
            sink.commit(sink.position + 5)
    with closing(ParquetSink(tmp_path)) as sink, pytest.raises(ConfigError, match="stream a"):
        sink.begin("stream b, all tables")
    (tmp_path / ".origin").unlink()
    with closing(ParquetSink(tmp_path)) as sink, pytest.raises(ConfigError, match="unknown origin"):
        sink.begin("stream a, all tables")
