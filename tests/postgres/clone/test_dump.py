"""What pg_dump and pg_restore leave behind: warnings, and files with passwords in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.sql import execute

from millrace.config.dsn import Dsn
from millrace.postgres.program.dump import dump_schema
from millrace.postgres.program.embedded import Cluster

SECRET = "of the subscription"


@pytest.fixture
def subscribed(source_db: str) -> Iterator[str]:
    """A database with a subscription, whose connection string holds a password."""
    execute(
        source_db,
        "CREATE ROLE plain_reader LOGIN",
        f"CREATE SUBSCRIPTION elsewhere CONNECTION 'dbname=nowhere password=''{SECRET}'''"
        " PUBLICATION p WITH (connect = false, slot_name = NONE)",
    )
    yield source_db
    execute(source_db, "DROP SUBSCRIPTION elsewhere", "DROP ROLE plain_reader")


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_pg_dump_leaves_out_is_a_warning(
    subscribed: str, source_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = source_cluster.installation
    with caplog.at_level(logging.WARNING, logger="millrace"):
        dump_schema(tools, Dsn.parse(subscribed), None, tmp_path / "all.dump")
    assert caplog.records == []
    reader = Dsn.parse(subscribed).with_(user="plain_reader")
    with caplog.at_level(logging.WARNING, logger="millrace"):
        dump_schema(tools, reader, None, tmp_path / "some.dump")
    (warning,) = caplog.records
    assert "subscriptions not dumped" in warning.getMessage()


@pytest.mark.usefixtures("usual_umask")
def test_files_with_the_schema_are_for_nobody_else(
    subscribed: str, source_cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "schema.dump"
    archive = dump_schema(source_cluster.installation, Dsn.parse(subscribed), None, path)
    script = archive.script(archive.entries("post-data"), "post-data")
    assert SECRET.encode() in script
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["schema.dump", "post-data.list", "post-data.sql"], "0o600")
