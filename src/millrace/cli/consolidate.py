"""`millrace consolidate`: many databases into one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from millrace.cli import options
from millrace.cli.consolidate_ddl import app as ddl_app
from millrace.cli.consolidate_options import DEFAULT_CONFIG, Config, SourceName
from millrace.cli.display import console, render_seconds
from millrace.clone.preflight import raise_problems
from millrace.config.size import render_size
from millrace.consolidate.config import read_config
from millrace.consolidate.status import SourceStatus, read_status, require_begun
from millrace.errors import ConfigError, MismatchError, PreflightError
from millrace.follow.settings import LOOPBACK
from millrace.log import LogSettings, setup_logging
from millrace.postgres.wire.connect import resolve
from millrace.spark.session import Engine, default_master, parse_conf

app = typer.Typer(
    no_args_is_help=True,
    help="Bring many databases into one, a schema for each of their schemas.",
)
app.add_typer(ddl_app, name="ddl")

# Tasks of one base copy, and one for tables that are copied again.
COPY_SLOTS = 5


def _service(service: str, doc: str) -> Callable[..., None]:
    """A command that works for all sources until it is stopped."""

    def run(
        config: Config = DEFAULT_CONFIG,
        directory: options.Directory = options.DEFAULT_DIRECTORY,
        master: options.Master = "",
        conf: options.Conf = [],  # noqa: B006
        metrics_port: options.MetricsPort = None,
        metrics_host: options.MetricsHost = LOOPBACK,
        ready_lag: Annotated[
            float,
            typer.Option(
                metavar="SECONDS",
                min=0,
                help="/readyz beside the metrics answers 503 while a source is further behind.",
            ),
        ] = 60.0,
        verbose: options.Verbose = 0,
        quiet: options.Quiet = False,
        log_json: options.LogJson = False,
    ) -> None:
        from millrace.consolidate.metrics import serve_source_metrics
        from millrace.consolidate.run import Consolidator, Service

        setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
        slots = read_config(config).apply_jobs + COPY_SLOTS
        spark = master or default_master(slots)
        with (
            Engine(spark, parse_conf(conf), directory / "spark.log", streams=True) as engine,
            serve_source_metrics(directory, metrics_port, metrics_host, ready_lag) as metrics,
        ):
            consolidator = Consolidator(
                config,
                directory,
                engine,
                LogSettings(verbose, quiet, log_json),
                service=Service(service),
                on_progress=metrics.update,
            )
            consolidator.run(threading.Event())

    run.__doc__ = doc
    return run


app.command("run")(
    _service(
        "run",
        """Copy every source that is not copied, then follow all of them, until stopped.

        Each source has a state of its own (`millrace consolidate status`) and fails alone. Stop it
        with Ctrl-C and start it again as often as you like. Sources that are added to the file
        while it runs are begun within seconds.

        Exit codes: 2 the file is wrong, 4 work directory.
        """,
    )
)
app.command("receive")(
    _service(
        "receive",
        """Only receive the changes of every source that is copied, until stopped.

        For two services in the place of `run`: this one, and `millrace consolidate replay` in the
        same --dir. So the sources let go of their WAL also while nothing is applied.
        """,
    )
)
app.command("replay")(
    _service(
        "replay",
        """Copy every source that is not copied, and apply what `consolidate receive` receives.""",
    )
)


@app.command("check")
def check(
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    as_json: options.AsJson = False,
) -> None:
    """Report every problem of every server, with the statement that fixes it; change nothing.

    Exit code 3 if there is a problem that is not a warning.
    """
    from millrace.consolidate.check import check_all

    found = check_all(read_config(config), directory)
    if as_json:
        print(json.dumps([one.to_dict() for one in found]))
    else:
        for one in found:
            kind = "warning" if one.problem.is_warning else "problem"
            whose = f"{one.source}: " if one.source else ""
            text = (
                f"{kind}: {whose}{one.problem.side}: {one.problem.what}\n  fix: {one.problem.fix}"
            )
            console().print(Text(text), soft_wrap=True)
    problems = [one for one in found if not one.problem.is_warning]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PreflightError(f"{count} found", is_printed=True)
    if not as_json:
        console().print("no problem found")


@app.command("status")
def status(
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    as_json: options.AsJson = False,
) -> None:
    """Show how each source is doing: state, lag, rate, last error."""
    found = read_status(directory, read_config(config) if config.exists() else None)
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    table = Table("source", "state", "for", "lag", "behind", "changes/s")
    for one in found:
        table.add_row(*_cells(one))
    console().print(table)
    for one in found:
        if one.error:
            console().print(Text(f"{one.name} is {one.state}: {one.error}"), soft_wrap=True)
            console().print(Text(f"  hint: {_hint(one)}"), soft_wrap=True)
    if found and not any(one.is_running for one in found):
        console().print("no process runs it: millrace consolidate run")


def _hint(one: SourceStatus) -> str:
    """What to do about it; a source that failed is also tried again by itself."""
    resume = f"millrace consolidate resume {one.name}"
    return one.hint if resume in one.hint else f"{one.hint or 'mend the cause'}; then {resume}"


def _cells(one: SourceStatus) -> list[Text]:
    state = one.state if one.is_running else f"{one.state} (not running)"
    rate = "" if one.changes_per_second is None else f"{one.changes_per_second:,.0f}"
    return [
        Text(text)
        for text in (
            one.name,
            state,
            "" if one.seconds is None else render_seconds(one.seconds),
            "" if one.lag_seconds is None else render_seconds(one.lag_seconds),
            "" if one.lag_bytes is None else render_size(one.lag_bytes),
            rate,
        )
    ]


@app.command("wait")
def wait(
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Give up after this; 0: never.")
    ] = 0.0,
) -> None:
    """Wait until everything that is committed now on every source is on the target.

    May be called before the first copy is done. Exit codes: 5 not in time, 7 a source is paused,
    halted or failed.
    """
    from millrace.consolidate.control import wait as run_wait

    run_wait(read_config(config), directory, timeout_seconds=timeout or None)


@app.command("pause")
def pause(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Apply nothing of a source until it is resumed; its changes are still received."""
    from millrace.consolidate.control import pause as run_pause

    require_begun(directory)
    run_pause(directory, source)
    console().print(Text(f"{source} is paused: its changes are received, and not applied"))


@app.command("resume")
def resume(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Continue a source that is paused, or whose halt or failure is mended."""
    from millrace.consolidate.control import resume as run_resume

    require_begun(directory)
    run_resume(directory, source)
    console().print(Text(f"{source} is resumed; `millrace consolidate status` shows its state"))


@app.command("resync")
def resync(
    what: Annotated[
        str, typer.Argument(metavar="SOURCE[.SCHEMA.TABLE]", help="A source, or one of its tables.")
    ],
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Copy a table of a source again, or all of them, while it is followed.

    The running `consolidate run` does the work; `wait` waits for it too.
    """
    from millrace.consolidate.control import resync as run_resync

    require_begun(directory)
    consolidation = read_config(config)
    name, tables = _parse_target(what, consolidation.sources)
    for request in run_resync(consolidation, directory, name, tables):
        console().print(Text(f"queued: {name}: {request.label}"))


def _parse_target(what: str, sources: object) -> tuple[str, set[tuple[str, str]]]:
    """A source's name may have dots itself: the longest one that fits is meant."""
    names = sorted(sources, key=len, reverse=True)  # type: ignore[call-overload]
    for name in names:
        if what == name:
            return name, set()
        if what.startswith(f"{name}."):
            schema, dot, table = what.removeprefix(f"{name}.").partition(".")
            if not dot:
                schema, table = "public", schema
            return name, {(schema, table)}
    raise ConfigError(f"there is no source in {what}", hint=f"sources are: {', '.join(names)}")


@app.command("add")
def add(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Check a source that was added to the file, and wait until a running process has begun it.

    The others are followed meanwhile. Exit code 3 if a server is not ready for it.
    """
    from millrace.consolidate.check import check_all
    from millrace.consolidate.control import begin_again, wait_until_begun

    consolidation = read_config(config)
    consolidation.require(source)
    found = [one for one in check_all(consolidation, directory) if one.source == source]
    problems = [one.problem for one in found if not one.problem.is_warning]
    raise_problems(problems)
    begin_again(directory, source)
    if wait_until_begun(directory, source):
        console().print(Text(f"source {source} is begun; `consolidate status` shows its state"))
    else:
        console().print(Text("no process runs it: millrace consolidate run begins it"))


@app.command("prepare")
def prepare(
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Make on the sources what must be there before their slots: publications.

    `run` does so by itself; this is for those who want to see beforehand that it is possible.
    Nothing is made on a source that was begun.
    """
    from millrace.consolidate.prepare import prepare_sources

    for name, line in prepare_sources(read_config(config), directory):
        console().print(Text(f"{name}: {line}"))


@app.command("remove")
def remove(
    source: SourceName,
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Drop what depends on its tables, too.")
    ] = False,
) -> None:
    """Remove a source: its slot, its position, and its schemas on the target.

    What others have made of its tables is listed, and refused without --cascade. Then take it out
    of the file; until then it is shown as removed, and `consolidate add` begins it anew. Without
    its lines in the file its slot can't be dropped, and the statement for that is printed.
    """
    from millrace.consolidate.remove import remove_source

    require_begun(directory)
    consolidation = read_config(config)
    known = consolidation.sources.get(source)
    dsn = known.dsn if known else None
    for one in remove_source(
        dsn, resolve(consolidation.target), directory, source, cascades=cascade
    ):
        console().print(Text(f"removed {one}"))
    if known:
        console().print(Text(f"now take [source.{source}] out of {config}"))


@app.command("compare")
def compare(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Only these; without, all of them.")
    ] = [],  # noqa: B006
    config: Config = DEFAULT_CONFIG,
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Compare every table of each source with its copy: counts and checksums.

    While a source is written to, a difference may be what is not applied yet. Exit code 9 if
    anything differs.
    """
    from millrace.consolidate.comparison import compare_sources

    # Of each source, that the schemas of the others are not compared goes without saying.
    setup_logging(verbose=verbose, quiet=quiet or not verbose)
    require_begun(directory)
    consolidation = read_config(config)
    differing = []
    results = []
    with Engine(master or default_master(4), parse_conf(conf), directory / "compare.log") as engine:
        for name, compared in compare_sources(consolidation, directory, tuple(sources), engine):
            wrong = [one for one in compared if not one.is_equal]
            differing += [f"{name}: {one.label}" for one in wrong]
            results.append({"source": name, "tables": len(compared), "equal": not wrong})
            if not as_json:
                found = "equal" if not wrong else f"{len(wrong)} differ"
                console().print(Text(f"{name}: {len(compared)} tables compared: {found}"))
    if as_json:
        print(json.dumps(results))
    if differing:
        raise MismatchError(
            f"{len(differing)} tables differ: {', '.join(differing[:5])}",
            hint="if the sources are written to, wait and compare again; `consolidate resync` "
            "copies a table again",
            is_printed=True,
        )
