"""Versions of extensions: the file, and what it makes of a dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.cli.command_options import CommandOptions
from millrace.clone.schema.requirements import parse_requirements, pin_versions, read_requirements
from millrace.errors import ConfigError, InvariantError

DUMP = b"""
SET client_encoding = 'UTF8';
CREATE EXTENSION IF NOT EXISTS hstore WITH SCHEMA public;
CREATE EXTENSION IF NOT EXISTS "uuid-ossp" WITH SCHEMA "Odd; one";
CREATE FUNCTION again() RETURNS void LANGUAGE sql AS $$
CREATE EXTENSION IF NOT EXISTS hstore WITH SCHEMA public;
$$;
"""


def test_file_has_names_and_versions(tmp_path: Path) -> None:
    file = tmp_path / "requirements.json"
    file.write_text('[{"name": "hstore", "version": "1.4"}, {"name": "x", "version": "2"}]')
    assert read_requirements(file) == {"hstore": "1.4", "x": "2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[{]", "line 1 is not JSON"),
        ("{}", "no list"),
        ('[{"name": "a"}]', "number 1"),
        ('[{"name": "a", "version": 1.5}]', "number 1"),
        ('[{"name": "a", "version": "1", "schema": "s"}]', "number 1"),
        ('["a"]', "number 1"),
        ('[{"name": "a", "version": "1"}, {"name": "a", "version": "2"}]', "two versions of a"),
    ],
)
def test_wrong_file_is_refused_with_its_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_requirements(text, name="r.json")
    assert said in caught.value.message
    assert caught.value.message.startswith("r.json: ")


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the requirements"):
        read_requirements(tmp_path / "none.json")


def test_named_extensions_get_their_version_and_nothing_else_changes() -> None:
    pinned = pin_versions(DUMP, ["hstore", "uuid-ossp"], {"hstore": "1.4", "uuid-ossp": "it's"})
    assert pinned.splitlines()[3:6] == [
        b"CREATE EXTENSION IF NOT EXISTS \"uuid-ossp\" WITH SCHEMA \"Odd; one\" VERSION 'it''s';",
        b"CREATE FUNCTION again() RETURNS void LANGUAGE sql AS $$",
        b"CREATE EXTENSION IF NOT EXISTS hstore WITH SCHEMA public;",
    ]
    assert b"hstore WITH SCHEMA public VERSION '1.4';" in pinned
    assert len(pinned) == len(DUMP) + len(b" VERSION '1.4' VERSION 'it''s'")
    assert pin_versions(DUMP, ["hstore", "uuid-ossp"], {"other": "1"}) == DUMP


def test_dump_that_says_it_otherwise_is_an_error() -> None:
    with pytest.raises(InvariantError, match="does not create extension vector"):
        pin_versions(DUMP, ["vector"], {"vector": "0.8"})


def test_requirements_of_what_is_not_created_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requirements.json"
    file.write_text("[]")
    asked = CommandOptions(
        source="dbname=a", target="dbname=b", skip_extensions=True, requirements=file
    )
    with pytest.raises(ConfigError, match="--skip-extensions and --requirements"):
        asked.settings()
