"""Roles: those that exist on the target are left as they are, the others arrive whole."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest
from tests.fixtures.roles import RECORDED

from millrace.clone.schema.roles import missing_roles

NAMES = ("ann", "ann2", 'Bob "the" builder', "two words", "semi;colon", "postgres")


@pytest.fixture(scope="module")
def script() -> str:
    return RECORDED.read_text()


def without_existing(script: str, existing: Collection[str]) -> str:
    return missing_roles(script.encode(), existing).decode()


def quoted(name: str) -> str:
    return name if re.fullmatch("[a-z0-9]+", name) else '"' + name.replace('"', '""') + '"'


def test_script_is_unchanged_if_no_role_exists(script: str) -> None:
    assert without_existing(script, ()) == script.replace(" GRANTED BY postgres", "")


@pytest.mark.parametrize("name", NAMES)
def test_existing_role_is_neither_made_nor_altered(script: str, name: str) -> None:
    left = without_existing(script, {name})
    for verb in ("CREATE ROLE", "ALTER ROLE"):
        assert f"\n{verb} {quoted(name)}" in script
        assert not re.search(rf"(?m)^{verb} {re.escape(quoted(name))}[ ;]", _statements(left))


@pytest.mark.parametrize("name", NAMES)
def test_other_roles_are_made_and_altered_all_the_same(script: str, name: str) -> None:
    left = without_existing(script, {name})
    for other in set(NAMES) - {name}:
        for verb in ("CREATE ROLE", "ALTER ROLE"):
            assert f"\n{verb} {quoted(other)}" in left


def test_name_that_starts_like_an_existing_one_is_another_role(script: str) -> None:
    left = without_existing(script, {"ann"})
    assert "\nCREATE ROLE ann2;" in left
    assert "\nCREATE ROLE ann;" not in left


def test_quoted_name_is_compared_as_the_server_has_it() -> None:
    script = 'CREATE ROLE "Ann";\nCREATE ROLE ann;\nCREATE ROLE "a""b";\n'
    assert without_existing(script, {"Ann"}) == '\nCREATE ROLE ann;\nCREATE ROLE "a""b";\n'
    assert without_existing(script, {'a"b'}) == 'CREATE ROLE "Ann";\nCREATE ROLE ann;'
    assert without_existing(script, {'"Ann"', 'a""b'}) == script


def test_comment_of_an_existing_role_is_left_as_it_is(script: str) -> None:
    assert """COMMENT ON ROLE "two words" IS 'plain';""" in script
    assert "COMMENT ON ROLE" not in without_existing(script, {"two words", "ann2"})


def test_comment_of_more_than_one_line_arrives_whole(script: str) -> None:
    comment = "COMMENT ON ROLE ann2 IS 'first line\nCREATE ROLE postgres;\nlast; line';\n"
    assert comment in script
    assert comment in without_existing(script, {"postgres", "ann"})


def test_setting_of_more_than_one_line_arrives_whole(script: str) -> None:
    setting = "SET application_name TO 'a\nALTER ROLE postgres NOLOGIN;\nb';\n"
    assert setting in script
    assert setting in without_existing(script, {"postgres"})


def test_setting_of_an_existing_role_is_left_out_with_all_its_lines(script: str) -> None:
    left = without_existing(script, {"ann2"})
    assert "SET application_name" not in left
    assert "\nb';" not in left


@pytest.mark.parametrize("name", ["new\nline", "line\u2028separator"])
def test_name_with_a_line_break_arrives_as_it_is(script: str, name: str) -> None:
    left = without_existing(script, {"postgres"})
    assert f'CREATE ROLE "{name}";' in left
    assert f'"{name}"' not in without_existing(script, {name})


def test_memberships_are_kept(script: str) -> None:
    granted = 'GRANT ann TO "two words" WITH ADMIN OPTION'
    assert granted in script
    assert granted in without_existing(script, {"ann"})


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("GRANT a TO b GRANTED BY shop;", "GRANT a TO b;"),
        (
            'GRANT "a ""b" TO "c;\nd" WITH ADMIN OPTION, INHERIT TRUE, SET FALSE'
            ' GRANTED BY "x GRANTED BY y";',
            'GRANT "a ""b" TO "c;\nd" WITH ADMIN OPTION, INHERIT TRUE, SET FALSE;',
        ),
        ('GRANT a TO "b GRANTED BY c";', None),
        ("COMMENT ON ROLE a IS 'GRANT a TO b GRANTED BY c;';", None),
    ],
)
def test_membership_is_granted_by_whoever_runs_the_script(
    statement: str, expected: str | None
) -> None:
    assert without_existing(f"{statement}\n", ()) == f"{expected or statement}\n"


def test_bytes_that_are_no_text_arrive_as_they_are() -> None:
    script = b'CREATE ROLE ann;\nCREATE ROLE "b\xe9b\xff";\nCREATE ROLE \xc3\xa9;\n-- the; end\n'
    assert missing_roles(script, {"ann"}) == script.removeprefix(b"CREATE ROLE ann;")
    assert missing_roles(script, {"\u00e9"}) == script.partition(b"\nCREATE ROLE \xc3")[0]


def _statements(script: str) -> str:
    """The script less what stands inside string literals."""
    return re.sub(r"'(?:[^']|'')*'", "''", script)
