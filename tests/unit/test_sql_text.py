"""SQL text is classified by the server's grammar."""

from __future__ import annotations

import pytest

from millrace.postgres.sql_text import cut_statements, is_constant


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("NULL::text", True),
        ("true", True),
        ("'-1'::integer", True),
        ("(-1.5)", True),
        ("'it''s; now()'::character varying(30)", True),
        ("'{1,2}'::integer[]", True),
        ("E'a\\\\b'::text", True),
        ("B'101'::\"bit\"", True),
        ("now()", False),
        ("CURRENT_DATE", False),
        ("nextval('s'::regclass)", False),
        ("ARRAY[1, 2]", False),
        ("(1 + 2)", False),
        ("('a'::text || 'b'::text)", False),
    ],
)
def test_a_constant_is_a_literal_with_its_casts(expression: str, expected: bool) -> None:
    assert is_constant(expression) is expected


def test_pieces_of_a_script_are_the_script() -> None:
    script = b"""-- a; comment
\\restrict abc
SET x = 'a;b';;
CREATE FUNCTION f() RETURNS void LANGUAGE sql AS $$ SELECT 1; SELECT ';' $$;
COMMENT ON ROLE "a;b" IS E'\\\\ \\';' -- one; more
;
SELECT '\xe9'
"""
    found = list(cut_statements(script))
    assert b"".join(one.text for one in found) == script
    assert [one.tree.WhichOneof("node") for one in found] == [
        "variable_set_stmt",
        "create_function_stmt",
        "comment_stmt",
        "select_stmt",
    ]
    assert all(script[one.offset :].startswith(one.text) for one in found)
