"""`millrace tube run`, and what becomes of ids that could not be delivered.

Invariant: it ends with exit code 0 only if it was told to stop at an empty tube, and then nothing
that was in the tube when it began is undelivered but what it counts as dead, which is an error.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict
from typing import Annotated

import typer

from millrace.cli import options
from millrace.cli.tube_observe import DEFAULT_READY_LAG, ReadyLag, observing
from millrace.errors import SinkError
from millrace.follow.settings import LOOPBACK
from millrace.log import setup_logging
from millrace.postgres.wire.connect import connect, resolve
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.tube.delivery.dead import discard_dead, read_dead, retry_dead
from millrace.tube.delivery.plan import Delivery, DeliveryLimits, TableDelivery
from millrace.tube.delivery.report import WorkerCounts
from millrace.tube.delivery.run import check_delivery, run_delivery
from millrace.tube.delivery.tube import find_tube
from millrace.tube.install import require_primary
from millrace.workdir.place import make_private

log = logging.getLogger(__name__)

TubeName = Annotated[str, typer.Option("--tube", metavar="NAME", help="The tube.")]
SchemaName = Annotated[
    str, typer.Option("--schema", help="Where it is installed, if there are several.")
]
Enrich = Annotated[
    str,
    typer.Option(
        metavar="SQL",
        help="A SELECT that returns the rows of the keys in $1, an array, with the key and"
        " whatever else belongs to a document; or python:module:function, called with an"
        " Arrow batch of keys. A key without a row is a deletion.",
    ),
]
SinkAddress = Annotated[
    str,
    typer.Option(
        metavar="URI",
        help="Where documents go: postgresql://.../database?table=NAME, jsonl:FILE,"
        " tantivy:DIR, or a sink of another package.",
    ),
]
TubeArgument = Annotated[str, typer.Argument(metavar="TUBE", help="Name of the tube.")]
Keys = Annotated[
    list[str], typer.Option("--key", help="Only this id; may be repeated. Without it, all of them.")
]


def run(
    tube: TubeName,
    enrich: Enrich,
    sink: SinkAddress,
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
    """
    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    delivery = Delivery(
        resolve(options.parse_dsn(source, "source")),
        schema,
        tube,
        {"": TableDelivery(enrich, sink)},
        until_empty=until_empty,
        limits=DeliveryLimits(batch_ids=batch, tries=tries),
    )
    delivery = check_delivery(delivery, workers)
    make_private(directory)
    log_path = directory / "spark.log"
    with (
        observing(
            [delivery],
            quiet=quiet,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            ready_lag=ready_lag,
        ),
        Engine(master or default_master(workers), parse_conf(conf), log_path) as engine,
    ):
        counts = run_delivery(delivery, workers, engine, stop=threading.Event(), on_progress=_tell)
    print(json.dumps(asdict(counts)) if as_json else _line(counts))
    # Not what was counted: a worker that failed has taken its numbers with it.
    with connect(delivery.source, "tube") as session:
        letters = read_dead(session, find_tube(session, tube, delivery.schema))
    if letters:
        raise SinkError(
            f"{len(letters)} ids could not be delivered",
            hint=f"`millrace tube dead {tube}` shows them, `tube retry {tube}` tries again",
        )


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


def _tell(counts: WorkerCounts) -> None:
    log.info("%s", _line(counts))


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
