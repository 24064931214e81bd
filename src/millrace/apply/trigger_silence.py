"""Triggers and rules of the target that would fire for applied changes: disabled meanwhile.

Invariant: a change is applied with no trigger and no rule of its table awake, but for those that
are meant to see it; after the transaction that applies, each is as it was, however that ended.

`session_replication_role = replica` silences most. Those that are enabled ALWAYS or REPLICA fire
all the same, and would do once more what the source has done. They are disabled by the transaction
that applies the changes, and enabled again by the same one before it commits. So nobody else ever
sees them disabled, there is nothing to put back after a crash, and nothing to remember. The
price is a lock: other writers of such a table wait while a batch is applied, and readers too if
it is a rule. Tables without such triggers and rules pay nothing but a look at the catalog.

Exempt are triggers whose function is marked (catalog.exempt_trigger): tubes, and whatever a user
wants to see applied changes.

Facts: trigger.c, TriggerEnabled(); rewriteHandler.c, matchLocks(); tablecmds.c,
AlterTableGetLockLevel() and CheckTableNotInUse().
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import psycopg
from psycopg.pq.abc import PGconn

from millrace.apply.target_table import TargetTable
from millrace.errors import ApplyError, ServerError
from millrace.postgres.catalog.exempt_trigger import is_exempt_sql
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.wire.connect import translated
from millrace.postgres.wire.libpq import execute, session_encoding

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# How long to wait for a lock before logging who holds it; then the wait continues.
LOCK_WAIT: Final = "10s"
# Of how many tables triggers are named when a stream begins.
_NAMED_TABLES: Final = 10
_LOCK_TIMEOUT: Final = "55P03"
_NOT_ALLOWED: Final = "42501"
# serialization_failure: the batch is applied once more.
_AGAIN: Final = "40001"

# Most often there are none: asked before each transaction commits, and after it began.
_ANY: Final = """
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgenabled IN ('A', 'R'))
    OR EXISTS (SELECT FROM pg_rewrite WHERE ev_enabled IN ('A', 'R'))
"""
# (name by which work may know the table, the table, trigger or rule, its name, its state). A
# partition is also known by all it belongs to. No function here locks a table.
_LOUD: Final = f"""
WITH loud (relation, kind, name, state) AS (
    SELECT t.tgrelid, 'TRIGGER', t.tgname, t.tgenabled FROM pg_trigger t
     WHERE t.tgenabled IN ('A', 'R') AND NOT {is_exempt_sql("t.tgfoid")}
    UNION ALL
    SELECT r.ev_class, 'RULE', r.rulename, r.ev_enabled FROM pg_rewrite r
     WHERE r.ev_enabled IN ('A', 'R')
)
SELECT kn.nspname::text, k.relname::text, n.nspname::text, c.relname::text,
       loud.kind, loud.name::text, loud.state::text
  FROM loud
  JOIN pg_class c ON c.oid = loud.relation AND c.relkind IN ('r', 'p', 'f')
  JOIN pg_namespace n ON n.oid = c.relnamespace,
       LATERAL (SELECT c.oid UNION SELECT a.relid FROM pg_partition_ancestors(c.oid) a)
         AS above (oid)
  JOIN pg_class k ON k.oid = above.oid
  JOIN pg_namespace kn ON kn.oid = k.relnamespace
 ORDER BY c.oid, loud.kind, loud.name
"""
_HOLDERS: Final = """
SELECT string_agg(DISTINCT format('process %s (%s)', a.pid,
                                  coalesce(nullif(a.application_name, ''), a.backend_type)), ', ')
  FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE l.relation = {table}::regclass AND l.granted AND l.pid <> pg_backend_pid()
   AND l.mode NOT IN ('AccessShareLock', 'RowShareLock')
"""


@dataclass(frozen=True)
class Loud:
    """A trigger or a rule that fires for applied changes."""

    schema: str
    table: str
    # TRIGGER or RULE
    kind: str
    name: str
    # A for ALWAYS, R for REPLICA
    state: str

    @property
    def label(self) -> str:
        return f"{self.kind.lower()} {self.name}"

    @property
    def disable(self) -> str:
        return f"DISABLE {self.kind} {ident(self.name)}"

    @property
    def enable(self) -> str:
        state = "ALWAYS" if self.state == "A" else "REPLICA"
        return f"ENABLE {state} {self.kind} {ident(self.name)}"


# By the name of a table that changes may be for.
LoudByTable = dict[tuple[str, str], list[Loud]]


class Silencer:
    """Keeps triggers and rules silent on one session, for one transaction after the other."""

    def __init__(self, session: PGconn) -> None:
        self._session = session
        self._encoding = session_encoding(session)
        self._loud: LoudByTable = {}
        self._touched: set[tuple[str, str]] = set()
        self._silenced: dict[Loud, None] = {}
        self._told: set[str] = set()

    def begin(self) -> None:
        """A transaction begins."""
        self._touched.clear()
        self._silenced.clear()
        self._loud = self._read()

    def silence(self, table: TargetTable) -> None:
        """Before the first change of this table in the transaction."""
        name = table.schema, table.name
        if name in self._touched:
            return
        self._touched.add(name)
        awake = [loud for loud in self._loud.get(name, ()) if loud not in self._silenced]
        for (schema, leaf), group in groupby(awake, lambda loud: (loud.schema, loud.table)):
            self._disable(schema, leaf, list(group))

    def end(self) -> None:
        """Before the transaction commits: as they were."""
        found = self._read()
        late = [loud for name in self._touched for loud in found.get(name, ())]
        if late:
            # Where changes were applied nobody can enable one any more, so it was before.
            raise ServerError(
                f"{late[0].schema}.{late[0].table}: {late[0].label} was created while changes "
                "were being applied",
                sqlstate=_AGAIN,
            )
        if not self._silenced:
            return
        # What still waits for the end of the transaction would forbid it.
        statements = ["SET CONSTRAINTS ALL IMMEDIATE"]
        for (schema, table), group in groupby(self._silenced, lambda one: (one.schema, one.table)):
            statements.append(_alter(schema, table, [loud.enable for loud in group]))
        execute(self._session, "; ".join(statements))

    def _read(self) -> LoudByTable:
        if execute(self._session, _ANY)[0].get_value(0, 0) != b"t":
            return {}
        result = execute(self._session, _LOUD)[0]
        rows = []
        for row in range(result.ntuples):
            values = (result.get_value(row, place) or b"" for place in range(7))
            rows.append([value.decode(self._encoding) for value in values])
        return _by_table(rows)

    def _disable(self, schema: str, table: str, group: list[Loud]) -> None:
        label = f"{schema}.{table}"
        names = ", ".join(loud.label for loud in group)
        statement = _alter(schema, table, [loud.disable for loud in group])
        try:
            while not self._is_done(statement):
                log.warning(
                    "%s: waiting for a lock to silence %s: held by %s",
                    label,
                    names,
                    self._holders(schema, table),
                )
        except ServerError as error:
            if error.facts.get("sqlstate") != _NOT_ALLOWED:
                raise
            raise _not_allowed(label, group, error) from error
        self._silenced |= dict.fromkeys(group)
        if label not in self._told:
            self._told.add(label)
            log.info("%s: disabled while changes are applied: %s", label, names)

    def _is_done(self, statement: str) -> bool:
        """False if it had to wait too long."""
        execute(self._session, f"SAVEPOINT silence; SET LOCAL lock_timeout = '{LOCK_WAIT}'")
        try:
            execute(self._session, statement)
        except ServerError as error:
            if error.facts.get("sqlstate") != _LOCK_TIMEOUT:
                raise
            execute(self._session, "ROLLBACK TO SAVEPOINT silence; RELEASE SAVEPOINT silence")
            return False
        execute(self._session, "SET LOCAL lock_timeout = 0; RELEASE SAVEPOINT silence")
        return True

    def _holders(self, schema: str, table: str) -> str:
        name = literal(qualified(schema, table))
        value = execute(self._session, _HOLDERS.format(table=name))[0].get_value(0, 0)
        return value.decode(self._encoding) if value else "no session any more"


def warn_of_loud(connection: Connection) -> None:
    """Tell what will be silent, and what can't be."""
    with translated("looking for triggers on the target"):
        found = _by_table(connection.execute(_LOUD.encode()).fetchall())
        events = connection.execute(
            "SELECT evtname FROM pg_event_trigger WHERE evtenabled IN ('A', 'R') ORDER BY 1"
        ).fetchall()
    names: dict[str, list[str]] = {}
    for loud in sorted({one for group in found.values() for one in group}, key=repr):
        names.setdefault(f"{loud.schema}.{loud.table}", []).append(loud.label)
    for label in list(names)[:_NAMED_TABLES]:
        log.warning(
            "%s: enabled ALWAYS or REPLICA, and silent for the changes that are applied: %s",
            label,
            ", ".join(names[label]),
        )
    if len(names) > _NAMED_TABLES:
        log.warning("... and triggers or rules of %d more tables", len(names) - _NAMED_TABLES)
    for (name,) in events:
        log.warning(
            "event trigger %s fires always, and so for the temporary tables by which changes are"
            " applied; ALTER EVENT TRIGGER %s ENABLE keeps it to other sessions",
            name,
            ident(name),
        )


def _by_table(rows: list[Any]) -> LoudByTable:
    found: LoudByTable = {}
    for known_schema, known_name, *loud in rows:
        found.setdefault((known_schema, known_name), []).append(Loud(*loud))
    return found


def _alter(schema: str, table: str, actions: list[str]) -> str:
    return f"ALTER TABLE ONLY {qualified(schema, table)} {', '.join(actions)}"


def _not_allowed(label: str, group: list[Loud], error: ServerError) -> ApplyError:
    names = ", ".join(loud.label for loud in group)
    actions = [f"ENABLE {loud.kind} {ident(loud.name)}" for loud in group]
    statement = _alter(group[0].schema, group[0].table, actions)
    return ApplyError(
        f"{label}: {names} would fire for applied changes and cannot be disabled for this "
        f"session: {error.message}",
        hint="apply as the owner of the table, or as a superuser; or keep them to other sessions:"
        f" {statement}",
        table=label,
        sqlstate=_NOT_ALLOWED,
    )
