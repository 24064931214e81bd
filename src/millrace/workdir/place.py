"""The default work directory, and whether a directory can be trusted.

Invariant: the default directory is the user's alone: made with mode 0700, owned by them like
everything above it, and no link; root is held to the same. A directory that the user names may be
any that they can use, but nothing of ours in it is a link that somebody else has put there.

Facts: XDG Base Directory Specification, "XDG_STATE_HOME"; proc(5), mountinfo.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from millrace.errors import ConfigError, WorkDirError

# Of a folder that we make: the schema in it may hold passwords, of user mappings for one.
PRIVATE: Final = 0o700
# What we write in a work directory, by name.
OURS: Final = (
    "millrace.pid",
    "snapshot.json",
    "snapshot.log",
    "snapshot-ended.json",
    "pause.json",
    "stream.db",
    "stream.db-wal",
    "stream.db-shm",
    "spool",
    "schema",
    "spark.log",
    "summary.json",
)
# Their files are gone after a power cut.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_directory() -> Path:
    """One directory of the user's, for every command that is given no other."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # as if it were not set
        state = Path("~/.local/state")
        with suppress(RuntimeError):  # no home; see require_own
            state = state.expanduser()
    return state / "millrace"


def former_directory() -> Path:
    """What the default was before: a name that anybody could have made first."""
    return Path(tempfile.gettempdir()) / "millrace"


def make_private(directory: Path) -> None:
    """Make a directory, and those above it that are missing, for the user alone."""
    for missing in reversed([one for one in (directory, *directory.parents) if not one.exists()]):
        missing.mkdir(PRIVATE, exist_ok=True)


def require_own(directory: Path) -> None:
    """Raise unless the default directory, or the place where it will be made, is the user's alone;
    one that others may look into is closed to them."""
    if not directory.is_absolute():
        raise ConfigError(
            "the work directory is kept in the home directory, and there is none",
            hint="name a work directory with --dir, or set XDG_STATE_HOME",
        )
    _require_no_link(directory)
    for above in _existing_above(directory):
        found = above.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise _others(above, found.st_uid)
        if found.st_mode & _OTHERS_MAY_WRITE and not found.st_mode & stat.S_ISVTX:
            raise WorkDirError(
                f"can't use the work directory {directory}: others may write in {above}",
                hint=f"chmod go-w {above}, or name another directory with --dir",
            )
    if directory.exists():
        _close(directory)
        for name in OURS:
            _require_no_link(directory / name)
            _require_owner(directory / name)


def require_no_foreign_link(directory: Path) -> None:
    """Raise if something of ours in a directory is a link that another user has put there."""
    for name in OURS:
        path = directory / name
        if path.is_symlink() and path.lstat().st_uid != 0:
            _require_owner(path)


def is_in_memory(path: Path) -> bool:
    """Whether the files of a folder are lost with the machine's memory; False where unknown."""
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == number:
            return rest.split()[0] in _IN_MEMORY
    return False


def _existing_above(directory: Path) -> list[Path]:
    """The folders above it that exist, from the nearest on, as they are without links."""
    above = next(one for one in directory.parents if one.exists()).resolve()
    return [above, *above.parents]


def _close(directory: Path) -> None:
    found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise WorkDirError(
            f"can't use the work directory {directory}: it is no directory",
            hint="remove it, or name another one with --dir",
        )
    _require_owner(directory)
    if stat.S_IMODE(found.st_mode) & ~PRIVATE:
        directory.chmod(PRIVATE)


def _require_no_link(path: Path) -> None:
    if path.is_symlink():
        raise WorkDirError(
            f"can't use the work directory: {path} is a symbolic link",
            hint=f"remove it, or name a directory: --dir {path.resolve()}",
        )


def _require_owner(path: Path) -> None:
    try:
        owner = path.lstat().st_uid
    except FileNotFoundError:
        return
    if owner != os.geteuid():
        raise _others(path, owner)


def _others(path: Path, owner: int) -> WorkDirError:
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"user {owner}"
    return WorkDirError(
        f"can't use the work directory: {path} belongs to {name}",
        hint="name a directory of your own with --dir",
    )
