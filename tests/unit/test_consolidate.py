"""The configuration of a consolidation, and whose turn it is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.fixtures.wait import wait_for

from millrace.config.dsn import Dsn
from millrace.consolidate.config import (
    Consolidation,
    Indexes,
    SourceConfig,
    Views,
    default_slot,
    read_config,
)
from millrace.consolidate.metrics import SourceMetrics
from millrace.consolidate.plan import SourcePlan, plan_naming
from millrace.consolidate.registry import Registry, SourceState, source_directory
from millrace.consolidate.status import read_status
from millrace.consolidate.turns import Turns
from millrace.errors import ConfigError
from millrace.filter.rules import FilterRules, NamePart, Rule
from millrace.name import Naming
from millrace.workdir.lock import open_lock

WHOLE = """
target = "postgresql://analyst@warehouse/all"
apply_jobs = 2
readers = ["bi_reader"]
[source.shop]
uri = "postgresql://replicator@shop-db/shop"
[source."C r-M.1"]
uri = "service=crm"
schemas = { public = "crm_core", audit = "" }
filters = "crm.ini"
columns = { "public.users" = { leave_out = ["password_hash"] } }
views = "drop"
indexes = "all"
plugin = "wal2json"
slot = "bi_crm"
ddl = "halt"
"""


def read(tmp_path: Path, text: str) -> Consolidation:
    path = tmp_path / "sources.toml"
    path.write_text(text)
    return read_config(path)


def test_every_key_of_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "crm.ini").write_text("[exclude-table]\npublic.session\n")
    found = read(tmp_path, WHOLE)
    assert (found.apply_jobs, found.readers) == (2, ("bi_reader",))
    shop, crm = found.sources.values()
    assert shop.target_schema("public") == "shop_public"
    assert (shop.slot, shop.indexes, shop.views) == ("millrace_shop", Indexes.KEYS, Views.KEEP)
    assert (crm.name, crm.slot, crm.plugin) == ("C r-M.1", "bi_crm", "wal2json")
    assert (crm.indexes, crm.views) == (Indexes.ALL, Views.DROP)
    assert [crm.target_schema(one) for one in ("public", "audit", "x")] == [
        "crm_core",
        "",
        "C r-M.1_x",
    ]
    assert [(rule.section, rule.label) for rule in crm.filters.rules] == [
        ("exclude-table", "public.session"),
        ("exclude-column", "public.users.password_hash"),
    ]


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            tmp_path,
            """
            target = "postgresql://x"
            aply_jobs = 3
            apply_jobs = 0
            [source.a]
            uri = 7
            view = "drop"
            views = "gone"
            ddl = "later"
            [source.b]
            slot = "Big"
            columns = { users = { leave_out = ["x"] } }
            """,
        )
    found = caught.value.facts["problems"]
    for part in (
        "unknown key aply_jobs; did you mean apply_jobs?",
        "apply_jobs must be a number from 1",
        "[source.a] uri must be a string",
        "[source.a] unknown key view; did you mean views?",
        "[source.a] views must be one of keep, drop",
        "[source.a] ddl must be one of replay, halt",
        "[source.b] uri is missing",
        "[source.b] slot may have lower-case",
        "[source.b.columns.users] a table is written as schema.name",
    ):
        assert any(part in one for one in found), (part, found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target = 'postgresql://x'", "it has no source"),
        ("target = ", "is not valid TOML"),
        (
            "target = ''\n[source.'a-b']\nuri = 'host=h'\n[source.a_b]\nuri = 'host=h'",
            "have the same slot, millrace_a_b",
        ),
    ],
)
def test_files_that_can_not_be_used_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_an_unknown_source_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "crm.ini").write_text("")
    found = read(tmp_path, WHOLE)
    with pytest.raises(ConfigError) as caught:
        found.require("shp")
    assert caught.value.hint == "did you mean shop?"


def test_slots_are_named_by_what_a_server_takes() -> None:
    assert default_slot('My "Shop"-1') == "millrace_my__shop__1"
    assert len(default_slot("x" * 100)) == 63


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    found = read(tmp_path, "target = ''\n[source.a]\nuri = ''")
    with pytest.raises(ConfigError, match="63"):
        plan_naming(found.sources["a"], ["s" * 62])


def test_a_plan_survives_being_written_down(tmp_path: Path) -> None:
    plan = SourcePlan(
        Naming({"public": 'a "b"'}),
        (Rule("exclude-index", (NamePart("public"), NamePart('i "x"'))),),
    )
    directory = tmp_path / "w"
    with Registry(directory) as registry:
        registry.begin("a/b")
        registry.begin("a/b")
        assert not registry.require("a/b").is_planned
        registry.write_plan("a/b", "postgresql://h/d", plan)
        registry.enter("a/b", SourceState.HALTED, "it broke", "mend it")
        assert registry.require("a/b").plan == plan
        assert not registry.take_retry("a/b", SourceState.FOLLOWING)
        registry.ask_retry("a/b")
        assert registry.take_retry("a/b", SourceState.FOLLOWING)
        assert not registry.take_retry("a/b", SourceState.FOLLOWING)
        assert registry.require("a/b").state is SourceState.FOLLOWING
        registry.enter("a/b", SourceState.HALTED, "it broke", "mend it")
    (status,) = read_status(directory, None)
    assert (status.state, status.error, status.is_running) == ("halted", "it broke", False)
    assert source_directory(directory, "a/b").parent == directory / "sources"


def test_whoever_waits_longest_is_next_and_no_more_than_the_workers_work() -> None:
    turns = Turns(2)
    order: list[int] = []
    holding = [threading.Event() for _ in range(6)]

    def work(number: int) -> None:
        with turns.taken():
            order.append(number)
            holding[number].wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_for(lambda n=number: len(order) + len(turns._waiting) > n)
    assert order == [0, 1]
    for number, event in enumerate(holding):
        event.set()
        wait_for(lambda n=number: len(order) >= min(6, n + 3))
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, 5]


def test_a_source_that_is_halted_or_behind_is_not_ready(tmp_path: Path) -> None:
    directory = tmp_path / "w"
    now = time.time()
    with Registry(directory) as registry:
        for name in ("well", "behind", "halted", "paused", "unknown"):
            registry.begin(name)
            registry.write_plan(name, "postgresql://h/d", SourcePlan(Naming()))
            registry.enter(name, SourceState.FOLLOWING)
        for name, lag in (("well", 1.0), ("behind", 500.0), ("halted", 2.0), ("paused", 900.0)):
            registry.note_progress(name, {"lag_seconds": lag, "noted_at": now})
        registry.enter("halted", SourceState.HALTED, "no column x")
        registry.enter("paused", SourceState.PAUSED)
    metrics = SourceMetrics(directory, 60.0)
    with open_lock(directory):
        assert [one.partition(":")[0] for one in metrics.problems()] == [
            "source behind",
            "source halted",
            "source unknown",
        ]
    samples = {
        (sample.name, sample.labels["source"], sample.labels.get("state", "")): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    assert samples["millrace_source_state", "halted", "halted"] == 1
    assert samples["millrace_source_state", "halted", "following"] == 0
    # Nobody runs it: each second it is a second further behind.
    assert samples["millrace_source_lag_seconds", "behind", ""] >= 500


def test_a_plan_is_known_again_from_the_copy_that_was_made_by_it() -> None:
    filters = FilterRules(
        (
            Rule("table-where", (NamePart("public"), NamePart("t")), "id > 3"),
            Rule("exclude-table", (NamePart("^p", is_regex=True), NamePart("x"))),
        )
    )
    source = SourceConfig("shop", Dsn({}), filters=filters)
    plan = SourcePlan(
        Naming({"public": "public"}, prefix="shop_"),
        (Rule("exclude-index", (NamePart("public"), NamePart("i"))),),
    )
    copy = {
        "filters": plan.filters(source).as_json(),
        "rename_schema": plan.naming.as_json(),
    }
    assert SourcePlan.of_copy(copy, source, 1) == plan
