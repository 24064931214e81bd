"""The table of contents of a dump: read entry by entry, restored exactly once each.

The recorded listings are in tests/fixtures/toc; record.py there says how they were made.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests import fixtures

from millrace.clone.schema.entries import RestoreLists, SchemaSettings, plan_restore
from millrace.postgres.program.dump import Entry, parse_toc
from millrace.relation import ForeignKey, Index, SourceCatalog

RECORDED = Path(fixtures.__file__).parent / "toc"


@pytest.fixture(scope="module")
def pre_data() -> list[Entry]:
    return parse_toc((RECORDED / "pre-data.list").read_text())


@pytest.fixture(scope="module")
def post_data() -> list[Entry]:
    return parse_toc((RECORDED / "post-data.list").read_text())


@pytest.fixture(scope="module")
def catalog() -> SourceCatalog:
    found = json.loads((RECORDED / "catalog.json").read_text())
    return SourceCatalog(
        indexes=tuple(
            Index(i["oid"], 0, "", i["name"], "", False, constraint_oid=i["constraint_oid"])
            for i in found["indexes"]
        ),
        foreign_keys=tuple(
            ForeignKey(k["oid"], k["name"], "", "", 0, 0, "", False) for k in found["foreign_keys"]
        ),
        schemas={int(oid): name for oid, name in found["schemas"].items()},
        view_indexes=frozenset(found["view_indexes"]),
    )


def names(entries: list[Entry]) -> list[str]:
    return [f"{entry.description} {entry.rest}" for entry in entries]


def everything(lists: RestoreLists) -> list[Entry]:
    return [*lists.before, *lists.attach, *lists.after, *lists.refresh, *lists.built_by_us]


@pytest.mark.parametrize("section", ["pre-data", "post-data"])
def test_every_line_but_comments_is_an_entry(section: str) -> None:
    text = (RECORDED / f"{section}.list").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(";")]
    assert [entry.line for entry in parse_toc(text)] == lines
    assert len(lines) > 30


def test_entry_is_known_by_catalog_and_oid() -> None:
    (entry,) = parse_toc("2737; 2606 16744 CONSTRAINT public plain_table plain_table_pkey postgres")
    assert (entry.catalog_oid, entry.object_oid) == (2606, 16744)
    assert entry.description == "CONSTRAINT"
    assert entry.rest == "public plain_table plain_table_pkey postgres"


@pytest.mark.parametrize(
    ("line", "description"),
    [
        ("1; 2606 5 FK CONSTRAINT public a b postgres", "FK CONSTRAINT"),
        ("1; 2606 5 CHECK CONSTRAINT public a b postgres", "CHECK CONSTRAINT"),
        ("1; 0 0 INDEX ATTACH public i postgres", "INDEX ATTACH"),
        ("1; 0 0 TABLE ATTACH public t postgres", "TABLE ATTACH"),
        ("1; 1259 5 MATERIALIZED VIEW public m postgres", "MATERIALIZED VIEW"),
        ("1; 0 5 MATERIALIZED VIEW DATA public m postgres", "MATERIALIZED VIEW DATA"),
        ("1; 6237 5 PUBLICATION TABLES IN SCHEMA s p s postgres", "PUBLICATION TABLES IN SCHEMA"),
        ("1; 6106 5 PUBLICATION TABLE public p t postgres", "PUBLICATION TABLE"),
        ("1; 6104 5 PUBLICATION - p postgres", "PUBLICATION"),
        ("1; 826 5 DEFAULT ACL - DEFAULT PRIVILEGES FOR TABLES postgres", "DEFAULT ACL"),
        ("1; 2604 5 DEFAULT public t c postgres", "DEFAULT"),
        ("1; 3381 5 STATISTICS public s postgres", "STATISTICS"),
        ("1; 0 5 STATISTICS DATA public t postgres", "STATISTICS DATA"),
        ("1; 3079 5 EXTENSION - vector ", "EXTENSION"),
        # The same words as names, not as kinds: an attachment has no OID of its own.
        ("1; 1259 5 INDEX ATTACH i postgres", "INDEX"),
        ("1; 1259 5 TABLE ATTACH t postgres", "TABLE"),
        ("1; 1259 5 TABLE DATA t postgres", "TABLE"),
    ],
)
def test_description_is_read_whole(line: str, description: str) -> None:
    (entry,) = parse_toc(line)
    assert entry.description == description


def test_what_is_no_entry_is_passed_over() -> None:
    assert parse_toc("") == []
    assert parse_toc(";\n; Archive created at ...\n;     dbname: 1; 2 3 TABLE\n\n") == []


def test_each_entry_is_restored_exactly_once(
    pre_data: list[Entry], post_data: list[Entry], catalog: SourceCatalog
) -> None:
    lists = plan_restore(pre_data, post_data, catalog, SchemaSettings())
    assert Counter(everything(lists)) == Counter([*pre_data, *post_data])


def test_we_build_what_our_catalog_has_and_nothing_else_does(
    pre_data: list[Entry], post_data: list[Entry], catalog: SourceCatalog
) -> None:
    lists = plan_restore(pre_data, post_data, catalog, SchemaSettings())
    ours = {(1259, i.oid) for i in catalog.indexes if not i.constraint_oid}
    ours |= {(2606, i.constraint_oid) for i in catalog.indexes if i.constraint_oid}
    ours |= {(2606, key.oid) for key in catalog.foreign_keys}
    assert {(e.catalog_oid, e.object_oid) for e in lists.built_by_us} == ours
    others = [*lists.before, *lists.attach, *lists.after, *lists.refresh]
    assert not [e.line for e in others if (e.catalog_oid, e.object_oid) in ours]


def test_entries_are_restored_at_the_step_they_belong_to(
    pre_data: list[Entry], post_data: list[Entry], catalog: SourceCatalog
) -> None:
    lists = plan_restore(pre_data, post_data, catalog, SchemaSettings())
    assert lists.before[: len(pre_data)] == pre_data
    assert names(lists.before[len(pre_data) :]) == ["STATISTICS public plain_statistics postgres"]
    attached = names(lists.attach)
    assert "CONSTRAINT public measured measured_pkey postgres" in attached
    assert "INDEX public measured_sensor postgres" in attached
    assert "INDEX ATTACH public measured_2024_pkey postgres" in attached
    after = names(lists.after)
    for wanted in (
        "TRIGGER public plain_table plain_touch postgres",
        "RULE public plain_table plain_rule postgres",
        "POLICY public plain_table plain_policy postgres",
        "ROW SECURITY public plain_table postgres",
        "CHECK CONSTRAINT public plain_table small postgres",
        "COMMENT public INDEX plain_code postgres",
        "COMMENT public CONSTRAINT plain_table_pkey ON plain_table postgres",
        "EVENT TRIGGER - watcher postgres",
        "PUBLICATION TABLE public few plain_table postgres",
        "INDEX public plain_copy_code postgres",
    ):
        assert wanted in after
    assert names(lists.refresh) == ["MATERIALIZED VIEW DATA public plain_copy postgres"]


def test_order_of_the_archive_is_kept_within_a_step(
    pre_data: list[Entry], post_data: list[Entry], catalog: SourceCatalog
) -> None:
    lists = plan_restore(pre_data, post_data, catalog, SchemaSettings())
    place = {entry.line: at for at, entry in enumerate([*pre_data, *post_data])}
    for step in (lists.before, lists.attach, lists.after, lists.built_by_us):
        assert [place[e.line] for e in step] == sorted(place[e.line] for e in step)


def test_schema_that_exists_is_not_made_again(
    pre_data: list[Entry], post_data: list[Entry], catalog: SourceCatalog
) -> None:
    (oid,) = (oid for oid, name in catalog.schemas.items() if name == "ATTACH")
    lists = plan_restore(pre_data, post_data, catalog, SchemaSettings(), existing_schema_oids={oid})
    left_out = Counter([*pre_data, *post_data]) - Counter(everything(lists))
    assert names(list(left_out)) == names(lists.existing) == ["SCHEMA - ATTACH postgres"]


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (
            SchemaSettings(skip_extensions=True),
            ["EXTENSION - vector ", "COMMENT - EXTENSION vector "],
        ),
        (SchemaSettings(skip_extension_comments=True), ["COMMENT - EXTENSION vector "]),
        (SchemaSettings(skip_collations=True), ["COLLATION public plain postgres"]),
    ],
    ids=["extensions", "extension-comments", "collations"],
)
def test_only_what_was_asked_for_is_left_out(
    pre_data: list[Entry],
    post_data: list[Entry],
    catalog: SourceCatalog,
    settings: SchemaSettings,
    missing: list[str],
) -> None:
    lists = plan_restore(pre_data, post_data, catalog, settings)
    left_out = Counter([*pre_data, *post_data]) - Counter(everything(lists))
    assert names(list(left_out)) == missing


def test_what_pg_restore_leaves_out_is_its_own_option() -> None:
    assert SchemaSettings().restore_options() == []
    assert SchemaSettings(no_owner=True, no_acl=True).restore_options() == [
        "--no-owner",
        "--no-acl",
    ]
    assert SchemaSettings(no_comments=True, no_tablespaces=True).restore_options() == [
        "--no-comments",
        "--no-tablespaces",
    ]
