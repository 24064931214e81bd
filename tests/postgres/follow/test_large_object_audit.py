"""Large objects while a stream follows: logical decoding leaves them out, and that is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.conftest import NoDisplay
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.auditing import execute, found, run_cutover
from tests.fixtures.stream.followed import Followed, open_followed

from millrace.cli.follow import print_follow
from millrace.clone.directory import catalog_path
from millrace.clone.kept_view import keep_skipped_large_objects
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.clone.step import Step
from millrace.config.dsn import Dsn
from millrace.errors import MismatchError
from millrace.follow.audit import closing
from millrace.follow.audit.finding import LARGE_OBJECTS as LABEL
from millrace.follow.audit.finding import FindingKind
from millrace.follow.audit.large_objects import count_differences
from millrace.route import Route
from millrace.workdir.store import Store

OBJECTS = """
SELECT lo_from_bytea(5001, 'one'), lo_from_bytea(5002, 'two'), lo_from_bytea(5003, '');
SELECT lo_put(5003, 3000000, 'after a hole');
-- Before the stream begins, so that nobody is accused of it.
SELECT pg_stat_force_next_flush();
"""
WRITES = (
    "SELECT lo_put(5001, 0, 'ONE')",
    "SELECT lo_unlink(5002)",
    "SELECT lo_from_bytea(6001, 'new')",
)


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Followed]:
    directory = tmp_path / "work"
    with open_followed(source_db, target_db, directory, DirectEngine(), more=OBJECTS) as opened:
        yield opened


def test_large_objects_that_are_written_are_found_and_can_be_accepted(
    followed: Followed, capsys: pytest.CaptureFixture[str]
) -> None:
    # Reading them is no crime.
    execute(followed.source, "SELECT lo_get(5001)", "INSERT INTO seat (id, place) VALUES (99, 99)")
    assert found(followed) == {}
    assert run_cutover(followed).is_good

    execute(followed.source, *WRITES)
    result = followed.follow()
    assert [(one.table, one.kind) for one in result.unfollowed] == [(LABEL, FindingKind.UNPROVED)]
    with pytest.raises(MismatchError, match=re.escape(LABEL)) as refused:
        print_follow(result, as_json=True, quiet=False)
    assert refused.value.exit_code == 9
    assert "copy large-objects" in refused.value.hint
    told = json.loads(capsys.readouterr().out)["unfollowed"]
    assert [(one["table"], one["kind"]) for one in told] == [(LABEL, "unproved")]
    accepted = followed.follow(accepted=frozenset({LABEL}))
    print_follow(accepted, as_json=False, quiet=False)
    assert f"unproved: {LABEL}: large objects are not followed" in capsys.readouterr().out

    # At the cut-over both sides are looked at.
    differing = run_cutover(followed)
    assert (differing.is_good, differing.is_equal) == (False, False)
    assert [(one.table, one.kind, one.reason) for one in differing.unfollowed] == [
        (
            LABEL,
            FindingKind.NOT_FOLLOWED,
            "large objects are not followed, and these differ: 1 in contents (the first is 5001), "
            "1 only on the source (the first is 6001), 1 only on the target (the first is 5002)",
        )
    ]
    assert run_cutover(followed, accepted=frozenset({LABEL})).is_good
    # The remedy that the hint names.
    execute(followed.target, "SELECT lo_unlink(oid) FROM pg_largeobject_metadata")
    copy = CloneSettings(
        Route(
            Dsn.parse(followed.source),
            Dsn.parse(followed.target),
            followed.directory.with_name("objects"),
        ),
        steps=frozenset({Step.LARGE_OBJECTS}),
    )
    clone(copy, followed.engine, NoDisplay())
    equal = run_cutover(followed)
    assert (equal.is_good, equal.is_equal, equal.unfollowed) == (True, True, ())


def test_counters_that_were_lost_accuse_only_where_there_are_large_objects(
    followed: Followed,
) -> None:
    execute(followed.source, "SELECT pg_stat_reset_single_table_counters(2613)")
    assert found(followed) == {LABEL: FindingKind.UNPROVED}
    equal = run_cutover(followed)
    assert (equal.is_good, equal.unfollowed) == (True, ())
    for uri in (followed.source, followed.target):
        execute(uri, "SELECT lo_unlink(oid) FROM pg_largeobject_metadata")
    assert found(followed) == {}


def test_a_session_that_is_not_done_may_have_written_large_objects(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "SETTLE_SECONDS", 1.0)  # it is not idle, however long one waits
    with psycopg.connect(followed.source, autocommit=True) as session:
        session.execute("INSERT INTO seat (id, place) VALUES (99, 99)")  # counters go by the second
        session.execute("SELECT lo_put(5001, 0, 'ONE')")
        session.execute("BEGIN")
        session.execute("SELECT")
        # No counter has moved yet; there is no time to wait for it.
        assert [one.kind for one in run_cutover(followed).unfollowed] == [FindingKind.NOT_FOLLOWED]
        assert found(followed) == {LABEL: FindingKind.UNPROVED}


def test_large_objects_that_the_clone_left_out_are_not_looked_at(followed: Followed) -> None:
    execute(followed.source, *WRITES)
    store = Store(catalog_path(followed.directory))
    keep_skipped_large_objects(store, is_skipped=True)
    store.close()
    assert found(followed) == {}
    assert run_cutover(followed).is_good


def test_large_objects_are_compared_in_several_batches(source_db: str, target_db: str) -> None:
    for uri in (source_db, target_db):
        execute(uri, "SELECT lo_from_bytea(n::oid, n::text::bytea) FROM generate_series(1, 20) n")
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    assert not count_differences(source, target, objects_per_batch=3)
    execute(target_db, "SELECT lo_from_bytea(4294967295::oid, '')", "SELECT lo_unlink(20)")
    execute(source_db, "SELECT lo_put(4, 0, 'x')")
    found = count_differences(source, target, objects_per_batch=3)
    assert found == {
        "in contents": (1, 4),
        "only on the source": (1, 20),
        "only on the target": (1, 4294967295),
    }
