"""The beginning of a stream: a slot whose snapshot a clone copies.

Invariant: copy and changes meet without gap or overlap, because the snapshot is the one that the
slot was made with. A plain snapshot can't be turned into such a one, and is refused.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from millrace.clone.decision import PG_CLASS_OID, Decision
from millrace.clone.filter import FilterRules
from millrace.clone.filtering import read_decision
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, MillraceError, PreflightError, WorkDirError
from millrace.lsn import parse_lsn
from millrace.postgres.connect import connect, server_encoding, translated
from millrace.postgres.quote import ident
from millrace.postgres.schemas import USER_SCHEMA
from millrace.snapshot.holder import Held, hold, read_held
from millrace.stream.publication import read_published_tables
from millrace.stream.sentinel import FILE as SENTINEL_FILE
from millrace.stream.sentinel import Sentinel, StreamSetup
from millrace.stream.settings import Left, SlotSettings, SpoolKind
from millrace.stream.slot import cleanup, prepare_source
from millrace.stream.spool import FOLDER as SPOOL_FOLDER

log = logging.getLogger(__name__)

# Tables as changes name them, with the partitions below that hold their rows.
_LEAVES = f"""
SELECT c.oid::int8, n.nspname, c.relname,
       array(SELECT t.relid::oid::int8 FROM pg_partition_tree(c.oid) t
              WHERE t.isleaf AND t.relid <> c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND {USER_SCHEMA}
"""


@contextmanager
def open_slot_snapshot(
    directory: Path, source: Dsn, target: Dsn, slot: SlotSettings, rules: FilterRules
) -> Iterator[Held]:
    """A snapshot that came with a slot: the one held for the directory, or a new one.

    If what is done under a new one fails, its slot goes too: nobody could use it, and it would
    make the source keep its WAL.
    """
    require_silence(target)
    held = read_held(directory)
    if held is not None:
        if held.slot is None:
            raise WorkDirError(
                f"the snapshot held for {directory} has no replication slot: changes between it "
                "and a slot made now would be lost",
                hint="end it (millrace snapshot --stop) and hold one with: millrace snapshot "
                "--follow; or let `clone --follow` make its own",
            )
        _write_setup(directory, held, target, slot.spool)
        yield held
        return

    def prepare() -> None:
        for warning in prepare_source(source, slot.name, slot.plugin, published(source, rules)):
            log.warning("source: %s", warning)

    with hold(directory, source, slot=slot.name, plugin=slot.plugin, before_slot=prepare) as (
        held,
        _,
    ):
        _write_setup(directory, held, target, slot.spool)
        try:
            yield held
        except BaseException:
            _drop(directory, source, target, slot.name, source.identity())
            raise


def require_silence(target: Dsn) -> None:
    """Raise if changes could not be applied without firing triggers: soon, and not after hours of
    copying."""
    with connect(target, "setup") as connection:
        try:
            connection.execute("SET session_replication_role = replica")
        except psycopg.errors.InsufficientPrivilege:
            role = connection.info.user
            raise PreflightError(
                f"{role} may not set session_replication_role on the target",
                hint=f"since version 15: GRANT SET ON PARAMETER session_replication_role TO "
                f"{ident(role)}; or connect as a superuser",
            ) from None


def forget_stream(directory: Path, source: Dsn, target: Dsn) -> None:
    """Remove a stream that is to begin anew: slot, publications, position and spool."""
    if (directory / SENTINEL_FILE).exists():
        with Sentinel(directory) as sentinel:
            setup = sentinel.read_setup()
        if setup is not None:
            _drop(directory, source, target, setup.slot_name, setup.source)


def published(source: Dsn, rules: FilterRules) -> set[int] | None:
    """The OIDs of the tables that filters keep; None for all."""
    if rules.is_empty:
        return None
    with connect(source, "filter") as connection, translated("reading the source's catalog"):
        decision = read_decision(connection, rules)
        tables = read_published_tables(connection, None)
    return {table.oid for table in tables} - _left_out(decision)


def read_left(source: Dsn, rules: FilterRules) -> Left:
    """What filters leave out of the changes."""
    if rules.is_empty:
        return Left()
    with connect(source, "filter") as connection, translated("reading the source's catalog"):
        decision = read_decision(connection, rules)
        tables = connection.execute(_LEAVES).fetchall()
    out = _left_out(decision)
    left: dict[tuple[str, str], tuple[bool, frozenset[str], str]] = {}
    for oid, schema, name, leaves in tables:
        # Of a partitioned table, filters speak of it or of its leaves.
        found = {
            (
                leaf in out or oid in out,
                decision.columns.get(leaf, decision.columns.get(oid, frozenset())),
                decision.predicates.get(leaf, decision.predicates.get(oid, "")),
            )
            for leaf in leaves or [oid]
        }
        if len(found) > 1:
            raise ConfigError(
                f"the filters treat the partitions of {schema}.{name} differently: that can't be "
                "followed, since a row may move from one to another",
                hint=f"name {schema}.{name} itself in the filters",
            )
        left[schema, name] = found.pop()
    return Left(
        frozenset(name for name, (is_out, _, _) in left.items() if is_out),
        {name: columns for name, (_, columns, _) in left.items() if columns},
        {name: where for name, (_, _, where) in left.items() if where},
    )


def _left_out(decision: Decision) -> set[int]:
    """OIDs of relations that are not there, or stay empty."""
    keys = (*decision.excluded, *decision.data_skipped)
    return {oid for kind, oid in keys if kind == PG_CLASS_OID}


def _write_setup(directory: Path, held: Held, target: Dsn, spool: SpoolKind) -> None:
    assert held.slot is not None
    assert held.start_lsn is not None
    with connect(target, "setup") as connection:
        encoding = server_encoding(connection)
    setup = StreamSetup(
        held.source,
        held.slot,
        held.plugin or "pgoutput",
        encoding,
        parse_lsn(held.start_lsn),
        spool=spool,
    )
    with Sentinel(directory) as sentinel:
        found = sentinel.read_setup()
        if found is not None and (found.slot_name, found.start_lsn) == (
            setup.slot_name,
            setup.start_lsn,
        ):
            return  # gone on with
        if found is not None:
            raise WorkDirError(
                f"{directory} holds the stream of another slot, {found.slot_name}",
                hint="choose another --dir, or start from zero with --restart",
            )
        sentinel.write_setup(setup)


def _drop(directory: Path, source: Dsn, target: Dsn, slot: str, identity: str) -> None:
    log.warning("dropping replication slot %s: what was copied with it is not whole", slot)
    try:
        with connect(source, "cleanup") as here, connect(target, "cleanup") as there:
            cleanup(here, there, slot, identity)
    except MillraceError as error:
        log.error("%s; remove it with: millrace stream cleanup", error)
        return
    with Sentinel(directory) as sentinel:
        sentinel.clear()
    shutil.rmtree(directory / SPOOL_FOLDER, ignore_errors=True)
