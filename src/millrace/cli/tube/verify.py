"""`millrace tube verify`: what the downstream holds against the source.

Invariant: exit code 0 only if nothing differs; what differs is printed before exit code 9.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.text import Text

from millrace.cli import options
from millrace.cli.display import console
from millrace.cli.tube.config import open_config
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
from millrace.errors import MillraceError, MismatchError
from millrace.log import setup_logging
from millrace.postgres.wire.connect import resolve
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.tube.delivery.plan import Delivery, TableDelivery
from millrace.tube.delivery.runs import raise_together
from millrace.tube.verify.run import VerifyReport
from millrace.tube.verify.run import verify as run
from millrace.tube.verify.task import SinkFindings
from millrace.workdir.place import make_private

_KINDS = ("missing", "surplus", "different")


def verify(
    context: typer.Context,
    tube: TubeName = "",
    enrich: Enrich = "",
    sink: SinkAddress = "",
    config: Config = None,
    source: Source = "",
    schema: Schema = "",
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

    Takes the options of `millrace tube run`; with --config, all tubes of a file are compared. Finds
    documents that are missing, surplus or different, also after writes that no trigger saw, and
    attachments that are broken. Ids that are still in the tube are counted as waiting, and are no
    difference. What differs is touched, so that the next delivery mends it; --dry-run only reports.
    Exit code 9 if something differs.
    """
    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    if config is None:
        require_tube_options(tube=tube, enrich=enrich, sink=sink)
        address = resolve(options.parse_dsn(source, "source"))
        deliveries = [Delivery(address, schema, tube, {"": TableDelivery(enrich, sink)})]
    else:
        refuse_beside_config(context, "tube", "enrich", "sink")
        planned = open_config(config, source, schema, until_empty=True).runs()
        deliveries = [one.delivery for one in planned]
    make_private(directory)
    reports: list[VerifyReport] = []
    errors: list[tuple[str, MillraceError]] = []
    with Engine(master or default_master(1), parse_conf(conf), directory / "spark.log") as engine:
        for delivery in deliveries:
            try:
                reports.append(run(delivery, engine, is_dry_run=dry_run, samples=samples))
            except MillraceError as error:
                errors.append((delivery.tube, error))
    _print(reports, is_alone=config is None, as_json=as_json)
    raise_together(errors, "verified")
    _raise_mismatch(reports)


def _print(reports: Sequence[VerifyReport], *, is_alone: bool, as_json: bool) -> None:
    if as_json:
        values = {one.tube: one.to_dict() for one in reports}
        if values or not is_alone:
            print(json.dumps(next(iter(values.values())) if is_alone else values))
        return
    for report in reports:
        for line in _lines(report):
            console().print(Text(line if is_alone else f"{report.tube}: {line}"))


def _lines(report: VerifyReport) -> Iterator[str]:
    for problem in report.problems:
        yield f"{problem.table}: {problem.what}; {problem.hint}"
    for one in report.sinks:
        yield _line(one)
        for kind in _KINDS:
            for key in one.samples.get(kind, ()):
                yield f"  {kind}: {key}"


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


def _raise_mismatch(reports: Sequence[VerifyReport]) -> None:
    if all(report.is_equal for report in reports):
        return
    sinks = [one for report in reports for one in report.sinks]
    differences = sum(one.differences for one in sinks)
    parts = []
    if differences:
        parts.append(f"{differences:,} documents differ from their rows")
    if any(report.problems for report in reports):
        parts.append("writes to attached tables may leave no pod")
    is_ahead = any(one.is_ahead for one in sinks)
    if is_ahead:
        parts.append("the sink holds versions that the source has not drawn")
    if reports[0].is_dry_run:
        hint = "run it without --dry-run to touch what differs"
        hint += ", and to raise the epoch: the source was restored" if is_ahead else ""
    else:
        hint = "what differs was touched: deliver with `millrace tube run`, then verify again"
    raise MismatchError("; ".join(parts), hint=hint, is_printed=True)
