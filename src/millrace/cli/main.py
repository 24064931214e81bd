"""The program: one application, one file for each command, one way to fail.

Invariant: an error of ours ends the program with its exit code, its message and
its hint on stderr (or as JSON on stdout with --json), never with a stack trace.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from millrace import __version__
from millrace.cli import (
    asked,
    clone,
    compare,
    copy,
    demo,
    follow,
    list_,
    snapshot,
    stream,
    stream_transform,
)
from millrace.errors import ConfigError, InvariantError, MillraceError, MismatchError
from millrace.log import redact

log = logging.getLogger("millrace")

# What a shell reports for a program that a signal ended: 128 and the signal's number.
INTERRUPTED = 130
TERMINATED = 143

_signals: list[int] = []

app = typer.Typer(
    name="millrace",
    help="Moves PostgreSQL data, consistently, on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("clone")(asked.command(clone.clone))
app.command("follow")(asked.command(follow.follow, follow.FOLLOW_OPTIONS))
app.command("cutover")(asked.command(follow.cutover, follow.CUTOVER_OPTIONS))
app.command("demo")(demo.demo)
app.command("snapshot")(snapshot.snapshot)
app.add_typer(copy.copy_app, name="copy")
app.add_typer(copy.dump_app, name="dump")
app.add_typer(copy.restore_app, name="restore")
app.add_typer(list_.app, name="list")
app.add_typer(compare.app, name="compare")
stream.app.command("prefetch")(stream.receive)
stream.app.command("transform")(stream_transform.transform)
stream.app.command("apply")(asked.command(follow.apply, follow.APPLY_OPTIONS))
stream.app.command("catchup")(asked.command(follow.catchup, follow.APPLY_OPTIONS))
stream.app.command("replay")(asked.command(follow.follow, follow.FOLLOW_OPTIONS))
app.add_typer(stream.app, name="stream")


@app.command()
def version(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Print the version."""
    print(json.dumps({"millrace": __version__}) if as_json else f"millrace {__version__}")


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit."""
    signal.signal(signal.SIGTERM, _terminate)
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
    if code == INTERRUPTED:  # typer, too, turns an interrupt into this
        print("millrace: stopped", file=sys.stderr)
        code = TERMINATED if _signals else INTERRUPTED
    sys.exit(code or 0)


def report(error: MillraceError) -> int:
    """Tell a person, or a program, what went wrong; the exit code."""
    # A difference has been printed already, as the result it is.
    if "--json" in sys.argv and not isinstance(error, MismatchError):
        print(json.dumps(error.to_dict(), default=str))
    print(f"millrace: {redact(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


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
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return _defaults(typer.main.get_command(app), found, str(path))


def _defaults(command: Any, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Option names as people write them, turned into parameter names; unknown ones refused."""
    children = getattr(command, "commands", None)
    names: dict[str, Any] = dict(children or {})
    if children is None:
        for parameter in command.params:
            names |= {option.lstrip("-"): parameter for option in parameter.opts}
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


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM: stop as for Ctrl-C, with another exit code."""
    _signals.append(number)
    raise KeyboardInterrupt
