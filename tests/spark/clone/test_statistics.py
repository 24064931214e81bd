"""The planner's statistics of the source, on a target that takes them."""

from __future__ import annotations

from pathlib import Path

import psycopg
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.followed import Silent

from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.route import Route

SCHEMA = """
CREATE TABLE skewed (id int PRIMARY KEY, kind text, n int);
INSERT INTO skewed SELECT i, CASE WHEN i % 100 = 0 THEN 'it''s "rare" \\' ELSE 'usual' END, i % 7
  FROM generate_series(1, 3000) AS i;
CREATE INDEX ON skewed (lower(kind));
CREATE TABLE paired (a int, b int);
INSERT INTO paired SELECT i % 10, i % 10 FROM generate_series(1, 1000) AS i;
CREATE STATISTICS both_of (dependencies) ON a, b FROM paired;
ANALYZE skewed, paired;
CREATE TABLE "never analyzed" (id int);
INSERT INTO "never analyzed" SELECT generate_series(1, 500);
-- What only the source knows: ANALYZE of the same rows would not say so.
UPDATE pg_statistic SET stadistinct = -0.123 WHERE starelid = 'skewed'::regclass AND staattnum = 3;
"""
COLUMNS = """
SELECT tablename, attname, n_distinct, most_common_vals::text, most_common_freqs,
       histogram_bounds::text, correlation
  FROM pg_stats WHERE tablename LIKE 'skewed%' ORDER BY 1, 2"""
KNOWN = "SELECT DISTINCT tablename FROM pg_stats WHERE schemaname = 'public' ORDER BY 1"


def test_a_table_has_the_statistics_of_the_source_and_the_others_are_analyzed(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    execute(source_db, SCHEMA)
    settings = CloneSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"),
        carries_statistics=True,
    )
    result = clone(settings, DirectEngine(), Silent())
    assert result.summary is not None
    assert result.summary.statistics_carried == 1
    assert rows(target_db, COLUMNS) == rows(source_db, COLUMNS)
    assert rows(target_db, KNOWN) == [
        ("never analyzed",), ("paired",), ("skewed",), ("skewed_lower_idx",)
    ]  # fmt: skip
    assert rows(target_db, "SELECT reltuples FROM pg_class WHERE relname = 'skewed'") == [(3000,)]
    extended = "SELECT count(*) FROM pg_stats_ext WHERE dependencies IS NOT NULL"
    assert rows(target_db, extended) == [(1,)]
    with psycopg.connect(target_db) as target:
        row = target.execute("SELECT count(*) FROM pg_stat_user_tables WHERE analyze_count > 0")
        assert row.fetchone() == (2,)
