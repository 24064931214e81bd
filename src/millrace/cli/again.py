"""The command that continues what has stopped, whole, so that it can be pasted.

Invariant: it is the command as it was typed, in the same work directory, with the one of --resume
and --restart that works in the state that the run was left in. Passwords are not shown.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace.clone.settings import CloneSettings
from millrace.clone.stopped import find_continuation
from millrace.errors import ConfigError, MillraceError
from millrace.log import redact
from millrace.room import AGAIN, RESUME

log = logging.getLogger(__name__)

_WAYS = frozenset({"--resume", "--restart"})


@contextmanager
def telling_how_to_continue(settings: CloneSettings) -> Iterator[None]:
    """What fails or is stopped inside ends with the command that continues it."""
    try:
        yield
    except (MillraceError, KeyboardInterrupt) as error:
        if isinstance(error, ConfigError):
            raise
        try:
            command = _command(settings)
        except MillraceError as another:
            log.debug("%s", another)
            raise error from None
        if isinstance(error, MillraceError):
            error.hint = _with_command(error.hint, command)
        elif command:
            log.warning("continue with: %s", command)
        raise


def _command(settings: CloneSettings) -> str:
    return as_typed(sys.argv, settings.directory, find_continuation(settings).value)


def _with_command(hint: str, command: str) -> str:
    for words in (RESUME, AGAIN):
        if words in hint:
            return hint.replace(words, f"run: {command}")
    return f"{hint}; then: {command}" if hint else f"continue with: {command}"


def as_typed(arguments: Sequence[str], directory: Path, way: str) -> str:
    """The command line, with its work directory spelled out and `way` in the place of any other."""
    program, rest = arguments[0], list(arguments[1:])
    words: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--dir" and rest:
            rest.pop(0)
        elif word not in _WAYS and not word.startswith("--dir="):
            words.append(word)
    words += ["--dir", str(directory)] + ([way] if way else [])
    typed = shlex.join(words)
    shown = redact(typed)
    note = "" if shown == typed else "  # with the password in the place of ***"
    return f"{_program(program)} {shown}{note}"


def _program(path: str) -> str:
    if Path(path).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m millrace"
    return "millrace"
