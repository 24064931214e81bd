"""What people get wrong: one clear error with a hint and a stable exit code, no pod lost, and no
write of the application that fails because of us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import ThreadEngine
from tests.fixtures.pooler import open_pooler
from tests.fixtures.tube.tube_source import ENRICH, TubeSource, fill
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.errors import MillraceError
from millrace.postgres.program.embedded import Cluster, open_cluster

SETUP = (
    "SELECT tube_ensure_exists('t', 2)",
    "SELECT tube_table_attach('t', 'article', 1)",
    "CREATE TABLE loose (id int PRIMARY KEY)",
    "CREATE VIEW seen AS SELECT * FROM loose",
    "CREATE TABLE keyless (a int)",
    "CREATE TABLE picky (id bigint PRIMARY KEY, title text CHECK (title <> 'title 2'), stars int)",
    "CREATE TABLE narrow (id bigint PRIMARY KEY, title text)",
    "CREATE TABLE unkeyed (id bigint, title text, stars int)",
)
NOWHERE = "postgresql://postgres@127.0.0.1:1/nowhere?table=docs"


@dataclass(frozen=True)
class Case:
    """A command line, and what is said about it."""

    name: str
    command: str
    code: int
    said: str
    hint: str


def run(enrich: str = ENRICH, sink: str = "{sink}", more: str = "--until-empty") -> str:
    return f"run --tube t --enrich|{enrich}|--sink|{sink}| {more}"


CASES = [
    Case("run: no tube", "run --tube no --enrich|x|--sink|{sink}|", 2, "no tube no", "tube list"),
    Case("verify: no tube", "verify --tube no --enrich|x|--sink|{sink}|", 2, "no tube no", "list"),
    Case("drop: no tube", "drop no", 2, "no tube no", "tube list"),
    Case("attach: no tube", "attach no article --shard 1", 2, "no tube no", "tube list"),
    Case("backfill: no tube", "backfill no article", 2, "no tube no", "tube list"),
    Case("touch: no tube", "touch no article 1", 2, "no tube no", "tube list"),
    Case("dead: no tube", "dead no", 2, "no tube no", "tube list"),
    Case("retry: no tube", "retry no", 2, "no tube no", "tube list"),
    Case("no schema", "list --schema no", 3, "not installed in schema no", "tube install"),
    Case("attach: no table", "attach t nothing --shard 1", 2, "nothing", "schema"),
    Case("backfill: no table", "backfill t nothing", 2, "nothing", "schema"),
    Case("touch: no table", "touch t nothing 1", 2, "nothing", "schema"),
    Case("detach: no table", "detach t loose", 2, "not attached", "Attach it"),
    Case("backfill: loose table", "backfill t loose", 2, "not attached", "Attach it"),
    Case("attach: a view", "attach t seen --shard 1", 2, "not a table", "table"),
    Case("attach: no key", "attach t keyless --shard 1", 2, "no primary key", "Name its key"),
    Case("attach: no column", "attach t loose --shard 1 --key no", 2, 'no column "no"', "column"),
    Case("attach: no shard", "attach t loose", 2, "Cannot infer a shard", "Pass the shard"),
    Case("order: no column", "backfill t article --order no", 2, "no", "column"),
    Case(
        "predicate: no column",
        "attach t loose --shard 1 --predicate|no > 1|",
        2,
        "predicate does not compile",
        "expression",
    ),
    Case(
        "predicate: syntax",
        "attach t loose --shard 1 --predicate|id >|",
        2,
        "predicate does not compile",
        "expression",
    ),
    Case(
        "predicate of the tube: no column",
        "create t --predicate|no|",
        2,
        "predicate does not compile",
        "expression",
    ),
    Case(
        "predicate: volatile",
        "attach t loose --shard 1 --predicate|random() < 0.5|",
        2,
        "predicate is volatile: it calls random",
        "same row",
    ),
    Case("routing: no column", "attach t loose --routing no", 2, "routing does not compile", "SQL"),
    Case(
        "routing: volatile",
        "attach t loose --routing|(random() * 9)::int|",
        2,
        "routing is volatile",
        "same row",
    ),
    Case(
        "routing: no number",
        "attach t loose --routing|now()|",
        2,
        "routing does not compile",
        "expression",
    ),
    Case("partitions: none", "create t --partitions 0", 2, "partitions", ""),
    Case("workers", run(more="--workers 3"), 2, "3 workers are more than", "--workers 2"),
    Case("enrichment: no keys", run("SELECT 1 AS id"), 2, r"parameters none", "ANY"),
    Case(
        "enrichment: syntax",
        run("SELEC id FROM article WHERE id = ANY($1)"),
        2,
        "does not compile",
        "SELECT",
    ),
    Case(
        "enrichment: no column",
        run("SELECT id, no FROM article WHERE id = ANY($1)"),
        2,
        'does not compile: column "no"',
        "SELECT",
    ),
    Case("enrichment: no module", run("python:nowhere:f"), 2, "can't be imported", "PYTHONPATH"),
    Case("sink: no kind", run(sink="void:x"), 2, "no sink 'void'", "known are"),
    Case("sink: no table", run(sink="{sink}_no"), 8, "no table docs_no", "create it"),
    Case("sink: no column", run(sink="{uri}&table=narrow"), 8, "no column stars", "add it"),
    Case("sink: no key", run(sink="{uri}&table=unkeyed"), 8, "no unique index", "PRIMARY KEY"),
    Case("sink: unreachable", run(sink=NOWHERE), 5, "can't connect", "check the host"),
    Case("sink: no folder", run(sink="jsonl:{tmp}/no/file"), 8, "No such file", "disk"),
    Case("sink: changes", run(sink="parquet:{tmp}/lake"), 2, "changes, not documents", "jsonl"),
]


@pytest.fixture(scope="module")
def shared(source_cluster: Cluster) -> Iterator[TubeSource]:
    """For commands that are refused, and so leave it as it is."""
    uri = source_cluster.create_database("tube_bad_input")
    found = TubeSource(uri)
    with closing(found.connection):
        found.run(*SETUP)
        fill(found, 3)
        yield found
    source_cluster.drop_database("tube_bad_input")


@pytest.fixture
def source(source_db: str) -> Iterator[TubeSource]:
    found = TubeSource(source_db)
    with closing(found.connection):
        found.run(*SETUP)
        fill(found, 3)
        yield found


def invoke(source: str, command: str, tmp_path: Path, **names: str) -> MillraceError | SystemExit:
    """What a command line ends with; `|` stands around words with spaces."""
    pieces = command.split("|")
    words: list[str] = []
    for at, piece in enumerate(pieces):
        words += [piece.format(tmp=tmp_path, **names)] if at % 2 else piece.split()
    more = ["--dir", str(tmp_path / "run")] if words[0] in ("run", "verify") else []
    result = CliRunner().invoke(app, ["tube", *words, "--source", source, *more])
    assert isinstance(result.exception, MillraceError | SystemExit), result.exception
    if isinstance(result.exception, SystemExit):
        result.exception.args = (result.output,)
    return result.exception


@pytest.fixture
def commands(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Spark."""
    monkeypatch.setattr("millrace.cli.tube.run.Engine", ThreadEngine)
    monkeypatch.setattr("millrace.cli.tube.verify.Engine", ThreadEngine)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("commands")
def test_a_mistake_is_one_clear_error_and_changes_nothing(
    shared: TubeSource, case: Case, tmp_path: Path
) -> None:
    pods = shared.rows("SELECT seq, op, ids FROM t ORDER BY seq")
    found = invoke(shared.uri, case.command, tmp_path, sink=shared.sink(), uri=shared.uri)
    code = getattr(found, "exit_code", getattr(found, "code", None))
    said = str(found)
    assert (code, case.said in said) == (case.code, True), (code, said)
    assert case.hint in getattr(found, "hint", ""), getattr(found, "hint", "")
    assert shared.rows("SELECT seq, op, ids FROM t ORDER BY seq") == pods
    # The application goes on.
    shared.run("UPDATE article SET stars = 1 WHERE false", "INSERT INTO loose VALUES (1)")
    shared.run("DELETE FROM loose")


@pytest.mark.parametrize(
    ("enrich", "table", "ids", "said"),
    [
        ("SELECT id + 1 AS id, title, stars FROM article WHERE id = ANY($1)", "docs", 3, "asked"),
        (
            "SELECT a.id, b.title, 1 AS stars FROM article a, article b WHERE a.id = ANY($1)",
            "docs",
            3,
            "a key twice",
        ),
        (ENRICH, "picky", 1, "picky_title_check"),
    ],
    ids=["other keys", "a key twice", "a document is refused"],
)
@pytest.mark.usefixtures("commands")
def test_ids_that_fail_are_dead_letters_and_the_others_arrive(
    source: TubeSource, tmp_path: Path, enrich: str, table: str, ids: int, said: str
) -> None:
    sink = source.sink().replace("docs", table)
    found = invoke(source.uri, run(enrich, sink, "--until-empty --tries 1"), tmp_path)
    assert getattr(found, "exit_code", None) == 8
    assert f"{ids} ids could not be delivered" in str(found)
    assert "tube retry t" in getattr(found, "hint", "")
    assert source.rows(f"SELECT count(*) FROM {table}") == [(3 - ids,)]
    errors = source.rows("SELECT error FROM tube._tube_dead")
    assert len(errors) == ids
    assert all(said in error for (error,) in errors)


def test_rows_in_another_order_than_asked_for_are_as_good(source: TubeSource) -> None:
    source.run("UPDATE article SET title = 'n' || id")
    source.deliver(enrich=f"{ENRICH} ORDER BY id % 2, id DESC")
    source.assert_equal()


COMMANDS = (
    "install",
    "list",
    "stats",
    "epoch",
    "create other",
    "attach t loose --shard 1",
    "backfill t article",
    "touch t article 1",
    run(),
    f"verify --tube t --enrich|{ENRICH}|--sink|{{sink}}|",
)


@pytest.mark.usefixtures("commands")
def test_a_standby_is_refused_by_every_command(tmp_path: Path) -> None:
    with open_cluster(16) as primary:
        source = TubeSource(primary.create_database("s"))
        with closing(source.connection):
            source.run(*SETUP)
        with open_cluster(16, base_backup_of=primary) as standby:
            for command in (*COMMANDS, "retry t", "discard t"):
                found = invoke(standby.uri("s"), command, tmp_path, sink=source.sink())
                assert getattr(found, "exit_code", None) == 3, (command, found)
                assert "the server is a standby" in str(found)
                assert getattr(found, "hint", "") == "connect to its primary"


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.usefixtures("commands")
def test_a_pooler_in_transaction_mode_is_refused(
    source: TubeSource, source_cluster: Cluster, tmp_path: Path, servers: int
) -> None:
    """Also if, with nobody else about, it gives us the same server each time."""
    socket = source_cluster.socket_dir / f".s.PGSQL.{source_cluster.port}"
    database = psycopg.conninfo.conninfo_to_dict(source.uri)["dbname"]
    pods = source.pods()
    with open_pooler(socket, str(database), servers=servers) as uri:
        for command in COMMANDS:
            found = invoke(uri, command, tmp_path, sink=source.sink())
            assert getattr(found, "exit_code", None) == 5, (command, found)
            assert "a pooler in transaction mode" in str(found)
            assert "session mode" in getattr(found, "hint", "")
    assert source.pods() == pods
