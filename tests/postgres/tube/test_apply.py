"""The database becomes what tube.toml says: all of it or, where it does not allow it, nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.tube.tubes import TubeDatabase
from tests.fixtures.wait import wait_for
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError, PreflightError
from millrace.postgres.wire.connect import connect
from millrace.tube.apply import apply_changes, plan_changes
from millrace.tube.config import read_tube_file

TABLES = (
    "CREATE TABLE article (id bigint PRIMARY KEY, slug text UNIQUE, region int, hidden bool)",
    "CREATE SCHEMA sh0042",
    "CREATE TABLE sh0042.item (a int, b text, PRIMARY KEY (a, b))",
)
FIRST = """
[tubes.articles]
partitions = 2
predicate = "region IS NOT NULL"
[tubes.articles.tables."public.article"]
shard = 1
[tubes.items.tables."sh0042.item"]
"""
SECOND = """
[tubes.articles]
partitions = 3
[tubes.articles.tables."public.article"]
key = "slug"
routing = "region % 8"
predicate = "hidden IS NOT TRUE"
[tubes.items]
"""


@pytest.fixture
def apply(
    tubes_16: TubeDatabase, in_this_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """`millrace tube apply` of a text."""
    monkeypatch.setenv("MILLRACE_SOURCE", tubes_16.uri)
    tubes_16.run(*TABLES)

    def run(text: str, *options: str) -> dict[str, Any]:
        path = tmp_path / "tube.toml"
        path.write_text(text)
        arguments = ["tube", "apply", "--config", str(path), "--json", *options]
        result = CliRunner().invoke(app, arguments)
        if result.exception is not None:
            raise result.exception
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return run


def state(tubes: TubeDatabase) -> list[Any]:
    return tubes.rows(
        "SELECT u.name, u.partitions, u.predicate, t.tbl::text, t.shard, t.key, t.routing,"
        " t.predicate FROM tube._tube_tubes u LEFT JOIN tube._tube_tables t ON t.tube = u.id"
        " ORDER BY 1, 4"
    )


def test_a_dry_run_shows_the_steps_that_are_done_then_and_nothing_is_left_to_do(
    tubes_16: TubeDatabase, apply: Callable[..., dict[str, Any]]
) -> None:
    planned = apply(FIRST, "--dry-run")
    assert state(tubes_16) == []
    done = apply(FIRST)
    assert (planned["steps"], planned["dry_run"]) == (done["steps"], True)
    assert [(one["tube"], one["table"], one["action"]) for one in done["steps"]] == [
        ("articles", None, "create"),
        ("articles", "public.article", "attach"),
        ("items", None, "create"),
        ("items", "sh0042.item", "attach"),
    ]
    assert done["steps"][3]["words"] == "attach it: key a, b, shard 42"
    assert state(tubes_16) == [
        ("articles", 2, "region IS NOT NULL", "article", 1, ["id"], None, ""),
        ("items", 1, "", "sh0042.item", 42, ["a", "b"], None, ""),
    ]
    assert apply(FIRST)["steps"] == []


def test_what_the_file_changes_is_changed_and_what_it_does_not_name_is_detached(
    tubes_16: TubeDatabase, apply: Callable[..., dict[str, Any]]
) -> None:
    apply(FIRST)
    tubes_16.run(
        "SELECT tube_ensure_exists('other')",
        "INSERT INTO article VALUES (7, 'seven', 1, false)",
        "INSERT INTO sh0042.item VALUES (1, 'x')",
    )
    planned = apply(SECOND, "--dry-run")
    done = apply(SECOND)
    assert planned["steps"] == done["steps"]
    assert done["left_alone"] == ["other"]
    words = {(one["tube"], one["table"]): one["words"] for one in done["steps"]}
    assert words["articles", None] == (
        "change partitions from 2 to 3, predicate from region IS NOT NULL to none"
    )
    assert words["articles", "public.article"].startswith(
        "change routing from none to region % 8, shard from 1 to 0,"
        " predicate from none to hidden IS NOT TRUE, key from id to slug; what waits"
    )
    assert words["items", "sh0042.item"].startswith("detach it: what is touched is not recorded")
    tubes_16.run(
        "INSERT INTO article VALUES (8, 'eight', 11, false), (9, 'nine', 1, true)",
        "INSERT INTO sh0042.item VALUES (2, 'x')",
    )
    # Pods with the old key belong to no table any more; nobody looks for slug 7.
    (old, new) = tubes_16.rows("SELECT tbl, ids, keys, shard FROM tube.articles ORDER BY seq")
    attached = tubes_16.rows("SELECT id FROM tube._tube_tables")
    assert (old[1], old[0] in attached) == ([7], False)
    assert (new[0] in attached, new[2], new[3]) == (True, ["eight"], 3)
    assert tubes_16.rows("SELECT count(*) FROM tube.items") == [1]
    assert apply(SECOND)["steps"] == []
    # The tube's predicate goes first, so that those of its new tables compile with it.
    apply(FIRST)
    assert apply(FIRST)["steps"] == []


def test_every_thing_that_the_database_does_not_allow_is_in_one_error_and_nothing_is_changed(
    tubes_16: TubeDatabase, apply: Callable[..., dict[str, Any]]
) -> None:
    tubes_16.run(
        "CREATE TABLE tube.taken (id int)",
        "CREATE VIEW seen AS SELECT * FROM article",
        "CREATE TABLE keyless (n int)",
    )
    apply(FIRST)
    before = state(tubes_16)
    with pytest.raises(PreflightError) as caught:
        apply(
            """
[tubes.taken]
[tubes.articles]
predicate = "no_such > 1"
partitions = 5
[tubes.articles.tables."public.article"]
routing = "random() * 8"
[tubes.articles.tables."public.none"]
[tubes.articles.tables."public.seen"]
[tubes.articles.tables."public.keyless"]
[tubes.items]
predicate = "a + "
[tubes.items.tables."sh0042.item"]
key = ["a", "c"]
[tubes.new.tables."public.article"]
[tubes.new.tables."sh0042.item"]
predicate = "a / b > 1"
"""
        )
    assert caught.value.exit_code == 3
    found = [f"{one['side']}: {one['what']}" for one in caught.value.facts["problems"]]
    wanted = [
        ("tube taken: ", "exists and is not a tube"),
        ("tube articles, table public.article: ", "The routing is volatile: it calls random"),
        ("tube articles, table public.article: ", 'column "no_such" does not exist'),
        ("tube articles, table public.none: ", "there is no such table"),
        ("tube articles, table public.seen: ", "it is a tube, or no table"),
        ("tube articles, table public.keyless: ", 'no column "id" and no primary key'),
        ("tube articles, table public.keyless: ", "Cannot infer a shard"),
        ("tube articles, table public.keyless: ", 'column "no_such" does not exist'),
        ("tube items, table sh0042.item: ", 'no column "c"'),
        ("tube items, table sh0042.item: ", "The predicate does not compile"),
        ("tube new, table public.article: ", "Cannot infer a shard"),
        ("tube new, table sh0042.item: ", "The predicate does not compile"),
    ]
    for one, (place, said) in zip(found, wanted, strict=True):
        assert one.startswith(place)
        assert said in one
    assert state(tubes_16) == before
    assert tubes_16.rows("SELECT count(*) FROM pg_class WHERE relname ~ '^_tube_check'") == [0]


def test_a_role_that_owns_neither_table_nor_schema_is_told_before_anything_happens(
    tubes_16: TubeDatabase, apply: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    role = f"stranger_{tubes_16.name}"
    tubes_16.run(
        f"CREATE ROLE {role} LOGIN",
        f"GRANT ALL ON SCHEMA tube TO {role}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA tube TO {role}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA tube TO {role}",
    )
    uri = tubes_16.cluster.uri(tubes_16.name, user=role)
    try:
        with pytest.raises(PreflightError, match="is not its owner, and can't attach it"):
            apply(FIRST, "--source", uri)
        assert state(tubes_16) == []
    finally:
        tubes_16.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_table_that_is_busy_is_waited_for_a_little_and_then_again(
    tubes_16: TubeDatabase, tmp_path: Path
) -> None:
    tubes_16.run(*TABLES)
    path = tmp_path / "tube.toml"
    path.write_text(FIRST)
    errors: list[MillraceError] = []

    def work() -> None:
        try:
            with connect(Dsn.parse(tubes_16.uri), "test apply") as session:
                changes = plan_changes(session, read_tube_file(path))
                apply_changes(session, changes, lambda step: None)
        except MillraceError as error:
            errors.append(error)

    waiting = (
        "SELECT count(*) FROM pg_locks WHERE relation = 'article'::regclass AND NOT granted"
        " AND mode = 'ShareRowExclusiveLock'"
    )
    with closing(tubes_16.connect(autocommit=False)) as writer:
        writer.execute("INSERT INTO article VALUES (1, 'one', 1, false)")
        thread = threading.Thread(target=work)
        thread.start()
        try:
            wait_for(lambda: tubes_16.rows(waiting) == [1])
            # Writers that came later are let through.
            wait_for(lambda: tubes_16.rows(waiting) == [0])
            writer.commit()
        finally:
            writer.rollback()
            thread.join()
    assert errors == []
    assert len(state(tubes_16)) == 2
