"""The copy stage: tasks out, records in, tables handed on as they are complete.

Invariant: the stage ends well only if every part has its record on the target. A
failed part never stops the others, unless the user asked for it or nothing else
could succeed either.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import psycopg

from millrace import failpoint
from millrace.clone.copy_task import CopyTask, Outcome, PartStatements, copy_parts, part_statements
from millrace.clone.finish.table import TableFinisher
from millrace.clone.full_tablespace import DISK_FULL, FullTablespaces
from millrace.clone.large_object import large_object_statements
from millrace.clone.plan import Plan, plan_packs
from millrace.clone.progress import (
    part_label,
    read_running_copies,
    read_running_indexes,
    weigh_copies,
)
from millrace.clone.run_state import Run
from millrace.clone.step import Step
from millrace.config.size import render_size
from millrace.errors import InvariantError, MillraceError, SnapshotLost
from millrace.postgres import run_record as record
from millrace.postgres.wire.connect import connect, translated
from millrace.retry import with_retries
from millrace.snapshot.export import HeldSnapshot, ReleasedSnapshot

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

POLL_SECONDS = 0.2
SNAPSHOT_CHECK_SECONDS = 5.0


class CopyStage:
    """One pass over all parts and large objects."""

    def __init__(self, run: Run, plan: Plan, snapshot: HeldSnapshot | ReleasedSnapshot) -> None:
        self.run = run
        self.plan = plan
        self.snapshot = snapshot
        self.copied: dict[record.PartKey, record.CopiedPart] = {}
        self._errors: list[MillraceError] = []
        self._tables = plan.tables
        self._planned = {
            (part.table_oid, part.number): part for parts in plan.parts.values() for part in parts
        }
        self._unfinished = set(plan.parts)
        self._families = plan.families()
        self._records = run.records
        self._finisher = TableFinisher(run, plan)
        self._moves_tables = Step.TABLE_DATA in run.settings.steps
        self._watch = _RecordWatch(run.run_id, run.settings.table_jobs)
        self._full = FullTablespaces(plan.catalog.tables)
        self._target: Connection | None = None
        self._reported_at = 0.0

    def copy(self) -> None:
        """Copy everything, build what rests on it; raises if anything failed."""
        settings = self.run.settings
        tables = ThreadPoolExecutor(settings.table_jobs, thread_name_prefix="copy")
        objects = ThreadPoolExecutor(settings.large_objects_jobs, thread_name_prefix="lo")
        self.run.progress.copy_started_at = time.monotonic()
        try:
            for part in self._ask(self._watch.poll):
                self._note_copied(part)
            if not self._moves_tables:
                self._unfinished.clear()
                for oid in self.plan.parts:
                    self._finisher.table_copied(oid)
            futures = {tables.submit(self._call, statements) for statements in self._packs()}
            futures |= {objects.submit(self._call, one) for one in self._large_objects()}
            self._wait_for_copies(futures)
            self.run.progress.copy_seconds = self.run.progress.seconds()
            # Nothing reads the source any more: let go of its locks and its horizon.
            self.snapshot.close()
            if self._has_every_row():
                self.run.give_back_snapshot()
                failpoint.hit("snapshot.given-back")
            self._wait_for_finisher()
            with_retries(lambda: self._records.check(self.plan, self.copied))
            failpoint.hit("copy.checked")
            self._finisher.close()
        except BaseException:
            tables.shutdown(wait=False, cancel_futures=True)
            objects.shutdown(wait=False, cancel_futures=True)
            self.run.engine.cancel()
            self._finisher.close(cancel=True)
            raise
        finally:
            tables.shutdown(wait=False)
            objects.shutdown(wait=False)
            if self._target is not None:
                self._target.close()

    def _packs(self) -> list[tuple[PartStatements, ...]]:
        if not self._moves_tables:
            return []
        left = [part for key, part in self._planned.items() if key not in self.copied]
        return [
            tuple(
                part_statements(
                    self._tables[part.table_oid],
                    part,
                    is_guarded=part.table_oid in self.run.guarded,
                )
                for part in pack.parts
            )
            for pack in plan_packs(left, jobs=self.run.settings.table_jobs)
        ]

    def _large_objects(self) -> list[tuple[PartStatements, ...]]:
        settings = self.run.settings
        if Step.LARGE_OBJECTS not in settings.steps or settings.skip_large_objects:
            return []
        return [
            (
                large_object_statements(
                    objects,
                    owner=not settings.schema.no_owner,
                    acl=not settings.schema.no_acl,
                    comments=not settings.schema.no_comments,
                    replace=self.run.replaces,
                ),
            )
            for objects in self.plan.catalog.large_object_ranges
            if (record.LARGE_OBJECTS_OID, objects.number) not in self.copied
        ]

    def _call(self, wanted: tuple[PartStatements, ...]) -> list[Outcome]:
        run = self.run
        refused = [one for part in wanted if (one := self._full.refuse(part))]
        without_room = {(one.table_oid, one.part) for one in refused}
        statements = tuple(p for p in wanted if (p.table_oid, p.part) not in without_room)
        if not statements:
            return refused
        task = CopyTask(
            run.run_id,
            run.epoch,
            run.settings.source,
            run.settings.target,
            self.snapshot.id,
            run.target_encoding,
            statements,
        )
        more = f" and {len(statements) - 1} more" if len(statements) > 1 else ""
        return refused + run.engine.call(copy_parts, task, f"copy {statements[0].label}{more}")

    def _wait_for_copies(self, waiting: set[Future[list[Outcome]]]) -> None:
        """Until every task has ended: hand over whole tables, notice errors, show progress."""
        checked = time.monotonic()
        while waiting:
            done, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                for outcome in future.result():
                    self._note_outcome(outcome)
            for part in self._ask(self._watch.poll):
                self._note_copied(part)
            self._hand_over()
            self._report()
            self._raise_fatal()
            if time.monotonic() - checked > SNAPSHOT_CHECK_SECONDS:
                self.snapshot.check()
                checked = time.monotonic()
        self._hand_over()
        if self._errors:
            self._wait_for_finisher()
        missing = [self._tables[oid].label for oid, _ in set(self._planned) - set(self.copied)]
        if missing and self._moves_tables:
            raise InvariantError(f"tasks ended without a record: {', '.join(missing[:5])}")

    def _has_every_row(self) -> bool:
        """Whether no step, of this command or a later one, has rows to read."""
        steps = self.run.settings.steps
        return self._moves_tables and Step.LARGE_OBJECTS in steps

    def _wait_for_finisher(self) -> None:
        """Until the last index, constraint and vacuum is done."""
        self.run.progress.step = "indexes, constraints, vacuum"
        while not self._finisher.wait(POLL_SECONDS):
            self._report()
            self._raise_fatal()
        errors = self._errors + self._finisher.errors
        if errors:
            raise several(errors)

    def _note_outcome(self, outcome: Outcome) -> None:
        if outcome.error:
            if outcome.error.facts.get("sqlstate") == DISK_FULL:
                self._note_full(outcome)
            if outcome.error not in self._errors:
                log.error("%s", outcome.error.message)
                self._errors.append(outcome.error)
        else:
            part = record.CopiedPart(
                outcome.table_oid, outcome.part, outcome.rows, outcome.bytes, outcome.seconds
            )
            self._note_copied(part)

    def _note_full(self, outcome: Outcome) -> None:
        error = outcome.error
        assert error is not None
        if error not in self._errors:
            self._ask(lambda target: self._full.note(target, outcome.table_oid, error))
            self._tell_needed(error)

    def _note_copied(self, part: record.CopiedPart) -> None:
        key = (part.table_oid, part.part)
        if key in self.copied:
            return
        self.copied[key] = part
        progress = self.run.progress
        label = f"large objects {part.part}"
        if key in self._planned:
            label = self._tables[part.table_oid].label
            progress.parts_done += 1
        progress.copied_bytes += part.bytes
        progress.copied_rows += part.rows
        self.run.store.write_timing(
            "copy",
            label,
            part.seconds,
            oid=part.table_oid,
            part=part.part,
            rows=part.rows,
            size=part.bytes,
        )

    def _hand_over(self) -> None:
        for oid in list(self._unfinished):
            if all(
                (member, part.number) in self.copied
                for member in self._families[oid]
                for part in self.plan.parts[member]
            ):
                self._unfinished.discard(oid)
                self._finisher.table_copied(oid)

    def _raise_fatal(self) -> None:
        """Where nothing else can succeed either: the snapshot is lost, or no table has room."""
        errors = self._errors + self._finisher.errors
        left = {oid for oid, _ in self._planned.keys() - self.copied.keys()}
        fatal = [
            error
            for error in errors
            if isinstance(error, SnapshotLost)
            or (error.facts.get("sqlstate") == DISK_FULL and self._full.have_all(left))
        ]
        for error in fatal:
            self._tell_needed(error)
        if fatal or (errors and self.run.settings.fail_fast):
            raise several([*fatal, *errors])

    def _tell_needed(self, error: MillraceError) -> None:
        """How much room the target needs besides what it has taken."""
        if error.facts.get("sqlstate") != DISK_FULL:
            return
        left = self._planned.keys() - self.copied.keys()
        size = sum(self._planned[key].estimated_bytes for key in left)
        error.facts["needed_bytes"] = size
        error.hint = (
            f"make room on the target: about {render_size(size)} of tables are still to be copied, "
            "and their indexes come besides; then continue with the same command and --resume"
        )

    def _report(self) -> None:
        """Show the run's progress, not more often than anyone can see."""
        if time.monotonic() - self._reported_at < POLL_SECONDS:
            return
        self._reported_at = time.monotonic()
        progress, run_id = self.run.progress, self.run.run_id
        left = self._planned.keys() - self.copied.keys()
        found = self._ask(lambda target: read_running_copies(target, run_id))
        running = [copy for copy in found if (copy.table_oid, copy.part) in left]
        progress.running_copies = [
            (part_label(self._tables[c.table_oid].label, self._planned[c.table_oid, c.part]), c)
            for c in running
        ]
        progress.estimated_bytes_done = weigh_copies(self._planned, self.copied, running)
        progress.running_indexes = self._ask(lambda target: read_running_indexes(target, run_id))
        self.run.reporter.update(progress)

    def _ask(self, query: Any) -> Any:
        """Ask the target, on a new session if the last one was lost."""

        def attempt() -> Any:
            if self._target is None or self._target.closed:
                self._target = connect(self.run.settings.target, f"watch {self.run.run_id}")
            with translated("watching the target"):
                return query(self._target)

        return with_retries(attempt)


class _RecordWatch:
    """Reads new completion records; ids in flight may commit out of order."""

    def __init__(self, run_id: str, jobs: int) -> None:
        self._run_id = run_id
        self._margin = 4 * jobs + 16
        self._highest = 0

    def poll(self, target: Connection) -> list[record.CopiedPart]:
        found = record.read_copied_parts(target, self._run_id, self._highest - self._margin)
        self._highest = max([self._highest, *(number for number, _ in found)])
        return [part for _, part in found]


def several(errors: list[MillraceError]) -> MillraceError:
    """The first error, saying how many more there are."""
    first = errors[0]
    others = len({error.message for error in errors}) - 1
    if others > 0:
        first.facts["other_errors"] = others
        first.message += f" (and {others} more, see the log)"
    return first
