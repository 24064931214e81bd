"""`millrace stream`: the steps of following, one by one, and the switches of a running stream.

Invariant: `follow` does the same steps with the same code; each step can be run again.
"""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.cli import follow, options, resync, stream_transform
from millrace.cli.signals import noted_signals
from millrace.clone.directory import read_naming
from millrace.config.dsn import Dsn
from millrace.config.size import parse_size, render_size
from millrace.errors import ConfigError, MismatchError, WorkDirError
from millrace.follow.settings import SlotSettings
from millrace.log import setup_logging
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.wire.connect import connect, resolve, server_encoding
from millrace.postgres.wire.wal_end import read_end
from millrace.route import Route
from millrace.spool.kind import SpoolKind
from millrace.workdir.sentinel import Sentinel, SentinelState, SourceRecord, StreamSetup
from millrace.workdir.stream_binding import has_stream
from millrace.workdir.stream_state import read_stream_status

log = logging.getLogger(__name__)

app = typer.Typer(help="The steps of following changes, one by one.", no_args_is_help=True)
sentinel_app = typer.Typer(
    help="Inspect and control a running stream from another terminal.", no_args_is_help=True
)
set_app = typer.Typer(help="Change one of the stream's switches.", no_args_is_help=True)
sentinel_app.add_typer(set_app, name="set")
app.add_typer(sentinel_app, name="sentinel")

SlotName = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_SLOT_NAME",
        help="Name of the replication slot; by default the work directory's, or millrace.",
        show_default=False,
    ),
]
Plugin = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_PLUGIN",
        help="Output plugin: pgoutput, test_decoding or wal2json; by default the work directory's, "
        "or pgoutput.",
        show_default=False,
    ),
]


def _only(name: str, what: str) -> Any:
    return typer.Option(name, help=f"Print only {what}.")


@app.command("setup")
def setup(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    filters: options.Filters = None,
    slot_name: SlotName = "",
    slot_timeout: options.SlotTimeout = 0,
    replica_identity_full: options.IdentityFull = False,
    plugin: Plugin = "",
    spool: options.Spool = SpoolKind.FILES,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Make publications, slot and position, without copying anything.

    For a target that has the source's rows already, or a `millrace snapshot --follow` that holds
    the slot's snapshot for this work directory. Changes are followed from here on. An existing
    setup is left as it is.
    """
    from millrace.clone.directory import read_setup
    from millrace.follow.audit.baseline import forget_counters, note_counters, note_tables
    from millrace.follow.bound_copy import choose_slot
    from millrace.follow.setup import published, require_place
    from millrace.follow.slot import CreatedSlot, create_stream
    from millrace.follow.slot_making import Making, making_slot
    from millrace.snapshot.holder import read_held

    setup_logging(verbose=verbose, quiet=quiet)
    dsn = resolve(options.parse_dsn(source, "source"))
    # What refuses the stream does so before anything is made for it.
    chosen = choose_slot(directory, SlotSettings(slot_name, plugin, spool))
    slot, plugin = chosen.name, chosen.plugin
    held = read_held(directory)
    is_held = held is not None and held.slot is not None and held.start_lsn is not None
    rules = options.read_rules(filters)
    encoding = _encoding(source, target)
    if (there := _target(target)) is not None:
        require_place(Route(dsn, there, filters=rules), spool)
    making = nullcontext(Making()) if is_held else making_slot(directory, dsn, slot, adopts=True)
    with making as made:
        if held is not None and held.start_lsn is not None and is_held:
            created = CreatedSlot(parse_lsn(held.start_lsn), (), is_new=False)
        else:
            oids = published(dsn, rules)
            timeout = slot_timeout or None
            note_counters(directory, dsn)
            created = create_stream(
                dsn,
                slot,
                plugin,
                oids,
                timeout_seconds=timeout,
                identity_full=replica_identity_full,
            )
        if created.is_new:
            made.made()
        for warning in created.warnings:
            log.warning("source: %s", warning)
        run = read_setup(directory)
        found = StreamSetup(
            dsn.identity(),
            slot,
            plugin,
            encoding,
            created.start_lsn,
            spool=spool,
            run_id=run["run_id"] if run else "",
        )
        if _setup_of(directory) is None:
            note_tables(directory, dsn, found, held.id if held else None)
            if not (created.is_new or is_held):
                forget_counters(directory)  # they are younger than the slot
        found = _begin(directory, found, dsn, _target(target), held.id if held else None)
    start = render_lsn(found.start_lsn)
    if as_json:
        print(json.dumps(asdict(found) | {"start_lsn": start, "warnings": created.warnings}))
    else:
        print(start)


@app.command("receive")
def receive(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    endpos: options.EndPos = "",
    max_spool: options.MaxSpool = "0",
    max_slot_lag: options.MaxSlotLag = "0",
    batches_from: options.BatchesFrom = "16MB",
    no_binary: options.NoBinary = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
    log_json: options.LogJson = False,
) -> None:
    """Receive changes into the spool of the work directory, and apply nothing.

    A spool in tables of the target needs --target; one in files does not.

    Runs until the end position, or until it is stopped: Ctrl-C, SIGTERM or SIGHUP. Only
    what is on disk here is confirmed to the source, so it can be stopped, killed and started again
    at any time. Connections that break are opened again.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.follow.membership import write_beginning
    from millrace.postgres.wire.slot_batch import sizes_from
    from millrace.receive.loop import ReceiveSettings
    from millrace.receive.loop import receive as run_receive
    from millrace.spool.place import place_of

    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    with _open_sentinel(directory) as sentinel:
        found = _require_setup(sentinel, directory)
        place = place_of(found, directory, _target(target))
    with (
        _open_sentinel(directory) as sentinel,
        place.open_writer() as spool,
        noted_signals() as stop,
    ):
        settings = ReceiveSettings(
            resolve(options.parse_dsn(source, "source")),
            found.slot_name,
            found.plugin,
            found.encoding,
            max_spool_bytes=parse_size(max_spool) or None,
            max_slot_lag_bytes=parse_size(max_slot_lag) or None,
            batches=sizes_from(parse_size(batches_from)),
            binary=not no_binary,
            ddl=found.ddl,
        )
        if endpos:
            sentinel.set_endpos(parse_lsn(endpos))
        write_beginning(settings.source, sentinel, found)
        received = run_receive(settings, spool, sentinel, stop=stop)
    if as_json:
        print(
            json.dumps(
                {
                    "end_lsn": render_lsn(received.end_lsn),
                    "complete_lsn": render_lsn(received.complete_lsn),
                    "reached_endpos": received.reached_endpos,
                }
            )
        )
    elif not quiet:
        print(render_lsn(received.complete_lsn))


@app.command("cleanup")
def cleanup(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    slot_name: SlotName = "",
    list_only: Annotated[
        bool, typer.Option("--list", help="Only list what streams have left on the servers.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Remove a stream: slot, publications, position, and the spool in the work directory.

    A slot that nobody reads makes the source keep its WAL until the disk is full, so do not leave
    one behind. Give --target as well, to remove the position there. With --list nothing is removed;
    what streams of millrace have left is shown.
    """
    from millrace.follow.settings import DEFAULT_SLOT
    from millrace.follow.slot import cleanup as run_cleanup
    from millrace.follow.slot import read_leftovers
    from millrace.follow.slot_making import forget_record, read_record

    setup_logging(verbose=verbose, quiet=quiet)
    dsn = resolve(options.parse_dsn(source, "source"))
    found = _setup_of(directory)
    # What a process that was killed may have left counts as this directory's.
    left = read_record(directory)
    slot = slot_name or (found.slot_name if found else left.slot if left else DEFAULT_SLOT)
    other = (
        connect(resolve(options.parse_dsn(target, "target")), "cleanup")
        if target
        else nullcontext(None)
    )
    with connect(dsn, "cleanup") as connection, other as target_connection:
        if list_only:
            prefix = slot_name or DEFAULT_SLOT
            leftovers = read_leftovers(connection, target_connection, prefix).to_dict()
            _print_leftovers(leftovers, as_json=as_json)
            return
        is_ours = found is not None and found.slot_name == slot
        identity = found.source if found and is_ours else dsn.identity()
        removed = run_cleanup(connection, target_connection, slot, identity, read_naming(directory))
    if is_ours:
        removed += _remove_files(directory)
    if left is not None and left.slot == slot:
        forget_record(directory)
    if as_json:
        print(json.dumps({"removed": removed}))
    elif not quiet:
        print("\n".join(f"removed {what}" for what in removed) or "there was nothing to remove")


@app.command("prune")
def prune(
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    target: options.Target = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Remove what is applied from the spool.

    A running `follow` does so too. What is applied is read from the work directory, or from the
    target if --target is given.
    """
    from millrace.apply import table_state
    from millrace.apply.position import read_worker_positions
    from millrace.spool.place import place_of
    from millrace.workdir.sync_request import spool_floor

    setup_logging(verbose=verbose, quiet=quiet)
    with _open_sentinel(directory) as sentinel:
        found = _require_setup(sentinel, directory)
        applied = sentinel.read().applied_lsn
        floors = [spool_floor(sentinel)]
    dsn = _target(target)
    place = place_of(found, directory, dsn)
    if dsn is not None:
        with connect(dsn, "prune") as connection:
            positions = read_worker_positions(connection, place.stream)
            applied = min(positions.values(), default=None)
            floors.append(table_state.read_spool_floor(connection, place.stream))
    if applied is not None:
        # Tables that are copied again may need more of it than what is still to be applied.
        applied = min([applied, *(floor for floor in floors if floor is not None)])
    size = 0 if applied is None else place.prune(applied, dry_run=dry_run)
    if as_json:
        position = None if applied is None else render_lsn(applied)
        print(json.dumps({"applied_lsn": position, "bytes": size, "dry_run": dry_run}))
    elif not quiet:
        print(f"{render_size(size)} {'would be removed' if dry_run else 'removed'}")


@sentinel_app.command("get")
def sentinel_get(
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    startpos: Annotated[bool, _only("--startpos", "where the stream begins")] = False,
    endpos: Annotated[bool, _only("--endpos", "the end position")] = False,
    apply: Annotated[bool, _only("--apply", "whether changes are applied")] = False,
    received: Annotated[bool, _only("--write-lsn", "what is received")] = False,
    flushed: Annotated[bool, _only("--flush-lsn", "what is on our disk")] = False,
    transformed: Annotated[bool, _only("--transform-lsn", "the same as --flush-lsn")] = False,
    applied: Annotated[bool, _only("--replay-lsn", "what is applied")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the state of a stream, its switches and its positions; or only one of them."""
    with _open_sentinel(directory) as sentinel:
        shown = _render(_in_order(sentinel.read())) | _render_source(sentinel.read_source())
    status = read_stream_status(directory)
    shown["state"] = status.label if status is not None else None
    shown["error"] = shown["error"] or None
    wanted = {
        "startpos": startpos,
        "endpos": endpos,
        "apply": apply,
        "received_lsn": received,
        "flushed_lsn": flushed or transformed,
        "applied_lsn": applied,
    }
    if any(wanted.values()):
        shown = {name: value for name, value in shown.items() if wanted.get(name)}
    if as_json:
        print(json.dumps(shown))
        return
    if len(shown) == 1:
        (only,) = shown.values()
        print(render_lsn(0) if only is None else only)
        return
    for name, value in shown.items():
        if value is not None:
            print(f"{name:<22}{value}")


@set_app.command("startpos")
def set_startpos(
    lsn: Annotated[str, typer.Argument(metavar="LSN", help="A position such as 16/B374D848.")],
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Say where the stream begins; for information only, the slot decides."""
    with _open_sentinel(directory) as sentinel:
        sentinel.set_startpos(parse_lsn(lsn))


@set_app.command("endpos")
def set_end_position(
    lsn: Annotated[
        str, typer.Argument(metavar="[LSN]", help="A position such as 16/B374D848.")
    ] = "",
    current: Annotated[
        bool,
        typer.Option(
            "--current",
            help="The current position of the source, or the end of what is being applied if that "
            "is later; needs --source.",
        ),
    ] = False,
    none: Annotated[bool, typer.Option("--none", help="Remove the end position.")] = False,
    source: options.Source = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Set where the stream ends: everything up to there, and nothing after it.

    A running stream sees it within a second. Prints the position. One that the stream has passed
    is refused (exit code 9).
    """
    if sum((bool(lsn), current, none)) != 1:
        raise ConfigError("give one of LSN, --current and --none")
    position = parse_lsn(lsn) if lsn else None
    if current:
        with connect(resolve(options.parse_dsn(source, "source")), "sentinel") as connection:
            position = read_end(connection)
    with _open_sentinel(directory) as sentinel:
        if position is None:
            sentinel.set_endpos(None)
        elif current:
            position = sentinel.choose_endpos(position)
        elif (passed := sentinel.try_endpos(position)) is not None:
            raise MismatchError(
                f"the stream can't end at {render_lsn(position)}: changes up to "
                f"{render_lsn(passed)} are applied, or are being applied",
                hint="choose a later position, or --current",
            )
    print("none" if position is None else render_lsn(position))


OnOff = Annotated[str, typer.Argument(metavar="[on|off]", help="on, or off.")]


@set_app.command("apply")
def set_apply(to: OnOff = "on", directory: options.Directory = options.DEFAULT_DIRECTORY) -> None:
    """Let a running stream apply, or make it only receive."""
    with _open_sentinel(directory) as sentinel:
        sentinel.set_apply(_is_on(to))


@set_app.command("prefetch")
def set_prefetch(
    to: OnOff = "on", directory: options.Directory = options.DEFAULT_DIRECTORY
) -> None:
    """Let a running stream receive, or hold it back: the source keeps the changes meanwhile."""
    with _open_sentinel(directory) as sentinel:
        sentinel.set_prefetch(_is_on(to))


def _target(uri: str) -> Dsn | None:
    return resolve(options.parse_dsn(uri, "target")) if uri else None


def _is_on(text: str) -> bool:
    if text not in ("on", "off"):
        raise ConfigError(f"expected on or off, not {text!r}")
    return text == "on"


def _open_sentinel(directory: Path) -> Sentinel:
    """The sentinel of a stream that is there; a wrong --dir must not make one."""
    if not has_stream(directory):
        raise WorkDirError(
            f"there is no stream in {directory}",
            hint="check --dir; a stream begins with `millrace clone --follow` or "
            "`millrace stream setup`",
        )
    return Sentinel(directory)


def _require_setup(sentinel: Sentinel, directory: Path) -> StreamSetup:
    from millrace.follow.bound_copy import require_bound

    found = sentinel.read_setup()
    if found is None:
        raise WorkDirError(
            f"there is no stream in {directory}",
            hint="check --dir; a stream begins with `millrace clone --follow` or "
            "`millrace stream setup`",
        )
    return require_bound(found)


def _begin(
    directory: Path, setup: StreamSetup, source: Dsn, target: Dsn | None, snapshot: str | None
) -> StreamSetup:
    """Make the position on the target and write down the stream, unless it is there; the stream."""
    from millrace.apply.position import setup_position
    from millrace.follow.membership import write_beginning
    from millrace.postgres.origin import stream_name

    found = _setup_of(directory) or setup
    if target is not None:
        with connect(target, "setup") as connection:
            name = stream_name(found.source, found.slot_name, found.start_lsn)
            setup_position(connection, name, found.start_lsn)
    with Sentinel(directory) as sentinel:
        if sentinel.read_setup() is None:
            write_beginning(source, sentinel, found, snapshot)
            sentinel.write_setup(found)
            sentinel.set_startpos(found.start_lsn)
        sentinel.complete_setup(setup.encoding, setup.spool)
        return sentinel.read_setup() or found


def _setup_of(directory: Path) -> StreamSetup | None:
    if not has_stream(directory):
        return None
    with Sentinel(directory) as sentinel:
        return sentinel.read_setup()


def _remove_files(directory: Path) -> list[str]:
    import shutil

    from millrace.spool.interface import FOLDER

    with Sentinel(directory) as sentinel:
        sentinel.clear()
    if not (directory / FOLDER).exists():
        return []
    shutil.rmtree(directory / FOLDER)
    return [str(directory / FOLDER)]


def _encoding(source: str, target: str) -> str:
    """Everything is received in the target's encoding, as it is copied; else in the source's."""
    option, text = ("target", target) if target else ("source", source)
    with connect(resolve(options.parse_dsn(text, option)), "setup") as connection:
        return server_encoding(connection)


def _in_order(state: SentinelState) -> SentinelState:
    """What is applied was received and spooled, even if the receiver has not said so yet."""
    flushed = _later(state.flushed_lsn, state.applied_lsn)
    received = _later(state.received_lsn, flushed)
    return replace(state, flushed_lsn=flushed, received_lsn=received)


def _later(one: int | None, other: int | None) -> int | None:
    return max(filter(None, (one, other)), default=None)


def _render_source(source: SourceRecord) -> dict[str, Any]:
    """What is known of the server that is received from."""
    return {
        "source_timeline": source.timeline,
        "source_heard_at": source.heard_at,
        "holding_back": source.held or None,
    }


def _render(state: SentinelState) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in asdict(state).items():
        is_lsn = name.endswith(("pos", "_lsn")) and value is not None
        shown[name] = render_lsn(value) if is_lsn else value
    return shown


def _print_leftovers(left: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(left))
        return
    for slot in left["slots"]:
        use = f"read by process {slot['active_pid']}" if slot["active_pid"] else "not in use"
        kept = render_size(slot["lag_bytes"])
        print(f"replication slot {slot['name']}: {use}, the source keeps {kept} of WAL for it")
    for publication in left["publications"]:
        print(f"publication {publication['name']} of slot {publication['slot']}")
    for origin in left["origins"]:
        print(f"replication origin {origin['name']} at {origin['lsn']}")
    if not any(left.values()):
        print("nothing is left")


app.command("prefetch")(receive)
app.command("transform")(stream_transform.transform)
app.command("apply")(follow.apply)
app.command("catchup")(follow.catchup)
app.command("resync")(resync.resync)
app.command("replay")(follow.follow)
