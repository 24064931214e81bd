"""Whether the source can serve an output plugin, asked before anything is made there.

Invariant: what would refuse the plugin when changes are received refuses it here, before the copy.

Facts: PostgreSQL 15.20, `output_plugin_libraries`: plugins that it does not list are not loaded,
and it lists only the server's own by default; logicalfuncs.c and logical.c: a slot's options are
looked at when it is read, so wal2json's version is found by reading an empty range of a slot.
"""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import Any, Final

import psycopg

from millrace.errors import PreflightError
from millrace.postgres.catalog.schemas import USER_SCHEMA, USER_TABLE
from millrace.postgres.quote import literal
from millrace.postgres.wire.connect import translated

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

LIBRARIES: Final = "output_plugin_libraries"

# Followed columns whose NaN and infinity come as null from an old wal2json: real, double precision
# and numeric.
_NUMBER_COLUMN = f"""
SELECT format('%s.%s.%s', n.nspname, c.relname, a.attname)
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       AND a.attgenerated = '' AND a.atttypid IN (700, 701, 1700)
 WHERE c.relkind IN ('r', 'p') AND {USER_SCHEMA} AND {USER_TABLE}
 ORDER BY 1 LIMIT 1
"""
# Oldest first: a new slot waits for each of them to end.
_OPEN_TRANSACTIONS = """
SELECT pid, application_name, extract(epoch FROM now() - xact_start)::int
  FROM pg_stat_activity
 WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start
"""


def require_plugin(source: Connection, plugin: str) -> None:
    """Raise PreflightError if the source would refuse the plugin, or it would lose values."""
    row = source.execute(
        "SELECT current_setting(%s, true), (SELECT context FROM pg_settings WHERE name = %s)",
        (LIBRARIES, LIBRARIES),
    ).fetchone()
    assert row is not None
    setting, context = row
    if setting is not None:
        require_listed(plugin, setting, needs_restart=context == "postmaster")
    if plugin == "wal2json":
        require_numbers(source)


def require_listed(plugin: str, setting: str, *, needs_restart: bool = False) -> None:
    """Raise PreflightError if the server's list of plugins has not this one."""
    listed = parse_libraries(setting)
    # With a path or a suffix it is the same library.
    if plugin in {PurePosixPath(name).name.removesuffix(".so") for name in listed}:
        return
    values = ", ".join(literal(name) for name in (*listed, plugin))
    then = "restart the server" if needs_restart else "SELECT pg_reload_conf()"
    raise PreflightError(
        f"the source does not load plugin {plugin}: its setting {LIBRARIES} is {setting!r}",
        hint=f"ALTER SYSTEM SET {LIBRARIES} = {values}; then: {then}; or use --plugin pgoutput",
    )


def parse_libraries(setting: str) -> tuple[str, ...]:
    """The names in a list as PostgreSQL shows it: separated by commas, some in double quotes."""
    names: list[str] = []
    name, is_quoted = "", False
    for character in setting + ",":
        if character == '"':
            is_quoted = not is_quoted
        elif character == "," and not is_quoted:
            names.append(name.strip())
            name = ""
        else:
            name += character
    return tuple(name for name in names if name)


def require_numbers(source: Connection) -> bool:
    """Whether wal2json can send numbers as strings. Without that NaN and infinity would become
    NULL: PreflightError if a column could hold one."""
    if _knows_option(source):
        return True
    with translated("reading the source's tables"):
        row = source.execute(_NUMBER_COLUMN.encode()).fetchone()
    if row is not None:
        raise PreflightError(
            "the source's wal2json is older than 2.6 and sends NaN and infinity as NULL; "
            f"{row[0]} could hold one",
            hint="use --plugin pgoutput, or wal2json 2.6 or later",
        )
    return False


# By the server's address: a receiver asks before each batch, and the answer takes as long as the
# longest transaction that is open.
_KNOWN_OPTIONS: dict[tuple[str, int], bool] = {}


def _knows_option(source: Connection) -> bool:
    address = source.info.host, source.info.port
    if address not in _KNOWN_OPTIONS:
        _tell_waiting(source)
        _KNOWN_OPTIONS[address] = _try_option(source)
    return _KNOWN_OPTIONS[address]


def _tell_waiting(source: Connection) -> None:
    waiting = source.execute(_OPEN_TRANSACTIONS).fetchall()
    if waiting:
        pid, application, seconds = waiting[0]
        log.warning(
            "trying wal2json on the source waits for %d open transactions; the oldest is of "
            "process %d (%s), %d seconds old",
            len(waiting),
            pid,
            application or "no application name",
            seconds,
        )


def _try_option(source: Connection) -> bool:
    """On a slot of its own."""
    # The parsers come with Numba: only those who need it wait for it.
    from millrace.postgres.pgoutput.wal2json import NUMBERS_AS_STRINGS

    name = f"millrace_try_{source.info.backend_pid}"
    with translated("trying wal2json"):
        _create_trial(source, name)
        try:
            source.execute(
                "SELECT pg_logical_slot_peek_changes(%s, '0/1', 1, VARIADIC %s)",
                (name, ["format-version", "2", NUMBERS_AS_STRINGS, "1"]),
            )
        except psycopg.errors.InvalidParameterValue:
            return False
        finally:
            # A failure has removed it already.
            source.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s",
                (name,),
            )
    return True


def _create_trial(source: Connection, name: str) -> None:
    try:
        source.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'wal2json', temporary => true)", (name,)
        )
    except psycopg.errors.UndefinedFile as error:
        raise PreflightError(
            f"the source has no plugin wal2json: {str(error).strip()}",
            hint="install its package on the source's machine, such as "
            f"postgresql-{source.info.server_version // 10000}-wal2json, or use --plugin pgoutput",
        ) from error
