"""Errors of a disk that is full or fails: which one, how much is free, how much is needed.

Invariant: every write below a work directory goes through `writing`, so that whatever its disk
says ends the run as a WorkDirError, never as a crash and never without a word.

Facts: write(2) and fsync(2), ENOSPC, EDQUOT, EFBIG; SQLite, "Result and Error Codes".
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from millrace.config.size import render_size
from millrace.errors import MillraceError, WorkDirError

# What strerror says for ENOSPC: programs print it, and Java.
NO_ROOM: Final = "No space left on device"
# What a catalog of a large schema, and its journal, may take.
CATALOG_BYTES: Final = 64 * 1024 * 1024
RESUME: Final = "continue with the same command and --resume"
AGAIN: Final = "run the same command again"

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path, *, needed_bytes: int = CATALOG_BYTES, then: str = RESUME) -> Iterator[None]:
    """What a disk says while `path` is written, or read, in our words."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if isinstance(error, MillraceError):
            raise
        raise disk_error(path, error, needed_bytes=needed_bytes, then=then) from error


def disk_error(
    path: Path, error: sqlite3.Error | OSError, *, needed_bytes: int, then: str
) -> WorkDirError:
    """The error for a file of the work directory that can't be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return no_room(path, reason, needed_bytes=needed_bytes, then=then, is_full=is_full(error))


def no_room(
    path: Path, reason: str, *, needed_bytes: int, then: str, is_full: bool = True
) -> WorkDirError:
    """The error for a disk that is full, or that failed."""
    hint = f"make room on that disk, at least {render_size(needed_bytes)}, then {then}"
    if not is_full:
        hint = f"look at that disk and at the rights of {path.parent}, then {then}"
    return WorkDirError(
        f"can't use {path}: {reason}{_describe(path)}",
        hint=hint,
        path=str(path),
        needed_bytes=needed_bytes if is_full else None,
    )


def is_full(error: BaseException) -> bool:
    """Whether the disk has no room, or no more for this user or this file."""
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    code = getattr(error, "sqlite_errorcode", None)
    # SQLite calls a journal that finds no room an error of input or output.
    return code is not None and code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _describe(path: Path) -> str:
    """How much the disk has left, as far as that can be asked."""
    folder = next((one for one in path.parents if one.exists()), None)
    if folder is None:
        return ""
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    free, total = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
    files = ", no inodes" if found.f_files and not found.f_favail else ""
    return f" ({render_size(free)} of {render_size(total)} are free there{files})"
