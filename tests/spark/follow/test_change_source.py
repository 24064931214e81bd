"""Changes as a DataFrame: a range of the spool, and the spool as it is filled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.stream.changes import Transaction, append, join
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.change import SCHEMA
from millrace.config.dsn import Dsn
from millrace.lsn import render_lsn
from millrace.postgres.wire.connect import connect
from millrace.spark import change_source
from millrace.spark.session import Engine
from millrace.spool import table as table_spool
from millrace.spool.kind import SpoolKind
from millrace.spool.place import place_of
from millrace.spool.reader import prune
from millrace.spool.writer import SpoolWriter
from millrace.workdir.sentinel import Sentinel, StreamSetup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spark(engine: Engine) -> Iterator[Any]:
    """A session on the context that all tests share."""
    from pyspark.sql import SparkSession

    engine.wait()
    session = SparkSession(engine._context)
    change_source.register(session)
    yield session
    SparkSession._instantiatedSession = None
    engine._context._jvm.SparkSession.clearDefaultSession()
    engine._context._jvm.SparkSession.clearActiveSession()


def fill(directory: Path, first: int, last: int, *, rows: int = 10, **more: Any) -> None:
    """Transactions of so many rows each."""
    with SpoolWriter(directory, **more) as writer:
        numbers = range(first, last + 1)
        for number in numbers:
            relation = 0 if number == 1 else None
            append(writer, join([Transaction(number, rows=rows, relation=relation)]))
            writer.sync()


def reader(session: Any, directory: Path, **options: str) -> Any:
    return session.read.format(change_source.NAME).options(dir=str(directory), **options)


def keys(frame: Any) -> list[tuple[int, int]]:
    return [(row.xid, row.position) for row in frame.select("xid", "position").collect()]


def expected(first: int, last: int, rows: int = 10) -> list[tuple[int, int]]:
    return [(xid, position) for xid in range(first, last + 1) for position in range(rows)]


def test_schemas_agree(spark: Any) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    struct = StructType.fromDDL(change_source.SCHEMA)
    assert to_arrow_schema(struct, timezone="UTC").equals(SCHEMA)


def test_a_range_is_read_in_several_partitions(spark: Any, tmp_path: Path) -> None:
    fill(tmp_path, 1, 20)
    frame = reader(spark, tmp_path, maxBytesPerPartition="3000").load()
    assert frame.rdd.getNumPartitions() > 3
    assert keys(frame) == expected(1, 20)
    row = frame.where("xid = 3 and position = 4").first()
    assert row.new == {"id": "4", "value_0": f"{3:08x}{4:08x}"}
    assert (row.operation, row.schema, row.table, row.old) == ("insert", "public", "t", None)
    assert (row.commit_lsn, row.end_lsn) == (340, 350)
    some = reader(spark, tmp_path, after=render_lsn(550), until=render_lsn(899)).load()
    assert keys(some) == expected(6, 8)
    assert reader(spark, tmp_path, tables="public.other").load().count() == 0
    assert reader(spark, tmp_path, tables="public.t").load().count() == 200


def test_a_spool_in_tables_of_the_target_is_read(
    spark: Any, tmp_path: Path, target_db: str
) -> None:
    setup = StreamSetup("source", "tabled", "pgoutput", "UTF8", 1, spool=SpoolKind.TABLE)
    with Sentinel(tmp_path) as sentinel:
        sentinel.write_setup(setup)
    place = place_of(setup, tmp_path, Dsn.parse(target_db))
    place.prepare()
    try:
        with place.open_writer() as writer:
            for number in range(1, 21):
                relation = 0 if number == 1 else None
                append(writer, Transaction(number, rows=10, relation=relation).frames())
            writer.sync()
        with pytest.raises(Exception, match="in tables of the target; give --target"):
            reader(spark, tmp_path).load()
        frame = reader(spark, tmp_path, target=target_db, maxBytesPerPartition="3000").load()
        assert frame.rdd.getNumPartitions() > 3
        assert keys(frame) == expected(1, 20)
        query = (
            spark.readStream.format(change_source.NAME)
            .options(dir=str(tmp_path), target=target_db, maxBytesPerTrigger="3000")
            .load()
            .writeStream.format("memory")
            .queryName("tabled")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(int(DEADLINE_SECONDS))
        assert spark.table("tabled").count() == 200
    finally:
        with connect(Dsn.parse(target_db), "test") as connection:
            table_spool.uninstall(connection, place.stream)


def test_what_is_not_there_is_an_error(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="holds no spool"):
        reader(spark, tmp_path).load()
    with pytest.raises(Exception, match="no option dirr"):
        spark.read.format(change_source.NAME).option("dirr", "x").load()
    fill(tmp_path, 1, 40, segment_bytes=2000)
    with pytest.raises(Exception, match="received them up to"):
        reader(spark, tmp_path, until="1/0").load().count()
    assert prune(tmp_path, 2000) > 0
    with pytest.raises(Exception, match=r"was pruned and begins after .*--keep-spool"):
        reader(spark, tmp_path, after="0/0").load().count()
    # Without a position, what there is.
    left = keys(reader(spark, tmp_path).load())
    assert left == expected(left[0][0], 40)
    assert 1 < left[0][0] <= 20


def test_a_stream_takes_what_is_available_in_batches_of_bytes(spark: Any, tmp_path: Path) -> None:
    work, output, checkpoint = tmp_path / "work", tmp_path / "out", tmp_path / "checkpoint"
    fill(work, 1, 10)

    def run() -> list[dict[str, Any]]:
        frame = (
            spark.readStream.format(change_source.NAME)
            .options(dir=str(work), maxBytesPerTrigger="3000", maxBytesPerPartition="1500")
            .load()
        )
        query = (
            frame.select("xid", "position")
            .writeStream.format("json")
            .option("path", str(output))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(120)
            return [json.loads(progress.json) for progress in query.recentProgress]
        finally:
            query.stop()

    first = [one for one in run() if one["numInputRows"]]
    assert len(first) > 2
    assert first[-1]["sources"][0]["endOffset"] == {"lsn": render_lsn(1050)}
    assert written(spark, output) == expected(1, 10)
    # From the checkpoint on, no change twice.
    fill(work, 11, 13)
    run()
    assert written(spark, output) == expected(1, 13)
    # The last batch was not confirmed yet; earlier ones may go.
    assert prune(work, 1050) >= 0


def written(session: Any, output: Path) -> list[tuple[int, int]]:
    found = session.read.schema("xid bigint, position bigint").json(str(output))
    return sorted(keys(found))


def test_a_stream_behind_what_was_pruned_stops_with_an_error(spark: Any, tmp_path: Path) -> None:
    fill(tmp_path / "work", 1, 40, segment_bytes=2000)
    assert prune(tmp_path / "work", 3000) > 0
    frame = (
        spark.readStream.format(change_source.NAME)
        .options(dir=str(tmp_path / "work"), after="0/0")
        .load()
    )
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(Exception, match="was pruned and begins after"):
        query.awaitTermination(120)
