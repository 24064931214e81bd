"""Captured commands: their text, what is decided about them, and what is derived."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.apply.structure import Place
from millrace.ddl import derive
from millrace.ddl.decide import Choices, Verdict, why_not_replayed
from millrace.ddl.describe import iter_differences
from millrace.ddl.entry import CapturedObject, Entry
from millrace.ddl.statement import find_candidates, fit
from millrace.filter.rules import FilterRules, NamePart, Rule

PLACE = Place(1, 2, "2026-01-01", "utf-8")
OWN = "PL/pgSQL function millrace.ddl_capture() line 10 at GET DIAGNOSTICS"


def table(name: str, tag: str = "ALTER TABLE", **description: object) -> CapturedObject:
    return CapturedObject(
        tag, "table", "public", f"public.{name}", ("public", name), description=description or None
    )


def entry(query: str, *objects: CapturedObject, context: str = OWN, tag: str = "") -> Entry:
    tag = tag or objects[0].tag
    return Entry(PLACE, "ddl_command_end", tag, query, context, objects=objects)


def test_of_several_statements_those_of_the_object_are_the_texts() -> None:
    query = "CREATE TABLE a (i int); ALTER TABLE b ADD x text DEFAULT ';'; ALTER TABLE a ADD y int"
    assert find_candidates(entry(query, table("a"))) == ["ALTER TABLE a ADD y int"]
    assert find_candidates(entry(query, table("b"))) == ["ALTER TABLE b ADD x text DEFAULT ';'"]


def test_the_innermost_statement_of_the_context_is_the_text() -> None:
    inner = "alter table a add t text default 'say \"x\"\nPL'"
    context = f'{OWN}\nSQL statement "{inner}"\nPL/pgSQL function f() line 3 at SQL statement'
    assert find_candidates(entry("select f()", table("a"), context=context)) == [inner]


def test_of_a_sql_function_the_numbered_statement_of_its_body_is_the_text() -> None:
    called = entry("select g()", table("a"), context=f'{OWN}\nSQL function "g" statement 2')
    bodies = ("select 1; alter table a add x int;", "select 2")
    assert find_candidates(replace(called, bodies=bodies)) == ["alter table a add x int"]
    # A function that is not written down gives none, and the outer string never runs.
    assert find_candidates(called) == []


@pytest.mark.parametrize(
    ("statement", "tag", "wanted"),
    [
        ("CREATE INDEX CONCURRENTLY i ON t (a)", "CREATE INDEX", "CREATE INDEX  i ON t (a)"),
        ("ALTER TABLE t OWNER TO joe", "ALTER TABLE", ""),
        ("ALTER TABLE t OWNER TO joe, ADD a int", "ALTER TABLE", "ALTER TABLE t ADD a int"),
        ("ALTER TABLE t ADD a int, OWNER TO joe", "ALTER TABLE", "ALTER TABLE t ADD a int"),
        ("ALTER TABLE t ADD c text DEFAULT 'OWNER TO, x'", "ALTER TABLE",
         "ALTER TABLE t ADD c text DEFAULT 'OWNER TO, x'"),
        ("CREATE TABLE t (i int) TABLESPACE fast", "CREATE TABLE", "CREATE TABLE t (i int)"),
        ("CREATE SCHEMA s AUTHORIZATION joe", "CREATE SCHEMA", "CREATE SCHEMA s"),
        ("CREATE SCHEMA AUTHORIZATION joe", "CREATE SCHEMA", "CREATE SCHEMA  joe"),
    ],
)  # fmt: skip
def test_only_clauses_that_mean_nothing_on_the_target_are_taken_away(
    statement: str, tag: str, wanted: str
) -> None:
    assert fit(statement, tag) == wanted


def test_what_comes_with_a_table_that_is_left_out_is_left_out() -> None:
    rules = FilterRules((Rule("exclude-table", (NamePart("public"), NamePart("secret"))),))
    sequence = CapturedObject("CREATE SEQUENCE", "sequence", "public", "public.secret_id_seq")
    made = entry("CREATE TABLE secret (id serial)", sequence, table("secret", "CREATE TABLE"),
                 tag="CREATE TABLE")  # fmt: skip
    assert Choices(rules).decide(made).verdict is Verdict.LEAVE_OUT
    assert Choices().decide(made).verdict is Verdict.REPLAY


def test_filters_that_go_by_the_name_of_a_table_do_not_go_with_ddl() -> None:
    parts = (NamePart("public"), NamePart("users"), NamePart("password"))
    assert "exclude-column" in why_not_replayed(FilterRules((Rule("exclude-column", parts),)))
    assert why_not_replayed(FilterRules((Rule("exclude-table", parts[:2]),))) == ""


def test_differences_of_descriptions_are_named_and_those_that_can_be_are_derived() -> None:
    one = {"name": "id", "type": "integer", "not_null": True}
    before = {"kind": "r", "columns": [one]}
    after = {"kind": "r", "columns": [one, {"name": "v", "type": "text", "default": "'x'::text"}]}
    assert list(iter_differences(after, before)) == ["column v is missing on the target"]
    assert list(iter_differences(before, after)) == ["column v is on the target only"]
    assert derive.derive("public.t", before, after) == [
        "ALTER TABLE public.t ADD COLUMN \"v\" text DEFAULT 'x'::text"
    ]
    assert derive.derive("public.t", after, after) == []
    enum = {"kind": "enum", "labels": ["a", "c"]}
    assert derive.derive("m", enum, {"kind": "enum", "labels": ["a", "b", "c"]}) == [
        "ALTER TYPE m ADD VALUE 'b' AFTER 'a'"
    ]
