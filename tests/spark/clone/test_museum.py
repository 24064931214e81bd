"""The museum, cloned: everything odd arrives, by every oracle there is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.fixtures import create_museum_roles, load_museum
from tests.fixtures.sql import rows

from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.spark.session import Engine
from millrace.split.plan import SplitSettings


def dumped(cluster: Cluster, uri: str, tools: Cluster) -> list[str]:
    """The schema as one pg_dump prints it, less what names the dump itself."""
    output = subprocess.run(
        [tools.installation.bindir / "pg_dump", "--schema-only", uri],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [
        line
        for line in output.splitlines()
        if not re.match(r"\\(un)?restrict|-- Dumped (from|by)", line)
    ]


def restored_by_pg_restore(source: str, target: str, tools: Cluster, directory: Path) -> None:
    """What PostgreSQL's own tools make of the same database: the oracle."""
    archive = directory / "oracle.dump"
    bindir = tools.installation.bindir
    subprocess.run([bindir / "pg_dump", "-Fc", "-f", archive, source], check=True)
    subprocess.run([bindir / "pg_restore", "--exit-on-error", "-d", target, archive], check=True)


@pytest.mark.parametrize("split", [0, 16 * 1024], ids=["whole", "split"])
def test_museum_arrives_as_pg_restore_would_bring_it_and_equal_row_by_row(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: object,
    tmp_path: Path,
    split: int,
) -> None:
    load_museum(source_db)
    create_museum_roles(target_db)
    settings = CloneSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"),
        split=SplitSettings(larger_than_bytes=split),
    )
    result = clone(settings, engine, reporter)  # type: ignore[arg-type]
    assert result.summary is not None
    assert (max(table.parts for table in result.summary.tables) > 1) == bool(split)

    compared = compare_data(CompareSettings(Route(settings.source, settings.target)), engine)
    assert [one.label for one in compared if not one.is_equal] == []
    assert len(compared) > 100

    oracle = target_cluster.create_database("museum_oracle")
    try:
        restored_by_pg_restore(source_db, oracle, target_cluster, tmp_path)
        ours = dumped(target_cluster, target_db, target_cluster)
        theirs = dumped(target_cluster, oracle, target_cluster)
        assert ours == theirs
        assert len(ours) > 10_000
        for query in (LARGE_OBJECTS, SEQUENCES_OF):
            assert rows(target_db, query) == rows(oracle, query)
        assert rows(target_db, SETTINGS) == rows(source_db, SETTINGS)
        assert rows(target_db, OUR_SCHEMA) == [(0,)]
    finally:
        target_cluster.drop_database("museum_oracle")


LARGE_OBJECTS = """
SELECT m.oid::int8, pg_get_userbyid(m.lomowner), m.lomacl::text,
       obj_description(m.oid, 'pg_largeobject'), md5(lo_get(m.oid))
  FROM pg_largeobject_metadata m ORDER BY 1"""
SEQUENCES_OF = """
SELECT schemaname, sequencename, last_value, start_value, increment_by, cycle, cache_size
  FROM pg_sequences ORDER BY 1, 2"""
SETTINGS = """
SELECT coalesce(r.rolname, ''), s.setconfig, shobj_description(d.oid, 'pg_database')
  FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase
  LEFT JOIN pg_roles r ON r.oid = s.setrole
 WHERE d.datname = current_database() ORDER BY 1"""
OUR_SCHEMA = "SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'"
