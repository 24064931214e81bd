"""Indexes that foreign keys lack on the target, built when nothing else is to be done.

Invariant: an index is built only while every source is caught up, without blocking whoever reads or
writes, and the build is given up as soon as a source falls behind. What a build that was given up
has left is dropped before the next; nothing is dropped that we did not make.

Facts: PostgreSQL documentation, CREATE INDEX, "Building Indexes Concurrently": a build that fails
leaves an index that is not valid; it can't be done for a partitioned table, but for each partition.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.config.dsn import Dsn
from millrace.errors import MillraceError
from millrace.name import NAME_BYTES
from millrace.postgres.quote import columns as column_list
from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import connect, translated
from millrace.retry import is_transient

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

PREFIX: Final = "millrace_fk_"
# How often is looked for what is missing, and, during a build, whether it may go on.
LOOK_SECONDS: Final = 10.0
WATCH_SECONDS: Final = 0.5

_MISSING: Final = """
SELECT n.nspname, c.relname, k.conname,
       array(SELECT a.attname::text FROM unnest(k.conkey) WITH ORDINALITY u (number, place)
               JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.number
              ORDER BY u.place)
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE k.contype = 'f' AND c.relkind = 'r' AND n.nspname = ANY(%s)
   AND NOT EXISTS (
       SELECT FROM pg_index i
        WHERE i.indrelid = k.conrelid AND i.indisvalid AND i.indpred IS NULL
          AND (i.indkey::int2[])[0:cardinality(k.conkey) - 1] @> k.conkey
          AND (i.indkey::int2[])[0:cardinality(k.conkey) - 1] <@ k.conkey)
 ORDER BY pg_table_size(c.oid), 1, 2, 3
"""
_LEFT: Final = """
SELECT n.nspname, c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE NOT i.indisvalid AND starts_with(c.relname, %s) AND n.nspname = ANY(%s)
   AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = c.oid)
"""


@dataclass(frozen=True)
class MissingIndex:
    """A foreign key whose columns begin no index."""

    schema: str
    table: str
    constraint: str
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        text = f"{PREFIX}{self.constraint}".encode()[:NAME_BYTES]
        return text.decode(errors="ignore")

    @property
    def label(self) -> str:
        return f"{self.schema}.{self.name}"

    def create_sql(self) -> str:
        return (
            f"CREATE INDEX CONCURRENTLY {ident(self.name)} ON"
            f" {qualified(self.schema, self.table)} ({column_list(self.columns)})"
        )


def read_missing(connection: Connection, schemas: Collection[str]) -> list[MissingIndex]:
    """What is missing, of the smallest table first."""
    with translated("looking for foreign keys without an index"):
        rows = connection.execute(_MISSING, (sorted(schemas),)).fetchall()
    return [
        MissingIndex(schema, table, constraint, tuple(columns))
        for schema, table, constraint, columns in rows
    ]


def drop_left(connection: Connection, schemas: Collection[str]) -> None:
    """Drop what builds that were given up have left."""
    with translated("dropping indexes that are not valid"):
        for schema, name in connection.execute(_LEFT, (PREFIX, sorted(schemas))).fetchall():
            connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {qualified(schema, name)}")
            log.info("dropped %s.%s, which was not finished", schema, name)


class ForeignKeyIndexes:
    """Builds them, one after the other, on a thread of its own."""

    def __init__(
        self, target: Dsn, schemas: Callable[[], Collection[str]], is_quiet: Callable[[], bool]
    ) -> None:
        """`schemas` of the sources that are followed; `is_quiet`: all of them have caught up."""
        self._target = target
        self._schemas = schemas
        self._is_quiet = is_quiet
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foreign key indexes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            if not self._is_quiet():
                continue
            try:
                self.build_missing()
            except MillraceError as error:
                # Somebody may have dropped the table; what is missing then is looked up anew.
                log.log(
                    logging.DEBUG if is_transient(error) else logging.WARNING,
                    "an index for a foreign key was not built: %s",
                    error,
                )

    def build_missing(self) -> int:
        """Build what is missing, as long as all is quiet; how many were built."""
        built = 0
        with connect(self._target, "foreign key indexes") as connection:
            drop_left(connection, self._schemas())
            for missing in read_missing(connection, self._schemas()):
                if self._stopping.is_set() or not self._is_quiet():
                    break
                if not self._build(connection, missing):
                    break
                built += 1
        return built

    def _build(self, connection: Connection, missing: MissingIndex) -> bool:
        """Whether it was finished."""
        log.info("building %s: a foreign key has no index", missing.label)
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(connection, done), daemon=True)
        watch.start()
        try:
            with translated(f"building index {missing.label}"):
                connection.execute(missing.create_sql().encode())
        except MillraceError as error:
            if error.facts.get("sqlstate") != psycopg.errors.QueryCanceled.sqlstate:
                raise
            log.info("the build of %s is given up for now: a source is behind", missing.label)
            return False
        finally:
            done.set()
            watch.join()
        return True

    def _watch(self, connection: Connection, done: threading.Event) -> None:
        while not done.wait(WATCH_SECONDS):
            if self._stopping.is_set() or not self._is_quiet():
                connection.cancel()
