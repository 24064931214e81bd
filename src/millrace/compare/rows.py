"""Which rows of a part differ: down to their keys.

Invariant: memory is bounded, whatever the size of the part and the number of rows that
differ; no row leaves a server that is in a bucket equal on both sides; no value but
those of key columns leaves one at all.

The idea: rows are dealt into buckets by a hash of their key, and each bucket is counted and
summed in the servers, in one pass. Only rows of buckets that differ are fetched, as
(hash of key, hash of row, key), in the order of the first, and merged. A bucket that
differs has a row that differs, so as many buckets as rows are wanted are enough. The
order is that of numbers: no collation, no encoding has a say in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice

from psycopg.pq.abc import PGconn, PGresult

from millrace.compare.task import (
    ComparePart,
    CompareTask,
    RowDifference,
    Sides,
    TableComparison,
    hash_sql,
)
from millrace.postgres.quote import ident
from millrace.postgres.wire.libpq import execute

MISSING = "missing on target"
EXTRA = "extra on target"
DIFFERENT = "different"

# Few enough rows in a bucket that fetching one is nothing, few enough buckets to hold.
ROWS_PER_BUCKET = 256
LEAST_BUCKET_BITS, MOST_BUCKET_BITS = 4, 16
FETCHED_ROWS = 2000


@dataclass(frozen=True)
class RowsTask:
    """One part that differs, and how many rows of it to name."""

    task: CompareTask
    compared: TableComparison
    most_rows: int


@dataclass(frozen=True)
class HashedRow:
    """Rows with the same key and the same hash; several only where no key forbids it."""

    key_hash: int
    row_hash: int
    count: int
    key: tuple[str, ...]


def compare_rows(rows_task: RowsTask, attempt: int = 0) -> TableComparison:
    """The task body: name the rows of one part that differ."""
    task = rows_task.task
    (part,) = task.parts
    if not part.expressions:
        return replace(rows_task.compared, rows_complete=True)  # rows without columns: a count
    with Sides(task.source, task.target, task.snapshot) as sides:
        return sides.retry(partial(_compare_rows, sides, rows_task, part))


def merge_rows(source: Iterable[HashedRow], target: Iterable[HashedRow]) -> Iterator[RowDifference]:
    """What differs between two runs of rows in the order of their key's hash."""
    left, right = _groups(source), _groups(target)
    one, other = next(left, None), next(right, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            assert one is not None
            yield from _group_differences(one[1], Counter())
            one = next(left, None)
        elif one is None or other[0] < one[0]:
            yield from _group_differences(Counter(), other[1])
            other = next(right, None)
        else:
            yield from _group_differences(one[1], other[1])
            one, other = next(left, None), next(right, None)


def _compare_rows(sides: Sides, rows_task: RowsTask, part: ComparePart) -> TableComparison:
    compared, most = rows_task.compared, rows_task.most_rows
    assert compared.source is not None
    assert compared.target is not None
    sides.sessions()
    execute(sides.sessions()[1], "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    rows = max(compared.source.rows, compared.target.rows)
    bits = max(LEAST_BUCKET_BITS, min(MOST_BUCKET_BITS, (rows // ROWS_PER_BUCKET).bit_length()))
    same = rows_task.task.same_encoding
    relations = part.relations()
    source, target = (_buckets_sql(part, each, bits, same_encoding=same) for each in relations)
    results = sides.query(source, target, f"summing buckets of {part.label}")
    buckets = _differing_buckets(*results)
    source, target = (
        _rows_sql(part, each, bits, buckets[:most], same_encoding=same) for each in relations
    )
    found: list[RowDifference] = []
    if buckets:
        sides.query(source, target, f"reading rows of {part.label}")
        runs = (_iter_rows(side, keyed=bool(part.key)) for side in sides.sessions())
        found = list(islice(merge_rows(*runs), most + 1))
    sides.close()
    complete = len(buckets) <= most and len(found) <= most
    ordered = sorted(found[:most], key=lambda row: [(len(text), text) for text in row.key])
    return replace(compared, rows=tuple(ordered), rows_complete=complete)


def _hashed_sql(part: ComparePart, relation: str, *, same_encoding: bool) -> str:
    """key_hash, row_hash and the key columns as text, k1, k2, ..., of each row."""
    row_hash = hash_sql(part.expressions, same_encoding=same_encoding)
    key_hash = hash_sql([*map(ident, part.key)], same_encoding=same_encoding)
    listed = [f"{key_hash if part.key else row_hash} AS key_hash", f"{row_hash} AS row_hash"]
    listed += [
        f'{ident(name)}::text COLLATE "C" AS k{number}' for number, name in enumerate(part.key)
    ]
    return f"(SELECT {', '.join(listed)} FROM {relation}) AS hashed"


def _buckets_sql(part: ComparePart, relation: str, bits: int, *, same_encoding: bool) -> str:
    return (
        f"SELECT key_hash & {(1 << bits) - 1}, count(*), sum(row_hash)"
        f" FROM {_hashed_sql(part, relation, same_encoding=same_encoding)} GROUP BY 1"
    )


def _rows_sql(
    part: ComparePart, relation: str, bits: int, buckets: list[int], *, same_encoding: bool
) -> str:
    names = ["key_hash", "row_hash", *(f"k{number}" for number in range(len(part.key)))]
    keys = ", ".join(names)
    return (
        f"DECLARE differing NO SCROLL CURSOR FOR SELECT count(*), {keys}"
        f" FROM {_hashed_sql(part, relation, same_encoding=same_encoding)}"
        f" WHERE key_hash & {(1 << bits) - 1} = ANY('{{{','.join(map(str, buckets))}}}'::int8[])"
        f" GROUP BY {keys} ORDER BY key_hash, row_hash"
    )


def _differing_buckets(source: PGresult, target: PGresult) -> list[int]:
    left, right = (
        {
            int(side.get_value(row, 0) or 0): (side.get_value(row, 1), side.get_value(row, 2))
            for row in range(side.ntuples)
        }
        for side in (source, target)
    )
    return sorted(
        bucket for bucket in left.keys() | right.keys() if left.get(bucket) != right.get(bucket)
    )


def _iter_rows(side: PGconn, *, keyed: bool) -> Iterator[HashedRow]:
    while (fetched := execute(side, f"FETCH {FETCHED_ROWS} FROM differing")[-1]).ntuples:
        for row in range(fetched.ntuples):
            count, key_hash, row_hash, *key = (
                (fetched.get_value(row, column) or b"").decode(errors="backslashreplace")
                for column in range(fetched.nfields)
            )
            if not keyed:
                key = [f"{int(row_hash) & (1 << 64) - 1:016x}"]
            yield HashedRow(int(key_hash), int(row_hash), int(count), tuple(key))


Group = Counter[tuple[tuple[str, ...], int]]


def _groups(rows: Iterable[HashedRow]) -> Iterator[tuple[int, Group]]:
    for key_hash, group in groupby(rows, key=lambda row: row.key_hash):
        yield key_hash, Counter({(row.key, row.row_hash): row.count for row in group})


def _group_differences(source: Group, target: Group) -> Iterator[RowDifference]:
    """Rows of one hash of key: what is left on each side after pairing off equal ones."""
    missing, extra = source - target, target - source
    for key in sorted({key for key, _ in missing} | {key for key, _ in extra}):
        gone, came = (
            sum(count for (of, _), count in side.items() if of == key) for side in (missing, extra)
        )
        changed = min(gone, came)
        for kind, count in (
            (DIFFERENT, changed),
            (MISSING, gone - changed),
            (EXTRA, came - changed),
        ):
            if count:
                yield RowDifference(key, kind, count)
