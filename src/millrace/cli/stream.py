"""`millrace stream`: the steps of following, each by itself, and the switches of a running one."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from millrace.cli import options
from millrace.config.dsn import Dsn
from millrace.config.size import parse_size, render_size
from millrace.errors import ConfigError, WorkDirError
from millrace.log import setup_logging
from millrace.lsn import parse_lsn, render_lsn
from millrace.postgres.connect import connect, resolve, server_encoding, translated
from millrace.stream.sentinel import FILE, Sentinel, SentinelState, StreamSetup
from millrace.stream.settings import SpoolKind

log = logging.getLogger(__name__)

app = typer.Typer(help="The steps of following changes, one by one.", no_args_is_help=True)
sentinel_app = typer.Typer(
    help="Look at a running stream, and steer it from another terminal.", no_args_is_help=True
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
        envvar="MILLRACE_PLUGIN", help="Output plugin: pgoutput, test_decoding or wal2json."
    ),
]


@app.command("setup")
def setup(
    source: options.Source = "",
    target: options.Target = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    filters: options.Filters = None,
    slot_name: SlotName = "",
    plugin: Plugin = "pgoutput",
    spool: options.Spool = SpoolKind.FILES,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Make publications, slot and position, without copying anything.

    For a target that has the source's rows already, or a `millrace snapshot --follow` that holds
    the slot's snapshot for this work directory. Changes are followed from here on. A setup that is
    there already is left as it is.
    """
    from millrace.snapshot.holder import read_held
    from millrace.stream.begin import published
    from millrace.stream.position import setup_position, stream_name
    from millrace.stream.slot import DEFAULT_SLOT, CreatedSlot, create_stream

    setup_logging(verbose=verbose, quiet=quiet)
    dsn = resolve(options.parse_dsn(source, "source"))
    slot = slot_name or DEFAULT_SLOT
    held = read_held(directory)
    if held is not None and held.slot is not None and held.start_lsn is not None:
        slot, plugin = held.slot, held.plugin or plugin
        created = CreatedSlot(parse_lsn(held.start_lsn), ())
    else:
        created = create_stream(dsn, slot, plugin, published(dsn, options.read_rules(filters)))
    for warning in created.warnings:
        log.warning("source: %s", warning)
    encoding = _encoding(source, target)
    with Sentinel(directory) as sentinel:
        found = sentinel.read_setup()
        if found is not None and found.slot_name != slot:
            raise WorkDirError(
                f"{directory} holds the stream of another slot, {found.slot_name}",
                hint="choose another --dir, or give --slot-name " + found.slot_name,
            )
        if found is None:
            found = StreamSetup(
                dsn.identity(), slot, plugin, encoding, created.start_lsn, spool=spool
            )
            sentinel.write_setup(found)
            sentinel.set_startpos(created.start_lsn)
    if target:
        with connect(resolve(options.parse_dsn(target, "target")), "setup") as connection:
            name = stream_name(found.source, slot, found.start_lsn)
            setup_position(connection, name, found.start_lsn)
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

    Runs until the end position, or until it is told to stop: Ctrl-C or SIGTERM. The source is told
    only of what is on disk here, so it can be stopped, killed and started again at any time.
    Connections that break are opened again.
    """
    # Numba takes half a second: only those who need it wait for it.
    from millrace.postgres.slot_batch import sizes_from
    from millrace.stream.receive import ReceiveSettings
    from millrace.stream.receive import receive as run_receive
    from millrace.stream.spool_place import place_of

    setup_logging(verbose=verbose, quiet=quiet, as_json=log_json)
    with _open_sentinel(directory) as sentinel:
        place = place_of(_require_setup(sentinel, directory), directory, _target(target))
    with (
        _open_sentinel(directory) as sentinel,
        place.open_writer() as spool,
        _signals() as stop,
    ):
        found = _require_setup(sentinel, directory)
        if endpos:
            sentinel.set_endpos(parse_lsn(endpos))
        settings = ReceiveSettings(
            resolve(options.parse_dsn(source, "source")),
            found.slot_name,
            found.plugin,
            found.encoding,
            max_spool_bytes=parse_size(max_spool) or None,
            max_slot_lag_bytes=parse_size(max_slot_lag) or None,
            batches=sizes_from(parse_size(batches_from)),
            binary=not no_binary,
        )
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
    whatever any stream of millrace has left is shown.
    """
    from millrace.stream.slot import DEFAULT_SLOT, read_leftovers
    from millrace.stream.slot import cleanup as run_cleanup

    setup_logging(verbose=verbose, quiet=quiet)
    dsn = resolve(options.parse_dsn(source, "source"))
    found = _setup_of(directory)
    slot = slot_name or (found.slot_name if found else DEFAULT_SLOT)
    other = (
        connect(resolve(options.parse_dsn(target, "target")), "cleanup")
        if target
        else nullcontext(None)
    )
    with connect(dsn, "cleanup") as connection, other as target_connection:
        if list_only:
            prefix = slot_name or DEFAULT_SLOT
            left = read_leftovers(connection, target_connection, prefix).to_dict()
            _print_leftovers(left, as_json=as_json)
            return
        is_ours = found is not None and found.slot_name == slot
        identity = found.source if found and is_ours else dsn.identity()
        removed = run_cleanup(connection, target_connection, slot, identity)
    if is_ours:
        removed += _remove_files(directory)
    if as_json:
        print(json.dumps({"removed": removed}))
    elif not quiet:
        print("\n".join(f"removed {what}" for what in removed) or "there was nothing to remove")


@app.command("prune")
def prune(
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    target: options.Target = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Remove what is applied from the spool.

    A running `follow` does that by itself. What is applied is known from the work directory, or
    asked from the target if --target is given.
    """
    from millrace.stream.position import read_worker_positions
    from millrace.stream.spool_place import place_of

    setup_logging(verbose=verbose, quiet=quiet)
    with _open_sentinel(directory) as sentinel:
        found = _require_setup(sentinel, directory)
        applied = sentinel.read().applied_lsn
    dsn = _target(target)
    place = place_of(found, directory, dsn)
    if dsn is not None:
        with connect(dsn, "prune") as connection:
            positions = read_worker_positions(connection, place.stream)
            applied = min(positions.values(), default=None)
    size = 0 if applied is None else place.prune(applied, dry_run=dry_run)
    if as_json:
        position = None if applied is None else render_lsn(applied)
        print(json.dumps({"applied_lsn": position, "bytes": size, "dry_run": dry_run}))
    elif not quiet:
        print(f"{render_size(size)} {'would be removed' if dry_run else 'removed'}")


@sentinel_app.command("get")
def sentinel_get(
    directory: options.Directory = options.DEFAULT_DIRECTORY,
    as_json: options.AsJson = False,
) -> None:
    """Show the switches and positions of a stream."""
    with _open_sentinel(directory) as sentinel:
        shown = _render(sentinel.read())
    if as_json:
        print(json.dumps(shown))
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
        bool, typer.Option("--current", help="Where the source stands now; needs --source.")
    ] = False,
    none: Annotated[bool, typer.Option("--none", help="Take the end position away.")] = False,
    source: options.Source = "",
    directory: options.Directory = options.DEFAULT_DIRECTORY,
) -> None:
    """Say where the stream ends: everything up to there, and nothing after it.

    A running stream sees it within a second. Prints the position.
    """
    if sum((bool(lsn), current, none)) != 1:
        raise ConfigError("give one of LSN, --current and --none")
    position = parse_lsn(lsn) if lsn else None
    if current:
        with connect(resolve(options.parse_dsn(source, "source")), "sentinel") as connection:
            position = _current_lsn(connection)
    with _open_sentinel(directory) as sentinel:
        sentinel.set_endpos(position)
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
    if not (directory / FILE).exists():
        raise WorkDirError(
            f"there is no stream in {directory}",
            hint="check --dir; a stream begins with `millrace clone --follow` or "
            "`millrace stream setup`",
        )
    return Sentinel(directory)


def _require_setup(sentinel: Sentinel, directory: Path) -> StreamSetup:
    found = sentinel.read_setup()
    if found is None:
        raise WorkDirError(
            f"there is no stream in {directory}",
            hint="check --dir; a stream begins with `millrace clone --follow` or "
            "`millrace stream setup`",
        )
    return found


def _setup_of(directory: Path) -> StreamSetup | None:
    if not (directory / FILE).exists():
        return None
    with Sentinel(directory) as sentinel:
        return sentinel.read_setup()


def _remove_files(directory: Path) -> list[str]:
    import shutil

    from millrace.stream.spool import FOLDER

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


def _current_lsn(connection: Any) -> int:
    """The end of what is on the source's disk."""
    with translated("asking the source for its position"):
        row = connection.execute(
            "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
            " ELSE pg_current_wal_flush_lsn() END)::text"
        ).fetchone()
    return parse_lsn(row[0])


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


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the work in good order; then they take their usual way."""
    stop = threading.Event()
    caught: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        stop.set()

    usual: dict[int, Any] = {
        number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    for number, frame in caught[:1]:
        usual[number](number, frame)
