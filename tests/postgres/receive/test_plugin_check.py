"""A plugin that the source can't serve is refused before anything is made there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from millrace.config.dsn import Dsn
from millrace.errors import PreflightError
from millrace.follow.slot import create_stream
from millrace.postgres.program.embedded import Cluster
from millrace.receive import plugin_check


@pytest.fixture
def source(system_cluster: Cluster) -> Iterator[str]:
    yield system_cluster.create_database("plugin_check")
    system_cluster.drop_database("plugin_check")


@pytest.fixture
def old_wal2json(
    system_cluster: Cluster, source: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A library of that name that loads, and does not know the option of version 2.6: as the
    versions before it, test_decoding refuses what it does not know."""
    bindir = system_cluster.installation.bindir
    library = bindir.parent / "lib" / "test_decoding.so"
    if not library.exists():
        pytest.skip("the server of the system has no test_decoding")
    monkeypatch.setattr(plugin_check, "_KNOWN_OPTIONS", {})
    folder = Path("/tmp") / f"millrace-plugins-{os.getpid()}"
    folder.mkdir(0o755)
    try:
        shutil.copy(library, folder / "wal2json.so")
        execute(
            source, f"ALTER DATABASE plugin_check SET dynamic_library_path = '{folder}:$libdir'"
        )
        yield source
    finally:
        shutil.rmtree(folder)


def execute(uri: str, *statements: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def slots(uri: str) -> list[str]:
    with psycopg.connect(uri) as connection:
        rows = connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall()
    return [name for (name,) in rows]


def test_wal2json_without_numbers_as_strings_is_refused_before_the_slot(old_wal2json: str) -> None:
    execute(old_wal2json, "CREATE TABLE t (id int PRIMARY KEY, price numeric)")
    with pytest.raises(PreflightError, match=r"older than 2\.6.*public\.t\.price") as raised:
        create_stream(Dsn.parse(old_wal2json), "checked", "wal2json")
    assert "--plugin pgoutput" in raised.value.hint
    assert slots(old_wal2json) == []


def test_wal2json_of_any_version_serves_tables_without_such_numbers(old_wal2json: str) -> None:
    execute(old_wal2json, "CREATE TABLE t (id int PRIMARY KEY, price int)")
    create_stream(Dsn.parse(old_wal2json), "checked", "wal2json")
    assert slots(old_wal2json) == ["checked"]
    execute(old_wal2json, "SELECT pg_drop_replication_slot('checked')")


def test_missing_plugin_is_refused_with_the_package_that_has_it(
    system_cluster: Cluster, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_check, "_KNOWN_OPTIONS", {})
    execute(source, "ALTER DATABASE plugin_check SET dynamic_library_path = '/nowhere'")
    with pytest.raises(PreflightError, match="no plugin wal2json") as raised:
        create_stream(Dsn.parse(source), "checked", "wal2json")
    assert f"postgresql-{system_cluster.installation.version}-wal2json" in raised.value.hint
    assert slots(source) == []


def test_plugin_that_the_server_lists_is_served() -> None:
    for setting in (
        "pgoutput, test_decoding, wal2json",
        'pgoutput,"wal2json"',
        '"$libdir/wal2json"',
        "/opt/lib/wal2json.so",
    ):
        plugin_check.require_listed("wal2json", setting)


@pytest.mark.parametrize("needs_restart", [False, True])
def test_plugin_that_the_server_does_not_list_is_refused_with_the_statement_that_adds_it(
    needs_restart: bool,
) -> None:
    with pytest.raises(PreflightError, match="output_plugin_libraries") as raised:
        plugin_check.require_listed(
            "wal2json", 'pgoutput, "test_decoding"', needs_restart=needs_restart
        )
    assert raised.value.hint.startswith(
        "ALTER SYSTEM SET output_plugin_libraries = 'pgoutput', 'test_decoding', 'wal2json'; then: "
    )
    assert ("restart" in raised.value.hint) == needs_restart


def test_server_without_such_a_list_serves_its_own_plugins(source_db: str) -> None:
    with psycopg.connect(source_db) as connection:
        plugin_check.require_plugin(connection, "pgoutput")
