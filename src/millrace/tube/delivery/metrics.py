"""Deliveries of tubes, for Prometheus and for probes.

Invariant: what is served is what was seen last of each tube, and serving it waits for nothing. A
tube that was not seen for long, or whose oldest pod is older than the limit, is not ready: silence
is never taken for health.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.follow.metrics import serve_registry
from millrace.tube.delivery.observe import TubeState

# What a tube may be unseen for, if the limit is smaller than that.
_UNSEEN_SECONDS: Final = 15.0

_OF_SHARDS: Final = (
    ("pods_waiting", "pods", "Pods that wait."),
    ("ids_waiting", "ids", "Ids in pods that wait."),
    ("oldest_pod_age_seconds", "lag_seconds", "Now minus the oldest pod that waits."),
    ("backfill_pods_waiting", "backfill_pods", "Pods of backfills that wait."),
    ("backfill_ids_waiting", "backfill_ids", "Ids in pods of backfills that wait."),
    (
        "backfill_oldest_pod_age_seconds",
        "backfill_lag_seconds",
        "Now minus the oldest pod of a backfill that waits.",
    ),
    ("control_pods_waiting", "control_pods", "Control pods that wait."),
)
_COUNTERS: Final = (
    ("pods_delivered_total", "pods", "Pods that were delivered and deleted."),
    ("ids_delivered_total", "ids", "Ids that a sink acknowledged."),
    ("documents_deleted_total", "deleted", "Ids whose row was gone."),
    ("dead_total", "dead", "Ids that were given up."),
    ("collected_total", "collected", "Ids looked at again after a backfill or TRUNCATE."),
    ("delivery_errors_total", "errors", "Deliveries that failed."),
    ("delivery_retries_total", "retries", "Deliveries that were tried again after a pause."),
)


class TubeMetrics(Collector):
    """The metrics of tubes; none of one before the first look."""

    def __init__(self, tubes: Sequence[str], ready_lag_seconds: float) -> None:
        self._states: dict[str, TubeState] = {tube: TubeState(tube) for tube in tubes}
        self._limit = ready_lag_seconds
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, state: TubeState) -> None:
        if state.tube in self._states:
            self._states[state.tube] = state

    def rearrange(self, tubes: Sequence[str]) -> None:
        """These are served from now on; one that is new is not ready before it was looked at."""
        known = self._states
        self._states = {tube: known.get(tube, TubeState(tube)) for tube in tubes}

    def collect(self) -> Iterator[Metric]:
        known = [one for one in self._states.values() if one.looked_at is not None]
        if not known:
            return
        labels = ["tube", "partition", "shard"]
        for name, field, text in _OF_SHARDS:
            gauge = GaugeMetricFamily(f"millrace_tube_{name}", text, labels=labels)
            for state in known:
                for one in state.shards:
                    where = [state.tube, str(one.partition), str(one.shard)]
                    gauge.add_metric(where, getattr(one, field))
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"millrace_tube_{name}", text, labels=labels[:2])
            for state in known:
                for partition, counts in state.counts.items():
                    counter.add_metric([state.tube, str(partition)], getattr(counts, field))
            yield counter
        yield self._of_tubes(
            "ids_per_second",
            "Ids delivered per second.",
            (([one.tube, str(p)], rate) for one in known for p, rate in one.ids_per_second.items()),
            labels[:2],
        )
        yield self._of_tubes(
            "dead_letters", "Ids in the table of dead letters.", (([s.tube], s.dead) for s in known)
        )
        yield self._of_tubes(
            "look_age_seconds",
            "Time since the tube was looked at.",
            (([one.tube], time.monotonic() - (one.looked_at or 0.0)) for one in known),
        )

    def problems(self) -> list[str]:
        """Why it is not ready; nothing if it is."""
        found = []
        for state in self._states.values():
            if state.looked_at is None:
                found.append(f"tube {state.tube}: not looked at yet")
                continue
            unseen = time.monotonic() - state.looked_at
            oldest = state.oldest()
            if unseen > max(self._limit, _UNSEEN_SECONDS):
                found.append(f"tube {state.tube}: not looked at for {unseen:.0f} s")
            elif oldest is not None and oldest.lag_seconds > self._limit:
                found.append(
                    f"tube {state.tube}: the oldest pod of shard {oldest.shard} has waited for"
                    f" {oldest.lag_seconds:.0f} s, and the limit is {self._limit:.0f} s"
                )
        return found

    @staticmethod
    def _of_tubes(
        name: str,
        text: str,
        values: Iterable[tuple[list[str], float]],
        labels: Sequence[str] = ("tube",),
    ) -> Metric:
        gauge = GaugeMetricFamily(f"millrace_tube_{name}", text, labels=labels)
        for where, value in values:
            gauge.add_metric(where, value)
        return gauge


@contextmanager
def serve_tube_metrics(
    tubes: Sequence[str], port: int | None, host: str, ready_lag_seconds: float
) -> Iterator[TubeMetrics]:
    """Metrics, /healthz and /readyz on this port of an address; None serves nothing."""
    metrics = TubeMetrics(tubes, ready_lag_seconds)
    with serve_registry(port, host, metrics.registry, metrics.problems):
        yield metrics
