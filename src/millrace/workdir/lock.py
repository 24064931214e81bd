"""One run per work directory.

Invariant: at most one living process holds the lock of a directory; the lock of
a dead process is taken over. The kernel's lock decides, the pid in the file is
for people.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.errors import WorkDirError
from millrace.room import AGAIN, writing
from millrace.workdir.place import make_private


def read_holder(directory: Path) -> int | None:
    """The living process that the file names. The lock itself is not tried: for a moment, that
    would keep another process from it."""
    try:
        words = (directory / "millrace.pid").read_text().split()
        number = int(words[1])
        os.kill(number, 0)
    except PermissionError:
        return number
    except (OSError, IndexError, ValueError):
        return None
    return number


def require_idle(directory: Path) -> None:
    """Raise if a process works in the directory."""
    with open_lock(directory):
        return


@contextmanager
def open_lock(directory: Path) -> Iterator[None]:
    """Hold the directory, or say who does."""
    try:
        make_private(directory)
        file = (directory / "millrace.pid").open("a+")
    except OSError as error:
        raise WorkDirError(
            f"can't use the work directory {directory}: {error.strerror}",
            hint="choose another one with --dir",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise WorkDirError(
                f"another millrace is running in {directory}: {file.read().strip()}",
                hint="wait for it, stop it, or choose another directory with --dir",
            ) from None
        with writing(directory / "millrace.pid", then=AGAIN):
            # Not through a buffer, which a full disk would make fail again when it is closed.
            os.ftruncate(file.fileno(), 0)
            line = f"pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            os.write(file.fileno(), line.encode())
        try:
            yield
        finally:
            # A process that lives on, with other directories in hand, is not the holder any more.
            os.ftruncate(file.fileno(), 0)
