"""`millrace tube verify`: what the downstream holds against the source.

Invariant: exit code 0 only if nothing differs; what differs is printed before exit code 9.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console
from millrace.cli.tube_run import Enrich, SchemaName, SinkAddress, TubeName
from millrace.errors import MismatchError
from millrace.log import setup_logging
from millrace.postgres.wire.connect import resolve
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.tube.delivery.plan import Delivery, TableDelivery
from millrace.tube.verify.run import VerifyReport
from millrace.tube.verify.run import verify as run
from millrace.tube.verify.task import SinkFindings
from millrace.workdir.place import make_private

_KINDS = ("missing", "surplus", "different")


def verify(
    tube: TubeName,
    enrich: Enrich,
    sink: SinkAddress,
    source: options.Source = "",
    schema: SchemaName = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only: touch nothing.")] = False,
    samples: Annotated[
        int, typer.Option(min=0, help="Keys that are shown of each kind of difference.")
    ] = 10,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    log_json: options.LogJson = False,
) -> None:
    """Compare what a sink holds with the rows of the tube's tables, and touch what differs.

    Takes the options of `millrace tube run`. Finds documents that are missing, surplus or
    different, also after writes that no trigger saw, and attachments that are broken. Ids that
    are still in the tube are counted as waiting, and are no difference. What differs is touched, so
    that the next delivery mends it; --dry-run only reports. Exit code 9 if something differs.
    """
    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    delivery = Delivery(
        resolve(options.parse_dsn(source, "source")),
        schema,
        tube,
        {"": TableDelivery(enrich, sink)},
    )
    make_private(directory)
    with Engine(master or default_master(1), parse_conf(conf), directory / "spark.log") as engine:
        report = run(delivery, engine, is_dry_run=dry_run, samples=samples)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        _print(report)
    if not report.is_equal:
        raise _mismatch(report)


def _print(report: VerifyReport) -> None:
    out = console()
    for problem in report.problems:
        out.print(Text(f"{problem.table}: {problem.what}; {problem.hint}"))
    for one in report.sinks:
        out.print(Text(_line(one)))
        for kind in _KINDS:
            for key in one.samples.get(kind, ()):
                out.print(Text(f"  {kind}: {key}"))


def _line(found: SinkFindings) -> str:
    parts = [f"{found.documents:,} documents against {found.keys:,} keys"]
    parts += [f"{getattr(found, kind):,} {kind}" for kind in _KINDS if getattr(found, kind)]
    if not found.differences:
        parts.append("no difference")
    if found.waiting:
        parts.append(f"{found.waiting:,} waiting in the tube")
    if found.touched:
        parts.append(f"{found.touched:,} touched")
    if found.is_ahead:
        parts.append("versions ahead of the source's")
    return f"{', '.join(found.tables)}: {', '.join(parts)}"


def _mismatch(report: VerifyReport) -> MismatchError:
    differences = sum(one.differences for one in report.sinks)
    parts = []
    if differences:
        parts.append(f"{differences:,} documents differ from their rows")
    if report.problems:
        parts.append("writes to attached tables may leave no pod")
    is_ahead = any(one.is_ahead for one in report.sinks)
    if is_ahead:
        parts.append("the sink holds versions that the source has not drawn")
    if report.is_dry_run:
        hint = "run it without --dry-run to touch what differs"
        hint += ", and to raise the epoch: the source was restored" if is_ahead else ""
    else:
        hint = "what differs was touched: deliver with `millrace tube run`, then verify again"
    return MismatchError("; ".join(parts), hint=hint, is_printed=True)
