"""Logging set-up: one line per event on stderr, as text or as JSON.

Invariant: nothing that looks like a password reaches a handler; `redact` is
applied to every formatted line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TextIO, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SECRETS = (
    # postgresql://user:secret@host
    (re.compile(r"(\b\w+://[^\s:/@]*):[^\s/]*@"), r"\1:***@"),
    # password=secret, password='se cret', password => "secret"
    (
        re.compile(r"(?i)((?:ssl)?password|passwd|pgpassword)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)"),
        r"\1\2***",
    ),
    # PASSWORD 'secret' in SQL
    (re.compile(r"(?i)(\bpassword\s+)'(?:[^']|'')*'"), r"\1'***'"),
)


# Whose lines they are, where a process has several streams.
_stream: ContextVar[str] = ContextVar("stream", default="")


def redact(text: str) -> str:
    """The text with anything that looks like a password replaced."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def fields(**values: Any) -> dict[str, Any]:
    """Key-value pairs for a log call: `log.info("copied", extra=fields(rows=3))`."""
    return {"fields": values}


@contextmanager
def logged_as(stream: str) -> Iterator[None]:
    """What this thread logs meanwhile names the stream; "" leaves it as it is."""
    token = _stream.set(stream or _stream.get())
    try:
        yield
    finally:
        _stream.reset(token)


def as_logged(function: Callable[P, R]) -> Callable[P, R]:
    """For a thread that logs in the name of whoever starts it, once."""
    return partial(copy_context().run, function)


class TextFormatter(logging.Formatter):
    """`12:30:01 INFO  clone  message  key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f"  {k}={v}" for k, v in _fields(record).items())
        name = record.name.removeprefix("millrace.")
        line = f"{clock} {record.levelname:<7} {name:<16} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redact(line)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(entry, default=str))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    stream = {"stream": _stream.get()} if _stream.get() else {}
    return stream | getattr(record, "fields", {})


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what is stderr when a line comes, not to what it was at the set-up.

    A live display puts itself in its place, to keep its own block below the log; somebody who
    captured stderr may have closed what it was before.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup_logging(
    *, verbose: int = 0, quiet: bool = False, as_json: bool = False, stream: Any = None
) -> None:
    """Send millrace's log to stderr (or `stream`); other libraries only from WARNING up."""
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    handler = StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("millrace").setLevel(level)
    # It warns of a session that could not be rolled back because it is gone, or was interrupted:
    # what ended it is raised.
    logging.getLogger("psycopg").setLevel(logging.WARNING if verbose else logging.ERROR)


@dataclass(frozen=True)
class LogSettings:
    """How the other process logs."""

    verbose: int = 0
    quiet: bool = False
    as_json: bool = False
    # Which stream its lines are of; "" where there is only one.
    stream: str = ""
