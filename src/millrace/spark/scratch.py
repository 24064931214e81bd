"""Where Spark, its JVM and its Python workers put what they need while they run.

Invariant: everything of one engine is below one directory, which its owner removes when it ends,
however it is told to. What a killed owner could not remove, the next one does: the kernel's lock
says who is alive, not a process number, which may be somebody else's by now. The JVM holds that
lock, too: it may outlive its owner for some seconds, and one that starts and does not find the
directory any more never ends (its main thread fails, the one that listens keeps running).

Without this, Spark leaves `spark-*` and `blockmgr-*`, the JVM unpacked libraries, and the workers
their sockets in the temporary directory of the machine.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "millrace-run-"
# The name of a unix-domain socket must fit into 104 bytes (macOS; 108 on Linux). Ours is the
# root, `/millrace-run-12345678`, and Spark's `/.UUID.sock`.
_ROOT_BYTES = 104 - 1 - 22 - 43
# What needs no quoting on the way through spark-submit to the JVM.
_PLAIN = re.compile(r"[\w./+-]+")


class Scratch:
    """A directory of our own, held until `close`."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or scratch_root()
        sweep(root)
        self.path, self._lock = _create(root)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a child inherits to hold it, too."""
        return () if self._lock is None else (self._lock,)

    def close(self) -> None:
        """Remove it, and what was still in use when we began; saying so twice does no harm."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            sweep(self.path.parent)


def scratch_root() -> Path:
    """The temporary directory, or `/tmp` if that one's name is too long or odd for Spark."""
    root = tempfile.gettempdir()
    fits = len(os.fsencode(root)) <= _ROOT_BYTES and _PLAIN.fullmatch(root)
    return Path(root if fits else "/tmp")


def sweep(root: Path) -> None:
    """Remove what owners who are dead have left, as far as it is this user's."""
    for path in root.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            if os.fstat(lock).st_uid == os.getuid() and _try_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _create(root: Path) -> tuple[Path, int | None]:
    """A new directory and its lock. Between the two somebody may take it for a dead owner's."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        if _try_lock(lock) and path.exists():
            return path, lock
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
