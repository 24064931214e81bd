"""What the target remembers of a run, and which schemas are whose.

Invariant: schemas are emptied only for the run whose records they have, or for one that was told
to; the records of a finished run leave the target in the transaction that finds them complete.

A target that crashes empties its unlogged tables, and their records with them: so a part that
lacks its record must be copied, whatever was there before.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Sequenced
from contextlib import contextmanager
from typing import Any

import psycopg

from millrace import failpoint
from millrace.clone.finish.sequence import set_sequences
from millrace.clone.plan import Plan
from millrace.clone.schema.database import drop_existing, read_shared_tables
from millrace.clone.settings import CloneSettings
from millrace.clone.step import Step
from millrace.errors import ServerError, WorkDirError
from millrace.filter.decide import Key
from millrace.postgres import run_record as record
from millrace.postgres.stream_record import Follower, read_followers, write_follower
from millrace.postgres.wire.connect import cancel_sessions, connect, read_sessions, translated
from millrace.relation import Sequence
from millrace.workdir.store import Store
from millrace.workdir.stream_binding import StreamBinding

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]

# The server looks every five seconds if the client of a busy session is still there.
LINGER_SECONDS = 15.0
POLL_SECONDS = 0.1


def planned_parts(store: Store) -> set[record.PartKey]:
    """Every part, large objects included, that is to have a record."""
    parts = {(oid, part.number) for oid, parts in store.read_parts().items() for part in parts}
    ranges = store.read_large_object_ranges()
    return parts | {(record.LARGE_OBJECTS_OID, one.number) for one in ranges}


def rows_left(
    store: Store, recorded: Collection[record.PartKey], settings: CloneSettings
) -> set[record.PartKey]:
    """The parts that these steps are still to copy."""
    wanted = Step.TABLE_DATA in settings.steps
    objects = Step.LARGE_OBJECTS in settings.steps and not settings.skip_large_objects
    return {
        (oid, number)
        for oid, number in planned_parts(store) - set(recorded)
        if (objects if oid == record.LARGE_OBJECTS_OID else wanted)
    }


class RunRecords:
    """The records of one run on its target."""

    def __init__(self, settings: CloneSettings, run_id: str) -> None:
        self._settings = settings
        self._run_id = run_id

    def require(self, store: Store) -> None:
        """Raise if the target knows nothing of a run that has begun there: it is another database,
        or an older state of it. Records are made before the plan, and go when it is done."""
        setup = store.setup()
        if setup is None or not setup["snapshot"] or setup["finished_at"]:
            return
        if not self.exists():
            raise WorkDirError(
                f"the target has no records of run {self._run_id}, which began to fill it: it is "
                "another database, or an older state of it",
                hint="give the --target of the run; or start from zero with --restart (and "
                "--drop-if-exists, if tables of the run are there)",
                run_id=self._run_id,
            )

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
            _drop_records(target, self._run_id)
        failpoint.hit("records.dropped")
        return True

    def open(
        self,
        *,
        schemas: frozenset[str],
        takes_over: bool,
        is_new: bool,
        excluded: Collection[Key] = (),
        former: str = "",
        stream: StreamBinding | None = None,
    ) -> tuple[int, set[str]]:
        """Begin an epoch of the run, which fills `schemas`: (its number, the steps that are done).

        `takes_over`: they may be another run's; a new run then empties them first, but for
        what is `excluded` from it. `former` is a run that this one restarts, and dead. `stream` is
        that of the work directory.
        """
        settings, own = self._settings, self._record(schemas)
        with self._connect() as target:
            if takes_over and is_new:
                self._refuse_followed(target, stream)
                others = _meeting(target, own)
                for other in others:
                    if other.run_id == former:
                        cancel_sessions(settings.target, [former])
                    else:
                        _wait_for_end(target, other.run_id)
                drop_existing(target, settings.route, excluded)
                for other in others:
                    record.drop_records(target, other.run_id)
            epoch = record.open_run(target, own)
            return epoch, record.read_done_steps(target, self._run_id)

    def check_owner(self, schemas: frozenset[str]) -> None:
        """Raise if another run has begun to fill one of them; `open` would do so later."""
        own = self._record(schemas)
        with self._connect() as target:
            for other in _meeting(target, own):
                raise record.owned_schemas(other, own)

    def _record(self, schemas: frozenset[str]) -> record.RunRecord:
        settings = self._settings
        return record.RunRecord(
            self._run_id,
            settings.source.identity(),
            schemas,
            socket.gethostname(),
            str(settings.directory),
        )

    def note_stream(self, stream: StreamBinding) -> None:
        """Record on the target that the stream belongs to this copy. Not before the schema is
        there: it may have a schema of the name of ours."""
        follower = Follower(
            stream.source,
            stream.slot_name,
            self._run_id,
            socket.gethostname(),
            str(self._settings.directory),
        )
        with self._connect() as target:
            write_follower(target, follower)

    def check_followed(self, stream: StreamBinding | None) -> None:
        """Raise what `open` would, before anything is changed."""
        with self._connect() as target:
            self._refuse_followed(target, stream)

    def _refuse_followed(self, target: Connection, stream: StreamBinding | None) -> None:
        """Raise if tables that another stream applies its changes to are about to be replaced."""
        own = (stream.source, stream.slot_name) if stream else None
        others = [one for one in read_followers(target) if (one.source, one.slot) != own]
        if not others:
            return
        shared = read_shared_tables(target, self._settings.route)
        if shared:
            other = others[0]
            raise WorkDirError(
                f"the target is followed by the stream of slot {other.slot} from {other.source}, "
                f"in {other.directory} on {other.host}: tables that it has too would be replaced, "
                f"{', '.join(shared[:5])}",
                hint="choose another --target; or end that stream first: millrace stream cleanup",
                slot=other.slot,
            )

    def check(self, plan: Plan, copied: Collection[record.PartKey]) -> None:
        """Raise if parts that were committed have lost their records since: a server that crashed
        may have lost what it had not yet written, or an unlogged table, together with the
        record."""
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
            _drop_records(target, self._run_id)
        failpoint.hit("records.dropped")

    def _exists(self, target: Connection) -> bool:
        return any(run.run_id == self._run_id for run in record.read_runs(target))

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


def _meeting(target: Connection, own: record.RunRecord) -> list[record.RunRecord]:
    """The other runs that fill a schema of ours."""
    found = record.read_runs(target)
    return [run for run in found if run.run_id != own.run_id and run.meets(own)]


def _wait_for_end(target: Connection, run_id: str) -> None:
    """Until nothing is left of a run that has died. The server sees within seconds that a
    client is gone, so sessions that stay are a living run's, whatever became of its claim."""
    deadline = time.monotonic() + LINGER_SECONDS
    while sessions := read_sessions(target, run_id):
        if time.monotonic() > deadline:
            raise WorkDirError(
                f"another millrace, run {run_id}, is at work on the target: "
                f"{len(sessions)} sessions, {sessions[0]}",
                hint="wait for it, or stop it; or choose another --target",
                run_id=run_id,
            )
        time.sleep(POLL_SECONDS)


def _drop_records(target: Connection, run_id: str) -> None:
    """An event trigger of the target may forbid it; the rows are there all the same."""
    try:
        with target.transaction():
            record.drop_records(target, run_id)
    except psycopg.OperationalError:
        raise  # the server is gone, and what it still has is not known
    except psycopg.Error as error:
        log.warning(
            "our records stay on the target (%s): DROP TABLE %s removes them",
            str(error).strip(),
            record.TABLES,
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
