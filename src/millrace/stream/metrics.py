"""Where a stream stands, for Prometheus.

Invariant: what is served is the last progress that was reported; serving it waits for nothing.

Facts: Prometheus documentation, "Exposition formats", text format 0.0.4.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from millrace.errors import ConfigError
from millrace.stream.progress import FollowProgress

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(progress: FollowProgress) -> str:
    """The same numbers as the live view."""
    gauges: list[tuple[str, str, float]] = [
        ("received_lsn_bytes", "Position received from the source.", progress.received_lsn),
        ("spooled_lsn_bytes", "Position that is on our disk.", progress.flushed_lsn),
        ("applied_lsn_bytes", "Position that is on the target.", progress.applied_lsn),
        ("lag_bytes", "Bytes of changes spooled and not applied.", progress.lag_bytes),
        ("lag_seconds", "Age of the last applied transaction.", progress.lag_seconds),
        ("apply_enabled", "Whether apply is on.", int(progress.is_applying)),
        ("changes_per_second", "Changes applied a second.", progress.changes_per_second),
    ]
    counters = [
        ("transactions_total", "Source transactions applied.", progress.transactions),
        ("changes_total", "Row changes applied.", progress.changes),
        ("changes_skipped_total", "Changes skipped for a conflict.", progress.skipped),
        ("rows_overwritten_total", "Rows overwritten for a conflict.", progress.overwritten),
    ]
    lines = []
    for kind, family in (("gauge", gauges), ("counter", counters)):
        for name, text, value in family:
            lines.append(f"# HELP millrace_{name} {text}")
            lines.append(f"# TYPE millrace_{name} {kind}")
            lines.append(f"millrace_{name} {value}")
    return "\n".join(lines) + "\n"


class Metrics:
    """Keeps the last progress."""

    def __init__(self) -> None:
        self.progress = FollowProgress()


@contextmanager
def serve_metrics(port: int | None) -> Iterator[Metrics]:
    """Serve /metrics on this port of all addresses; None serves nothing."""
    metrics = Metrics()
    if port is None:
        yield metrics
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path in ("/", "/metrics")
            body = render_metrics(metrics.progress).encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", _CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are of no interest."""

    try:
        server = ThreadingHTTPServer(("", port), Handler)
    except OSError as error:
        raise ConfigError(
            f"can't serve metrics on port {port}: {error.strerror}", hint="choose another port"
        ) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
