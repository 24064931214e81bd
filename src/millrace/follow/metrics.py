"""The progress of streams, for Prometheus.

Invariant: what is served is the progress that each stream reported last, and serving it waits for
nothing. The label `stream` distinguishes them. The registry that prometheus_client shares between
all is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.errors import ConfigError
from millrace.follow.progress import FollowProgress
from millrace.follow.settings import LOOPBACK
from millrace.workdir.stream_state import StreamState

# What is not known is left out, or NaN where a dashboard must not take its absence for zero.
_UNKNOWN = math.nan
_WAL_STATES = ("reserved", "extended", "unreserved", "lost", "gone")
_STATES = tuple(StreamState)


class StreamMetrics(Collector):
    """The metrics of streams; none of one until its progress is reported."""

    def __init__(self) -> None:
        self._progress: dict[str, FollowProgress] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, progress: FollowProgress) -> None:
        """What is served of this stream from now on."""
        self._progress[progress.stream] = progress

    def collect(self) -> Iterator[Metric]:
        """The same numbers as the live view; each family once, with all streams."""
        known = list(self._progress.values())
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for kind, read in ((GaugeMetricFamily, _gauges), (CounterMetricFamily, _counters)):
            for progress in known:
                for name, text, value in read(progress):
                    if value is not None:
                        made = kind(f"millrace_{name}", text, labels=["stream"])
                        family = families.setdefault(name, made)
                        family.add_metric([progress.stream], value)
        yield from families.values()
        if known:
            yield _one_of("stream_state", "The state of the stream", "state", _STATES, known)
        with_slot = [progress for progress in known if progress.source.wal_status]
        if with_slot:
            text = "The state of the slot"
            yield _one_of("slot_wal_status", text, "status", _WAL_STATES, with_slot)


@contextmanager
def serve_metrics(port: int | None, host: str = LOOPBACK) -> Iterator[StreamMetrics]:
    """Serve the metrics of streams on this port of an address; None serves nothing."""
    metrics = StreamMetrics()
    with serve_registry(port, host, metrics.registry):
        yield metrics


@contextmanager
def serve_registry(
    port: int | None,
    host: str,
    registry: CollectorRegistry,
    problems: Callable[[], list[str]] | None = None,
) -> Iterator[None]:
    """The same for any registry. `problems` says why it is not ready, for /readyz beside the
    metrics; with it there is a /healthz, too."""
    if port is None:
        yield
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"can't serve metrics on port {port} of {host}: {error.strerror}",
            hint="choose another --metrics-port, or --metrics-host",
        ) from error
    if problems is not None:
        server.set_app(_with_probes(server.get_app(), problems))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _with_probes(metrics_app: Any, problems: Callable[[], list[str]]) -> Callable[..., Any]:
    """A WSGI application: probes beside the metrics."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = environ.get("PATH_INFO", "")
        if path not in ("/healthz", "/readyz"):
            return metrics_app(environ, start_response)
        found = problems() if path == "/readyz" else []
        status = "503 Service Unavailable" if found else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return ["".join(f"{line}\n" for line in found or ["ok"]).encode()]

    return answer


def _gauges(progress: FollowProgress) -> list[tuple[str, str, float | None]]:
    source = progress.source
    lag_bytes = _UNKNOWN if progress.lag_bytes is None else progress.lag_bytes
    lag_seconds = _UNKNOWN if progress.lag_seconds is None else progress.lag_seconds
    return [
        ("received_lsn_bytes", "Position received from the source.", progress.received_lsn),
        ("spooled_lsn_bytes", "Position that is on our disk.", progress.flushed_lsn),
        ("applied_lsn_bytes", "Position that is on the target.", progress.applied_lsn),
        ("source_lsn_bytes", "Position of the source, asked beside the stream.", source.wal_lsn),
        ("source_age_seconds", "Time since the source was asked for it.", source.age_seconds),
        (
            "source_contact_age_seconds",
            "Time since anything arrived on the stream.",
            source.contact_seconds,
        ),
        (
            "source_silent",
            "1 if nothing arrives although something should.",
            int(source.is_silent),
        ),
        ("lag_bytes", "WAL of the source that is not on the target.", lag_bytes),
        ("lag_seconds", "How long the oldest of it has been waiting.", lag_seconds),
        ("waiting_bytes", "Bytes of changes spooled and not applied.", progress.waiting_bytes),
        ("slot_retained_bytes", "WAL that the source keeps.", source.retained_bytes),
        ("slot_safe_wal_bytes", "WAL until the slot is lost.", source.safe_wal_bytes),
        (
            "slot_seconds_until_lost",
            "Time until the slot is lost, at the present rate.",
            source.seconds_until_lost,
        ),
        ("apply_enabled", "1 if apply is on.", int(progress.is_applying)),
        ("changes_per_second", "Changes applied per second.", progress.changes_per_second),
    ]


def _counters(progress: FollowProgress) -> list[tuple[str, str, float | None]]:
    return [
        ("transactions_total", "Source transactions applied.", progress.transactions),
        ("changes_total", "Row changes applied.", progress.changes),
        ("changes_skipped_total", "Changes skipped because of a conflict.", progress.skipped),
        (
            "rows_overwritten_total",
            "Rows overwritten because of a conflict.",
            progress.overwritten,
        ),
    ]


def _one_of(
    name: str, text: str, label: str, values: Sequence[str], known: Iterable[FollowProgress]
) -> Metric:
    """A gauge for each value that it could be."""
    metric = GaugeMetricFamily(
        f"millrace_{name}", f"{text}: 1 for the one it is in.", labels=["stream", label]
    )
    for progress in known:
        found = progress.state if label == "state" else progress.source.wal_status
        for value in values:
            metric.add_metric([progress.stream, value], float(value == found))
    return metric
