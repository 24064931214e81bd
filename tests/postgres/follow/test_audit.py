"""The closing audit of a stream, on real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.auditing import execute, found, run_cutover
from tests.fixtures.stream.followed import Followed, open_followed
from tests.fixtures.stream.syncing import request, sync_alone

from millrace.cli.follow import print_follow
from millrace.config.dsn import Dsn
from millrace.errors import MismatchError
from millrace.filter.exclusions import Exclusions
from millrace.follow.audit import closing
from millrace.follow.audit.finding import FindingKind
from millrace.follow.audit.source_state import read_source_tables
from millrace.postgres.wire.connect import connect

MORE = """
CREATE TABLE log (line text);
INSERT INTO log VALUES ('a'), ('b');
CREATE TABLE kept (id int PRIMARY KEY);
CREATE TABLE base (id int PRIMARY KEY);
CREATE TABLE part (id int, day int, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);
CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (1) TO (2);
CREATE UNLOGGED TABLE cache (id int PRIMARY KEY);
INSERT INTO cache VALUES (1);
"""


@pytest.fixture
def followed(source_db: str, target_db: str, tmp_path: Path) -> Iterator[Followed]:
    directory = tmp_path / "work"
    with open_followed(source_db, target_db, directory, DirectEngine(), more=MORE) as opened:
        yield opened


def test_changes_that_are_not_followed_are_found_and_can_be_accepted(
    followed: Followed, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(
        followed.source,
        "INSERT INTO log VALUES ('c')",
        "INSERT INTO kept VALUES (1), (2)",
        "DELETE FROM kept WHERE id = 1",
        "CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (2) TO (3)",
    )
    execute(followed.target, "CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (2) TO (3)")
    execute(followed.source, "INSERT INTO part VALUES (1, 2)", "UPDATE part SET id = 2")
    assert found(followed) == {}
    execute(followed.source, "UPDATE log SET line = 'x' WHERE line = 'a'", "DELETE FROM cache")
    unproved = {"public.log": FindingKind.UNPROVED, "public.cache": FindingKind.UNPROVED}
    assert found(followed) == unproved
    result = followed.follow(accepted=frozenset({"public.log"}))
    assert [one.table for one in result.refused] == ["public.cache"]
    with pytest.raises(MismatchError, match=r"1 tables are not proved to be equal: public\.cache"):
        print_follow(result, as_json=True, quiet=False)
    told = json.loads(capsys.readouterr().out)["unfollowed"]
    assert [(one["table"], one["kind"], one["is_accepted"]) for one in told] == [
        ("public.cache", "unproved", False),
        ("public.log", "unproved", True),
    ]
    with pytest.raises(MismatchError):
        print_follow(result, as_json=False, quiet=False)
    assert "unproved: public.log: its updates and deletes" in capsys.readouterr().out
    print_follow(
        followed.follow(accepted=frozenset({"public.log", "public.cache"})),
        as_json=False,
        quiet=False,
    )

    # A comparison decides: accepted or not, and what is equal is acquitted.
    differing = run_cutover(followed)
    assert not differing.is_good
    assert {one.table for one in differing.unfollowed} == {"public.log", "public.cache"}
    accepted = run_cutover(followed, accepted=frozenset({"public.log", "public.cache"}))
    assert (accepted.is_good, accepted.is_equal) == (True, False)
    execute(followed.target, "UPDATE log SET line = 'x' WHERE line = 'a'", "DELETE FROM cache")
    equal = run_cutover(followed)
    assert (equal.is_good, equal.unfollowed) == (True, ())


def test_counters_that_were_reset_acquit_nobody_but_what_is_copied_again(
    followed: Followed,
) -> None:
    execute(
        followed.source,
        "UPDATE log SET line = 'x'",
        "SELECT pg_stat_reset_single_table_counters('account'::regclass)",
    )
    unproved = {"public.log": FindingKind.UNPROVED, "public.cache": FindingKind.UNPROVED}
    assert found(followed) == unproved
    request(followed, "log")
    followed.set_endpos(None)
    sync_alone(followed)
    # The remedy: from the new copy on, nothing was done to the table that is not followed.
    assert found(followed).keys() == {"public.cache"}
    execute(followed.source, "DELETE FROM log WHERE line = 'x'")
    assert found(followed) == unproved


def test_tables_that_are_not_the_ones_that_were_copied_are_found(followed: Followed) -> None:
    execute(
        followed.source,
        "DROP TABLE kept",
        "CREATE TABLE kept (id int PRIMARY KEY)",
        "DROP TABLE log",
        "CREATE SCHEMA aside",
        "CREATE TABLE aside.other (id int PRIMARY KEY)",
    )
    left = Exclusions(tables=frozenset({("aside", "other")}))
    assert found(followed, left=left) == {
        "public.kept": FindingKind.RECREATED,
        "public.log": FindingKind.DROPPED,
    }


def test_tables_that_got_another_name_or_another_root_are_found(followed: Followed) -> None:
    execute(
        followed.source,
        "ALTER TABLE kept RENAME TO held",
        "ALTER TABLE part DETACH PARTITION part_1",
        "TRUNCATE cache",
    )
    assert found(followed) == {
        "public.held": FindingKind.UNPROVED,
        "public.kept": FindingKind.DROPPED,
        "public.part": FindingKind.UNPROVED,
        "public.part_1": FindingKind.UNPROVED,
        "public.cache": FindingKind.UNPROVED,
    }


def test_a_session_in_a_transaction_may_have_counters_in_hand(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "SETTLE_SECONDS", 1.0)  # it is not idle, however long one waits
    with psycopg.connect(followed.source, autocommit=True) as session:
        session.execute("INSERT INTO kept VALUES (1)")  # writes the counters down, for a second
        session.execute("UPDATE log SET line = 'changed'")
        session.execute("BEGIN")
        session.execute("SELECT")
        assert found(followed)["public.log"] is FindingKind.UNPROVED


def test_columns_whose_defaults_each_server_computes_are_found(followed: Followed) -> None:
    execute(followed.source, "INSERT INTO kept VALUES (1)", "INSERT INTO base VALUES (1)")
    assert found(followed) == {}
    for uri in (followed.target, followed.source):
        execute(
            uri,
            "ALTER TABLE seat ADD token uuid DEFAULT gen_random_uuid()",
            "ALTER TABLE account ADD seen timestamptz DEFAULT now()",
            "ALTER TABLE transfer ADD number serial",
            # The same on both sides: a constant, none at first, a column of new rows only.
            "ALTER TABLE kept ADD kind text DEFAULT 'plain'::text, ADD size int DEFAULT -1",
            "ALTER TABLE base ADD token uuid",
            "ALTER TABLE base ALTER token SET DEFAULT gen_random_uuid()",
        )
    names = {"public.seat", "public.account", "public.transfer"}
    assert found(followed) == dict.fromkeys(names, FindingKind.UNPROVED)
    assert found(followed, accepted=frozenset(names)) == dict.fromkeys(names, FindingKind.UNPROVED)
    differing = run_cutover(followed)
    assert {one.label for one in differing.different} == {"public.seat", "public.account"}
    # Nothing was in it: equal, however its column came to be.
    assert {one.table for one in differing.unfollowed} == {"public.seat", "public.account"}


def test_columns_that_are_no_longer_the_ones_that_were_copied_are_found(followed: Followed) -> None:
    execute(
        followed.source,
        "INSERT INTO kept VALUES (1)",
        "ALTER TABLE seat ALTER place TYPE bigint USING place * 100",
        "ALTER TABLE transfer DROP note, ADD note text",
        # Nothing of the rows is changed by these.
        "ALTER TABLE kept ADD note varchar(5)",
        "VACUUM FULL kept",
        "ALTER TABLE log ALTER line TYPE varchar",
    )
    assert found(followed) == dict.fromkeys(
        ["public.seat", "public.transfer"], FindingKind.UNPROVED
    )


def test_what_publications_of_any_shape_send_of_each_table_is_known(source_db: str) -> None:
    execute(
        source_db,
        MORE,
        "CREATE SCHEMA aside",
        "CREATE TABLE aside.other (id int)",
        "CREATE TABLE aside.sub PARTITION OF part FOR VALUES FROM (5) TO (6)",
        "CREATE TABLE heir () INHERITS (base)",
        "CREATE PUBLICATION mine FOR TABLE part, ONLY base",
        "CREATE PUBLICATION mine_insert_only FOR TABLES IN SCHEMA aside WITH (publish = 'insert')",
        "CREATE PUBLICATION theirs FOR ALL TABLES",
    )

    def sent(plugin: str = "pgoutput") -> dict[str, tuple[bool, bool, bool]]:
        with connect(Dsn.parse(source_db), "test") as connection:
            tables = read_source_tables(connection, "mine", plugin).values()
        return {t.name: (t.sends_inserts, t.sends_updates, t.is_for_all) for t in tables}

    both, inserts, nothing = (True, True, False), (True, False, False), (False, False, False)
    assert sent() == {
        "part_1": both,
        "sub": both,
        "base": both,
        "other": inserts,
        "heir": nothing,
        "log": nothing,
        "kept": nothing,
        "cache": nothing,
    }
    execute(
        source_db,
        "DROP PUBLICATION mine_insert_only",
        "CREATE PUBLICATION mine_insert_only FOR ALL TABLES WITH (publish = 'insert, truncate')",
    )
    found = sent()
    assert (found["part_1"], found["log"], found["cache"]) == (
        (True, True, True),
        (True, False, True),
        nothing,
    )
    # The text plugins need no publications.
    found = sent("test_decoding")
    assert (found["kept"], found["log"]) == ((True, True, True), (True, False, True))
