"""Changes as lines of SQL and JSON."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.fixtures.stream.change_rows import batch

from millrace.errors import FormatError
from millrace.sink.render import SESSION, JsonRenderer, Renderer, SqlRenderer


def lines_of(renderer: Renderer, *batches: pa.RecordBatch) -> list[str]:
    lines = [line for one in batches for line in renderer.render(one)]
    return [*lines, *renderer.end()]


def sql(*rows: dict[str, Any]) -> list[str]:
    """The statements of one transaction, without what is around them."""
    session, begin, *statements, commit = lines_of(SqlRenderer(), batch(*rows))
    assert session == SESSION
    assert begin.startswith("BEGIN;")
    assert commit.startswith("COMMIT;")
    return statements


def test_transactions_begin_and_end_across_batches() -> None:
    lines = lines_of(
        SqlRenderer(),
        batch({}),
        batch({"position": 1}, {"commit_lsn": 0x16B3800, "end_lsn": 0x16B3810, "xid": 743}),
    )
    insert = 'INSERT INTO "s"."t" ("id", "v") OVERRIDING SYSTEM VALUE VALUES (\'1\', \'it\'\'s\');'
    assert lines == [
        SESSION,
        "BEGIN; -- xid 742, commit 0/16B3748, 2025-05-08 12:13:14+00:00",
        insert,
        insert,
        "COMMIT; -- xid 742, end 0/16B3780",
        "BEGIN; -- xid 743, commit 0/16B3800, 2025-05-08 12:13:14+00:00",
        insert,
        "COMMIT; -- xid 743, end 0/16B3810",
    ]
    assert lines_of(SqlRenderer()) == []


def test_updates_set_what_may_have_changed() -> None:
    update = {"operation": "update"}
    assert sql(
        update,
        update | {"old": [("id", "1")], "new": [("id", "2"), ("v", None)]},
        update | {"new": [("id", "1")], "unchanged": ["v"]},
    ) == [
        'UPDATE "s"."t" SET "v" = \'it\'\'s\' WHERE "id" = \'1\';',
        'UPDATE "s"."t" SET "id" = \'2\', "v" = NULL WHERE "id" = \'1\';',
        'SELECT FROM "s"."t" WHERE "id" = \'1\';',
    ]


def test_rows_without_a_key_are_known_by_their_looks() -> None:
    full = {"replica_identity": "full", "key": ["id", "v"], "old": [("id", "1"), ("v", None)]}
    (statement,) = sql(full | {"operation": "delete", "new": None})
    assert statement == (
        'DELETE FROM "s"."t" WHERE (tableoid, ctid) = (SELECT tableoid, ctid FROM "s"."t"'
        " WHERE format('%s', \"id\") = '1' AND \"v\" IS NULL LIMIT 1);"
    )


def test_tables_truncated_together_are_one_statement() -> None:
    truncate = {"operation": "truncate", "new": None, "options": ["cascade", "restart_identity"]}
    assert sql(truncate, truncate | {"table": "u"}, truncate | {"lsn": 1, "options": []}) == [
        'TRUNCATE "s"."t", "s"."u" RESTART IDENTITY CASCADE;',
        'TRUNCATE "s"."t";',
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"operation": "update", "key": []},
        {"operation": "delete", "key": [], "new": None, "old": []},
        {"operation": "update", "new": [("v", "x")], "unchanged": ["id"]},
    ],
)
def test_a_row_that_can_not_be_named_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="does not tell which row"):
        sql(row)


def test_json_has_a_line_for_each() -> None:
    printed = lines_of(JsonRenderer(), batch({}, {"operation": "update"}))
    lines = [json.loads(line) for line in printed]
    assert [line["action"] for line in lines] == ["begin", "insert", "update", "commit"]
    assert lines[0] == {
        "action": "begin",
        "xid": 742,
        "commit_lsn": "0/16B3748",
        "end_lsn": "0/16B3780",
        "committed_at": "2025-05-08 12:13:14+00:00",
    }
    assert lines[1] == {
        "action": "insert",
        "lsn": "0/16B3700",
        "position": 0,
        "schema": "s",
        "table": "t",
        "key": ["id"],
        "new": {"id": "1", "v": "it's"},
    }
