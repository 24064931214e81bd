"""The beginning of a stream: a slot whose snapshot a clone copies.

Invariant: copy and changes meet without gap or overlap, because the snapshot is the one that the
slot was made with. A plain snapshot can't be turned into such a one, and is refused.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import psycopg

from millrace.clone.directory import read_naming
from millrace.config.dsn import Dsn
from millrace.ddl.capture import LeftOut
from millrace.errors import ConfigError, ConnectionLost, MillraceError, PreflightError, WorkDirError
from millrace.filter.apply import read_decision, read_left_out_schemas
from millrace.filter.decide import PG_CLASS_OID, Decision
from millrace.filter.exclusions import Exclusions
from millrace.filter.rules import FilterRules
from millrace.follow.audit.baseline import note_counters
from millrace.follow.bound_copy import (
    choose_slot,
    read_stream,
    require_no_stream,
    write_stream,
)
from millrace.follow.membership import has_all
from millrace.follow.published_table import read_published_tables
from millrace.follow.settings import SlotSettings
from millrace.follow.slot import cleanup, prepare_source
from millrace.follow.slot_making import making_slot
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.catalog.schemas import OWN_SCHEMA, USER_SCHEMA
from millrace.postgres.own_schema import SPOOL_SCHEMA, foreign_schema, is_foreign
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect, server_encoding, translated
from millrace.route import Route
from millrace.snapshot.holder import SnapshotHolder, hold, read_held
from millrace.spool.interface import FOLDER as SPOOL_FOLDER
from millrace.spool.kind import SpoolKind
from millrace.workdir.sentinel import Sentinel

log = logging.getLogger(__name__)

# Tables as changes name them, with the partitions below that hold their rows. Without
# pg_partition_tree(), which would wait for the application's locks.
_LEAVES = f"""
WITH RECURSIVE below (root, oid, kind) AS (
    SELECT i.inhparent, c.oid, c.relkind
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
     WHERE NOT i.inhdetachpending
    UNION ALL
    SELECT below.root, c.oid, c.relkind
      FROM below JOIN pg_inherits i ON i.inhparent = below.oid AND NOT i.inhdetachpending
      JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT c.oid::int8, n.nspname, c.relname,
       array(SELECT b.oid::int8 FROM below b WHERE b.root = c.oid AND b.kind <> 'p')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND {USER_SCHEMA}
"""


@contextmanager
def open_slot_snapshot(
    route: Route,
    slot: SlotSettings,
    *,
    is_copied: Callable[[], bool] = lambda: False,
) -> Iterator[SnapshotHolder]:
    """A snapshot that came with a slot: the one held for the directory, or a new one.

    If what is done under a new one fails, its slot goes too: nobody could use it, and it would
    make the source keep its WAL. Unless every row `is_copied`: who continues then needs no
    snapshot, but the slot.
    """
    slot, encoding = prepare_slot(route, slot)
    if (held := join_held(route, slot, encoding)) is not None:
        yield held
        return
    with make_slot_snapshot(route, slot, encoding) as (held, _):
        try:
            yield held
        except BaseException:
            if is_copied():
                log.warning(
                    "replication slot %s stays: every row is copied; continue with clone --follow "
                    "--resume, or remove it with: millrace stream cleanup",
                    slot.name,
                )
            else:
                drop_stream(route, slot.name, route.source.identity())
            raise


def prepare_slot(route: Route, slot: SlotSettings) -> tuple[SlotSettings, str]:
    """The slot of the directory, or the one asked for, and the target's encoding; raises if the
    target could not be followed."""
    slot = choose_slot(route.place, slot)
    require_silence(route.target)
    require_place(route, slot.spool)
    with connect(route.target, "setup") as connection:
        return slot, server_encoding(connection)


def join_held(route: Route, slot: SlotSettings, encoding: str) -> SnapshotHolder | None:
    """The snapshot held for the directory, whose stream is written down; raises if it has no
    slot. None if nobody holds one, and none is in the way of a new one."""
    directory = route.place
    held = read_held(directory)
    if held is None:
        require_no_stream(directory)
        return None
    if held.slot is None:
        raise WorkDirError(
            f"the snapshot held for {directory} has no replication slot: changes between it "
            "and a slot made now would be lost",
            hint="end it (millrace snapshot --stop) and hold one with: millrace snapshot "
            "--follow; or let `clone --follow` make its own",
        )
    write_stream(directory, held, route.source, slot.spool, encoding)
    return held


@contextmanager
def make_slot_snapshot(
    route: Route, slot: SlotSettings, encoding: str, keep_seconds: float | None = None
) -> Iterator[tuple[SnapshotHolder, Callable[[], None]]]:
    """A new slot and its snapshot, which the directory's stream begins with; and a check."""
    directory, source = route.place, route.source
    holding = _hold_new(route, slot, keep_seconds)
    with making_slot(directory, source, slot.name) as making, holding as (held, check):
        making.made()
        write_stream(directory, held, source, slot.spool, encoding, ddl=slot.ddl)
        making.keep()
        yield held, check


def _hold_new(
    route: Route, slot: SlotSettings, keep_seconds: float | None
) -> AbstractContextManager[tuple[SnapshotHolder, Callable[[], None]]]:
    """A new slot's snapshot, with the publications that have to be there before the slot."""
    source, rules = route.source, route.filters

    def prepare() -> None:
        note_counters(route.place, source)
        wanted = published(source, rules)
        for warning in prepare_source(
            source,
            slot.name,
            slot.plugin,
            wanted,
            identity_full=slot.identity_full,
            capture=LeftOut.of(rules) if slot.ddl else None,
        ):
            log.warning("source: %s", warning)

    return hold(
        route.place,
        source,
        slot=slot.name,
        plugin=slot.plugin,
        before_slot=prepare,
        is_slot_whole=lambda snapshot: has_all(
            source, slot.name, slot.plugin, published(source, rules), snapshot
        ),
        slot_timeout_seconds=slot.timeout_seconds,
        keep_seconds=keep_seconds,
    )


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


def require_place(route: Route, spool: SpoolKind) -> None:
    """Raise if the target has, or would get from the source, a schema of the user's that has the
    name of one in which a stream keeps its tables."""
    schemas = (OWN_SCHEMA, SPOOL_SCHEMA) if spool is SpoolKind.TABLE else (OWN_SCHEMA,)
    with (
        connect(route.target, "setup") as target,
        connect(route.source, "setup") as source,
        translated("looking at the schemas"),
    ):
        left_out = read_left_out_schemas(source, route.filters)
        for schema in schemas:
            if is_foreign(target, schema):
                raise foreign_schema(schema)
            if is_foreign(source, schema) and schema not in left_out:
                raise PreflightError(
                    f"the source has a schema {schema} of its own: on the target, a stream keeps "
                    "its tables in a schema of that name",
                    hint=f"ALTER SCHEMA {schema} RENAME TO ... on the source; or leave it out: "
                    f"[exclude-schema] {schema} in --filters",
                )


def forget_stream(route: Route) -> None:
    """Remove a stream that is to start over: slot, publications, position and spool."""
    setup = read_stream(route.place)
    if setup is not None:
        drop_stream(route, setup.slot_name, setup.source)


def published(source: Dsn, rules: FilterRules) -> set[int] | None:
    """The OIDs of the tables that filters keep; None for all."""
    if rules.keeps_all_rows:
        return None
    with connect(source, "filter") as connection, translated("reading the source's catalog"):
        decision = read_decision(connection, rules)
        tables = read_published_tables(connection, None)
    return {table.oid for table in tables} - _left_out(decision)


def read_left(source: Dsn, rules: FilterRules) -> Exclusions:
    """What filters leave out of the changes."""
    if rules.keeps_all_rows:
        return Exclusions()
    with connect(source, "filter") as connection, translated("reading the source's catalog"):
        decision = read_decision(connection, rules)
        tables = connection.execute(_LEAVES).fetchall()
        sequences = catalog.read_sequences(connection)
    out = _left_out(decision)
    left: dict[tuple[str, str], tuple[bool, frozenset[str], str, frozenset[str]]] = {}
    for oid, schema, name, leaves in tables:
        # Of a partitioned table, filters speak of it or of its leaves.
        found = {
            (
                leaf in out or oid in out,
                decision.columns.get(leaf, decision.columns.get(oid, frozenset())),
                decision.predicates.get(leaf, decision.predicates.get(oid, "")),
                decision.hashed.get(leaf, decision.hashed.get(oid, frozenset())),
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
    return Exclusions(
        frozenset(name for name, one in left.items() if one[0]),
        {name: columns for name, (_, columns, _, _) in left.items() if columns},
        {name: where for name, (_, _, where, _) in left.items() if where},
        frozenset((one.schema, one.name) for one in sequences if one.oid in out),
        {name: hashed for name, (_, _, _, hashed) in left.items() if hashed},
    )


def _left_out(decision: Decision) -> set[int]:
    """OIDs of relations that are not there, or stay empty."""
    keys = (*decision.excluded, *decision.data_skipped)
    return {oid for kind, oid in keys if kind == PG_CLASS_OID}


def drop_stream(route: Route, slot: str, identity: str) -> None:
    """Remove the slot of a copy that is not complete, and all that belongs to it; what can't be
    removed is logged."""
    log.warning("dropping replication slot %s: what was copied with it is not complete", slot)
    try:
        remove_stream(route, slot, identity)
    except MillraceError as error:
        log.error("%s; remove it with: millrace stream cleanup", error)


def remove_stream(route: Route, slot: str, identity: str) -> None:
    """Slot and publications on the source, positions on the target, the stream in the directory."""
    with connect(route.source, "cleanup") as here, ExitStack() as stack:
        there = None
        try:
            there = stack.enter_context(connect(route.target, "cleanup"))
        except ConnectionLost as error:
            log.warning("%s; the slot goes all the same", error)
        cleanup(here, there, slot, identity, read_naming(route.place))
    if not route.place.exists():
        return
    with Sentinel(route.place) as sentinel:
        sentinel.clear()
    shutil.rmtree(route.place / SPOOL_FOLDER, ignore_errors=True)
