"""Garbage: documents that a backfill did not touch, or that a TRUNCATE took the rows of.

Invariant: an id is looked at again like any touched one, so a document goes only if its row is
gone; nothing is deleted by age. A collection is over when the sink has listed nothing for some time
twice; its control pod goes after that, so a crash begins it again.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from millrace.sink.protocol import DocumentSink, ListingSink, ShardChoice
from millrace.tube.delivery.pod import Pod
from millrace.tube.delivery.tube import TubeTable

log = logging.getLogger(__name__)

_KINDS: Final = ("backfill_end", "truncate")
# Looks that find nothing, at least.
_LOOKS: Final = 2
_LOOKS_WHILE_SETTLING: Final = 10


def is_collection(kind: object) -> bool:
    return kind in _KINDS


class Collection:
    """What one control pod asks for."""

    def __init__(self, table: TubeTable, pod: Pod, partitions: int, partition: int) -> None:
        payload = pod.payload or {}
        self.table = table
        self.pod = pod
        self._start = int(payload.get("start_seq") or 0)
        # Documents may be in shards that the table has left, so all of its own are looked at; of a
        # routed table's, those of this partition, if every partition has such a pod.
        is_one_of_all = payload.get("all_shards") and payload.get("partitions") == partitions
        is_part = table.is_routed and is_one_of_all
        self._choice = ShardChoice(None, *((partitions, partition) if is_part else (1, 0)))
        # Dead letters stay as old as they are.
        self._given_up: set[str] = set()
        self._empty_since: float | None = None
        self._looks = 0
        self._looked_at = 0.0
        self._told = False

    def page(self, sink: DocumentSink, epoch: int, limit: int) -> dict[str, int]:
        """The next ids to look at, with their shards."""
        if not isinstance(sink, ListingSink):
            if not self._told:
                log.warning(
                    "%s: the sink can't list what it holds, so documents of rows that are gone"
                    " stay; write to a new place and backfill",
                    self.table.label,
                )
                self._told = True
            found: dict[str, int] = {}
        else:
            listed = sink.list_ids(self._choice, (epoch, self._start), limit + len(self._given_up))
            found = {id_: shard for id_, shard in listed.items() if id_ not in self._given_up}
        self._looked_at = time.monotonic()
        if found:
            self._empty_since, self._looks = None, 0
        else:
            self._looks += 1
            self._empty_since = self._empty_since or time.monotonic()
        return found

    def give_up(self, ids: set[str]) -> None:
        """Do not look at these again."""
        self._given_up |= ids

    def is_due(self, seconds: float) -> bool:
        """Whether to look again: one that only waits until it is settled does so now and then, or
        many of them would take all the time."""
        pause = seconds / _LOOKS_WHILE_SETTLING
        return self._empty_since is None or time.monotonic() - self._looked_at >= pause

    def is_settled(self, seconds: float) -> bool:
        since = self._empty_since
        return since is not None and self._looks >= _LOOKS and time.monotonic() - since >= seconds

    def finish(self, sink: DocumentSink, epoch: int) -> None:
        if isinstance(sink, ListingSink):
            sink.forget_deleted(self._choice, (epoch, self._start))
