"""What --dir names, and the directory that is the default.

Invariant: a directory is looked at before a command uses it, whichever command it is; a run that
an earlier version left where its default was is never taken for nothing done yet.
"""

from __future__ import annotations

import os
from pathlib import Path

import typer

from millrace.clone.directory import catalog_path
from millrace.errors import WorkDirError
from millrace.workdir.place import (
    default_directory,
    former_directory,
    require_no_foreign_link,
    require_own,
)
from millrace.workdir.store import Store
from millrace.workdir.stream_binding import has_stream

# As it is written in help texts, for any user.
DEFAULT_SHOWN = "~/.local/state/millrace"
DEFAULT = default_directory()


def choose(context: typer.Context, parameter: typer.CallbackParam, value: Path) -> Path:
    """The directory, if it can be trusted."""
    if context.resilient_parsing:
        return value
    assert parameter.name is not None
    origin = context.get_parameter_source(parameter.name)
    if origin is not None and origin.name != "DEFAULT":
        require_no_foreign_link(value)
        return value
    # Links are resolved in `value`.
    require_own(DEFAULT)
    if not has_run(DEFAULT):
        _refuse_former(former_directory())
    return DEFAULT


def has_run(directory: Path) -> bool:
    """Whether a copy or a stream has begun in it, and may have to be continued."""
    if has_stream(directory):
        return True
    path = catalog_path(directory)
    if not path.exists():
        return False
    try:
        store = Store(path, read_only=True)
    except WorkDirError:
        return True
    try:
        setup = store.setup()
    finally:
        store.close()
    return setup is not None and not setup["finished_at"]


def _refuse_former(former: Path) -> None:
    """What somebody else keeps there is none of our business."""
    try:
        is_own = not former.is_symlink() and former.stat().st_uid == os.geteuid()
    except OSError:
        return
    if is_own and has_run(former):
        raise WorkDirError(
            f"there is a run in {former}, where the work directory was by default before; now it "
            f"is {DEFAULT}",
            hint=f"continue it: --dir {former}; or move it: mv {former} {DEFAULT}; or, if it is "
            "of no use any more, remove it",
        )
