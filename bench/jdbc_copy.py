"""What a Spark user does without Millrace: one table, data only, by Spark's JDBC reader and writer.

The table exists on the target. The read is partitioned on the key; the options are those that the
documentation of Spark and of the driver recommend for bulk work.

Run as a program: python -m bench.jdbc_copy JAR SOURCE TARGET TABLE PARTS RESULT
SOURCE and TARGET are jdbc: URLs. RESULT receives how long Spark's start and the copy took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BATCH_ROWS = 10_000
MEMORY = "1g"
_DRIVER = {"driver": "org.postgresql.Driver"}


def copy_table(spark: Any, source: str, target: str, table: str, parts: int) -> None:
    low, high = (
        spark.read.format("jdbc")
        .options(url=source, query=f"SELECT min(id), max(id) FROM {table}", **_DRIVER)
        .load()
        .first()
    )
    rows = (
        spark.read.format("jdbc")
        .options(url=source, dbtable=table, fetchsize=BATCH_ROWS, **_DRIVER)
        .options(partitionColumn="id", lowerBound=low, upperBound=high, numPartitions=parts)
        .load()
    )
    # stringtype: Spark knows jsonb and uuid as strings, the server casts them back.
    url = target + "&reWriteBatchedInserts=true&stringtype=unspecified"
    rows.write.format("jdbc").options(url=url, dbtable=table, batchsize=BATCH_ROWS, **_DRIVER).mode(
        "append"
    ).save()


def main() -> None:
    jar, source, target, table, parts, result = sys.argv[1:]
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    started = time.monotonic()
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(f"local[{parts}]")
        .config("spark.jars", jar)
        .config("spark.driver.memory", MEMORY)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    ready = time.monotonic()
    copy_table(spark, source, target, table, int(parts))
    ended = time.monotonic()
    seconds = {"spark_start_seconds": ready - started, "copy_seconds": ended - ready}
    Path(result).write_text(json.dumps(seconds))
    spark.stop()


if __name__ == "__main__":
    main()
