"""Prepared changes, written into the target.

Invariant: rows and position commit in one transaction; a change that finds no row, or a row in
its way, is never passed over silently.

For each table: rows deleted, then updated, then inserted, each kind as one set. Deleted and
updated rows are sent to a stage and joined with the table; the number of rows touched must be the
number sent. Inserted rows go straight into the table.

Rows that trade unique values would be in each other's way within one UPDATE, although nothing is
wrong once all are updated. When that happens they are lifted out of the table and put back with
their new values. So are rows that take each other's keys, if it takes more than one UPDATE.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from psycopg.pq.abc import PGconn

from millrace import failpoint
from millrace.apply.conflict import ApplyCounts, OnConflict
from millrace.apply.prepare import StagedRows, TableWork, TruncateWork
from millrace.apply.statement import MappedColumn, Span, TablePlan
from millrace.apply.trigger_silence import Silencer
from millrace.apply.truncate import truncate
from millrace.errors import ApplyError, InvariantError, MillraceError, ServerError
from millrace.lsn import render_lsn
from millrace.postgres.wire.libpq import command_rows, copy_in, execute

log = logging.getLogger(__name__)

# unique_violation and exclusion_violation
_IN_THE_WAY = ("23505", "23P01")
# Each transaction empties every stage of the session, used or not.
MAX_STAGES = 64
# Fewer rows are looked up one by one; more numbers than this between the ends of a span for each
# row of a stage, too.
LEAST_SPAN_ROWS = 500
MAX_SPAN_SHARE = 2


@dataclass
class _Group:
    """Rows to update that have the same columns unchanged, and their stage."""

    plan: TablePlan
    kind: str
    rows: StagedRows
    # Numbers of those that the table does not have.
    missing: list[int] = field(default_factory=list)
    # How many were left as they are, because another row is in their way.
    blocked: int = 0

    @cached_property
    def columns(self) -> list[MappedColumn]:
        return self.plan.settable(with_key=self.rows.is_key_changed, unchanged=self.rows.unchanged)

    @cached_property
    def new_identities(self) -> str | None:
        return self.plan.count_new_identities(self.kind, self.rows.unchanged)

    @property
    def is_missing(self) -> str:
        """A condition on stage rows."""
        return f"s.n IN ({', '.join(map(str, self.missing))})"

    @property
    def missing_lsn(self) -> str:
        return render_lsn(int(self.rows.lsn[self.missing[0]]))


class Applier:
    """Applies work on one session, inside a transaction that the caller opens and ends."""

    def __init__(self, session: PGconn, on_conflict: OnConflict = OnConflict.STOP) -> None:
        self._session = session
        self._on_conflict = on_conflict
        self._silencer = Silencer(session)
        self._stages: set[str] = set()
        # Stages with rows of this transaction.
        self._filled: set[str] = set()
        self.applied = ApplyCounts()

    def begin(self) -> None:
        """A transaction begins."""
        self._filled.clear()
        if len(self._stages) > MAX_STAGES:
            self.drop_stages()
        self._silencer.begin()

    def drop_stages(self) -> None:
        """Nothing of the session is in the way of those who change tables and types."""
        execute(self._session, "DISCARD TEMP")
        self._stages.clear()
        self._filled.clear()

    def end(self) -> None:
        """Before the transaction commits."""
        self._silencer.end()

    def take(self) -> ApplyCounts:
        """What the transaction did, now that it is committed."""
        done, self.applied = self.applied, ApplyCounts()
        return done

    def apply(self, work: TableWork | TruncateWork) -> None:
        """Do it; an error leaves the transaction, and this object, unusable."""
        if isinstance(work, TruncateWork):
            self._truncate(work)
            return
        self.applied.changes += work.changes
        self._silencer.silence(work.plan.table)
        try:
            if work.deletes:
                self._delete(work.plan, work.deletes)
            failpoint.hit("apply.after_delete")
            self._update(work.plan, work.updates)
            failpoint.hit("apply.after_update")
            if work.inserts:
                self._insert(work.plan, work.inserts, is_direct=work.is_direct)
        except ServerError as error:
            raise _named(error, work) from error

    def _truncate(self, work: TruncateWork) -> None:
        tables = (*work.tables, *(one.table for one in work.partitions))
        for table in tables:
            self._silencer.silence(table)
        try:
            truncate(self._session, work)
        except ServerError as error:
            labels = ", ".join(f"{table.schema}.{table.name}" for table in tables)
            raise _apply_error(error, labels, work.lsn) from error
        self.applied.changes += 1

    def _delete(self, plan: TablePlan, staged: StagedRows) -> None:
        self._fill(plan, "d", staged)
        deleted = self._touch(plan.delete(self._span(plan, "d", staged)), "DELETE")
        if deleted != len(staged) and not plan.where:
            self._note_missing(plan, "d", staged, deleted, "delete")
        self.applied.deleted += deleted

    def _update(self, plan: TablePlan, updates: Sequence[StagedRows]) -> None:
        """Groups whose rows may be in each other's way, or take each other's keys, are done as
        one: none before all are looked up."""
        groups = [_Group(plan, f"u{number or ''}", staged) for number, staged in enumerate(updates)]
        groups = [group for group in groups if group.columns or group.new_identities]
        if plan.can_trade_values or plan.where or any(g.rows.is_key_changed for g in groups):
            self._update_together(plan, groups)
            return
        for group in groups:
            self._update_together(plan, [group])

    def _update_together(self, plan: TablePlan, groups: Sequence[_Group]) -> None:
        for group in groups:
            self._fill(plan, group.kind, group.rows)
        if plan.where or (self._on_conflict is not OnConflict.STOP and not plan.is_multiset):
            for group in groups:
                group.missing = self._numbers(plan.missing(group.kind))
        for group, updated in zip(groups, self._update_rows(plan, groups), strict=True):
            self.applied.updated += updated
            found = updated + group.blocked
            if plan.where or found == len(group.rows):
                continue
            self._note_missing(plan, group.kind, group.rows, found, "update")
            if group.missing and self._on_conflict is OnConflict.OVERWRITE:
                self._insert_missing(plan, group)
        if plan.where:
            self._move_through_filter(plan, groups)

    def _move_through_filter(self, plan: TablePlan, groups: Sequence[_Group]) -> None:
        """Updated rows that no longer meet the condition go, those that now do come."""
        for group in groups:
            self.applied.deleted += self._touch(plan.delete_left(group.kind))
        for group in groups:
            if group.missing:
                self._enter_filter(plan, group)

    def _enter_filter(self, plan: TablePlan, group: _Group) -> None:
        entering = f"{group.is_missing} AND {plan.is_kept(group.kind)}"
        if not group.rows.unchanged:
            self.applied.inserted += self._touch(plan.insert_staged(group.kind, entering))
            return
        counted = self._numbers(
            f"SELECT count(*) FROM {plan.stage(group.kind)} AS s WHERE {entering}"
        )
        if counted[0] or plan.mentions(group.rows.unchanged):
            raise ApplyError(
                f"{plan.label}: an updated row now matches the filter, and the update does not "
                "contain all of its columns",
                hint="an update does not contain TOASTed values that it did not change: ALTER"
                f" TABLE {plan.source_name} REPLICA IDENTITY FULL on the source",
                table=plan.label,
                lsn=group.missing_lsn,
            )

    def _update_rows(self, plan: TablePlan, groups: Sequence[_Group]) -> list[int]:
        """How many rows of each group were updated."""
        is_key_changed = any(group.rows.is_key_changed for group in groups)
        is_identity_new = any(
            self._numbers(group.new_identities)[0] for group in groups if group.new_identities
        )
        # A later group would find rows by keys that an earlier one has given them.
        must_lift = is_identity_new or (is_key_changed and len(groups) > 1)
        if not must_lift and not plan.can_trade_values and not is_key_changed:
            return self._set(plan, groups)
        ways = [self._lift] if must_lift else [self._set, self._lift]
        if self._on_conflict is OnConflict.SKIP and not is_identity_new:
            ways.append(self._set_what_can_be)
        execute(self._session, "SAVEPOINT millrace")
        while True:
            way = ways.pop(0)
            try:
                updated = way(plan, groups)
                break
            except ServerError as error:
                if not ways or error.facts.get("sqlstate") not in _IN_THE_WAY:
                    raise
                execute(self._session, "ROLLBACK TO SAVEPOINT millrace")
        execute(self._session, "RELEASE SAVEPOINT millrace")
        return updated

    def _set(self, plan: TablePlan, groups: Sequence[_Group]) -> list[int]:
        updated = []
        for group in groups:
            if not group.columns:  # nothing is another than before
                updated.append(len(group.rows))
                continue
            span = self._span(plan, group.kind, group.rows)
            statement = plan.update(group.kind, group.columns, span=span)
            updated.append(self._touch(statement, "UPDATE"))
        return updated

    def _span(self, plan: TablePlan, kind: str, staged: StagedRows) -> Span | None:
        """From the smallest to the largest key of a stage, if the table can't have many more rows
        between them than the stage."""
        if not plan.has_integer_key or len(staged) < LEAST_SPAN_ROWS:
            return None
        result = execute(self._session, plan.span(kind))[0]
        low, high = (int(result.get_value(0, place) or 0) for place in range(2))
        return (low, high) if high - low < MAX_SPAN_SHARE * len(staged) else None

    def _set_what_can_be(self, plan: TablePlan, groups: Sequence[_Group]) -> list[int]:
        return [self._set_part(plan, g, 0, len(g.rows)) if g.columns else 0 for g in groups]

    def _set_part(self, plan: TablePlan, group: _Group, first: int, end: int) -> int:
        """Stage rows from `first` to before `end`, in halves until it is known which one is in
        the way."""
        execute(self._session, "SAVEPOINT millrace_part")
        try:
            # One that was missing must not find a row that has taken its key meanwhile.
            part = f"s.n >= {first} AND s.n < {end}"
            if group.missing:
                part += f" AND NOT {group.is_missing}"
            updated = self._touch(plan.update(group.kind, group.columns, part), "UPDATE")
        except ServerError as error:
            if error.facts.get("sqlstate") not in _IN_THE_WAY:
                raise
            execute(self._session, "ROLLBACK TO SAVEPOINT millrace_part")
            middle = (first + end) // 2
            if middle > first:
                return self._set_part(plan, group, first, middle) + self._set_part(
                    plan, group, middle, end
                )
            group.blocked += 1
            self.applied.skipped += 1
            lsn = render_lsn(int(group.rows.lsn[first]))
            log.warning("%s: the update at %s is skipped: %s", plan.label, lsn, error.message)
            return 0
        execute(self._session, "RELEASE SAVEPOINT millrace_part")
        return updated

    def _lift(self, plan: TablePlan, groups: Sequence[_Group]) -> list[int]:
        """Out of the table with all of them, then back with their new values."""
        lifted = []
        for group in groups:
            create, move = plan.lift(group.kind)
            execute(self._session, create)
            lifted.append(self._touch(move))
        if self._on_conflict is OnConflict.OVERWRITE:
            for group in groups:
                for statement in plan.delete_blocking(group.kind):
                    self.applied.overwritten += self._touch(statement)
        for group, count in zip(groups, lifted, strict=True):
            put_back = self._touch(plan.put_back(group.kind, group.rows.unchanged))
            if put_back != count:
                raise InvariantError(f"{plan.label}: {count} rows lifted, {put_back} put back")
            execute(self._session, f"DROP TABLE {plan.lifted(group.kind)}")
        return lifted

    def _insert(self, plan: TablePlan, staged: StagedRows, *, is_direct: bool) -> None:
        if is_direct:
            stored = copy_in(self._session, plan.insert_copy(), staged.data.data)
            if stored != len(staged):
                raise InvariantError(f"{plan.label}: {len(staged)} rows sent, {stored} stored")
            self.applied.inserted += stored
            return
        self._fill(plan, "i", staged)
        if self._on_conflict is OnConflict.OVERWRITE:
            for statement in plan.delete_blocking("i"):
                replaced = self._touch(statement)
                self.applied.overwritten += replaced
                if replaced:
                    _log_conflict(plan, "insert", staged, replaced, "the rows in its way replaced")
        skips = self._on_conflict is OnConflict.SKIP
        conflict = " ON CONFLICT DO NOTHING" if skips else ""
        condition = plan.is_kept("i") if plan.where else ""
        stored = self._touch(plan.insert_staged("i", condition, conflict))
        if stored != len(staged) and not plan.where:
            self.applied.skipped += len(staged) - stored
            _log_conflict(plan, "insert", staged, len(staged) - stored, "skipped")
        self.applied.inserted += stored

    def _insert_missing(self, plan: TablePlan, group: _Group) -> None:
        """Updates whose row is not there become inserts, if the whole row is known."""
        if group.rows.unchanged:
            raise ApplyError(
                f"{plan.label}: the row to update does not exist on the target, and the update "
                "does not contain all of its columns",
                hint="an update does not contain TOASTed values that it did not change; copy the"
                " table again: `millrace stream resync`",
                table=plan.label,
                lsn=group.missing_lsn,
            )
        inserted = self._touch(plan.insert_staged(group.kind, group.is_missing))
        self.applied.overwritten += inserted

    def _note_missing(
        self, plan: TablePlan, kind: str, staged: StagedRows, touched: int, verb: str
    ) -> None:
        """Not every stage row met exactly one row of the table."""
        lsn = int(staged.lsn[0])
        if not plan.is_multiset and not staged.is_key_changed:
            numbers = self._numbers(plan.missing(kind)) if verb == "update" else []
            lsn = int(staged.lsn[numbers[0]]) if numbers else lsn
        if self._on_conflict is OnConflict.STOP or touched > len(staged):
            key = ", ".join(column.target.name for column in plan.key)
            raise ApplyError(
                f"{plan.label}: expected to {verb} {len(staged)} rows, matched {touched}"
                f" (key: {key}; first change at or after {render_lsn(lsn)})",
                hint="something else writes to the target, or it differed from the source when the"
                " stream began; `millrace compare data --rows` shows where; `millrace stream"
                " resync` copies the table again",
                table=plan.label,
                lsn=render_lsn(lsn),
                key_columns=key,
            )
        if self._on_conflict is OnConflict.SKIP or kind == "d":
            self.applied.skipped += len(staged) - touched
        _log_conflict(plan, verb, staged, len(staged) - touched, "not on the target")

    def _fill(self, plan: TablePlan, kind: str, staged: StagedRows) -> None:
        stage = plan.stage(kind)
        if stage not in self._stages:
            execute(self._session, plan.create_stage(kind))
            self._stages.add(stage)
        elif stage in self._filled:
            execute(self._session, f"TRUNCATE {stage}")
        self._filled.add(stage)
        stored = copy_in(self._session, plan.copy(stage), staged.data.data)
        if stored != len(staged):
            raise InvariantError(f"{plan.label}: {len(staged)} rows sent, {stored} staged")

    def _touch(self, statement: str, what: str = "") -> int:
        return sum(map(command_rows, execute(self._session, statement, what)))

    def _numbers(self, query: str) -> list[int]:
        result = execute(self._session, query)[0]
        return [int(result.get_value(row, 0) or 0) for row in range(result.ntuples)]


def _log_conflict(plan: TablePlan, verb: str, staged: StagedRows, count: int, what: str) -> None:
    log.warning(
        "%s: %d of %d rows to %s from %s on: %s",
        plan.label,
        count,
        len(staged),
        verb,
        render_lsn(int(staged.lsn[0])),
        what,
    )


def _named(error: ServerError, work: TableWork) -> MillraceError:
    """Errors about the data become ApplyErrors; a lost connection stays what it is."""
    code = error.facts.get("sqlstate") or "08"
    if not code.startswith(("22", "23", "42", "0A", "P0")):
        return error
    line = re.search(r"COPY \S+, line (\d+)", error.message)
    lsn = None
    staged = next((s for s in (work.inserts, *work.updates, work.deletes) if s), None)
    if staged is not None:
        number = int(line[1]) - 1 if line and work.inserts else 0
        source = work.inserts if line and work.inserts else staged
        lsn = int(source.lsn[min(number, len(source) - 1)])
    return _apply_error(error, work.plan.label, lsn)


def _apply_error(error: ServerError, label: str, lsn: int | None) -> ApplyError:
    at = f" at or after {render_lsn(lsn)}" if lsn else ""
    return ApplyError(
        f"{label}: a change{at} is refused: {error.message}",
        hint=error.hint or "make the target take the change, then run the same command again",
        table=label,
        lsn=render_lsn(lsn) if lsn else None,
        sqlstate=error.facts.get("sqlstate"),
    )
