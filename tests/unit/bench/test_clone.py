"""What `bench clone` compares, on what data, and how it tells a wrong copy."""

from __future__ import annotations

import json
from pathlib import Path

from bench.clone import COMPARISONS, FIELD, ratios
from bench.contestants import MILLRACE
from bench.data import SINGLE, UNEVEN, Fingerprint, differences
from bench.floor import copy_statements, key_ranges
from bench.report import RIGHT, Run

SOURCE = Fingerprint({"a": (10, 77), "b": (0, 0)}, {"a_pkey": "CREATE UNIQUE INDEX ... p true"})


def test_data_sets_have_the_promised_tables_and_indexes() -> None:
    assert len(UNEVEN.tables) == 12
    assert sum(len(table.indexes) for table in UNEVEN.tables) == 20
    assert len(SINGLE.tables[0].indexes) == 3


def test_every_side_of_a_comparison_takes_part() -> None:
    taking_part = {(data.name, c.name) for data, contestants in FIELD for c in contestants}
    for comparison in COMPARISONS:
        assert {comparison.ours, comparison.theirs} <= taking_part


def test_wait_for_spark_counts_only_in_the_whole() -> None:
    ours = {"wall_seconds": 15.0, "wall_without_spark_seconds": 9.0, "peak_memory_bytes": 8e8}
    theirs = {"wall_seconds": 10.0, "wall_without_spark_seconds": 10.0}
    found = ratios(
        [
            Run("A", "millrace", 1, RIGHT, figures=ours),
            Run("A", "pgcopydb", 1, RIGHT, figures=theirs),
        ]
    )
    assert found["clone_A_vs_pgcopydb_without_spark_start"].value == 0.9
    assert found["clone_A_vs_pgcopydb_whole"].value == 1.5
    assert found["peak_memory_gb"].value == 0.8
    assert found["data_vs_jdbc"].value is None


def test_peak_memory_is_the_highest_of_all_our_runs() -> None:
    runs = [
        Run("A", "millrace", 1, RIGHT, figures={"peak_memory_bytes": 8e8}),
        Run("B", "millrace split4", 1, RIGHT, figures={"peak_memory_bytes": 9e8}),
        Run("B", "Spark JDBC", 1, RIGHT, figures={"peak_memory_bytes": 3e9}),
    ]
    assert ratios(runs)["peak_memory_gb"].value == 0.9


def test_equal_copy_has_no_differences() -> None:
    assert differences(SOURCE, SOURCE) == []


def test_lost_row_changed_row_and_missing_index_are_told() -> None:
    found = Fingerprint({"a": (9, 76), "extra": (1, 1)}, {})
    assert len(differences(SOURCE, found)) == 4
    assert len(differences(SOURCE, found, indexes=False)) == 3


def test_key_ranges_cover_every_key_once() -> None:
    assert key_ranges(1, 10, 4) == [
        "id >= 1 AND id < 3",
        "id >= 3 AND id < 6",
        "id >= 6 AND id < 8",
        "id >= 8 AND id < 11",
    ]


def test_only_a_whole_table_is_truncated_and_frozen() -> None:
    assert copy_statements("t")[1][0] == "TRUNCATE ONLY t"
    assert copy_statements("t", "id < 3")[1] == ["COPY t FROM STDIN (FORMAT binary)"]


def test_summary_of_millrace_is_read(tmp_path: Path) -> None:
    summary = {
        "seconds": 30.0,
        "spark_start_seconds": 2.5,
        "steps": [{"name": "schema", "seconds": 1.0}, {"name": "copy", "seconds": 20.0}],
        "tables": [],
    }
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "summary.json").write_text(json.dumps(summary))
    figures = MILLRACE.figures(tmp_path)
    assert figures["spark_start_seconds"] == 2.5
    assert figures["copy_seconds"] == 20.0
    assert "tables" not in figures


def test_absent_summary_of_millrace_gives_no_figures(tmp_path: Path) -> None:
    assert MILLRACE.figures(tmp_path) == {}
