"""The closing audit's judgement, without servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.apply.table_state import SyncState, TableState
from millrace.filter.exclusions import Exclusions
from millrace.follow.audit.baseline import STREAM, Baseline
from millrace.follow.audit.changed_columns import iter_changed_columns
from millrace.follow.audit.closing import Judge
from millrace.follow.audit.finding import Finding, FindingKind, acquit
from millrace.follow.audit.source_state import SourceCounters, SourceTable, TableCounters
from millrace.workdir.followed_table import FollowedTable

COLUMNS = ((1, "id", "integer"), (2, "v", "text"))
WHOLE = SourceTable(
    1, "public", "whole", 1, "public", "whole", True, 100, True, True, False, COLUMNS
)
KEYLESS = replace(WHOLE, oid=2, name="log", root_oid=2, root_name="log", sends_updates=False)
UNLOGGED = replace(
    KEYLESS,
    oid=3,
    name="cache",
    root_oid=3,
    root_name="cache",
    is_logged=False,
    sends_inserts=False,
)
LEAF = replace(WHOLE, oid=5, name="leaf", root_oid=4, root_name="tree")
COUNTERS = SourceCounters("", 10, 1, {2: TableCounters(5, 2, 1), 3: TableCounters(7, 0, 0)})


def judged(
    now: list[SourceTable],
    counters: SourceCounters = COUNTERS,
    *,
    before: tuple[SourceTable, ...] = (WHOLE, KEYLESS, UNLOGGED, LEAF),
    left: Exclusions | None = None,
    state: TableState | None = None,
    record: tuple[FollowedTable, ...] = (),
    silent: tuple[int, ...] = (),
    has_ddl: bool = False,
) -> list[tuple[str, FindingKind, str]]:
    states = {(state.schema, state.name): state} if state else {}
    read = {STREAM: COUNTERS} | (dict.fromkeys(COUNTERS.tables, COUNTERS))
    baseline = Baseline({table.oid: table for table in before}, read)
    tables = {table.oid: table for table in now}
    followed = {one.oid: one for one in record}
    judge = Judge(baseline, tables, states, followed, left or Exclusions(), has_ddl=has_ddl)
    return [(one.table, one.kind, one.reason) for one in judge.judge(counters, silent)]


def counted(commits: int = 10, **tables: tuple[int, int, int]) -> SourceCounters:
    counts = {int(oid[1:]): TableCounters(*values) for oid, values in tables.items()}
    return replace(COUNTERS, commits=commits, tables=dict(COUNTERS.tables) | counts)


def test_nothing_is_found_while_nothing_happens_that_is_not_followed() -> None:
    moved = counted(t1=(9, 9, 9), t2=(500, 2, 1), t5=(1, 1, 1))
    assert judged([WHOLE, KEYLESS, UNLOGGED, LEAF], moved) == []
    # A new partition is published with its root, from its first row on.
    assert judged([WHOLE, LEAF, replace(LEAF, oid=6, name="leaf_2")]) == []


def test_only_counters_of_what_is_not_followed_accuse() -> None:
    found = judged([WHOLE, KEYLESS, UNLOGGED], counted(t2=(5, 6, 1), t3=(8, 0, 0)))
    assert found == [
        (
            "public.log",
            FindingKind.UNPROVED,
            "its updates and deletes are not followed, and the source counts 4 updates",
        ),
        (
            "public.cache",
            FindingKind.UNPROVED,
            "its changes are not followed (it is unlogged, or was), and the source counts 1"
            " inserts",
        ),
    ]


@pytest.mark.parametrize(
    "counters",
    [
        replace(COUNTERS, reset_at="2026-01-01"),
        replace(COUNTERS, timeline=2),
        replace(COUNTERS, timeline=0),
        counted(commits=9),
        counted(t2=(5, 1, 1)),
    ],
    ids=["reset", "failover", "standby", "crash", "crash of a table"],
)
def test_counters_that_began_anew_prove_nothing(counters: SourceCounters) -> None:
    found = judged([WHOLE, KEYLESS], counters)
    assert [(table, kind) for table, kind, _ in found] == [("public.log", FindingKind.UNPROVED)]
    assert "reset" in found[0][2]


def test_tables_that_the_stream_does_not_know_are_found() -> None:
    late = replace(WHOLE, oid=20, name="late", root_oid=20, root_name="late")
    unknown = replace(late, sends_inserts=False, sends_updates=False)
    again = replace(WHOLE, oid=21, root_oid=21)
    for table, kind in (
        (unknown, FindingKind.NOT_FOLLOWED),
        # Added to a publication late: what came before is missing.
        (late, FindingKind.NOT_FOLLOWED),
        (again, FindingKind.RECREATED),
        (replace(again, is_for_all=True), FindingKind.RECREATED),
        # Taken out of the publications.
        (replace(WHOLE, sends_inserts=False), FindingKind.NOT_FOLLOWED),
        (replace(LEAF, oid=30), FindingKind.RECREATED),
    ):
        assert [one[1] for one in judged([table])] == [kind]
    unpublished = replace(WHOLE, sends_inserts=False, sends_updates=False)
    assert [one[1] for one in judged([WHOLE], before=(unpublished,))] == [FindingKind.NOT_FOLLOWED]

    # Published with all tables, so from its first row on; what was changed then is not.
    for_all = replace(late, is_for_all=True)
    assert judged([for_all]) == []
    assert [one[1] for one in judged([for_all], counted(t20=(3, 1, 0)))] == [FindingKind.UNPROVED]
    # Unless the stream takes only what is written down.
    written = FollowedTable(1, "public", "whole", True)
    lacking = judged([for_all], record=(written,))
    assert [one[1] for one in lacking] == [FindingKind.NOT_FOLLOWED]
    taken_up = FollowedTable(20, "public", "late", True)
    assert judged([for_all], record=(written, taken_up)) == []
    assert judged([unknown], left=Exclusions(tables=frozenset({("public", "late")}))) == []


def test_what_became_of_tables_is_known_where_their_ddl_is_replayed() -> None:
    again = replace(WHOLE, oid=21, root_oid=21)
    renamed = replace(KEYLESS, name="renamed", root_name="renamed")
    log = FollowedTable(2, "public", "log", False)
    followed = (FollowedTable(21, "public", "whole", True), log)
    moved = counted(t21=(9, 9, 9))
    assert judged([again, renamed], moved, record=followed, has_ddl=True) == []
    found = judged([again, renamed], moved, record=followed)
    assert {one[1] for one in found} == {FindingKind.RECREATED, FindingKind.UNPROVED}
    # DDL says nothing of updates that are not sent, and of tables that nobody has looked at.
    for record, kind in (
        ((FollowedTable(21, "public", "whole", False), log), FindingKind.UNPROVED),
        ((log,), FindingKind.NOT_FOLLOWED),
    ):
        assert [one[1] for one in judged([again], moved, record=record, has_ddl=True)] == [kind]


def test_a_table_that_was_copied_again_is_followed_since() -> None:
    again = replace(WHOLE, oid=21, root_oid=21)
    state = TableState("public", "whole", SyncState.FOLLOWED, 5, "sync", 21, 5, 1)
    assert judged([again], state=state) == []
    for other in (replace(state, source_oid=1), replace(state, state=SyncState.CATCHING_UP)):
        assert [one[1] for one in judged([again], state=other)] == [FindingKind.RECREATED]
    # Copied again because it has an identity by now.
    had_none = (replace(WHOLE, sends_updates=False),)
    moved = counted(t1=(1, 1, 1))
    same = replace(state, source_oid=1)
    assert judged([WHOLE], moved, before=had_none, state=same) == []
    assert [one[1] for one in judged([WHOLE], moved, before=had_none)] == [FindingKind.UNPROVED]


def test_a_table_that_got_another_name_is_found_under_both() -> None:
    """Changes go by name: after a swap, those of one table are in the other's rows."""
    swapped = replace(WHOLE, name="log", root_name="log")
    back = replace(KEYLESS, name="whole", root_name="whole")
    found = {(table, kind) for table, kind, _ in judged([swapped, back])}
    assert found == {
        ("public.log", FindingKind.UNPROVED),
        ("public.whole", FindingKind.UNPROVED),
    }
    detached = replace(LEAF, root_oid=5, root_name="leaf")
    assert {table for table, _, _ in judged([detached])} == {"public.leaf", "public.tree"}
    # A partition's own name is nobody's business: its changes go by the root's.
    assert judged([replace(LEAF, name="leaf_2026")]) == []


def test_an_unlogged_table_that_was_truncated_is_found() -> None:
    assert [one[0] for one in judged([replace(UNLOGGED, filenode=101)])] == ["public.cache"]


def test_sessions_that_can_not_have_written_their_counters_down_acquit_nobody() -> None:
    found = judged([WHOLE, KEYLESS], silent=(4711,))
    assert [one[0] for one in found] == ["public.log"]
    assert "4711" in found[0][2]


def test_what_the_record_calls_inserts_only_is_not_whole() -> None:
    for_inserts = FollowedTable(1, "public", "whole", False)
    moved = counted(t1=(1, 1, 1))
    assert [one[1] for one in judged([WHOLE], moved, record=(for_inserts,))] == [
        FindingKind.UNPROVED
    ]
    assert judged([WHOLE], moved, record=(replace(for_inserts, is_whole=True),)) == []


@pytest.mark.parametrize(
    ("columns", "filenode", "is_found"),
    [
        # Another type: with the rows written anew, and without. The same type, written anew.
        (((1, "id", "integer"), (2, "v", "varchar")), 101, True),
        (((1, "id", "integer"), (2, "v", "varchar")), 100, False),
        (((1, "id", "integer"), (2, "v", "text")), 101, False),
        # Dropped and added again; two that traded their names; a new one, and a new name.
        (((1, "id", "integer"), (3, "v", "text")), 100, True),
        (((1, "v", "integer"), (2, "id", "text")), 100, True),
        (((1, "id", "integer"), (2, "v", "text"), (3, "w", "text")), 100, False),
        (((1, "id", "integer"), (2, "w", "text")), 100, False),
    ],
)
def test_columns_that_are_not_what_they_were_are_found(
    columns: tuple[tuple[int, str, str], ...], filenode: int, is_found: bool
) -> None:
    now = replace(WHOLE, columns=columns, filenode=filenode)
    assert bool(list(iter_changed_columns(WHOLE, now))) == is_found
    unknown = replace(WHOLE, columns=tuple((number, "", "") for number, _, _ in WHOLE.columns))
    assert list(iter_changed_columns(unknown, now)) == []


def test_only_a_comparison_of_all_of_it_acquits() -> None:
    plain = Finding("public.log", FindingKind.UNPROVED, "")
    tree = Finding("public.tree", FindingKind.UNPROVED, "", partitions=("public.a", "public.b"))
    assert acquit((plain, tree), {"public.log", "public.a"}) == (tree,)
    assert acquit((plain, tree), {"public.a", "public.b"}) == (plain,)
    assert acquit((plain, tree), {"public.tree"}) == (plain,)
