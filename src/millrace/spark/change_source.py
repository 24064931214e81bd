"""Changes in a spool as a DataFrame: the Spark data source `millrace.changes`.

Invariant: an offset is the end of a transaction, and the changes between two offsets are the same
whenever and wherever they are read; an offset whose changes were pruned is an error.

    from millrace.spark.change_source import register

    register(spark)
    spark.read.format("millrace.changes").option("dir", "./shop-move").load()
    spark.readStream.format("millrace.changes").option("dir", "./shop-move").load()

The options are in `ChangeOptions`; the columns are those of `millrace.change`. Each partition is a
range of the spool with its changes in commit order, and partitions are in the same order. The work
directory must be readable where tasks run, or the target must be for a spool in its tables, and
this package installed there.

Facts: pyspark.sql.datasource; facts/spark.md, 1 (the reader lives in a process of its own, plans
there, and is pickled to the tasks; what it raises reaches the user as text only).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

from millrace.config.dsn import Dsn
from millrace.config.size import parse_size
from millrace.errors import ConfigError, MillraceError, WorkDirError
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.wire.connect import resolve
from millrace.spool.change_batch import iter_changes
from millrace.spool.interface import Range
from millrace.spool.selection import ChangeSpool, open_change_spool, parse_tables

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

NAME: Final = "millrace.changes"
# Bytes of the spool that one micro-batch takes, and one task.
MAX_BYTES_PER_TRIGGER: Final = "64 MB"
MAX_BYTES_PER_PARTITION: Final = "16 MB"

# The same as millrace.change.SCHEMA, as Spark writes it.
SCHEMA: Final = (
    "`commit_lsn` bigint, `end_lsn` bigint, `lsn` bigint, `position` bigint, `xid` bigint,"
    " `committed_at` timestamp, `schema` string, `table` string, `relation_oid` bigint,"
    " `operation` string, `replica_identity` string, `key` array<string>,"
    " `old` map<string, string>, `new` map<string, string>, `unchanged` array<string>,"
    " `options` array<string>, `prefix` string, `content` binary"
)

Offset = dict[str, str]


def register(spark: SparkSession) -> None:
    """Make `millrace.changes` known to a session."""
    spark.dataSource.register(ChangeSource)


@dataclass(frozen=True)
class ChangeOptions:
    """What a reader is given with `.option(name, value)`."""

    # dir: the work directory of the stream; target: of a stream whose spool is in tables there.
    spool: ChangeSpool
    # after: transactions that end after this position; by default all the spool holds.
    after_lsn: int | None
    # until: transactions that end at or before this position; a stream continues if there is none.
    until_lsn: int | None
    # tables: schema.table, separated by commas; by default all.
    tables: frozenset[tuple[str, str]] | None
    # maxBytesPerTrigger and maxBytesPerPartition: `16 MB`, or plain bytes. A transaction is never
    # divided, so one that is larger is read alone.
    max_bytes_per_trigger: int
    max_bytes_per_partition: int

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ChangeOptions:
        known = {"dir", "target", "after", "until", "tables"}
        known |= {"maxbytespertrigger", "maxbytesperpartition"}
        unknown = sorted(set(map(str.lower, options)) - known - {"path"})
        if unknown:
            raise ConfigError(
                f"{NAME} has no option {unknown[0]}", hint=f"known are: {', '.join(sorted(known))}"
            )
        directory = options.get("dir") or options.get("path")
        if not directory:
            raise ConfigError(
                f"{NAME}: the option dir is missing", hint="name the work directory of the stream"
            )
        target = options.get("target")
        return cls(
            open_change_spool(
                Path(directory).absolute(), resolve(Dsn.parse(target)) if target else None
            ),
            _lsn(options.get("after")),
            _lsn(options.get("until")),
            parse_tables(options["tables"]) if options.get("tables") else None,
            parse_size(options.get("maxBytesPerTrigger", MAX_BYTES_PER_TRIGGER)),
            parse_size(options.get("maxBytesPerPartition", MAX_BYTES_PER_PARTITION)),
        )


@dataclass(frozen=True)
class ChangeRange:
    """What one task reads."""

    spool: ChangeSpool
    range: Range
    tables: frozenset[tuple[str, str]] | None


class ChangeSource(DataSource):
    """The data source; Spark makes one for each `load()`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        with _explained():
            self._options = ChangeOptions.parse(options)

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> ChangeReader:
        return ChangeReader(self._options)

    def streamReader(self, schema: Any) -> ChangeStreamReader:
        return ChangeStreamReader(self._options)


class ChangeReader(DataSourceReader):
    """One range of the spool, up to what is there when the query is planned."""

    def __init__(self, options: ChangeOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with _explained():
            extent = options.spool.extent()
            after = extent.oldest_lsn if options.after_lsn is None else options.after_lsn
            until = extent.last_end_lsn if options.until_lsn is None else options.until_lsn
            options.spool.check_until(until)
            return _partitions(options, after, until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The spool as it is filled."""

    def __init__(self, options: ChangeOptions) -> None:
        self._options = options
        # Where a query that takes what is available now ends.
        self._available_lsn: int | None = None

    def initialOffset(self) -> Offset:
        options = self._options
        with _explained():
            if options.after_lsn is None:
                return _offset(options.spool.extent().oldest_lsn)
            options.spool.check_after(options.after_lsn)
            return _offset(options.after_lsn)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._options.max_bytes_per_trigger)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        options = self._options
        with _explained():
            after = parse_lsn(start["lsn"])
            options.spool.check_after(after)
            until = self._until()
            size = getattr(limit, "max_bytes", options.max_bytes_per_trigger)
            if isinstance(limit, ReadAllAvailable):
                size = _ALL
            with options.spool.opened() as reader:
                last = reader.plan(after, size, until)
            return start if last is None else _offset(last.end_lsn)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_lsn = self._options.spool.extent().last_end_lsn

    def reportLatestOffset(self) -> Offset:
        return _offset(self._options.spool.extent().last_end_lsn)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        with _explained():
            until = parse_lsn(end["lsn"])
            found = _partitions(self._options, parse_lsn(start["lsn"]), until)
            if found and found[-1].value.range.end_lsn != until:
                raise WorkDirError(
                    f"{self._options.spool.place.label} has no transaction that ends at "
                    f"{render_lsn(until)}, where the query's checkpoint is",
                    hint="the checkpoint belongs to another stream: give the query a new one",
                )
            return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)

    def _until(self) -> int | None:
        ends = [self._options.until_lsn, self._available_lsn]
        return min((end for end in ends if end is not None), default=None)


# More than any spool holds.
_ALL: Final = 1 << 62


def _partitions(options: ChangeOptions, after_lsn: int, until_lsn: int) -> list[InputPartition]:
    return [
        InputPartition(ChangeRange(options.spool, range_, options.tables))
        for range_ in options.spool.ranges(after_lsn, until_lsn, options.max_bytes_per_partition)
    ]


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """In a task. Spark makes a partition of nothing if there is none."""
    piece: ChangeRange | None = partition.value
    if piece is None:
        return
    with _explained(), piece.spool.opened() as reader:
        yield from iter_changes(reader, piece.range, piece.spool.encoding, tables=piece.tables)


def _offset(lsn: int) -> Offset:
    return {"lsn": render_lsn(lsn)}


def _lsn(text: str | None) -> int | None:
    return parse_lsn(text) if text else None


@contextmanager
def _explained() -> Iterator[None]:
    """Of an error only its text comes through Spark, so the hint has to be in it."""
    try:
        yield
    except MillraceError as error:
        if not error.hint or error.message.endswith(error.hint):
            raise
        raise type(error)(
            f"{error.message}; {error.hint}", hint=error.hint, **error.facts
        ) from None
