"""What pgcopydb's users type: its variables, and its options where ours has none of that name.

Invariant: an option of pgcopydb's is understood, has no effect that could be missed and is then
accepted, or is refused with the words that say what to use instead; it is never unknown.

Facts: pgcopydb's manual and its --help, 0.10 to 0.18.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from millrace.errors import ConfigError

PREFIX = "PGCOPYDB_"
# Of the variables that are not called as ours with another prefix.
_OTHER_NAMES = {
    "PGCOPYDB_SOURCE_PGURI": "MILLRACE_SOURCE",
    "PGCOPYDB_TARGET_PGURI": "MILLRACE_TARGET",
    "PGCOPYDB_SKIP_TABLESPACES": "MILLRACE_NO_TABLESPACES",
    "PGCOPYDB_OUTPUT_PLUGIN": "MILLRACE_PLUGIN",
}
_SAME_NAMES = (
    "TABLE_JOBS",
    "INDEX_JOBS",
    "RESTORE_JOBS",
    "LARGE_OBJECTS_JOBS",
    "SPLIT_TABLES_LARGER_THAN",
    "SPLIT_MAX_PARTS",
    "SKIP_CTID_SPLIT",
    "DROP_IF_EXISTS",
    "SKIP_VACUUM",
    "SKIP_DB_PROPERTIES",
    "FAIL_FAST",
    "SNAPSHOT",
    "LOG_JSON",
)
VARIABLES = _OTHER_NAMES | {f"{PREFIX}{name}": f"MILLRACE_{name}" for name in _SAME_NAMES}


def take_variables(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set ours to what pgcopydb's say, where they are not set; the names of those taken."""
    taken = []
    for theirs, ours in VARIABLES.items():
        if theirs in environment and ours not in environment:
            environment[ours] = environment[theirs]
            taken.append(theirs)
    return taken


@dataclass(frozen=True)
class Habit:
    """An option that some commands of pgcopydb take, and ours do not."""

    name: str
    # Commands of ours, as words; a group for all of its commands.
    commands: tuple[str, ...]
    is_flag: bool = True
    # What to use in its place, where ignoring it would be wrong.
    instead: str = ""

    def is_of(self, path: str) -> bool:
        return any(path == one or path.startswith(f"{one} ") for one in self.commands)


_STEPS = ("list", "compare", "copy", "dump", "restore", "follow", "stream", "snapshot", "ping")
_STREAMS = ("follow", "stream")
# Commands that both have.
COMMANDS = ("clone", "fork", *_STEPS)
HABITS = (
    # Every command continues what is in its directory, and reads the source's live catalog.
    Habit("--resume", _STEPS),
    Habit("--not-consistent", _STEPS),
    Habit(
        "--restart",
        _STREAMS,
        instead="end the stream with `millrace stream cleanup`, then begin it again with "
        "`millrace clone --follow --restart`",
    ),
    Habit("--restart", _STEPS),
    Habit("--force", ("list",)),
    # More of the log; those that have no log take it, and print what they print.
    Habit("--verbose", COMMANDS),
    Habit("--debug", COMMANDS),
    Habit("--trace", COMMANDS),
    Habit("--notice", COMMANDS),
    Habit("--quiet", COMMANDS),
    Habit("--dir", COMMANDS, is_flag=False),
    Habit("--jobs", COMMANDS, is_flag=False),
    Habit("--table-jobs", COMMANDS, is_flag=False),
    # Binary is used wherever it is safe.
    Habit("--use-copy-binary", ("clone", "fork", "copy")),
    # Sizes of all tables are read in one query.
    Habit("--estimate-table-sizes", ("clone", "fork", "copy", "list")),
    Habit("--skip-analyze", ("clone", "fork", "copy", "list")),
    Habit("--create-slot", ("clone", "fork", *_STREAMS, "snapshot")),
    # Numbers travel as the source prints them.
    Habit("--wal2json-numeric-as-string", ("clone", "fork", *_STREAMS, "snapshot")),
    Habit("--replay-no-op-updates", ("clone", "fork", *_STREAMS)),
    Habit(
        "--origin",
        ("clone", "fork", *_STREAMS),
        is_flag=False,
        instead="the origin is named after the slot: give --slot-name",
    ),
    Habit(
        "--publication",
        ("clone", "fork", *_STREAMS),
        is_flag=False,
        instead="publications are made for the stream and named after the slot: give --slot-name",
    ),
    Habit(
        "--host",
        ("clone", "fork", *_STREAMS),
        is_flag=False,
        instead="the sentinel is a file: give `millrace stream sentinel` the --dir of the stream",
    ),
    Habit(
        "--port",
        ("clone", "fork", *_STREAMS),
        is_flag=False,
        instead="the sentinel is a file: give `millrace stream sentinel` the --dir of the stream",
    ),
)


def add_habits(command: Any, path: str) -> None:
    """Give a command, or all commands of a group, the options that its namesake has."""
    children = getattr(command, "commands", None)
    if children is not None:
        for name, child in children.items():
            add_habits(child, f"{path} {name}")
        return
    known = {name for option in command.params for name in option.opts}
    for habit in HABITS:
        if habit.is_of(path) and habit.name not in known:
            known.add(habit.name)
            command.params.append(_option(habit))


def _option(habit: Habit) -> Any:
    """Made by typer, from a command that has nothing else."""
    given = typer.Option(
        habit.name,
        hidden=True,
        help="An option of pgcopydb's that has no effect here.",
        expose_value=False,
        callback=_refusal(habit) if habit.instead else None,
    )

    # Unlike any of a command: options are told apart by it.
    name = "habit" + habit.name.replace("-", "_")

    def command(**values: Any) -> None: ...

    kind = bool if habit.is_flag else str
    default = False if habit.is_flag else ""
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, given],
            )
        ]
    )
    made = typer.Typer(add_completion=False)
    made.command()(command)
    return next(one for one in typer.main.get_command(made).params if habit.name in one.opts)


def _refusal(habit: Habit) -> Any:
    def refuse(value: object) -> object:
        if value:
            raise ConfigError(f"there is no {habit.name} here", hint=habit.instead)
        return value

    return refuse
