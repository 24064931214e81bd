"""What the target remembers of a run, and whose target it is.

Invariant: a target is emptied only for the run whose records it holds, or for one that was told
to; the records of a finished run leave the target in the transaction that finds them complete.

A target that crashes empties its unlogged tables, and their records with them: so a part that
lacks its record must be copied, whatever was there before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Sequenced
from contextlib import contextmanager
from typing import Any

import psycopg

from millrace import failpoint
from millrace.clone.decision import Key
from millrace.clone.plan import Plan
from millrace.clone.sequence import set_sequences
from millrace.clone.settings import CloneSettings
from millrace.clone.target import drop_existing
from millrace.errors import ServerError, WorkDirError
from millrace.postgres import record
from millrace.postgres.connect import APPLICATION, cancel_sessions, connect, translated
from millrace.relation import Sequence
from millrace.workdir.store import Store

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


def planned_parts(store: Store) -> set[record.PartKey]:
    """Every part, large objects included, that is to have a record."""
    parts = {(oid, part.number) for oid, parts in store.read_parts().items() for part in parts}
    ranges = store.read_large_object_ranges()
    return parts | {(record.LARGE_OBJECTS_OID, one.number) for one in ranges}


class Ledger:
    """The records of one run on its target."""

    def __init__(self, settings: CloneSettings, run_id: str) -> None:
        self._settings = settings
        self._run_id = run_id

    def exists(self) -> bool:
        with self._connect() as target:
            return self._exists(target)

    def parts(self) -> set[record.PartKey]:
        """The parts that have their record."""
        with self._connect() as target:
            return self._parts(target) if self._exists(target) else set()

    def settle(self, store: Store) -> bool:
        """The run is finished, and its process may have died before it took its records away: do
        so. False if some of them are not there: the target has crashed, and lost those rows."""
        with self._connect() as target, target.transaction():
            if not self._exists(target):
                return True
            if not record.are_sequences_set(target, self._run_id):
                return False
            if not planned_parts(store) <= self._parts(target):
                return False
            _drop_records(target)
        failpoint.hit("records.dropped")
        return True

    def open(
        self, *, takes_over: bool, is_new: bool, excluded: Collection[Key] = ()
    ) -> tuple[int, set[str]]:
        """Begin an epoch of the run: (its number, the steps that are done).

        `takes_over`: the target may be another run's; a new run then empties it first, but for
        what is `excluded` from it.
        """
        settings = self._settings
        with self._connect() as target:
            others = [run for run in record.read_runs(target) if run[0] != self._run_id]
            if others and not takes_over:
                run_id, source = others[0]
                raise WorkDirError(
                    f"the target belongs to another run, {run_id}, from {source}",
                    hint="go on with that one in its own --dir (--resume), or, if it is dead: "
                    "DROP SCHEMA millrace CASCADE on the target",
                )
            if takes_over and is_new:
                for run_id, _ in others:
                    cancel_sessions(settings.target, f"{APPLICATION} % {run_id}%")
                drop_existing(target, settings.source, excluded)
                record.drop_records(target)
            epoch = record.open_run(target, self._run_id, settings.source.identity())
            return epoch, record.read_done_steps(target, self._run_id)

    def check(self, plan: Plan, copied: Collection[record.PartKey]) -> None:
        """Raise if parts that were committed have lost their records since."""
        if copied:
            _refuse_loss(plan, copied, self.parts())

    def close(
        self, plan: Plan, copied: Collection[record.PartKey], sequences: Sequenced[Sequence]
    ) -> None:
        """Take the records off the target.

        In one transaction they are seen for the last time and go: a target that crashes before
        its end has lost rows, one that crashes after it is a clone that crashed. If that fails,
        nobody knows which it was, and the run is not reported as done: --resume settles it.
        """
        with self._connect() as target, target.transaction():
            _refuse_loss(plan, copied, self._parts(target))
            if not record.are_sequences_set(target, self._run_id):
                set_sequences(target, sequences)
            _drop_records(target)
        failpoint.hit("records.dropped")

    def _exists(self, target: Connection) -> bool:
        return any(run_id == self._run_id for run_id, _ in record.read_runs(target))

    def _parts(self, target: Connection) -> set[record.PartKey]:
        found = record.read_copied_parts(target, self._run_id)
        return {(part.table_oid, part.part) for _, part in found}

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        with (
            connect(self._settings.target, self._role()) as target,
            translated("our records on the target"),
        ):
            yield target

    def _role(self) -> str:
        return f"records {self._run_id}"


def _drop_records(target: Connection) -> None:
    """An event trigger of the target may forbid it; the rows are there all the same."""
    try:
        with target.transaction():
            record.drop_records(target)
    except psycopg.OperationalError:
        raise  # the server is gone, and what it still has is not known
    except psycopg.Error as error:
        log.warning(
            "our records stay on the target (%s): DROP SCHEMA millrace CASCADE removes them",
            str(error).strip(),
        )


def _refuse_loss(
    plan: Plan, copied: Collection[record.PartKey], recorded: set[record.PartKey]
) -> None:
    lost = set(copied) - recorded
    if lost:
        labels = {plan.tables[oid].label for oid, _ in lost if oid in plan.tables}
        raise ServerError(
            f"the target crashed and lost {len(lost)} parts it had committed: "
            f"{', '.join(sorted(labels)[:5]) or 'large objects'}",
            hint="run the same command with --resume: only those are copied again",
        )
