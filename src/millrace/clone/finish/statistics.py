"""The planner's statistics of the source, carried along to a target that takes them.

Invariant: a table is left without ANALYZE only if the source has statistics of it that were dumped
under the run's snapshot, and all of them are restored at the end; if one is not, it is analyzed
after all. Extended statistics can't be carried: tables that have some are analyzed.

Sizes are the target's own: VACUUM has counted pages and rows there, without the source's bloat.

Facts: pg_dump 18, --statistics-only; "Statistics Information Functions",
pg_restore_attribute_stats().
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from millrace.clone.run_state import Run
from millrace.clone.step import Step
from millrace.errors import MillraceError
from millrace.name import QualifiedName
from millrace.postgres.program.dump import dump_statistics
from millrace.postgres.quote import qualified
from millrace.postgres.sql_text import cut_statements
from millrace.postgres.wire.connect import connect, translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# The first release whose server takes statistics, and whose pg_dump writes them.
SINCE: Final = 18
_FILE: Final = "statistics.sql"
_LITERAL = r"(E?'(?:[^'\\]|''|\\.)*')"
_ATTRIBUTE = re.compile(
    rf"pg_restore_attribute_stats\(.*?'schemaname', {_LITERAL},\s*'relname', {_LITERAL}", re.S
)
# Relations whose indexes and columns have no statistics of more than one column.
_EXTENDED = """
SELECT DISTINCT n.nspname, c.relname FROM pg_statistic_ext s
  JOIN pg_class c ON c.oid = s.stxrelid JOIN pg_namespace n ON n.oid = c.relnamespace
"""
_INDEXES = """
SELECT n.nspname, i.relname, tn.nspname, t.relname FROM pg_index x
  JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_namespace n ON n.oid = i.relnamespace
  JOIN pg_class t ON t.oid = x.indrelid JOIN pg_namespace tn ON tn.oid = t.relnamespace
"""

Statements = Mapping[QualifiedName, list[bytes]]


def keep_statistics(run: Run, snapshot: str) -> None:
    """Dump them under the snapshot, if the target takes them; what can't be dumped is analyzed."""
    path = _path(run)
    if path.exists() or not _is_wanted(run):
        return
    try:
        dump_statistics(run.tools, run.settings.source, snapshot, path, role=run.role("schema"))
    except MillraceError as error:
        log.warning("statistics are not carried along, tables are analyzed: %s", error)


def read_carried(run: Run, tables: Iterable[QualifiedName]) -> frozenset[QualifiedName]:
    """Those of the tables that need no ANALYZE."""
    found = _read_statements(run)
    if not found:
        return frozenset()
    with (
        connect(run.settings.source, run.role("statistics")) as source,
        translated("reading extended statistics"),
    ):
        extended = {QualifiedName(*row) for row in source.execute(_EXTENDED)}
    return (frozenset(found) & frozenset(tables)) - extended


def restore_statistics(run: Run) -> int:
    """Put them in place, those of indexes too; the number of tables that have theirs."""
    statements = _read_statements(run)
    carried = run.carried
    failed: set[QualifiedName] = set()
    with (
        connect(run.settings.target, run.role("statistics")) as target,
        translated("restoring statistics"),
    ):
        tables = _tables_of_indexes(target)
        for name, texts in statements.items():
            table = tables.get(name, name)
            if table in carried and not _restore(target, name, texts):
                failed.add(table)
        for table in failed:
            target.execute(f"ANALYZE {qualified(*table)}")
    return len(carried - failed)


def _is_wanted(run: Run) -> bool:
    settings = run.settings
    if not settings.carries_statistics or settings.skip_vacuum or run.tools.version < SINCE:
        return False
    # Of some rows, or under other names, they are not those of the source.
    if not (settings.filters.is_empty and settings.naming.is_identity):
        return False
    if Step.VACUUM not in settings.steps:
        return False
    with connect(settings.target, run.role("statistics")) as target:
        return target.info.server_version // 10000 >= SINCE


def _path(run: Run) -> Path:
    return run.settings.directory / "schema" / _FILE


def _read_statements(run: Run) -> Statements:
    """By relation; empty if nothing was dumped."""
    path = _path(run)
    if not path.exists() or not _is_wanted(run):
        return {}
    found: dict[QualifiedName, list[bytes]] = defaultdict(list)
    for one in cut_statements(path.read_bytes()):
        text = one.text[: one.length]
        match = _ATTRIBUTE.search(text.decode(errors="surrogateescape"))
        if match:
            found[QualifiedName(_unquoted(match[1]), _unquoted(match[2]))].append(text)
    return found


def _unquoted(literal: str) -> str:
    text = literal.removeprefix("E")[1:-1].replace("''", "'")
    return text.replace("\\\\", "\\") if literal.startswith("E") else text


def _tables_of_indexes(target: Connection) -> dict[QualifiedName, QualifiedName]:
    return {
        QualifiedName(schema, index): QualifiedName(table_schema, table)
        for schema, index, table_schema, table in target.execute(_INDEXES)
    }


def _restore(target: Connection, name: QualifiedName, texts: Iterable[bytes]) -> bool:
    """Whether all were taken; the server warns of what it does not understand, and says false."""
    try:
        with target.transaction():
            return all(target.execute(text).fetchone() == (True,) for text in texts)
    except psycopg.Error as error:
        log.info("statistics of %s: %s", name.label, error.diag.message_primary)
        return False
