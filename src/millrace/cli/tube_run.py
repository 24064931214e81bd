"""`millrace tube run`, and what becomes of ids that could not be delivered.

Invariant: it ends with exit code 0 only if it was told to stop at an empty tube, and then nothing
that was in the tube when it began is undelivered but what it counts as dead, which is an error.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli import options, tube_config
from millrace.cli.tube_observe import DEFAULT_READY_LAG, ReadyLag, observing
from millrace.errors import ConfigError, SinkError
from millrace.follow.settings import LOOPBACK
from millrace.log import setup_logging
from millrace.postgres.wire.connect import connect, resolve
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.tube.config_watch import ConfigWatch
from millrace.tube.delivery.dead import discard_dead, read_dead, retry_dead
from millrace.tube.delivery.plan import Delivery, DeliveryLimits, TableDelivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.run import check_delivery, require_slots, run_delivery
from millrace.tube.delivery.runs import TubeRun, check_runs, run_deliveries
from millrace.tube.delivery.tube import find_tube
from millrace.tube.install import require_primary
from millrace.workdir.place import make_private

log = logging.getLogger(__name__)

# For workers of tubes that a file gets later: a slot that is not used costs nothing.
_SPARE_SLOTS = 8

TubeName = Annotated[
    str, typer.Option("--tube", metavar="NAME", help="The tube.", show_default=False)
]
SchemaName = Annotated[
    str, typer.Option("--schema", help="Where it is installed, if there are several.")
]
Enrich = Annotated[
    str,
    typer.Option(
        metavar="SQL",
        show_default=False,
        help="A SELECT that returns the rows of the keys in $1, an array, with the key and"
        " whatever else belongs to a document; or python:module:function, called with an"
        " Arrow batch of keys. A key without a row is a deletion.",
    ),
]
SinkAddress = Annotated[
    str,
    typer.Option(
        metavar="URI",
        show_default=False,
        help="Where documents go: postgresql://.../database?table=NAME, jsonl:FILE,"
        " tantivy:DIR, or a sink of another package.",
    ),
]
TubeArgument = Annotated[str, typer.Argument(metavar="TUBE", help="Name of the tube.")]
Keys = Annotated[
    list[str], typer.Option("--key", help="Only this id; may be repeated. Without it, all of them.")
]


def run(
    context: typer.Context,
    tube: TubeName = "",
    enrich: Enrich = "",
    sink: SinkAddress = "",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Deliver all tubes of this TOML file, instead of one by --tube.",
            show_default=False,
        ),
    ] = None,
    source: options.Source = "",
    schema: SchemaName = "",
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
        _require(tube=tube, enrich=enrich, sink=sink)
        limits = DeliveryLimits(batch_ids=batch, tries=tries)
        plan = {"": TableDelivery(enrich, sink)}
        address = resolve(options.parse_dsn(source, "source"))
        delivery = Delivery(address, schema, tube, plan, until_empty=until_empty, limits=limits)
        runs = [TubeRun(check_delivery(delivery, workers), workers)]
    else:
        _refuse(context, "tube", "enrich", "sink", "workers", "batch", "tries")
        watch = tube_config.open_config(config, source, schema, until_empty=until_empty)
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
        ),
        Engine(master or default_master(slots), parse_conf(conf), log_path) as engine,
    ):
        require_slots(engine, workers)
        _deliver(runs, engine, watch)
    _print_counts(runs, is_alone=config is None, as_json=as_json)
    _raise_dead([one.delivery for one in runs])


def dead(
    tube: TubeArgument,
    source: options.Source = "",
    schema: SchemaName = "",
    as_json: options.AsJson = False,
) -> None:
    """Show the ids that could not be delivered, each with its error."""
    with connect(options.parse_dsn(source, "source"), "tube") as session:
        letters = read_dead(session, find_tube(session, tube, schema or None))
    if as_json:
        rows = [asdict(one) | {"last_at": one.last_at.isoformat()} for one in letters]
        print(json.dumps(rows))
        return
    for one in letters:
        print(f"{one.table} {one.key} (shard {one.shard}, {one.tries} tries): {one.error}")


def retry(
    tube: TubeArgument,
    source: options.Source = "",
    schema: SchemaName = "",
    key: Keys = [],  # noqa: B006
) -> None:
    """Touch dead letters again, so that they are delivered anew."""
    with connect(options.parse_dsn(source, "source"), "tube") as session:
        require_primary(session)
        count = retry_dead(session, find_tube(session, tube, schema or None), key or None)
    print(f"{count} touched again")


def discard(
    tube: TubeArgument,
    source: options.Source = "",
    schema: SchemaName = "",
    key: Keys = [],  # noqa: B006
) -> None:
    """Forget dead letters: their documents stay as they are."""
    with connect(options.parse_dsn(source, "source"), "tube") as session:
        require_primary(session)
        count = discard_dead(session, find_tube(session, tube, schema or None), key or None)
    print(f"{count} discarded")


def _require(**options: str) -> None:
    missing = [f"--{name}" for name, value in options.items() if not value]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint="give --tube, --enrich and --sink, or --config with a file that has them",
        )


def _refuse(context: typer.Context, *names: str) -> None:
    """What a file says can't be said beside it; defaults, of settings too, are no matter."""
    sources = {name: context.get_parameter_source(name) for name in names}
    found = [f"--{name}" for name, one in sources.items() if one and one.name == "COMMANDLINE"]
    if found:
        raise ConfigError(
            f"{', '.join(found)} can't be used with --config",
            hint="the file says what each tube is delivered with",
        )


def _deliver(runs: list[TubeRun], engine: Engine, watch: ConfigWatch | None) -> None:
    stop = threading.Event()
    if watch is not None:

        def require(wanted: Sequence[TubeRun]) -> None:
            require_slots(engine, sum(one.workers for one in wanted))

        changed = partial(watch.changed, require)
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
