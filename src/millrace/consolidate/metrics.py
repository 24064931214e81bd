"""Consolidated sources, for Prometheus and for probes.

Invariant: a source that is halted, paused or failed is served like any other, with a lag that keeps
growing; it is not ready as long as it is halted or failed, or its lag is over the limit or unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.consolidate.registry import SourceState
from millrace.consolidate.status import SourceStatus, read_status
from millrace.follow.metrics import StreamMetrics, serve_registry

_GAUGES = (
    ("lag_seconds", "How long the oldest change has been waiting."),
    ("lag_bytes", "WAL of the source that is not on the target."),
    ("changes_per_second", "Changes applied per second."),
)


class SourceMetrics(Collector):
    """What the registry of a work directory says."""

    def __init__(self, directory: Path, ready_lag_seconds: float) -> None:
        self._directory = directory
        self._limit = ready_lag_seconds

    def collect(self) -> Iterator[Metric]:
        known = read_status(self._directory, None)
        for name, text in _GAUGES:
            gauge = GaugeMetricFamily(f"millrace_source_{name}", text, labels=["source"])
            for one in known:
                value = getattr(one, name)
                gauge.add_metric([one.name], math.nan if value is None else value)
            yield gauge
        states = GaugeMetricFamily(
            "millrace_source_state",
            "The state of the source: 1 for the one it is in.",
            labels=["source", "state"],
        )
        for one in known:
            for state in SourceState:
                states.add_metric([one.name, state], float(one.state == state))
        yield states

    def problems(self) -> list[str]:
        """Why it is not ready; nothing if it is."""
        return [
            f"source {one.name}: {text}"
            for one in read_status(self._directory, None)
            if (text := self._problem(one))
        ]

    def _problem(self, one: SourceStatus) -> str:
        if one.state in (SourceState.HALTED, SourceState.FAILED):
            return f"{one.state}: {one.error}"
        if one.state != SourceState.FOLLOWING:
            return ""  # it is copied, or somebody has paused it
        if one.lag_seconds is None:
            return "its lag is not known"
        if one.lag_seconds > self._limit:
            return f"{one.lag_seconds:.0f} s behind, and the limit is {self._limit:.0f} s"
        return ""


@contextmanager
def serve_source_metrics(
    directory: Path, port: int | None, host: str, ready_lag_seconds: float
) -> Iterator[StreamMetrics]:
    """Metrics of sources and of their streams, /healthz and /readyz; None serves nothing."""
    streams, sources = StreamMetrics(), SourceMetrics(directory, ready_lag_seconds)
    streams.registry.register(sources)
    with serve_registry(port, host, streams.registry, sources.problems):
        yield streams
