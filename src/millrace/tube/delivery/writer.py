"""Keys of a table into its sink: enriched, written, tried again, given up one by one.

Invariant: after `write` every key was acknowledged by the sink, or is a dead letter. If the table
as a whole can't be delivered, it rests, and nothing of it counts as delivered.

Nothing reaches a sink that the source could still lose: neither a row nor the number of a version.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from millrace import failpoint
from millrace.errors import ConfigError, MillraceError
from millrace.postgres.wire.connect import translated
from millrace.retry import is_transient, iter_pauses
from millrace.sink.document import DocumentBatch
from millrace.tube.delivery.dead import bury, forget, tables_with_dead
from millrace.tube.delivery.epoch import draw_version
from millrace.tube.delivery.outlet import Outlet, open_outlet
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.resting import Rest, RestingTables
from millrace.tube.delivery.tube import Connection, Tube, TubeTable

log = logging.getLogger(__name__)

# Errors that are not about an id, by the class of their SQLSTATE: what is written to, or read, is
# not there or not allowed, or the server has no room.
_ABOUT_TABLES: Final = ("28", "3D", "3F", "42", "53", "57")
# Documents that are in memory together: at first so many, then about as many bytes.
_FIRST_IDS: Final = 200
_BATCH_BYTES: Final = 64 << 20


class TableWriter:
    """What one worker's tables are written through."""

    def __init__(self, reader: Connection, delivery: Delivery, counts: WorkerCounts) -> None:
        self._reader = reader
        self._delivery = delivery
        self._limits = delivery.limits
        self._counts = counts
        self._outlets: dict[int, Outlet] = {}
        # Tables with dead letters, by id.
        self._with_dead: set[int] = set()
        # How many documents of a table are taken at once, by its id.
        self._ids_at_once: dict[int, int] = {}
        self.resting = RestingTables()

    def look(self, tube: Tube) -> None:
        """Which tables have dead letters; others may write and discard them."""
        self._with_dead = tables_with_dead(self._reader, tube)

    def write(
        self, tube: Tube, table: TubeTable, shards: dict[str, int], *, are_documents: bool
    ) -> set[str]:
        """All of them; what keeps failing is halved until an id fails alone. Those are returned."""
        work, given_up = [shards], set()
        while work:
            part, rest = _split(work.pop(), self._ids_at_once.get(table.id, _FIRST_IDS))
            work += [rest] if rest else []
            try:
                attempts = 1 if len(part) > 1 else self._limits.tries
                self._try(tube, table, part, are_documents, attempts=attempts)
            except MillraceError as error:
                if isinstance(error, ConfigError) or is_transient(error):
                    raise
                if len(part) > 1:
                    work += reversed(_split(part, len(part) // 2))
                    continue
                ((key, shard),) = part.items()
                self._give_up(tube, table, key, shard, error)
                given_up.add(key)
        return given_up

    def outlet(self, tube: Tube, table: TubeTable) -> Outlet:
        found = self._outlets.get(table.id)
        if found is None:
            try:
                plan = self._delivery.require_table(table.label)
                found = self._outlets[table.id] = open_outlet(self._reader, tube, table, plan)
            except MillraceError as error:
                # No id is at fault. Somebody may mend it, and other tables go on.
                if self._reader.closed:
                    raise
                raise self.rest(tube, table, error) from error
        return found

    def rest(self, tube: Tube, table: TubeTable, error: MillraceError) -> Rest:
        """Leave a table alone for a while, so that others go on."""
        self._counts.retries += 1
        # Whoever waits for an empty tube looks often enough to see a sink that came back.
        most = self._limits.away_seconds / 4 if self._delivery.until_empty else float("inf")
        pause = self.resting.rest(table, error, most)
        log.warning("tube %s: %s: %s; trying again in %.1f s", tube.name, table.label, error, pause)
        return Rest(str(error))

    def forget(self, table: TubeTable) -> None:
        """A table that is attached in another way now, or not any more."""
        self.close_outlet(table)
        self.resting.wake(table.id)

    def close_outlet(self, table: TubeTable) -> None:
        outlet = self._outlets.pop(table.id, None)
        if outlet is not None:
            outlet.close()

    def close(self) -> None:
        while self._outlets:
            self._outlets.popitem()[1].close()

    def _try(
        self,
        tube: Tube,
        table: TubeTable,
        shards: dict[str, int],
        are_documents: bool,
        *,
        attempts: int,
    ) -> None:
        pauses = iter_pauses(attempts)
        while True:
            is_open = False
            try:
                outlet = self.outlet(tube, table)
                is_open = True
                return self._write_once(tube, table, outlet, shards, are_documents)
            except MillraceError as error:
                self._counts.errors += 1
                self.close_outlet(table)
                if self._reader.closed or isinstance(error, ConfigError):
                    raise
                if not is_open or _is_about_table(error):
                    raise self.rest(tube, table, error) from error
                pause = next(pauses, None)
                if pause is None:
                    raise
                self._counts.retries += 1
                log.warning("tube %s: %s; trying again in %.1f s", tube.name, error, pause)
            time.sleep(pause)

    def _write_once(
        self,
        tube: Tube,
        table: TubeTable,
        outlet: Outlet,
        shards: dict[str, int],
        are_documents: bool,
    ) -> None:
        version = draw_version(self._reader, tube.schema)
        failpoint.hit("tube.after_draw")
        batch = outlet.enrich(version, shards, are_documents=are_documents)
        self._flush_source()
        failpoint.hit("tube.before_write")
        outlet.sink.write_documents(batch)
        failpoint.hit("tube.before_commit")
        outlet.sink.commit(0)
        failpoint.hit("tube.after_commit")
        self.resting.wake(table.id)
        # Documents of a table that fans out are its parents: dead letters are of its own rows.
        if table.id in self._with_dead and not (are_documents and outlet.fan_out):
            forget(self._reader, tube, table, list(shards))
        self._note_size(table, batch)
        self._counts.ids += len(batch)
        self._counts.deleted += batch.is_deleted.true_count

    def _note_size(self, table: TubeTable, batch: DocumentBatch) -> None:
        """As many as are not too large together, but no sudden growth: sizes differ."""
        fitting = len(batch) * _BATCH_BYTES // max(1, batch.body.nbytes)
        before = self._ids_at_once.get(table.id, _FIRST_IDS)
        self._ids_at_once[table.id] = max(1, min(fitting, 10 * before, self._limits.batch_ids))

    def _give_up(
        self, tube: Tube, table: TubeTable, key: str, shard: int, error: MillraceError
    ) -> None:
        log.error("tube %s: %s %s is given up: %s", tube.name, table.label, key, error)
        bury(self._reader, tube, table, shard, key, self._limits.tries, str(error))
        self._with_dead.add(table.id)
        self._counts.dead += 1

    def _flush_source(self) -> None:
        """What was read may come from commits that are not on disk yet (`synchronous_commit` is
        off), and so may the number of the version. A commit of ours takes the WAL before it to
        disk; it has to have written something."""
        with translated("waiting for the source's disk"):
            self._reader.execute("SELECT pg_logical_emit_message(true, 'millrace tube', '')")


def _split(shards: dict[str, int], first: int) -> tuple[dict[str, int], dict[str, int]]:
    """So many of them, and the others."""
    if len(shards) <= first:
        return shards, {}
    items = list(shards.items())
    return dict(items[:first]), dict(items[first:])


def _is_about_table(error: MillraceError) -> bool:
    """Whether the other ids of the table would fail, too."""
    return is_transient(error) or str(error.facts.get("sqlstate"))[:2] in _ABOUT_TABLES
