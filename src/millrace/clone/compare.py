"""Are both sides equal? Counts and checksums computed inside the servers.

Invariant: a checksum does not depend on the order of rows, and two sides that hold
the same rows give the same one whatever their encodings or settings. Rows never
leave a server.

The checksum of a table is the sum, over its rows, of a 64-bit hash of the row's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import pq
from psycopg.pq.abc import PGconn

from millrace.clone.copy import snapshot_sql
from millrace.clone.plan import plan_table_parts
from millrace.clone.split import SplitSettings
from millrace.config.dsn import Dsn
from millrace.errors import MillraceError
from millrace.postgres.libpq import drain, execute, open_session, result_error
from millrace.postgres.quote import columns, qualified
from millrace.relation import Table
from millrace.retry import with_retries

# A table larger than this is compared in key ranges, several at once.
PART_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class ComparePart:
    """A table, or a key range of one, to be summed on both sides."""

    label: str
    schema: str
    name: str
    column_names: tuple[str, ...]
    condition: str
    with_partitions: bool = False


@dataclass(frozen=True)
class CompareTask:
    """What one Spark task compares."""

    source: Dsn
    target: Dsn
    snapshot: str | None
    same_encoding: bool
    parts: tuple[ComparePart, ...]


@dataclass(frozen=True)
class Sum:
    """One side of one part."""

    rows: int
    checksum: str


@dataclass(frozen=True)
class Compared:
    """Both sides of one part."""

    label: str
    source: Sum | None
    target: Sum | None
    error: MillraceError | None = None

    @property
    def is_equal(self) -> bool:
        return self.error is None and self.source == self.target


def plan_compare(tables: Sequence[Table], samples: dict[int, Any]) -> list[ComparePart]:
    """Parts, largest first; only key ranges mean the same on both sides."""
    split = SplitSettings(larger_than_bytes=PART_BYTES, by_ctid=False)
    parts = []
    roots = set()
    for table in sorted(tables, key=lambda t: -t.total_bytes):
        names = tuple(column.name for column in table.columns)
        if table.load_via:
            # Its rows may be in other partitions on the target: compare the whole.
            if table.load_via not in roots:
                _, schema, name = table.load_via
                parts.append(ComparePart(f"{schema}.{name}", schema, name, names, "", True))
            roots.add(table.load_via)
            continue
        for part in plan_table_parts(table, samples.get(table.oid, ()), split):
            parts.append(ComparePart(table.label, table.schema, table.name, names, part.condition))
    return parts


def compare_parts(task: CompareTask, attempt: int = 0) -> list[Compared]:
    """The task body: sum each part on both sides at once."""
    return [with_retries(partial(_compare, task, part)) for part in task.parts]


def checksum_statement(part: ComparePart, *, same_encoding: bool) -> str:
    """Count and checksum of a part."""
    name = ("" if part.with_partitions else "ONLY ") + qualified(part.schema, part.name)
    where = f" WHERE {part.condition}" if part.condition else ""
    if not part.column_names:
        return f"SELECT count(*), 0 FROM {name}{where}"
    text = f'ROW({columns(part.column_names)})::text COLLATE "C"'
    if same_encoding:
        hashed = f"hashtextextended({text}, 0)"
    else:
        hashed = f"('x' || substr(md5(convert_to({text}, 'UTF8')), 1, 16))::bit(64)::int8"
    return f"SELECT count(*), coalesce(sum({hashed}), 0) FROM {name}{where}"


def _compare(task: CompareTask, part: ComparePart) -> Compared:
    statement = checksum_statement(part, same_encoding=task.same_encoding)
    sides: list[PGconn] = []
    try:
        for dsn in (task.source, task.target):
            sides.append(open_session(dsn, "compare", "UTF8"))
        execute(sides[0], snapshot_sql(task.snapshot).rstrip("; "))
        for side in sides:
            side.send_query(statement.encode())
        source, target = (_sum(side, part.label) for side in sides)
        return Compared(part.label, source, target)
    except MillraceError as error:
        if error.facts.get("sqlstate") in ("42P01", "42703"):
            return Compared(part.label, None, None, error)
        raise
    finally:
        for side in sides:
            side.finish()


def _sum(side: PGconn, label: str) -> Sum:
    result = drain(side)[0]
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise result_error(result, f"summing {label}")
    rows, checksum = (result.get_value(0, column) or b"" for column in range(2))
    return Sum(int(rows), checksum.decode())


def merge_parts(compared: Sequence[Compared]) -> list[Compared]:
    """One line for each table: parts added up."""
    tables: dict[str, Compared] = {}
    for one in compared:
        before = tables.get(one.label)
        if before is None:
            tables[one.label] = one
        else:
            tables[one.label] = Compared(
                one.label,
                _added(before.source, one.source),
                _added(before.target, one.target),
                before.error or one.error,
            )
    return list(tables.values())


def _added(one: Sum | None, other: Sum | None) -> Sum | None:
    if one is None or other is None:
        return None
    return Sum(one.rows + other.rows, str(int(one.checksum) + int(other.checksum)))
