"""A worker: serves partitions of a tube, one batch after the other.

Invariant: of a partition nothing is in flight twice, because one session owns it and does one thing
at a time: incremental pods, then a page of garbage or backfill pods. A pod is deleted after all
its keys were acknowledged by the sink, or are dead letters.

Keys of a routed table may be in two partitions at once, when an update moves a row: each is locked
on the source while it is in flight, and left for the next look if another worker has it. Pods of
any other table are forwarded to the partition of its shard, if they are elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from millrace import failpoint
from millrace.errors import ConfigError, MillraceError
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.backfill import BackfillRunner
from millrace.tube.delivery.batch import cut, take
from millrace.tube.delivery.epoch import draw_version, settle_epoch
from millrace.tube.delivery.garbage import Collection, is_collection
from millrace.tube.delivery.holds import Holds
from millrace.tube.delivery.owner import give_up, try_own
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.pod import (
    Pod,
    PodReader,
    TubeChanged,
    delete_pods,
    forward,
    rotate,
)
from millrace.tube.delivery.report import LeaseReporter, WorkerCounts
from millrace.tube.delivery.resting import Rest, RestingTables
from millrace.tube.delivery.tube import Tube, TubeTable, open_reader, read_tube
from millrace.tube.delivery.writer import TableWriter

log = logging.getLogger(__name__)

# The tube's tables are looked at this often.
LOOK_SECONDS = 2.0
# Locks for keys of routed tables: the server's lock table is small.
ROUTED_IDS = 500
# Pods that are looked at together: from, and to.
FEW_PODS = 100
MANY_PODS = 20_000
# Two looks that find nothing: what was written before the first is delivered.
EMPTY_LOOKS = 2


@dataclass(frozen=True)
class WorkerTask:
    """A worker's share; it travels to where the worker runs."""

    delivery: Delivery
    number: int
    workers: int
    # How long it goes on until it is sent anew.
    lease_seconds: float = 120.0


@dataclass(frozen=True)
class WorkerOutcome:
    """How a lease ended."""

    counts: WorkerCounts
    # Nothing was left in its partitions.
    is_empty: bool
    # It may have written pods for others.
    has_spread: bool = False


def serve(task: WorkerTask, attempt: int) -> WorkerOutcome:
    """The body of a worker's task."""
    return Worker(task).run()


@dataclass(frozen=True)
class _Passed:
    seq: int
    # When pods are looked for from the first on again.
    until: float


class Worker:
    """One lease."""

    def __init__(
        self, task: WorkerTask, *, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._task = task
        self._delivery = task.delivery
        self._limits = task.delivery.limits
        self._should_stop = should_stop
        self.counts = WorkerCounts()
        self._reporter = LeaseReporter(task.delivery.schema, task.delivery.tube)
        # By partition and number of their control pod.
        self._collections: dict[tuple[int, int], Collection] = {}
        self._told = ""
        self._pod_limit = FEW_PODS
        # How many pods were delivered when drained storage was last truncated for want of work.
        self._rotated = 0
        # How far a backlog is delivered, by partition.
        self._passed: dict[int, _Passed] = {}
        # Keys of the present batch that became dead letters.
        self._buried: set[str] = set()
        self._has_spread = False
        self._looked = 0.0

    def run(self) -> WorkerOutcome:
        delivery = self._delivery
        with (
            open_reader(delivery.source, delivery.tube) as reader,
            BackfillRunner(delivery) as backfills,
        ):
            self._reader, self._backfills, self._holds = reader, backfills, Holds(reader)
            self._pods = PodReader(reader)
            self._writer = TableWriter(reader, delivery, self.counts)
            settle_epoch(reader, delivery.schema)
            try:
                return self._serve(time.monotonic() + self._task.lease_seconds)
            finally:
                self._reporter.send(reader, is_last=True)
                self._writer.close()

    def _serve(self, until: float) -> WorkerOutcome:
        pause, empty = self._limits.least_pause_seconds, 0
        tube = self._read_tube()
        owned: set[int] = set()
        while time.monotonic() < until and not self._should_stop():
            try:
                if time.monotonic() - self._looked > LOOK_SECONDS:
                    tube = self._refresh(tube)
                is_busy = self._own(tube, owned)
                for partition in sorted(owned):
                    is_busy |= self._step(tube, partition)
                    self._reporter.note(partition, self.counts)
                self._reporter.send(self._reader)
            except TubeChanged:
                give_up(self._reader)
                owned.clear()
                self._holds.forget()
                self._collections.clear()
                tube, is_busy = self._read_tube(), True
            if is_busy:
                pause, empty = self._limits.least_pause_seconds, 0
                continue
            empty += 1
            if self.counts.pods - self._rotated >= FEW_PODS:
                rotate(self._reader, tube)
                self._rotated = self.counts.pods
            if self._delivery.until_empty and empty >= EMPTY_LOOKS:
                if self._is_quiet():
                    return WorkerOutcome(self.counts, True, self._has_spread)
                if self._waits_for_others():
                    return WorkerOutcome(self.counts, True, has_spread=True)
            time.sleep(pause)
            pause = min(2 * pause, self._limits.most_pause_seconds)
        return WorkerOutcome(self.counts, False, self._has_spread)

    def _is_quiet(self) -> bool:
        if self._backfills.failure is not None:
            raise self._backfills.failure
        self._resting.raise_lasting(self._limits.away_seconds)  # the others are delivered
        return not self._collections and not self._resting and self._backfills.is_idle

    def _waits_for_others(self) -> bool:
        """Whether nothing is left to do before other partitions are served, whose workers may have
        found them empty: a backfill waits until what the one before it wrote is delivered."""
        return (
            self._task.workers > 1
            and self._backfills.waits_for_turn
            and not self._collections
            and not self._resting
        )

    @property
    def _resting(self) -> RestingTables:
        return self._writer.resting

    def _read_tube(self) -> Tube:
        with translated("reading the tube"):
            tube = read_tube(self._reader, self._delivery.schema, self._delivery.tube)
            self._writer.look(tube)
        self._looked = time.monotonic()
        return tube

    def _refresh(self, tube: Tube) -> Tube:
        """Tables come and go; another number of partitions means other locks."""
        found = self._read_tube()
        if found.partitions != tube.partitions:
            raise TubeChanged(tube.name)
        for table in set(tube.tables) - set(found.tables):
            self._writer.forget(table)
            self._holds.let_go_table(tube, table)
            # Begun again from their pods, with the table as it is now.
            self._collections = {
                at: one for at, one in self._collections.items() if one.table != table
            }
        return found

    def _own(self, tube: Tube, owned: set[int]) -> bool:
        """Whether one of this worker's partitions is still somebody else's."""
        wanted = set(range(self._task.number, tube.partitions, self._task.workers))
        is_waiting = False
        for partition in sorted(wanted - owned):
            holder = try_own(self._reader, tube, partition)
            if holder is None:
                owned.add(partition)
                continue
            is_waiting = True
            if holder != self._told:
                log.warning(
                    "tube %s: partition %d is served by %s; waiting", tube.name, partition, holder
                )
                self._told = holder
            time.sleep(self._limits.most_pause_seconds)
        return is_waiting

    def _step(self, tube: Tube, partition: int) -> bool:
        """What was touched last, then a page of garbage or of a backfill: where something is
        always written, that would never have its turn otherwise. Whether there was anything."""
        waiting = self._fetch(tube, partition)
        if {pod.table_id for pod in waiting} - {table.id for table in tube.tables} - {None}:
            # Of a table that was attached, or detached, since the tube was read.
            tube = self._refresh(tube)
            waiting = [pod for pod in waiting if not self._is_resting(tube, pod)]
        ahead = [pod for pod in waiting if pod.op != "B"]
        batch = cut(ahead)
        if batch:
            self._do(tube, partition, batch)
        if len(batch) < len(ahead) or self._collect(tube, partition):
            return True
        behind = cut(waiting[len(ahead) :])
        if behind:
            self._do(tube, partition, behind)
        return bool(batch or behind)

    def _do(self, tube: Tube, partition: int, batch: list[Pod]) -> None:
        if batch[0].is_control:
            self._control(tube, partition, batch[0])
        else:
            self._deliver(tube, partition, batch)

    def _fetch(self, tube: Tube, partition: int) -> list[Pod]:
        """The next pods that nobody is at work on, and whose sink is there."""
        pods = self._fetch_next(tube, partition, self._pod_limit)
        if pods:
            # As many as fill a batch, if the next ones are as large.
            average = max(1, sum(len(pod.keys) for pod in pods) // len(pods))
            self._pod_limit = max(FEW_PODS, min(MANY_PODS, self._limits.batch_ids // average))
        if not self._collections and not self._resting and self._backfills.is_idle:
            return pods
        return [
            pod
            for pod in pods
            if not self._backfills.has(pod.seq)
            and not (self._backfills.is_busy and pod.asks_for_backfill)
            and not self._is_resting(tube, pod)
        ]

    def _fetch_next(self, tube: Tube, partition: int, limit: int) -> list[Pod]:
        """From the first pod on, at least every now and then: one with a lower number may have been
        committed late. In between, from where the last batch of a backlog ended, because what was
        deleted is still in the index while somebody holds a snapshot."""
        now = time.monotonic()
        fetch = partial(
            self._pods.fetch,
            tube,
            partition,
            limit,
            without=[seq for at, seq in self._collections if at == partition],
            without_tables=self._resting.ids(),
        )
        passed = self._passed.get(partition)
        if passed is not None and now < passed.until:
            pods = fetch(after=passed.seq)
            if len(pods) == limit:
                return pods
        pods = fetch()
        self._passed.pop(partition, None)
        if len(pods) == limit:
            self._passed[partition] = _Passed(0, now + LOOK_SECONDS)
        return pods

    def _deliver(self, tube: Tube, partition: int, pods: list[Pod]) -> None:
        """Pods up to the size of a batch, but for those with a key that is in flight elsewhere."""
        taken, shards = take(tube, pods, self._limits.batch_ids)
        held: set[tuple[int, str]] = set()
        for table, keys in shards.items():
            if not tube.is_at_home(table, partition):
                mine = [pod for pod in taken if table in tube.tables_of(pod.table_id)]
                self._forward(tube, table, mine)
                continue
            try:
                held |= {(table.id, key) for key in self._deliver_table(tube, table, keys)}
            except Rest:
                held |= {(table.id, key) for key in keys}
        done = [
            pod
            for pod in taken
            if not held
            or not any(
                (t.id, key) in held for t in tube.tables_of(pod.table_id) for key in pod.keys
            )
        ]
        failpoint.hit("tube.before_delete")
        delete_pods(self._reader, tube, partition, [pod.seq for pod in done])
        failpoint.hit("tube.after_delete")
        self.counts.pods += len(done)
        if done and done[-1].op != "B" and partition in self._passed:
            self._passed[partition] = replace(self._passed[partition], seq=done[-1].seq)
        if not done:
            time.sleep(self._limits.least_pause_seconds)

    def _forward(self, tube: Tube, table: TubeTable, pods: list[Pod]) -> None:
        """The table has another shard now, if this worker knows the newest one."""
        forward(self._reader, tube, table, pods)
        failpoint.hit("tube.after_forward")
        self._has_spread = True
        self._looked = 0.0

    def _deliver_table(
        self, tube: Tube, table: TubeTable, shards: dict[str, int], *, are_documents: bool = False
    ) -> set[str]:
        """Deliver keys, or documents again; those that another worker has in flight are
        returned."""
        self._buried = set()
        if tube.partitions == 1:
            self._write(tube, table, shards, are_documents)
            return set()
        if not self._holds.take_table(tube, table):
            return set(shards)
        sink = self._fanned_out_to(tube, table)
        if sink is None:
            return self._deliver_free(tube, table, shards, are_documents)
        if not self._holds.take(tube, sink):
            return set(shards)
        try:
            return self._deliver_free(tube, table, shards, are_documents)
        finally:
            self._holds.let_go(tube, sink)

    def _fanned_out_to(self, tube: Tube, table: TubeTable) -> str | None:
        """The table's sink, if there are documents in it that touches of several rows lead to."""
        plans = [self._delivery.require_table(one.label) for one in tube.tables]
        sink = self._delivery.require_table(table.label).sink
        return sink if any(one.fan_out and one.sink == sink for one in plans) else None

    def _deliver_free(
        self, tube: Tube, table: TubeTable, shards: dict[str, int], are_documents: bool
    ) -> set[str]:
        if not table.is_routed:
            self._write(tube, table, shards, are_documents)
            return set()
        held: set[str] = set()
        keys = sorted(shards)
        for start in range(0, len(keys), ROUTED_IDS):
            piece = keys[start : start + ROUTED_IDS]
            locked = self._holds.lock_keys(table, piece)
            try:
                free = {key: shards[key] for key in piece if key in locked}
                if free:
                    self._write(tube, table, free, are_documents)
            finally:
                self._holds.unlock_keys(table, locked)
            held |= set(piece) - set(locked)
        return held

    def _write(
        self, tube: Tube, table: TubeTable, shards: dict[str, int], are_documents: bool
    ) -> None:
        self._buried |= self._writer.write(tube, table, shards, are_documents=are_documents)

    def _is_resting(self, tube: Tube, pod: Pod) -> bool:
        ids = self._resting.ids()
        return any(table.id in ids for table in tube.tables_of(pod.table_id))

    def _control(self, tube: Tube, partition: int, pod: Pod) -> None:
        payload = pod.payload or {}
        tables, kind = tube.tables_of(pod.table_id), payload.get("type")
        # A tube of pg-tube's has one table in a shard; of several, the pod does not say which.
        table = tables[0] if len(tables) == 1 else None
        if table is None and tables and (is_collection(kind) or pod.asks_for_backfill):
            log.error("tube %s: a %s pod names no table: backfill its tables", tube.name, kind)
        if table is not None and not tube.is_at_home(table, partition):
            self._forward(tube, table, [pod])
            delete_pods(self._reader, tube, partition, [pod.seq])
            return
        if table is not None and is_collection(kind):
            found = Collection(table, pod, tube.partitions, partition)
            self._collections[partition, pod.seq] = found
            return
        if table is not None and pod.asks_for_backfill:
            if kind == "lost":
                log.error(
                    "tube %s: touches of %s were lost, so it is backfilled: %s",
                    tube.name,
                    table.label,
                    payload.get("error"),
                )
            self._has_spread = True
            self._backfills.begin(partition, pod, table, payload.get("order_col"))
            return
        delete_pods(self._reader, tube, partition, [pod.seq])

    def _collect(self, tube: Tube, partition: int) -> bool:
        """A page of garbage, or the end of a backfill; whether there was one."""
        for (at, seq), collection in list(self._collections.items()):
            if at != partition or self._is_resting(tube, collection.pod):
                continue
            if not collection.is_due(self._settle_seconds):
                continue
            try:
                if self._collect_page(tube, partition, seq, collection):
                    return True
            except Rest:
                continue
            except MillraceError as error:
                self._writer.close_outlet(collection.table)
                if self._reader.closed or isinstance(error, ConfigError):
                    raise
                self._writer.rest(tube, collection.table, error)
        done = self._backfills.take_done(partition)
        delete_pods(self._reader, tube, partition, done)
        return bool(done)

    @property
    def _settle_seconds(self) -> float:
        return 0.0 if self._delivery.until_empty else self._limits.settle_seconds

    def _collect_page(self, tube: Tube, partition: int, seq: int, collection: Collection) -> bool:
        outlet = self._writer.outlet(tube, collection.table)
        epoch = draw_version(self._reader, tube.schema)[0]
        failpoint.hit("tube.before_list")
        found = collection.page(outlet.sink, epoch, self._limits.batch_ids)
        self._resting.wake(collection.table.id)
        if found:
            held = self._deliver_table(tube, collection.table, found, are_documents=True)
            collection.give_up(self._buried)
            self.counts.collected += len(found) - len(held)
            return len(held) < len(found)
        if not collection.is_settled(self._settle_seconds):
            return False
        failpoint.hit("tube.before_forget")
        collection.finish(outlet.sink, epoch)
        failpoint.hit("tube.after_forget")
        delete_pods(self._reader, tube, partition, [seq])
        del self._collections[partition, seq]
        return True
