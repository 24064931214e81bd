"""The program: one application, one file for each command, one way to fail.

Invariant: an error of ours ends the program with its exit code, its message and
its hint on stderr (or as JSON on stdout with --json), never with a stack trace.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from millrace import __version__
from millrace.cli.habits import COMMANDS, VARIABLES, take_variables
from millrace.cli.lazy import HELP_OPTIONS, LazyGroup, Place
from millrace.cli.signals import stop_on_signals, stopped_code
from millrace.errors import ConfigError, InvariantError, MillraceError, MismatchError
from millrace.log import redact

log = logging.getLogger("millrace")

# What typer, too, turns an interrupt into.
INTERRUPTED = 130


# What people come for; the headings of the list of commands.
_MIGRATE = "Move a database"
_STEPS = "The same, step by step"
_MORE = "Merge, deliver, decode"
_LOOK = "Look around"


class Program(LazyGroup):
    """All commands, in the order of --help."""

    places: ClassVar = {
        "clone": Place(
            "millrace.cli.clone", "clone", "Copy a whole database under one snapshot.", _MIGRATE
        ),
        "fork": Place(
            "millrace.cli.clone", "clone", "Copy a whole database under one snapshot.", _MIGRATE
        ),
        "follow": Place(
            "millrace.cli.follow",
            "follow",
            "Apply every change of the source since the snapshot, until the end position.",
            _MIGRATE,
        ),
        "cutover": Place(
            "millrace.cli.follow",
            "cutover",
            "End the stream at the source's current position, and prove that both sides are equal.",
            _MIGRATE,
        ),
        "compare": Place("millrace.cli.compare", "app", "Compare source and target.", _MIGRATE),
        "snapshot": Place(
            "millrace.cli.snapshot",
            "snapshot",
            "Hold an exported snapshot until it is stopped.",
            _MIGRATE,
        ),
        "copy": Place("millrace.cli.copy", "copy_app", "Do one step of a clone.", _STEPS),
        "dump": Place(
            "millrace.cli.copy", "dump_app", "Read from the source into the work directory.", _STEPS
        ),
        "restore": Place(
            "millrace.cli.copy",
            "restore_app",
            "Write from the work directory to the target.",
            _STEPS,
        ),
        "stream": Place(
            "millrace.cli.stream", "app", "The steps of following changes, one by one.", _STEPS
        ),
        "consolidate": Place(
            "millrace.cli.consolidate",
            "app",
            "Bring many databases into one, a schema for each of their schemas.",
            _MORE,
        ),
        "tube": Place(
            "millrace.cli.tube.commands",
            "app",
            "Record which rows of tables are touched, in queues, and deliver them.",
            _MORE,
        ),
        "decode": Place(
            "millrace.cli.decode",
            "app",
            "Decode WAL files into changes, without a server and without a slot.",
            _MORE,
        ),
        "demo": Place(
            "millrace.cli.demo.commands",
            "app",
            "Move a busy shop database from PostgreSQL 16 to 18 and prove both sides equal.",
            _LOOK,
        ),
        "list": Place(
            "millrace.cli.list_",
            "app",
            "Show what the source contains, and how tables would be split.",
            _LOOK,
        ),
        "ping": Place(
            "millrace.cli.ping",
            "ping",
            "Check that both servers answer, with the connection strings of a clone.",
            _LOOK,
        ),
        "version": Place("millrace.cli.version", "version", "Print the version.", _LOOK),
    }


app = typer.Typer(
    name="millrace",
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": HELP_OPTIONS, "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"millrace {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Print the version."),
    ] = False,
) -> None:
    """Moves PostgreSQL data, consistently, on Apache Spark."""


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit."""
    stop_on_signals()
    _take_variables(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments, standalone_mode=False, default_map=read_settings_file())
    except MillraceError as error:
        code = report(error)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        code = report_other(error)
    if code == INTERRUPTED:
        print("millrace: stopped", file=sys.stderr)
        code = stopped_code()
    sys.exit(code or 0)


def _take_variables(arguments: list[str]) -> None:
    """Fall back to pgcopydb's variables for commands that it has too, and say so."""
    if arguments and arguments[0] in COMMANDS:
        for theirs in take_variables():
            print(f"millrace: {theirs} is used, as {VARIABLES[theirs]} is not set", file=sys.stderr)


def report(error: MillraceError) -> int:
    """Tell a person, or a program, what went wrong; the exit code."""
    # A difference may have been printed already, as the result it is.
    if "--json" in sys.argv and not is_printed(error):
        print(json.dumps(error.to_dict(), default=str))
    print(f"millrace: {redact(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def is_printed(error: MillraceError) -> bool:
    """Whether it only sums up a result that stdout has."""
    return isinstance(error, MismatchError) and "is_printed" in error.facts


def report_other(error: Exception) -> int:
    """A wrong option, which typer can show itself; anything else is a bug."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):
        error.show()
        return int(error.exit_code)
    log.debug("unexpected error", exc_info=True)
    return report(
        InvariantError(
            f"unexpected {type(error).__name__}: {redact(str(error))}",
            hint="this is a bug in millrace; please report it with the output of --verbose",
        )
    )


def read_settings_file() -> dict[str, Any]:
    """Defaults for options from millrace.toml in the current directory, a table per command."""
    named = os.environ.get("MILLRACE_CONFIG")
    path = Path(named or "millrace.toml")
    if not path.exists():
        if named:
            raise ConfigError(f"MILLRACE_CONFIG names {path}, which does not exist")
        return {}
    import tomllib  # few have such a file

    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return _defaults(typer.main.get_command(app), found, str(path))


def _defaults(command: Any, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Option names as people write them, turned into parameter names; unknown ones refused."""
    children = getattr(command, "commands", None)
    names: Mapping[str, Any] = (
        {name.lstrip("-"): option for option in command.params for name in option.opts}
        if children is None
        else children
    )
    defaults = {}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(
                f"{where}: unknown {'command' if children else 'option'} {key!r}",
                hint=f"known are: {', '.join(sorted(names))}",
            )
        known = names[key]
        if children is not None and not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} must be a table: write [{key}]")
        if children is not None:
            defaults[key] = _defaults(known, value, f"{where} [{key}]")
        else:
            defaults[known.name] = value
    return defaults
