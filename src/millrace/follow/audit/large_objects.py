"""Large objects at the end of a stream: the clone copies them, and no change of them is followed.

Invariant: large objects that were written, made or removed since the copy never go without a word.
The source's counters accuse; a comparison of the objects themselves acquits. Where neither side has
a large object there is nothing to accuse.

Compared are OIDs and contents, not owners, grants and comments. Only checksums leave the servers.

Facts: PostgreSQL documentation, "Logical Replication", Restrictions: large objects are not
replicated; "pg_stat_all_tables", which counts catalogs too; a descriptor of lo_open() is closed at
the end of its transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import psycopg

from millrace.clone.large_object import CHUNK_BYTES, INV_READ
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.follow.audit.baseline import Baseline
from millrace.follow.audit.finding import LARGE_OBJECTS, Finding, FindingKind
from millrace.follow.audit.source_state import LARGE_OBJECT_CATALOGS, SourceCounters
from millrace.postgres.wire.connect import connect, translated

Connection = psycopg.Connection[tuple[Any, ...]]

WHY: Final = "large objects are not followed"
# Descriptors that one transaction has open, at most.
OBJECTS_PER_BATCH = 1000
LAST_OID = 2**32 - 1
_INSUFFICIENT_PRIVILEGE = "42501"
_UPPER = """
SELECT max(b.oid)::int8 FROM (
    SELECT m.oid FROM pg_largeobject_metadata m WHERE m.oid > %s::int8::oid ORDER BY 1 LIMIT %s) b
"""
_CHECKSUMS = f"""
SELECT m.oid::int8, s.size, sha256((
         SELECT string_agg(sha256(lo_get(m.oid, c * {CHUNK_BYTES}, {CHUNK_BYTES})), ''::bytea
                           ORDER BY c)
           FROM generate_series(0, (s.size - 1) / {CHUNK_BYTES}) AS c))
  FROM pg_largeobject_metadata m,
       LATERAL (SELECT lo_lseek64(lo_open(m.oid, {INV_READ}), 0, 2) AS size) s
 WHERE m.oid > %s::int8::oid AND m.oid <= %s::int8::oid
"""


def has_large_objects(connection: Connection) -> bool:
    with translated("looking for large objects"):
        row = connection.execute("SELECT EXISTS (SELECT FROM pg_largeobject_metadata)").fetchone()
    return row == (True,)


def accuse(
    before: Baseline, counters: SourceCounters, silent: Collection[int] = (), *, is_settled: bool
) -> Finding | None:
    """What the source's counters say of large objects since the stream began.

    `silent`: processes that may have counted something and have not written it down. Unless the
    counters are settled, there may be any number of them.
    """
    moved = [before.moved(counters, oid) for oid in LARGE_OBJECT_CATALOGS]
    writes = sum(one.inserted + one.updated + one.deleted for one in moved if one is not None)
    reason = ""
    if writes:
        reason = f"the source counts {writes:,} writes to them since the stream began"
    elif None in moved:
        reason = (
            "the source's counters do not say if there were writes to them: they were reset, or "
            "lost in a crash or failover, or the source is a standby"
        )
    elif silent:
        pids = ", ".join(map(str, sorted(silent)[:3]))
        reason = (
            f"sessions of the source (pid {pids}) have been in a transaction too long to tell "
            "what they did before it"
        )
    elif not is_settled:
        reason = "sessions of the source may not have reported yet what they wrote"
    return Finding(LARGE_OBJECTS, FindingKind.UNPROVED, f"{WHY}, and {reason}") if reason else None


def compare_accused(findings: Iterable[Finding], source: Dsn, target: Dsn) -> tuple[Finding, ...]:
    """The findings, with what a comparison says of large objects that are among them. Nobody must
    write to either side meanwhile."""
    return tuple(
        kept
        for one in findings
        if (kept := _compared(one, source, target) if one.table == LARGE_OBJECTS else one)
        is not None
    )


def count_differences(
    source: Dsn, target: Dsn, *, objects_per_batch: int = OBJECTS_PER_BATCH
) -> dict[str, tuple[int, int]]:
    """By what is wrong: the number of objects, and the first one's OID."""
    found: dict[str, tuple[int, int]] = {}

    def add(kind: str, oids: Collection[int]) -> None:
        if oids:
            count, first = found.get(kind, (0, min(oids)))
            found[kind] = (count + len(oids), first)

    with (
        connect(source, "compare") as here,
        connect(target, "compare") as there,
        ThreadPoolExecutor(1) as beside,
        translated("comparing large objects"),
    ):
        last = 0
        while last < LAST_OID:
            upper = _upper_bound(here, last, objects_per_batch)
            asked = beside.submit(_checksums, there, last, upper)
            ours, theirs = _checksums(here, last, upper), asked.result()
            add("in contents", [oid for oid in ours.keys() & theirs if ours[oid] != theirs[oid]])
            add("only on the source", ours.keys() - theirs.keys())
            add("only on the target", theirs.keys() - ours.keys())
            last = upper
    return found


def _compared(accused: Finding, source: Dsn, target: Dsn) -> Finding | None:
    try:
        found = count_differences(source, target)
    except ServerError as error:
        if error.facts.get("sqlstate") != _INSUFFICIENT_PRIVILEGE:
            raise
        return replace(accused, reason=f"{accused.reason}; they could not be compared: {error}")
    if not found:
        return None
    told = (f"{count:,} {kind} (the first is {oid})" for kind, (count, oid) in found.items())
    return replace(
        accused,
        kind=FindingKind.NOT_FOLLOWED,
        reason=f"{WHY}, and these differ: {', '.join(told)}",
    )


def _upper_bound(source: Connection, last: int, objects: int) -> int:
    """The last OID of the next batch; beyond the source's last object, of all."""
    row = source.execute(_UPPER, (last, objects)).fetchone()
    return row[0] if row and row[0] is not None else LAST_OID


def _checksums(side: Connection, last: int, upper: int) -> dict[int, tuple[int, bytes]]:
    rows = side.execute(_CHECKSUMS, (last, upper)).fetchall()
    return {oid: (size, checksum) for oid, size, checksum in rows}
