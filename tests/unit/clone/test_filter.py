"""The filter file: every form of an entry, every mistake with its line, one canonical text."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError
from millrace.filter.decide import DbObject, Decision, Depend, decide
from millrace.filter.rules import (
    FilterRules,
    NamePart,
    Rule,
    parse_filters,
    read_filters,
)
from millrace.postgres.quote import ident


def parse(text: str) -> FilterRules:
    return parse_filters(text, name="f.ini")


def entry(section: str, line: str) -> Rule:
    (rule,) = parse(f"[{section}]\n{line}\n").rules
    return rule


def texts(rule: Rule) -> list[str]:
    return [part.text for part in rule.parts]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("public.actor", ["public", "actor"]),
        ("  public.actor\t", ["public", "actor"]),
        ("public.actor\r", ["public", "actor"]),
        ("public.actor=", ["public", "actor"]),
        ("Public.ACTOR", ["public", "actor"]),
        ('"Public"."ACTOR"', ["Public", "ACTOR"]),
        ('public."Quoted ""Name"""', ["public", 'Quoted "Name"']),
        ('"a.b"."c.d"', ["a.b", "c.d"]),
        ('"a = b"."; c"', ["a = b", "; c"]),
        ('"~/a/".b', ["~/a/", "b"]),
        ("my-schema.my-table$1", ["my-schema", "my-table$1"]),
        # Only A-Z fold, as in a server with a multibyte encoding.
        ("ÄRGER.Ünder", ["Ärger", "Ünder"]),
    ],
)
def test_names_are_read_as_postgres_reads_them(line: str, names: list[str]) -> None:
    rule = entry("exclude-table", line)
    assert texts(rule) == names
    assert rule.is_exact


@pytest.mark.parametrize(
    "delimited",
    ["~/^a/", "~[^a]", "~{^a}", "~(^a)", "~<^a>", '~"^a"', "~'^a'", "~|^a|", "~#^a#", "~$^a$"],
)
def test_regular_expression_may_stand_for_either_name(delimited: str) -> None:
    regex, name = NamePart("^a", is_regex=True), NamePart("b")
    assert entry("exclude-schema", delimited).parts == (regex,)
    assert entry("exclude-table", f"{delimited}.b").parts == (regex, name)
    assert entry("exclude-table", f"b.{delimited}").parts == (name, regex)
    assert entry("exclude-table", f"{delimited}.{delimited}").parts == (regex, regex)


def test_regular_expression_keeps_its_case_and_its_signs() -> None:
    assert texts(entry("exclude-table", "~/A.b = c/.~|x/y|")) == ["A.b = c", "x/y"]


def test_regular_expressions_side_by_side_are_one() -> None:
    assert texts(entry("exclude-table", "public.~/^tmp_/~/[0-9]+$/")) == ["public", "^tmp_[0-9]+$"]


def test_comments_and_blank_lines_are_passed_over() -> None:
    rules = parse("; one\n\n[exclude-table]\n  ; two\na.b\n\n\n; three\n[exclude-index]\nc.d")
    assert [(rule.section, texts(rule)) for rule in rules.rules] == [
        ("exclude-index", ["c", "d"]),
        ("exclude-table", ["a", "b"]),
    ]


def test_an_empty_file_has_no_rules() -> None:
    assert parse("").is_empty
    assert parse("; nothing\n[exclude-table]\n").is_empty
    assert not parse("[exclude-table]\na.b\n").is_empty


@pytest.mark.parametrize(
    ("line", "names", "predicate"),
    [
        ("a.b = id > 3", ["a", "b"], "id > 3"),
        ("a.b = x = y", ["a", "b"], "x = y"),
        ("a.b=x", ["a", "b"], "x"),
        ("\"a = b\".c = t = '; [x]'", ["a = b", "c"], "t = '; [x]'"),
    ],
)
def test_predicate_is_what_follows_the_name(line: str, names: list[str], predicate: str) -> None:
    rule = entry("table-where", line)
    assert texts(rule) == names
    assert rule.predicate == predicate


def test_column_has_three_names() -> None:
    assert texts(entry("exclude-column", 'a.b."C.d"')) == ["a", "b", "C.d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.b\n", "line 1: an entry before the first section"),
        ("\n[exclude-tables]\n", r"line 2: there is no section \[exclude-tables\]"),
        ("[Exclude-Table]\n", r"line 1: there is no section \[Exclude-Table\]"),
        ("[exclude-table\n", r"line 1: there is no section \[exclude-table$"),
        ("[exclude-kind]\ntable\n", "line 2: table is none of: trigger, event trigger"),
        ("[exclude-table] x\n", r"line 1: there is no section \[exclude-table\] x"),
        (
            "[exclude-table]\n[exclude-index]\n[exclude-table]\n",
            r"line 3: a second section \[exclude-table\], the first is in line 1",
        ),
        ("[exclude-table]\nactor\n", r"line 2: schema\.name is expected in \[exclude-table\]"),
        ("[exclude-table]\na.b.c\n", r"line 2: schema\.name is expected"),
        ("[exclude-schema]\na.b\n", r"line 2: a name is expected in \[exclude-schema\]"),
        ("[exclude-table]\n.b\n", "line 2: a name is missing"),
        ("[exclude-table]\na.\n", "line 2: a name is missing"),
        ("[exclude-table]\n=\n", "line 2: a name is missing"),
        ('[exclude-table]\na."b\n', "line 2: a quoted name does not end"),
        ('[exclude-table]\na.""\n', "line 2: a name is empty"),
        ("[exclude-table]\na.b c\n", "line 2: after the name there is more: c"),
        ("[exclude-table]\na.b ; no\n", "line 2: after the name there is more: ; no"),
        ("[exclude-table]\na.b = 1\n", "line 2: after the name there is more: = 1"),
        ('[exclude-table]\na."b"c\n', "line 2: after the name there is more: c"),
        ("[exclude-table]\na.b~/c/\n", "line 2: after the name there is more"),
        ("[exclude-table]\na.~/b\n", "line 2: the regular expression has no closing /"),
        ("[exclude-table]\na.~{b\n", "line 2: the regular expression has no closing }"),
        ("[exclude-table]\na.~//\n", "line 2: a regular expression is empty"),
        ("[exclude-table]\na.~b\n", "line 2: a regular expression is written"),
        ("[exclude-table]\na.~/b/c\n", "line 2: after the name there is more: c"),
        ("[table-where]\na.b\n", r"line 2: schema\.table = predicate is expected"),
        ("[table-where]\na.b =\n", r"line 2: schema\.table = predicate is expected"),
        ("[table-where]\na.~/b/ = 1\n", "line 2: a plain name is expected"),
        (
            "[table-where]\na.b = x\na.b = y\n",
            r"line 3: a\.b is in \[table-where\] already, in line 2",
        ),
        ("[exclude-column]\na.b\n", r"line 2: schema\.table\.column is expected"),
    ],
)
def test_mistake_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^f\.ini, {message}") as caught:
        parse(text)
    assert caught.value.hint
    assert caught.value.facts["file"] == "f.ini"


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ("include-only-schema", "exclude-schema", "a"),
        ("include-only-table", "exclude-table", "a.b"),
        ("include-only-table", "exclude-table", "a.~/b/"),
        ("include-only-extension", "exclude-extension", "a"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(one: str, other: str, name: str) -> None:
    for early, late in ((one, other), (other, one)):
        message = rf"line 4: \[{late}\] can't be combined with \[{early}\] \(line 2\)"
        with pytest.raises(ConfigError, match=message):
            parse(f"[{early}]\n{name}\n[{late}]\n{name}\n")
        parse(f"[{early}]\n{name}\n[{late}]\n; nothing\n")


def test_sections_that_do_not_contradict_stand_together() -> None:
    parse(
        "[include-only-schema]\na\n[include-only-table]\na.b\n[exclude-table-data]\na.b\n"
        "[exclude-index]\na.i\n[exclude-extension]\ne\n[table-where]\na.b = true\n"
        "[exclude-column]\na.b.c\n"
    )


def test_same_rules_give_the_same_text_whatever_the_file_looks_like() -> None:
    one = parse('[exclude-table]\na.b\n"C".~/x/\n[exclude-schema]\nd\n')
    other = parse('; why\n[exclude-schema]\n"d"\n[exclude-table]\n"C".~{x}\nA.B\na.b\n; end')
    assert one.as_json() == other.as_json()
    assert one == other
    assert json.loads(one.as_json()) == {
        "exclude-schema": [["d"]],
        "exclude-table": [["C", {"~": "x"}], ["a", "b"]],
    }


def test_other_rules_give_another_text() -> None:
    files = [
        "",
        "[exclude-table]\na.b\n",
        "[exclude-table]\na.~/b/\n",
        "[exclude-table-data]\na.b\n",
        "[table-where]\na.b = c\n",
        "[table-where]\na.b = d\n",
        "[exclude-column]\na.b.c\n",
    ]
    assert len({parse(text).as_json() for text in files}) == len(files)


def test_rules_survive_pickle() -> None:
    rules = parse("[exclude-table]\na.~/b/\n")
    assert pickle.loads(pickle.dumps(rules)).as_json() == rules.as_json()


@given(st.text(st.characters(exclude_characters="\n\0", codec="utf-8"), min_size=1))
def test_any_name_can_be_written_with_quotes(name: str) -> None:
    assert texts(entry("exclude-table", f"{ident(name)}.{ident(name)}")) == [name, name]


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text)
        parse(f"[exclude-table]\n{text}")
    except ConfigError:
        pass


def test_file_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the filters"):
        read_filters(tmp_path / "nothing.ini")
    (tmp_path / "latin.ini").write_bytes(b"[exclude-table]\na.\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_filters(tmp_path / "latin.ini")


def test_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "f.ini").write_bytes(b"\xef\xbb\xbf[exclude-table]\r\na.b\r\n")
    assert texts(read_filters(tmp_path / "f.ini").rules[0]) == ["a", "b"]


# A small database by hand: a schema, tables a and b, a view of a, a foreign key from b to a.
SCHEMA = DbObject(2615, 1, "schema", "", "s")
A = DbObject(1259, 10, "table", "s", "a")
B = DbObject(1259, 11, "table", "s", "b")
VIEW = DbObject(1259, 12, "view", "s", "v")
FOREIGN_KEY = DbObject(2606, 13, "foreign key", "s", "b.b_fkey", 11)
OBJECTS = [SCHEMA, A, B, VIEW, FOREIGN_KEY]
RULE = (2618, 14)
DEPENDS = [
    *(Depend(o.key, SCHEMA.key, "n") for o in (A, B, VIEW)),
    Depend(RULE, VIEW.key, "i"),
    Depend(RULE, A.key, "n"),
    Depend(VIEW.key, RULE, "whole"),
    Depend(FOREIGN_KEY.key, B.key, "a"),
    Depend(FOREIGN_KEY.key, A.key, "n"),
]


def decided(text: str, **matched: set[str]) -> Decision:
    return decide(parse(text), OBJECTS, DEPENDS, matched)


def test_no_rules_leave_out_nothing() -> None:
    assert decided("") == Decision()


def test_what_depends_on_an_excluded_table_goes_with_it() -> None:
    decision = decided("[exclude-table]\ns.a\n")
    assert decision.excluded == {
        A.key: "[exclude-table], line 2",
        RULE: "depends on table s.a",
        VIEW.key: "depends on table s.a",
        FOREIGN_KEY.key: "depends on table s.a",
    }
    assert set(decision.dependents) == {VIEW.key, FOREIGN_KEY.key}


def test_parts_of_an_excluded_table_are_not_listed() -> None:
    decision = decided("[exclude-table]\ns.b\n")
    assert set(decision.excluded) == {B.key, FOREIGN_KEY.key}
    assert decision.dependents == {}


def test_regular_expression_means_what_the_server_found() -> None:
    decision = decided("[exclude-table]\ns.~/x/\n", x={"b", "v"})
    assert set(decision.excluded) == {B.key, FOREIGN_KEY.key}
    assert decided("[exclude-table]\ns.~/x/\n", x=set()).excluded == {}
    assert decided("[include-only-table]\ns.~/x/\n", x={"a"}).excluded == {
        B.key: "not in [include-only-table]",
        FOREIGN_KEY.key: "depends on table s.b",
    }


def test_order_of_what_is_given_does_not_matter() -> None:
    rules = parse("[exclude-table]\ns.a\n")
    assert decide(rules, OBJECTS[::-1], DEPENDS[::-1]) == decide(rules, OBJECTS, DEPENDS)


def test_included_table_in_an_excluded_schema_is_left_out_with_a_warning() -> None:
    decision = decided("[include-only-table]\ns.a\n[exclude-schema]\ns\n")
    assert {A.key, B.key, VIEW.key, SCHEMA.key} <= set(decision.excluded)
    assert "both [include-only-table] and [exclude-schema]" in decision.warnings[0]


def test_predicate_on_a_table_that_is_left_out_is_reported() -> None:
    decision = decided("[exclude-table]\ns.b\n[table-where]\ns.b = true\ns.a = x\n")
    assert decision.predicates[A.oid] == "x"
    assert "line 4: no row of s.b is copied, so [table-where] has no effect" in decision.warnings[0]
