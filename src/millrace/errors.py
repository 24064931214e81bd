"""The one exception tree; every class carries the exit code of the program.

Invariant: an error keeps its facts and its hint through pickle, because errors
raised in Spark tasks are reported by the driver. No error holds a row value or
a password.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

log = logging.getLogger(__name__)


class MillraceError(Exception):
    """Something a person has to know about; `hint` says what to do next."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.facts))

    def to_dict(self) -> dict[str, Any]:
        return {
            "error": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
            **self.facts,
        }


def _rebuild(
    cls: type[MillraceError], message: str, hint: str, facts: dict[str, Any]
) -> MillraceError:
    return cls(message, hint=hint, **facts)


class ConfigError(MillraceError):
    """A setting, a flag or a file given by the user is wrong."""

    exit_code = 2


class NoSuchTube(ConfigError):
    """A tube that is not in the database, or not yet."""


class PreflightError(MillraceError):
    """The servers are not ready for the job; nothing was touched."""

    exit_code = 3


class WorkDirError(MillraceError):
    """The work directory belongs to another run, is locked or is unusable."""

    exit_code = 4


class ServerError(MillraceError):
    """A PostgreSQL server, or a program that talks to it, reported an error."""

    exit_code = 5


class ConnectionLost(ServerError):
    """The connection broke; the same work may succeed on a new one."""


class EngineLost(ServerError):
    """What runs tasks has ended, or did not start: no further task can run."""


class Blocked(ServerError):
    """Others hold a lock that is needed; it is asked for again, for as long as it takes."""


class TubeLost(ServerError):
    """The tube was dropped."""


class SlotLost(ServerError):
    """The replication slot is gone or invalidated."""


class SourceDiverged(ServerError):
    """The source's history lacks changes that were received from it."""


class SnapshotLost(ServerError):
    """The exported snapshot can no longer be imported."""


class FormatError(MillraceError):
    """Bytes are not what the format says they must be."""

    exit_code = 6


class UnknownVersion(FormatError):
    """Another version of the program wrote it: it is whole, so it is left as it is."""


class ApplyError(MillraceError):
    """A change could not be applied exactly."""

    exit_code = 7


class SinkError(MillraceError):
    """A sink refused a delivery."""

    exit_code = 8


class MismatchError(MillraceError):
    """Source and target differ."""

    exit_code = 9


class InvariantError(MillraceError):
    """A promise of the program itself is broken: a bug, please report it."""

    exit_code = 70


@contextmanager
def as_bug(what: str, **facts: Any) -> Iterator[None]:
    """What nobody expected to be raised becomes an InvariantError that says what was done, and
    where in the code. What the machine may have caused, its files or its memory, stays as it is."""
    try:
        yield
    except (MillraceError, OSError, MemoryError):
        raise
    except Exception as error:
        # Its own words may quote a row, so they are for the log of the process alone.
        log.exception("%s", what)
        kind = type(error).__name__
        raise InvariantError(
            f"{what}: unexpected {kind} at {_place(error)}",
            hint="this is a bug of millrace: please report it, with the traceback in spark.log in"
            " --dir",
            error_type=kind,
            **facts,
        ) from error


def _place(error: BaseException) -> str:
    """Where our own code was, innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parent)
    ours = [frame for frame in frames if frame.filename.startswith(package)] or frames
    frame = ours[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
