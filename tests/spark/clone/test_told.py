"""What a run tells: its plan before, its summary afterwards."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tests.fixtures.cloning import DEPOT, Cloner
from tests.fixtures.sql import execute, rows

from millrace.clone.run import dry_run
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.route import Route
from millrace.split.plan import SplitSettings

COUNTED = """
SELECT relname, (SELECT count(*) FROM pg_index WHERE indrelid = c.oid)
FROM pg_class AS c WHERE relkind = 'r' AND relnamespace = 'depot'::regnamespace ORDER BY 1"""


def test_summary_agrees_with_the_target(
    source_db: str, target_db: str, cloner: Cloner, tmp_path: Path
) -> None:
    execute(source_db, DEPOT)
    result = cloner(source_db, target_db, split=SplitSettings(larger_than_bytes=100_000))
    written = json.loads((tmp_path / "work1" / "summary.json").read_text())
    assert result.summary is not None
    assert written == json.loads(json.dumps(asdict(result.summary)))

    tables = {table["name"]: table for table in written["tables"]}
    assert [(name, tables[name]["indexes"]) for name in sorted(tables)] == rows(target_db, COUNTED)
    for name, table in tables.items():
        assert rows(target_db, f"SELECT count(*) FROM ONLY depot.{name}") == [(table["rows"],)]
        assert table["schema"] == "depot"
        assert table["bytes"] > 0
        assert table["copy_seconds"] > 0
        assert table["index_seconds"] > 0
        assert table["vacuum_seconds"] > 0
    assert tables["things"]["parts"] > 1
    assert tables["places"]["parts"] == 1
    assert {name for name in tables if tables[name]["format"] == "text"} == {"things"}
    assert written["rows"] == sum(table["rows"] for table in tables.values())
    assert (written["large_objects"], written["sequences"], written["foreign_keys"]) == (2, 2, 1)
    steps = [step["name"] for step in written["steps"]]
    assert len(steps) == len(set(steps))
    assert {"dump the schema", "restore the schema", "copy", "foreign keys"} <= set(steps)
    spent = sum(step["seconds"] for step in written["steps"])
    assert 0 < spent <= written["seconds"]


def test_dry_run_shows_the_plan_of_the_run_and_changes_nothing(
    source_db: str, target_db: str, cloner: Cloner, tmp_path: Path
) -> None:
    execute(source_db, DEPOT)
    everything = "SELECT count(*) FROM pg_class UNION ALL SELECT count(*) FROM pg_namespace"
    before = [rows(uri, everything) for uri in (source_db, target_db)]
    split = SplitSettings(larger_than_bytes=100_000)
    settings = CloneSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "dry"), split=split
    )
    planned = dry_run(settings).plan
    assert not (tmp_path / "dry").exists()
    assert [rows(uri, everything) for uri in (source_db, target_db)] == before

    done = cloner(source_db, target_db, split=split).plan
    assert planned.parts == done.parts
    assert planned.indexes == done.indexes
