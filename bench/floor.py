"""The floor: the least a copy through a client can take, made of bare psql processes.

It knows no snapshot, no resume and no check. Its COPY, CREATE INDEX and VACUUM are those of a
clone, each started as early as it may be: an index when its table is copied, a constraint when the
indexes are there, VACUUM after that. What lies above the floor is the price of the program.

Run as a program, to be measured as the others: python -m bench.floor BINDIR SOURCE TARGET PARTS
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

JOBS = 4

# Names come out quoted where they need it: regclass and pg_get_indexdef see to that.
_TABLES = """
    SELECT json_agg(t ORDER BY t.bytes DESC) FROM (
        SELECT c.oid::regclass AS name, pg_table_size(c.oid) AS bytes,
               array(SELECT pg_get_indexdef(indexrelid)
                       FROM pg_index WHERE indrelid = c.oid) AS indexes,
               array(SELECT format('ALTER TABLE %s ADD CONSTRAINT %I %s USING INDEX %I',
                                   c.oid::regclass, conname,
                                   CASE contype WHEN 'p' THEN 'PRIMARY KEY' ELSE 'UNIQUE' END,
                                   conname)
                       FROM pg_constraint
                      WHERE conrelid = c.oid AND contype IN ('p', 'u')) AS constraints
          FROM pg_class c
         WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace
    ) AS t
"""


@dataclass(frozen=True)
class Psql:
    """psql of one installation, and the two databases."""

    bindir: Path
    source: str
    target: str

    def query(self, uri: str, statement: str) -> str:
        command = self._command(uri, [statement])
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def pipe(self, copy_out: str, copy_in: Sequence[str]) -> None:
        """Run COPY on the source into the last of `copy_in` on the target, in one transaction."""
        _run_pipe(self._command(self.source, [copy_out]), self._command(self.target, copy_in))

    def copy_schema(self) -> None:
        dump = [str(self.bindir / "pg_dump"), "--section=pre-data", "-d", self.source]
        _run_pipe(dump, [*self._command(self.target), "-o", "/dev/null"])

    def _command(self, uri: str, statements: Sequence[str] = ()) -> list[str]:
        psql = [str(self.bindir / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]
        transaction = ["--single-transaction"] if len(statements) > 1 else []
        options = [option for statement in statements for option in ("-c", statement)]
        return [*psql, *transaction, "-d", uri, *options]


def copy_statements(table: str, where: str = "") -> tuple[str, list[str]]:
    """COPY out and COPY in of a whole table, or of a part of one that was truncated before."""
    if where:
        out = f"COPY (SELECT * FROM ONLY {table} WHERE {where}) TO STDOUT (FORMAT binary)"
        return out, [f"COPY {table} FROM STDIN (FORMAT binary)"]
    freeze = f"COPY {table} FROM STDIN (FORMAT binary, FREEZE)"
    return f"COPY {table} TO STDOUT (FORMAT binary)", [f"TRUNCATE ONLY {table}", freeze]


def key_ranges(low: int, high: int, parts: int) -> list[str]:
    """Conditions on `id` that cut low..high into parts of equal width."""
    cuts = [low + (high + 1 - low) * part // parts for part in range(parts + 1)]
    return [f"id >= {a} AND id < {b}" for a, b in pairwise(cuts)]


class Floor:
    """One copy, with a pool of threads for each kind of work."""

    def __init__(self, psql: Psql, parts: int) -> None:
        self._psql = psql
        self._parts = parts
        self._copy_pool = ThreadPoolExecutor(JOBS)
        self._index_pool = ThreadPoolExecutor(JOBS)

    def run(self) -> None:
        self._psql.copy_schema()
        tables = json.loads(self._psql.query(self._psql.source, _TABLES))
        copies = [self._start_copy(table["name"]) for table in tables]
        # One thread for each table: it waits for its own copies and indexes, not for others'.
        with self._copy_pool, self._index_pool, ThreadPoolExecutor(len(tables)) as finishers:
            for _ in finishers.map(self._finish, tables, copies):
                pass

    def _start_copy(self, table: str) -> list[Future[None]]:
        statements = [copy_statements(table)]
        if self._parts > 1:
            extent = f"SELECT min(id), max(id) FROM {table}"
            low, high = map(int, self._psql.query(self._psql.source, extent).split("|"))
            ranges = key_ranges(low, high, self._parts)
            statements = [copy_statements(table, condition) for condition in ranges]
            self._psql.query(self._psql.target, f"TRUNCATE ONLY {table}")
        return [self._copy_pool.submit(self._psql.pipe, *pair) for pair in statements]

    def _finish(self, table: dict[str, Any], copies: list[Future[None]]) -> None:
        for copy in copies:
            copy.result()
        indexes = [self._index_pool.submit(self._on_target, text) for text in table["indexes"]]
        for index in indexes:
            index.result()
        for statement in [*table["constraints"], f"VACUUM ANALYZE {table['name']}"]:
            self._on_target(statement)

    def _on_target(self, statement: str) -> None:
        self._psql.query(self._psql.target, statement)


def _run_pipe(left: list[str], right: list[str]) -> None:
    with subprocess.Popen(left, stdout=subprocess.PIPE) as reader:
        subprocess.run(right, stdin=reader.stdout, check=True)
    if reader.returncode:
        raise subprocess.CalledProcessError(reader.returncode, left[0])


if __name__ == "__main__":
    bindir, source_uri, target_uri, part_count = sys.argv[1:]
    Floor(Psql(Path(bindir), source_uri, target_uri), int(part_count)).run()
