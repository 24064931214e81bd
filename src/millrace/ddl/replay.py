"""Captured commands, run on the target at their place in the stream.

Invariant: a command runs once, in the transaction of its source transaction, under the source's
names and search path; afterwards the target's objects equal the description that was captured with
it, or nothing has happened and the source is halted there. Values that only the source knows are
never invented: tables that need them are copied.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg.pq.abc import PGconn

from millrace import failpoint
from millrace.apply.structure import Place, TableName, WatchedRow
from millrace.apply.table_state import TABLE as STATE_TABLE
from millrace.apply.table_state import SyncState, copying_sql, forget_sql
from millrace.ddl import derive, history
from millrace.ddl.decide import Choices, Verdict
from millrace.ddl.dependents import OutsideView, create_views, drop_views, read_views
from millrace.ddl.describe import Description, columns, iter_differences, read_description
from millrace.ddl.entry import CapturedObject, Entry, read_entry
from millrace.ddl.extension import follow_extension
from millrace.ddl.history import Action, Status
from millrace.ddl.renaming import Renaming
from millrace.ddl.statement import find_candidates, fit, has_cascade, scan_tokens, split
from millrace.errors import ApplyError, Blocked, MillraceError, ServerError
from millrace.lsn import render_lsn
from millrace.name import Naming
from millrace.postgres.catalog.schemas import DDL_TABLE
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.wire.libpq import execute, fetch

log = logging.getLogger(__name__)

# dependent_objects_still_exist; feature_not_supported: a view uses the column
_IN_THE_WAY: Final = ("2BP01", "0A000")
# lock_not_available, deadlock_detected
_BLOCKED: Final = ("55P03", "40P01")
_OTHER_RENAMER: Final = "tuple concurrently updated"
_WAYS: Final = (
    "`millrace consolidate ddl show {0}` shows it; then `ddl edit {0}` runs another text in its "
    "place, `ddl skip {0}` runs nothing, `ddl retry {0}` tries again"
)
_MEND: Final = (
    "mend the target so that it can run there, then run the same command again; the statement: {}"
)
_SHOWN: Final = 1000
# What only the source can say, although it is not volatile.
_OF_THE_MOMENT: Final = frozenset(
    (
        "now",
        "current_timestamp",
        "current_date",
        "current_time",
        "localtime",
        "localtimestamp",
        "transaction_timestamp",
        "statement_timestamp",
        "current_user",
        "session_user",
    )
)
MOST_CANDIDATES: Final = 8
_HOLDERS: Final = """
SELECT string_agg(DISTINCT format('process %s (%s): %s', a.pid,
                  coalesce(nullif(a.application_name, ''), a.backend_type),
                  left(regexp_replace(a.query, '\\s+', ' ', 'g'), 100)), '; ')
  FROM pg_locks l JOIN pg_stat_activity a USING (pid)
  JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE l.granted AND l.pid <> pg_backend_pid() AND a.datname = current_database()
   AND {is_ours}
"""


@dataclass(frozen=True)
class Replay:
    """How DDL of one stream is replayed; an `apply.structure.Structure`."""

    stream: str
    slot: str
    # What people call the source.
    name: str
    naming: Naming
    choices: Choices = field(default_factory=Choices)
    # Roles that may read what is new.
    readers: tuple[str, ...] = ()
    tables: Collection[TableName] = (DDL_TABLE,)
    # Of the mark that the event trigger leaves if not even a row could be written.
    prefix: str = "millrace.ddl"

    def open(self, session: PGconn) -> Replayer:
        return Replayer(self, session)

    def leaves_out(self, schema: str, name: str) -> bool:
        return self.choices.leaves_out(schema, name)

    def note_failure(self, session: PGconn, error: MillraceError) -> None:
        entry = error.facts.pop("entry", None)
        if entry is not None:
            status = Status.FAILED
            if isinstance(error, Blocked):
                status = Status.BLOCKED
                if holders := read_holders(session, self.naming):
                    error.message += f"; locks on its tables: {holders}"
            statement = error.facts.get("statement", "")
            history.write(session, self.stream, entry, statement, status, error.message)


class Replayer:
    """The commands of one source transaction."""

    def __init__(self, replay: Replay, session: PGconn) -> None:
        self._replay = replay
        self._session = session
        out = frozenset(replay.choices.schemas_out)
        self._renaming = Renaming(session, replay.stream, replay.naming, out, replay.readers)

    def apply(self, row: WatchedRow, place: Place) -> None:
        entry = read_entry(row, place)
        statement = ""
        try:
            resolution = history.find_resolution(self._session, self._replay.stream, entry)
            if resolution is not None and resolution.action is Action.SKIP:
                self._write(entry, "", Status.SKIPPED)
                return
            text = resolution.text if resolution is not None else None
            statement = text or ""
            self._apply(entry, text)
            failpoint.hit("ddl.replayed")
        except (ApplyError, ServerError) as error:
            raise self._named(entry, error, statement) from error

    def end(self) -> None:
        """Everything is done in its place."""

    def _apply(self, entry: Entry, text: str | None) -> None:
        if entry.is_lost and text is None:
            raise ApplyError(f"the source could not record it: {entry.error}")
        decision = self._replay.choices.decide(entry)
        if text is None and decision.verdict is Verdict.LEAVE_OUT:
            self._write(entry, "", Status.LEFT_OUT, decision.reason)
            return
        if text is None and decision.verdict is Verdict.EXTENSION:
            done = follow_extension(self._session, entry)
            self._write(entry, done, Status.REPLAYED if done else Status.LEFT_OUT)
            return
        statement = self._run(entry, text)
        status = Status.EDITED if text is not None else Status.REPLAYED
        self._write(entry, statement, status if statement else Status.LEFT_OUT)

    def _write(self, entry: Entry, statement: str, status: Status, reason: str = "") -> None:
        history.write(self._session, self._replay.stream, entry, statement, status, reason)
        log.info("%s %s: %s", entry.tag, entry.main.identity if entry.main else "", status)

    def _named(self, entry: Entry, error: MillraceError, statement: str) -> MillraceError:
        """What went wrong, with the command; a lost connection stays what it is."""
        sqlstate = error.facts.get("sqlstate", "")
        what = f"{entry.tag} {entry.main.identity if entry.main else ''}".strip()
        facts: dict[str, Any] = {
            "entry": entry,
            "ddl": render_lsn(entry.place.lsn),
            "statement": error.facts.get("statement") or statement,
        }
        if sqlstate in _BLOCKED or _OTHER_RENAMER in error.message:
            return Blocked(
                f"{what} at {render_lsn(entry.place.lsn)} waits for a lock: {error.message}",
                **facts,
            )
        if not isinstance(error, ApplyError) and (sqlstate or "08")[:2] in ("08", "57", "53", "58"):
            return error
        hint = error.hint if isinstance(error, ApplyError) and error.hint else ""
        ways = _WAYS.format(self._replay.name)
        if not self._replay.name:
            ways = _MEND.format(facts["statement"][:_SHOWN])
        return ApplyError(
            f"{what} at {render_lsn(entry.place.lsn)} can't be replayed: {error.message}",
            hint=hint or ways,
            sqlstate=sqlstate or None,
            **facts,
        )

    def _run(self, entry: Entry, text: str | None) -> str:
        """What ran; empty if nothing had to."""
        self._enter(entry)
        with self._settings(entry):
            done = self._run_named(entry, text)
        self._renaming.leave()
        return done

    def _run_named(self, entry: Entry, text: str | None) -> str:
        """Under the source's names: the command, or another text in its place, which may leave
        something else behind than it has."""
        tables = [one for one in entry.objects if one.is_table and one.description]
        before = {one.identity: read_description(self._session, one) for one in tables}
        syncs = self._unfinished()
        if text is None:
            statements = self._run_candidates(entry, before)
        else:
            statements = split(text)
            self._execute_with_views(statements)
        self._copy_what_must_be(entry, tables, before, statements)
        self._move_syncs(entry, syncs)
        return ";\n".join(statements) if text is None else text

    def _enter(self, entry: Entry) -> None:
        schemas = {one.schema for one in entry.objects} | set(entry.search_path)
        schemas |= {one.names[0] for one in entry.objects if one.type == "schema" and one.names}
        self._renaming.enter(schemas - self._replay.choices.schemas_out, entry.extensions)

    @contextmanager
    def _settings(self, entry: Entry) -> Iterator[None]:
        """As the command found them on the source; triggers of the target's own stay silent."""
        names = self._renaming.schemas
        path = [one for one in entry.search_path if one in names or not entry.objects]
        settings = {
            "search_path": ", ".join(map(ident, path)) or "pg_catalog",
            "check_function_bodies": "off",
            **{name: value for name, value in entry.settings.items() if name != "search_path"},
        }
        keys = ", ".join(map(literal, settings))
        query = f"SELECT name, current_setting(name) FROM unnest(ARRAY[{keys}]) AS n (name)"
        before = fetch(self._session, query)
        self._set(settings.items())
        yield
        self._set([(str(name), str(value)) for name, value in before])

    def _set(self, settings: Collection[tuple[str, str]]) -> None:
        calls = [f"set_config({literal(n)}, {literal(v)}, true)" for n, v in settings]
        execute(self._session, f"SELECT {', '.join(calls)}")

    def _run_candidates(self, entry: Entry, before: dict[str, Description | None]) -> Sequence[str]:
        """The text of the command, or what its description says; the first that leads there."""
        attempts = self._statements(entry, before)
        if not attempts:
            raise ApplyError("its text is not known, and can't be derived from what was recorded")
        error: MillraceError | None = None
        for statements in attempts[:MOST_CANDIDATES]:
            execute(self._session, "SAVEPOINT millrace_ddl")
            try:
                self._execute_with_views(statements)
                self._verify(entry)
            except (ApplyError, ServerError) as failed:
                if failed.facts.get("sqlstate", "08000") in (None, *_BLOCKED):
                    raise
                failed.facts["statement"] = ";\n".join(statements)
                error = error or failed
                execute(
                    self._session,
                    "ROLLBACK TO SAVEPOINT millrace_ddl; RELEASE SAVEPOINT millrace_ddl",
                )
                continue
            execute(self._session, "RELEASE SAVEPOINT millrace_ddl")
            return statements
        assert error is not None
        raise error

    def _statements(self, entry: Entry, before: dict[str, Description | None]) -> list[list[str]]:
        """The ways to do it, the likeliest first."""
        choices = self._replay.choices
        if entry.is_drop:
            kept = [one for one in entry.asked if not choices.why_not(one)]
            texts = find_candidates(entry)
            dragged = any(not one.is_asked for one in entry.objects)
            cascades = any(map(has_cascade, texts)) or (not texts and dragged)
            return [derive.drop(kept, cascades=cascades)]
        main = entry.main
        if entry.tag in ("CREATE TABLE AS", "SELECT INTO") and main and main.description:
            return [[derive.create_table(main.relation, main.description)]]
        found = [[text] if (text := fit(one, entry.tag)) else [] for one in find_candidates(entry)]
        if main is not None and main.is_table and main.description is not None:
            if before.get(main.identity) is None and entry.tag == "ALTER TABLE" and not any(found):
                # It was left out until now, as an unlogged table is.
                found.insert(0, [derive.create_table(main.relation, main.description)])
            # Only where there is no text: one that fails has a reason, which a person has to see.
            known = before.get(main.identity)
            if not found and (derived := derive.derive(main.relation, known, main.description)):
                found.append(derived)
        return found

    def _execute_with_views(self, statements: Sequence[str]) -> None:
        """Views of the target's own that are in the way go before, and come back after."""
        oids = self._renaming.oids
        is_risky = any(has_cascade(one) for one in statements)
        views = read_views(self._session, oids) if is_risky else []
        execute(self._session, "SAVEPOINT millrace_views_stay")
        try:
            self._execute(statements)
            is_harmed = bool(views) and not _ids(views) <= _ids(read_views(self._session, oids))
        except ServerError as error:
            if error.facts.get("sqlstate") not in _IN_THE_WAY:
                raise
            is_harmed = True
            views, cause = self._views_after(error, oids), error
            if not views:
                raise cause from None
        if is_harmed:
            execute(self._session, "ROLLBACK TO SAVEPOINT millrace_views_stay")
            drop_views(self._session, views)
            self._execute(statements)
            create_views(self._session, views)
        execute(self._session, "RELEASE SAVEPOINT millrace_views_stay")

    def _views_after(self, error: ServerError, oids: Collection[str]) -> list[OutsideView]:
        execute(self._session, "ROLLBACK TO SAVEPOINT millrace_views_stay")
        return read_views(self._session, oids)

    def _execute(self, statements: Sequence[str]) -> None:
        for statement in statements:
            execute(self._session, statement, "DDL")

    def _verify(self, entry: Entry) -> None:
        """Hold the target's objects against what was captured."""
        choices = self._replay.choices
        for one in entry.objects:
            if one.description is None or entry.is_drop or choices.why_not(one):
                continue
            found = read_description(self._session, one)
            if found is None:
                raise ApplyError(f"{one.type} {one.identity} is not on the target afterwards")
            out = choices.columns_out(*one.table) if one.table else frozenset()
            differences = list(iter_differences(one.description, found, out))
            if differences:
                raise ApplyError(
                    f"{one.type} {one.identity} is not what it is on the source: "
                    f"{'; '.join(differences[:5])}",
                    sqlstate="",
                )

    def _copy_what_must_be(
        self,
        entry: Entry,
        tables: Sequence[CapturedObject],
        before: dict[str, Description | None],
        statements: Sequence[str],
    ) -> None:
        """Tables whose rows can't come with the stream, or have values that only the source has,
        are copied from it."""
        for one in tables:
            name = one.table
            assert name is not None
            if self._replay.choices.why_not(one) or read_description(self._session, one) is None:
                continue
            why = entry.why_copied(self._replay.slot, name)
            if why:
                self._copy(entry, name, why)
                continue
            facts = entry.facts_of(name)
            is_empty = facts is not None and facts.is_empty and not self._has_rows(name)
            invented = self._invented(entry, one, before.get(one.identity), statements)
            if invented is not None and not is_empty:
                self._forget_values(name, one, invented)
                self._copy(entry, name, "it has values that only the source knows")
            elif entry.gains_identity(self._replay.slot, name) and not is_empty:
                self._copy(entry, name, "its updates and deletes are followed from now on")

    def _invented(
        self,
        entry: Entry,
        one: CapturedObject,
        before: Description | None,
        statements: Sequence[str],
    ) -> list[str] | None:
        """The columns that have values of the target's making; all that are not named may have
        them if the list is empty. None if there are none."""
        if before is None or entry.tag != "ALTER TABLE" or one.description is None:
            return None
        added = [
            column
            for name, column in columns(one.description).items()
            if name not in columns(before) and not column.get("generated")
        ]
        if added and (one.names[0], one.names[1]) in entry.refilled:
            return [column["name"] for column in added]
        now = columns(read_description(self._session, one))
        differing = [
            column["name"]
            for column in added
            if column.get("missing") != now.get(column["name"], {}).get("missing")
        ]
        if differing:
            return differing
        return [] if self._is_volatile(statements) else None

    def _is_volatile(self, statements: Sequence[str]) -> bool:
        """Whether a USING expression may give other values here than on the source."""
        names: set[str] = set()
        for statement in statements:
            tokens = list(scan_tokens(statement))
            words = [token.word for token in tokens]
            if "USING" in words and "TYPE" in words:
                names |= {token.name for token in tokens[words.index("USING") :]}
        if not names:
            return False
        if names & _OF_THE_MOMENT:
            return True
        listed = ", ".join(map(literal, sorted(names)))
        query = f"SELECT FROM pg_proc WHERE proname IN ({listed}) AND provolatile = 'v' LIMIT 1"
        return bool(fetch(self._session, query))

    def _forget_values(self, name: TableName, one: CapturedObject, invented: list[str]) -> None:
        """Until the source's values are here, nobody reads others."""
        by_name = columns(one.description)
        if invented and not any(by_name[column].get("not_null") for column in invented):
            values = ", ".join(f"{ident(column)} = NULL" for column in invented)
            execute(self._session, f"UPDATE {qualified(*name)} SET {values}")
        else:
            execute(self._session, f"DELETE FROM {qualified(*name)}")

    def _has_rows(self, name: TableName) -> bool:
        return bool(fetch(self._session, f"SELECT FROM {qualified(*name)} LIMIT 1"))

    def _copy(self, entry: Entry, name: TableName, why: str) -> None:
        """From the next batch on, its changes are left to table sync."""
        facts = entry.facts_of(name)
        root = self._root(name)
        oid = facts.oid if facts is not None and root == name else 0
        log.info("%s is copied again: %s", ".".join(root), why)
        execute(
            self._session,
            copying_sql(self._replay.stream, root, entry.place.end_lsn, secrets.token_hex(6), oid),
        )

    def _root(self, name: TableName) -> TableName:
        """Partitions are copied with the topmost table above them."""
        rows = fetch(
            self._session,
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n"
            f" ON n.oid = c.relnamespace WHERE c.oid = pg_partition_root({_regclass(name)})",
        )
        return (str(rows[0][0]), str(rows[0][1])) if rows else name

    def _unfinished(self) -> dict[str, TableName]:
        """Tables that are being copied, by the target's OID."""
        rows = fetch(
            self._session,
            f"SELECT schema_name, table_name FROM {STATE_TABLE}"
            f" WHERE stream = {literal(self._replay.stream)} AND state IN"
            f" ('{SyncState.COPYING}', '{SyncState.CATCHING_UP}')",
        )
        found = {}
        for schema, table in rows:
            name = str(schema), str(table)
            ((oid,),) = fetch(
                self._session, f"SELECT to_regclass({literal(qualified(*name))})::oid"
            )
            if oid is not None:
                found[oid] = name
        return found

    def _move_syncs(self, entry: Entry, before: dict[str, TableName]) -> None:
        """A copy of a table that the command has changed begins anew; of one that is gone, it is
        forgotten."""
        for oid, name in before.items():
            rows = fetch(
                self._session,
                "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n"
                f" ON n.oid = c.relnamespace WHERE c.oid = {oid}",
            )
            now = (str(rows[0][0]), str(rows[0][1])) if rows else None
            is_touched = any(one.table in (name, now) for one in entry.objects)
            if now != name:
                execute(self._session, forget_sql(self._replay.stream, name))
            if now is not None and (is_touched or now != name):
                self._copy(entry, now, "it was changed while it was copied")


def _ids(views: Sequence[OutsideView]) -> set[str]:
    return {one.oid for one in views}


def _regclass(name: TableName) -> str:
    return f"{literal(qualified(*name))}::regclass"


def read_holders(session: PGconn, naming: Naming) -> str:
    """Who holds locks on the tables of a source."""
    schemas = ", ".join(map(literal, naming.schemas.values()))
    is_ours = f"n.nspname IN ({schemas})" if schemas else "n.nspname !~ '^pg_'"
    ((found,),) = fetch(session, _HOLDERS.format(is_ours=is_ours))
    return found or ""
