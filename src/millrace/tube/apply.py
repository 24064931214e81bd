"""Making the database as tube.toml says.

Invariant: nothing is changed before everything was checked; then each step is one transaction, and
applying again does what is left. A check leaves nothing behind and locks no table against writers;
a step waits for a lock two seconds at a time, so that writers queue no longer behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from millrace.clone.preflight import raise_problems
from millrace.clone.problem import Problem
from millrace.errors import MillraceError, PreflightError, ServerError
from millrace.postgres.quote import ident, qualified
from millrace.postgres.wire.connect import server_error, translated
from millrace.retry import is_transient_code, with_retries
from millrace.tube.config import TableEntry, TubeEntry, TubeFile
from millrace.tube.delivery.tube import Connection
from millrace.tube.difference import Attachment, Step, TubeState, plan_steps
from millrace.tube.install import find_schema, require_primary, use_schema

log = logging.getLogger(__name__)

_LOCK_TIMEOUT: Final = "2s"
_COMPILE_ROUTING: Final = "((%s\n)::integer) IS NOT NULL"


@dataclass(frozen=True)
class Changes:
    """What a file asks of a database."""

    steps: tuple[Step, ...]
    # Tubes of the database that the file does not name.
    left_alone: tuple[str, ...]


def plan_changes(connection: Connection, file: TubeFile, schema: str | None = None) -> Changes:
    """The steps, if the database allows all of them; every problem is in one error."""
    require_primary(connection)
    use_schema(connection, find_schema(connection, schema or file.schema or None))
    problems: list[Problem] = []
    steps: list[Step] = []
    with translated("reading tubes"):
        states = read_states(connection)
    with translated("checking tubes"), connection.transaction(force_rollback=True):
        for entry in file.tubes:
            check = _Check(connection, entry, states.get(entry.name), problems)
            wanted = check.tables()
            refused = {table.label for table in entry.tables} - wanted.keys()
            planned = plan_steps(entry, wanted, states.get(entry.name))
            for step in planned:
                if step.table and step.table not in refused:
                    check.rights(step)
            steps += planned
    raise_problems(problems)
    named = {entry.name for entry in file.tubes}
    return Changes(tuple(steps), tuple(sorted(states.keys() - named)))


def apply_changes(
    connection: Connection, changes: Changes, on_step: Callable[[Step], None]
) -> None:
    """All steps, in order."""
    for number, step in enumerate(changes.steps):
        try:
            with_retries(
                lambda step=step: _do(connection, step),  # type: ignore[misc]
                on_retry=lambda error, pause: log.warning("%s; again in %.1f s", error, pause),
            )
        except MillraceError as error:
            raise ServerError(
                f"{error.message} (step {number + 1} of {len(changes.steps)})",
                hint=f"{error.hint or 'see what it waits for'}; then apply again: what is done"
                " stays done",
                **error.facts,
            ) from error
        on_step(step)


def read_states(connection: Connection) -> dict[str, TubeState]:
    """The tubes of the schema that the session uses, by name."""
    tables: dict[str, dict[str, Attachment]] = {}
    for tube, schema, name, key, shard, routing, predicate in connection.execute(
        "SELECT u.name, n.nspname, c.relname, t.key, t.shard, coalesce(t.routing, ''), t.predicate"
        " FROM _tube_tables t JOIN _tube_tubes u ON u.id = t.tube JOIN pg_class c ON c.oid = t.tbl"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
    ):
        found = Attachment(schema, name, tuple(key), shard, routing, predicate)
        tables.setdefault(tube, {})[found.label] = found
    return {
        name: TubeState(name, partitions, predicate, tables.get(name, {}))
        for name, partitions, predicate in connection.execute(
            "SELECT u.name, u.partitions, u.predicate FROM _tube_tubes u"
            " JOIN pg_class c ON c.oid = u.rel"
        )
    }


def _do(connection: Connection, step: Step) -> None:
    what = f"tube {step.tube}" + (f", {step.table}" if step.table else "") + f": {step.action}"
    with translated(what), connection.transaction():
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (_LOCK_TIMEOUT,))
        for call in step.calls:
            connection.execute(call.statement.encode(), call.values)


class _Check:
    """What the database says to one tube of the file, in a transaction that is rolled back."""

    def __init__(
        self,
        connection: Connection,
        entry: TubeEntry,
        state: TubeState | None,
        problems: list[Problem],
    ) -> None:
        self._connection = connection
        self._entry = entry
        self._state = state
        self._problems = problems

    def tables(self) -> dict[str, Attachment]:
        """The tables of the file, as they would be attached."""
        if self._state is None:
            with self._noted(self._entry.place):
                self._one(
                    "SELECT tube_ensure_exists(%s, %s)", self._entry.name, self._entry.partitions
                )
        found = [self._table(table) for table in self._entry.tables]
        return {one.label: one for one in found if one is not None}

    def rights(self, step: Step) -> None:
        """Triggers are made and dropped by a table's owner; {table}_touch is in its schema."""
        with self._noted(f"{self._entry.place}, table {step.table}"):
            is_owner, may_create, user, owner, schema = self._one(
                "SELECT pg_has_role(c.relowner, 'USAGE'), has_schema_privilege(n.oid, 'CREATE'),"
                " current_user, pg_get_userbyid(c.relowner), n.nspname FROM pg_class c"
                " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s::regclass",
                step.calls[0].values[1],
            )
            if not is_owner:
                raise PreflightError(
                    f"role {user} is not its owner, and can't {step.action} it",
                    hint=f"connect as {owner}, or GRANT {ident(owner)} TO {ident(user)}",
                )
            if not may_create:
                raise PreflightError(
                    f"role {user} can't create functions in schema {schema}",
                    hint=f"GRANT CREATE ON SCHEMA {ident(schema)} TO {ident(user)}",
                )

    def _table(self, table: TableEntry) -> Attachment | None:
        """None if there is a problem with it."""
        place, before = f"{self._entry.place}, table {table.label}", len(self._problems)
        name = qualified(table.schema, table.name)
        with self._noted(place):
            self._require_table(name)
        if len(self._problems) > before:
            return None
        key: tuple[str, ...] = ()
        shard = table.shard or 0
        with self._noted(place):
            given = list(table.key) if table.key else None
            key = tuple(self._one("SELECT _tube_find_key(%s::regclass, %s)", name, given)[0])
        if table.shard is None and not table.routing:
            with self._noted(place):
                shard = self._one("SELECT _tube_infer_shard(%s::regclass)", name)[0]
        for what, expression in self._expressions(table):
            with self._noted(place):
                check = "SELECT _tube_check_expression(%s::regclass, %s, %s)"
                self._one(check, name, expression, what)
        if len(self._problems) > before:
            return None
        return Attachment(table.schema, table.name, key, shard, table.routing, table.predicate)

    def _require_table(self, name: str) -> None:
        row = self._one(
            "SELECT c.relkind IN ('r', 'p'), EXISTS (SELECT FROM _tube_slots s WHERE s.rel = c.oid"
            " UNION ALL SELECT FROM _tube_tubes u WHERE u.rel = c.oid)"
            " FROM pg_class c WHERE c.oid = to_regclass(%s)",
            name,
        )
        if row is None:
            raise PreflightError("there is no such table", hint="create it, or correct its name")
        if row != (True, False):
            raise PreflightError("it is a tube, or no table", hint="name a table")

    def _expressions(self, table: TableEntry) -> Iterator[tuple[str, str]]:
        """Those that the database does not have yet."""
        before = None if self._state is None else self._state.tables.get(table.label)
        tube = self._entry.predicate
        if table.routing and (before is None or before.routing != table.routing):
            yield "routing", _COMPILE_ROUTING % table.routing
        if tube and (self._state is None or before is None or self._state.predicate != tube):
            yield "predicate", f"({tube}\n)"
        if table.predicate and (before is None or before.predicate != table.predicate):
            yield "predicate", f"({table.predicate}\n)"

    def _one(self, statement: str, *values: Any) -> Any:
        return self._connection.execute(statement.encode(), values).fetchone()

    @contextmanager
    def _noted(self, place: str) -> Iterator[None]:
        """What is refused is a problem; a server that is gone is not."""
        try:
            with self._connection.transaction():
                yield
        except PreflightError as error:
            self._problems.append(Problem(place, error.message, error.hint))
        except psycopg.Error as error:
            if is_transient_code(error.sqlstate) or error.diag.message_primary is None:
                raise
            ours = server_error(error, "")
            hint = error.diag.message_hint or ours.hint or "correct the file or the database"
            self._problems.append(Problem(place, error.diag.message_primary, hint))
