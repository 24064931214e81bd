"""A source that is written to all the while: the clone is the source of one instant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.wait import wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.demo.shop import Writers, create_shop
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.snapshot.export import open_snapshot
from millrace.spark.session import Engine
from millrace.split.plan import SplitSettings


@pytest.fixture(scope="module")
def shop(source_cluster: Cluster) -> Iterator[str]:
    uri = source_cluster.create_database("busy_shop")
    create_shop(uri, megabytes=20)
    yield uri
    source_cluster.drop_database("busy_shop")


@pytest.mark.parametrize("split", [0, 512 * 1024], ids=["whole", "split"])
def test_clone_of_a_busy_shop_holds_exactly_the_rows_of_its_snapshot(
    shop: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path, split: int
) -> None:
    source, target = Dsn.parse(shop), Dsn.parse(target_db)
    with Writers(shop) as writers, open_snapshot(source) as held:
        wait_for(lambda: writers.committed > 0)
        before = writers.committed
        settings = CloneSettings(
            Route(source, target, tmp_path / "work"),
            split=SplitSettings(larger_than_bytes=split),
            snapshot=held.id,
        )
        result = clone(settings, engine, reporter)
        assert result.summary is not None
        assert result.summary.snapshot == held.id
        assert (max(table.parts for table in result.summary.tables) > 1) == bool(split)
        assert writers.committed > before

        compared = compare_data(CompareSettings(Route(source, target), snapshot=held.id), engine)
        assert [one.label for one in compared if not one.is_equal] == []
        assert {"shop.order_lines", "shop.orders_2025_12_0", "audit.log"} <= {
            one.label for one in compared
        }
        # Without the snapshot the target would have some of what was written meanwhile.
        count = "SELECT count(*) FROM shop.orders"
        wait_for(lambda: scalar(shop, count) > scalar(target_db, count))
    # Sequences know no snapshots: a target's may be ahead of its rows, never behind.
    behind = "SELECT (SELECT last_value FROM shop.orders_id_seq) - max(id) FROM shop.orders"
    assert scalar(target_db, behind) >= 0


def scalar(uri: str, query: str) -> int:
    with psycopg.connect(uri) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])
