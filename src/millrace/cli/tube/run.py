"""`millrace tube run`: what is touched is delivered.

Invariant: it ends with exit code 0 only if it was told to stop at an empty tube, and then nothing
that was in the tube when it began is undelivered but what it counts as dead, which is an error.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from millrace.cli import options
from millrace.cli.tube.config import open_config
from millrace.cli.tube.observe import DEFAULT_READY_LAG, ReadyLag, observing
from millrace.cli.tube.options import (
    Config,
    Enrich,
    Schema,
    SinkAddress,
    Source,
    TubeName,
    refuse_beside_config,
    require_tube_options,
)
from millrace.errors import SinkError
from millrace.follow.settings import LOOPBACK
from millrace.log import setup_logging
from millrace.postgres.wire.connect import connect, resolve
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.tube.config_watch import ConfigWatch
from millrace.tube.delivery.dead import read_dead
from millrace.tube.delivery.plan import Delivery, DeliveryLimits, TableDelivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.run import check_delivery, require_slots, run_delivery
from millrace.tube.delivery.runs import TubeRun, check_runs, run_deliveries
from millrace.tube.delivery.tube import find_tube
from millrace.workdir.place import make_private

log = logging.getLogger(__name__)

# For workers of tubes that a file gets later: a slot that is not used costs nothing.
_SPARE_SLOTS = 8


def run(
    context: typer.Context,
    tube: TubeName = "",
    enrich: Enrich = "",
    sink: SinkAddress = "",
    config: Config = None,
    source: Source = "",
    schema: Schema = "",
    workers: Annotated[
        int, typer.Option(min=1, help="Tasks that deliver; each serves whole partitions.")
    ] = 1,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when nothing is left in the tube.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Ids that are delivered together.")] = 20_000,
    tries: Annotated[
        int, typer.Option(min=1, help="Tries of an id alone until it is a dead letter.")
    ] = 5,
    metrics_port: options.MetricsPort = None,
    metrics_host: options.MetricsHost = LOOPBACK,
    ready_lag: ReadyLag = DEFAULT_READY_LAG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    log_json: options.LogJson = False,
) -> None:
    """Deliver what is touched: in order, enriched, each id at least once.

    Runs until it is stopped, or, with --until-empty, until the tube is empty. An id that can't be
    delivered is tried several times, then kept as a dead letter (`millrace tube dead`), and the
    others go on. Exit code 8 if there were dead letters.

    With --config all tubes of a file are delivered at once, each with its own workers. A tube that
    fails does not stop the others; tables and tubes that come and go are picked up.
    """
    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    watch: ConfigWatch | None = None
    if config is None:
        require_tube_options(tube=tube, enrich=enrich, sink=sink)
        limits = DeliveryLimits(batch_ids=batch, tries=tries)
        plan = {"": TableDelivery(enrich, sink)}
        address = resolve(options.parse_dsn(source, "source"))
        delivery = Delivery(address, schema, tube, plan, until_empty=until_empty, limits=limits)
        runs = [TubeRun(check_delivery(delivery, workers), workers)]
    else:
        refuse_beside_config(context, "tube", "enrich", "sink", "workers", "batch", "tries")
        watch = open_config(config, source, schema, until_empty=until_empty)
        runs = watch.runs()
        check_runs(runs)
    workers = sum(one.workers for one in runs)
    slots = workers if watch is None or until_empty else workers + _SPARE_SLOTS
    make_private(directory)
    log_path = directory / "spark.log"
    with (
        observing(
            [one.delivery for one in runs],
            quiet=quiet,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            ready_lag=ready_lag,
        ) as observe,
        Engine(master or default_master(slots), parse_conf(conf), log_path) as engine,
    ):
        require_slots(engine, workers)
        _deliver(runs, engine, watch, observe)
    _print_counts(runs, is_alone=config is None, as_json=as_json)
    _raise_dead([one.delivery for one in runs])


def _deliver(
    runs: list[TubeRun],
    engine: Engine,
    watch: ConfigWatch | None,
    observe: Callable[[Sequence[Delivery]], None],
) -> None:
    stop = threading.Event()
    if watch is not None:

        def require(wanted: Sequence[TubeRun]) -> None:
            require_slots(engine, sum(one.workers for one in wanted))

        def changed() -> Sequence[TubeRun] | None:
            again = watch.changed(require)
            if again is not None:
                observe([one.delivery for one in again])
            return again

        run_deliveries(runs, engine, stop=stop, on_progress=_tell, changed=changed)
        return
    (one,) = runs
    one.counts = run_delivery(
        one.delivery,
        one.workers,
        engine,
        stop=stop,
        on_progress=lambda counts: _tell(one.delivery.tube, counts),
    )


def _print_counts(runs: list[TubeRun], *, is_alone: bool, as_json: bool) -> None:
    counts = {one.delivery.tube: one.counts for one in runs}
    if as_json:
        values = {tube: asdict(one) for tube, one in counts.items()}
        print(json.dumps(next(iter(values.values())) if is_alone else values))
        return
    for tube, one in counts.items():
        print(_line(one) if is_alone else f"{tube}: {_line(one)}")


def _raise_dead(deliveries: list[Delivery]) -> None:
    """Not what was counted: a worker that failed has taken its numbers with it."""
    found: dict[str, int] = {}
    for one in deliveries:
        with connect(one.source, "tube") as session:
            letters = read_dead(session, find_tube(session, one.tube, one.schema or None))
        if letters:
            found[one.tube] = len(letters)
    if found:
        tubes = ", ".join(found)
        raise SinkError(
            f"{sum(found.values())} ids could not be delivered"
            + (f" (tubes {tubes})" if len(deliveries) > 1 else ""),
            hint=f"`millrace tube dead {next(iter(found))}` shows them, `tube retry"
            f" {next(iter(found))}` tries again",
        )


def _tell(tube: str, counts: WorkerCounts) -> None:
    log.info("%s: %s", tube, _line(counts))


def _line(counts: WorkerCounts) -> str:
    parts = [
        f"{counts.ids:,} ids of {counts.pods:,} pods delivered",
        f"{counts.deleted:,} deletions",
    ]
    if counts.collected:
        parts.append(f"{counts.collected:,} looked at again after a backfill or TRUNCATE")
    if counts.dead:
        parts.append(f"{counts.dead:,} dead letters")
    return ", ".join(parts)
