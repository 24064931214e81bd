"""Applying changes of columns whose types are not what they seem: domains, and types that have
other numbers on another major version."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import StreamPair

from millrace.apply import prepare as work
from millrace.errors import InvariantError

LONG = "repeat(i::text, 9000)"


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_unsent_values_of_a_domain_that_takes_no_nulls(pair: StreamPair, identity: str) -> None:
    pair.begin(
        "CREATE DOMAIN word AS varchar(20000) COLLATE \"C\" NOT NULL CHECK (VALUE <> '')",
        "CREATE DOMAIN body AS word CHECK (length(VALUE) > 3)",
        "CREATE DOMAIN code AS char(5) NOT NULL",
        "CREATE DOMAIN price AS numeric(8, 2) CHECK (VALUE > 0)",
        "CREATE DOMAIN bits AS bit(3) NOT NULL",
        "CREATE TABLE page (id code PRIMARY KEY, title word UNIQUE, body body, other body,"
        " price price, bits bits, list word[])",
        "ALTER TABLE page ALTER body SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL",
        f"ALTER TABLE page REPLICA IDENTITY {identity}",
    )
    pair.run(
        f"INSERT INTO page SELECT i, 't' || i, {LONG}, {LONG}, i, '101', ARRAY['a', 'b']::word[]"
        " FROM generate_series(1, 20) i"
    )
    pair.follow()
    pair.run(
        "UPDATE page SET price = price + 0.5 WHERE id::text::int < 5",
        "UPDATE page SET body = 'short', bits = '011' WHERE id::text::int BETWEEN 4 AND 8",
        "UPDATE page SET id = 'x' || id WHERE id::text::int IN (1, 9)",
        # They trade values, with bodies that are not sent.
        [
            "UPDATE page SET title = 'x' WHERE id = '11'",
            "UPDATE page SET title = 't11' WHERE id = '12'",
            "UPDATE page SET title = 't12' WHERE id = '11'",
        ],
        "DELETE FROM page WHERE id = '20'",
    )
    pair.follow()
    pair.assert_equal()


def test_rows_without_a_key_are_found_by_domains_too(pair: StreamPair) -> None:
    pair.begin(
        "CREATE DOMAIN code AS char(5) NOT NULL CHECK (VALUE <> 'no')",
        "CREATE TABLE loose (a code, b numeric, c int)",
        "ALTER TABLE loose REPLICA IDENTITY FULL",
        on_target="ALTER TABLE loose ALTER c TYPE bigint",
    )
    pair.run("INSERT INTO loose SELECT 'x', 1, i % 2 FROM generate_series(1, 6) i")
    pair.follow()
    pair.run(
        "DELETE FROM loose WHERE ctid = (SELECT min(ctid) FROM loose)",
        "UPDATE loose SET a = 'y' WHERE ctid = (SELECT min(ctid) FROM loose)",
    )
    pair.follow()
    pair.assert_equal()


def test_types_whose_numbers_differ_between_major_versions(pair: StreamPair) -> None:
    """Some of the source's OIDs are no type on the target, others are another one."""
    types = (
        "SELECT string_agg(format('%s %s', typname, oid), ', ' ORDER BY oid) FROM pg_type"
        " WHERE typnamespace = 'information_schema'::regnamespace AND typtype = 'd'"
    )
    assert pair.source.execute(types).fetchone() != pair.target.execute(types).fetchone()
    pair.begin(
        "CREATE TABLE known (id information_schema.cardinal_number PRIMARY KEY,"
        " name information_schema.sql_identifier, at information_schema.time_stamp,"
        " yes information_schema.yes_or_no, data information_schema.character_data)"
    )
    pair.run(
        "INSERT INTO known SELECT i, 'n' || i, '2024-02-29 12:00:00.25+00', 'YES', NULL"
        " FROM generate_series(1, 700) i"
    )
    pair.follow()
    pair.run(
        "UPDATE known SET name = 'other', yes = 'NO' WHERE id < 650",
        "UPDATE known SET id = id + 1000 WHERE id < 3",
        "DELETE FROM known WHERE id > 660",
    )
    pair.follow()
    pair.assert_equal()


def test_a_bug_in_the_preparation_names_table_and_position(
    pair: StreamPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object, **__: object) -> None:
        raise KeyError(12345)

    pair.begin("CREATE TABLE t (id int PRIMARY KEY)")
    pair.run("INSERT INTO t VALUES (1)")
    monkeypatch.setattr(work, "plan_table", stumble)
    with pytest.raises(InvariantError, match=r"^public\.t: changes after .*KeyError") as caught:
        pair.follow()
    assert caught.value.facts["table"] == "public.t"
    monkeypatch.undo()
    pair.apply()
    pair.assert_equal()
