"""`millrace stream resync`: a table of a stream copied again.

Invariant: without --no-wait, exit code 0 means that every table is copied, by whichever process.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from millrace.cli import options
from millrace.cli.command_options import CommandOptions
from millrace.cli.display import console
from millrace.cli.follow import require_stream
from millrace.errors import ConfigError
from millrace.follow.settings import FollowSettings
from millrace.log import setup_logging
from millrace.lsn import render_lsn
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.sync_request import SyncRequest, read_request

Tables = Annotated[
    list[str],
    typer.Argument(
        metavar="TABLE",
        help="schema.table, quoted as in SQL where needed; of a partitioned table, the root.",
    ),
]
NoWait = Annotated[
    bool,
    typer.Option("--no-wait", help="Only queue the tables; the next `follow` copies them."),
]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="Withdraw requests for these tables instead.")
]


def resync(
    tables: Tables,
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    filters: options.Filters = None,
    no_wait: NoWait = False,
    cancel: Cancel = False,
    apply_jobs: options.ApplyJobs = None,
    master: options.Master = "",
    conf: options.Conf = [],  # noqa: B006
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    log_json: options.LogJson = False,
) -> None:
    """Copy tables again while their stream continues, and follow them from there.

    For a table whose rows on the target are wrong or missing: another program wrote to it, a change
    of it could not be applied, it was created or got its replica identity after the stream began,
    or a column was added whose default gives each row another value.

    A `millrace follow` that runs in the work directory does the work, and applies the other tables
    meanwhile; this command waits for it. If none runs, the tables are copied here, and the next
    `follow` continues with them. Give the --filters of the stream.

    Each table is emptied and filled in one transaction of the target, under a snapshot of the
    source that comes with a temporary replication slot. Its changes since are applied before it is
    followed like the others. Sessions that read the table on the target wait during the copy. If
    the process is killed, the next `follow` or `resync` copies the tables.

    --cancel withdraws a request that can't be fulfilled. A table whose copy had begun is then not
    followed any more, and a stream that ends names it, with exit code 9.

    Exit codes: 2 wrong option, 4 work directory, or the source is past the stream's end position, 5
    a server failed, 7 a table is missing on one side, or can't be followed.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.follow.table_sync.resync import cancel_tables, queue_tables, wait_for_syncs
    from millrace.spool.selection import parse_tables

    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    if cancel and no_wait:
        raise ConfigError("--cancel and --no-wait cannot be used together")
    require_stream(directory)
    names = [name for text in tables for name in sorted(parse_tables(text))]
    asked = CommandOptions(
        source=source,
        target=target,
        directory=directory,
        filters=filters,
        apply_jobs=apply_jobs,
        master=master,
        conf=conf,
        verbose=verbose,
        quiet=quiet,
        log_json=log_json,
    )
    settings = asked.follow_settings()
    if cancel:
        _print_cancelled(cancel_tables(settings, names), as_json=as_json, quiet=quiet)
        return
    queued = queue_tables(settings, names)
    if not no_wait:
        with asked.engine(1, streams=True) as engine:
            wait_for_syncs(settings, engine, [one.id for one in queued])
    _print(_read(settings, queued), as_json=as_json, quiet=quiet)


def _read(settings: FollowSettings, queued: list[SyncRequest]) -> list[SyncRequest]:
    with Sentinel(settings.directory) as sentinel:
        return [read_request(sentinel, one.id) or one for one in queued]


def _print(requests: list[SyncRequest], *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps({"tables": [_as_dict(one) for one in requests]}))
        return
    for one in requests if not quiet else ():
        if one.copied_lsn is None:
            console().print(f"{one.label} is {one.state}")
        else:
            console().print(
                f"{one.label}: copied {one.rows or 0:,} rows as of {render_lsn(one.copied_lsn)}, "
                "and followed from there"
            )


def _print_cancelled(requests: list[SyncRequest], *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps({"cancelled": [one.label for one in requests]}))
    elif not quiet:
        told = "\n".join(f"{one.label}: the request is taken back" for one in requests)
        print(told or "there was nothing to take back")


def _as_dict(request: SyncRequest) -> dict[str, Any]:
    return {
        "schema": request.schema,
        "name": request.name,
        "state": request.state,
        "copied_lsn": None if request.copied_lsn is None else render_lsn(request.copied_lsn),
        "rows": request.rows,
        "error": request.error,
    }
