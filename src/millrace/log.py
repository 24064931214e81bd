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
from typing import Any

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


def redact(text: str) -> str:
    """The text with anything that looks like a password replaced."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def fields(**values: Any) -> dict[str, Any]:
    """Key-value pairs for a log call: `log.info("copied", extra=fields(rows=3))`."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """`12:30:01 INFO  clone  message  key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f"  {k}={v}" for k, v in getattr(record, "fields", {}).items())
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
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(entry, default=str))


def setup_logging(
    *, verbose: int = 0, quiet: bool = False, as_json: bool = False, stream: Any = None
) -> None:
    """Send millrace's log to stderr (or `stream`); other libraries only from WARNING up."""
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("millrace").setLevel(level)
