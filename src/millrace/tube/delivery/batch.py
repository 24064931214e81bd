"""Which pods make a batch.

Invariant: pods are taken in their order, and a control pod is a batch of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.tube.delivery.pod import Pod
from millrace.tube.delivery.tube import Tube, TubeTable


def cut(pods: Iterable[Pod]) -> list[Pod]:
    """A control pod alone, or what comes before the next one."""
    found: list[Pod] = []
    for pod in pods:
        if pod.is_control:
            return found or [pod]
        found.append(pod)
    return found


def take(
    tube: Tube, pods: list[Pod], most: int
) -> tuple[list[Pod], dict[TubeTable, dict[str, int]]]:
    """Pods up to the size of a batch, and their keys by table, each with its shard."""
    # By what pods name, so that no table is hashed for each of them.
    found: dict[int | None, tuple[dict[str, int], ...]] = {}
    shards: dict[TubeTable, dict[str, int]] = {}
    taken: list[Pod] = []
    total = 0
    for pod in pods:
        if taken and total + len(pod.keys) > most:
            break
        taken.append(pod)
        if pod.table_id not in found:
            tables = tube.tables_of(pod.table_id)
            found[pod.table_id] = tuple(shards.setdefault(table, {}) for table in tables)
        for keys in found[pod.table_id]:
            keys.update(dict.fromkeys(pod.keys, pod.shard))
            total += len(pod.keys)
    return taken, shards
