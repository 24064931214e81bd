"""What people and machines see of a running `millrace tube run`: progress, metrics, probes.

Invariant: a tube that can't be looked at shows as such, and its delivery goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from millrace.cli.display import Display, open_display, render_seconds
from millrace.tube.delivery.metrics import TubeMetrics, serve_tube_metrics
from millrace.tube.delivery.observe import TubeState, observed
from millrace.tube.delivery.plan import Delivery

ReadyLag = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="/readyz beside the metrics answers 503 while the oldest pod of a shard, but for"
        " backfills, is older.",
    ),
]
DEFAULT_READY_LAG = 60.0


class _View:
    """Passes what was seen on to the display and to the metrics."""

    def __init__(self, display: Display, metrics: TubeMetrics) -> None:
        self._display, self._metrics = display, metrics
        self._lines: dict[str, str] = {}

    def update(self, state: TubeState) -> None:
        self._metrics.update(state)
        line = render_state(state)
        # Nothing new is no news: an idle tube fills no log.
        if self._lines.get(state.tube) != line:
            self._lines[state.tube] = line
            self._display.update_line("; ".join(self._lines.values()))

    def keep(self, tubes: Sequence[str]) -> None:
        """Others are not shown any more."""
        self._lines = {tube: line for tube, line in self._lines.items() if tube in tubes}
        self._metrics.rearrange(tubes)


@contextmanager
def observing(
    deliveries: Sequence[Delivery],
    *,
    quiet: bool,
    metrics_port: int | None,
    metrics_host: str,
    ready_lag: float,
) -> Iterator[Callable[[Sequence[Delivery]], None]]:
    """While the block runs, its tubes are shown and served; those it gets are others to show."""
    if quiet and metrics_port is None:
        yield lambda deliveries: None
        return
    tubes = [one.tube for one in deliveries]
    with (
        serve_tube_metrics(tubes, metrics_port, metrics_host, ready_lag) as metrics,
        open_display(quiet=quiet) as display,
    ):
        view = _View(display, metrics)
        with observed(deliveries, view.update) as observers:

            def rearrange(deliveries: Sequence[Delivery]) -> None:
                view.keep([one.tube for one in deliveries])
                observers.rearrange(deliveries)

            yield rearrange


def render_state(state: TubeState) -> str:
    """A tube in a line."""
    ids = sum(one.ids for one in state.shards)
    backfill = sum(one.backfill_ids for one in state.shards)
    delivered = sum(one.ids for one in state.counts.values())
    parts = [
        f"{delivered:,} ids delivered",
        f"{sum(state.ids_per_second.values()):,.0f} ids/s",
        f"{ids:,} waiting",
        f"lag {render_seconds(state.lag_seconds)}",
    ]
    if backfill:
        parts.append(f"{backfill:,} of backfills waiting")
    if state.dead:
        parts.append(f"{state.dead:,} dead letters")
    return f"{state.tube}: {', '.join(parts)}"
