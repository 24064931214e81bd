"""Client CPU for one COPY: psql | psql against Millrace's relay, without Spark.

Both copy the same rows with the same statements. What counts is the CPU of the client alone,
measured in a fresh process from the first byte to the last: connections are open before, and the
imports are paid. psql's start is in its figure; it is 10 ms.

Run as a program: python -m bench.relay_cpu (psql|relay) BINDIR SOURCE TARGET RESULT
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from bench.data import DataSet, Table
from bench.floor import Psql, copy_statements

NARROW = DataSet(
    "relay",
    "one table of narrow rows",
    (
        Table(
            "narrow",
            3_000_000,
            "id int not null, at timestamptz, value int, word text",
            "i, timestamptz '2024-01-01' + i * interval '1 s', i * 7919 % 100000, 'w' || i % 1000",
        ),
    ),
)


def copy_by_psql(bindir: str, source: str, target: str) -> Callable[[], None]:
    copy_out, copy_in = copy_statements("narrow")
    return lambda: Psql(Path(bindir), source, target).pipe(copy_out, copy_in)


def copy_by_relay(bindir: str, source: str, target: str) -> Callable[[], None]:
    """The hook into Millrace: the function that a copy task runs, on two open connections."""
    from millrace.postgres.wire.relay import relay

    copy_out, (truncate, copy_in) = copy_statements("narrow")
    reader = psycopg.connect(source, autocommit=True)
    writer = psycopg.connect(target)

    def copy() -> None:
        with reader, writer:
            writer.execute(truncate.encode())
            # The relay wants a query that opens its own transaction, and rolls it back.
            relay(reader.pgconn, writer.pgconn, f"BEGIN; {copy_out}", copy_in)

    return copy


def main() -> None:
    side, bindir, source, target, result = sys.argv[1:]
    open_copy = {"psql": copy_by_psql, "relay": copy_by_relay}[side]
    copy = open_copy(bindir, source, target)
    cpu_before, started = _cpu_seconds(), time.monotonic()
    copy()
    seconds = {
        "copy_cpu_seconds": _cpu_seconds() - cpu_before,
        "copy_seconds": time.monotonic() - started,
    }
    Path(result).write_text(json.dumps(seconds))


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
