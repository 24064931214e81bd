"""The work directory of a run: new, continued, or started over.

Invariant: a directory belongs to one run, pinned to its source, target, snapshot and
settings; a command that does not fit is refused, with the field and both values.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from millrace.clone.settings import CloneSettings
from millrace.errors import WorkDirError
from millrace.name import Naming
from millrace.snapshot.holder import read_held
from millrace.workdir.store import Store

log = logging.getLogger(__name__)

# Ours, and nothing else, is removed when a run starts from zero.
FILES = ("schema", "summary.json", "spark.log")


def pinned(settings: CloneSettings) -> dict[str, Any]:
    """What a run is pinned to, besides its snapshot."""
    return {
        "source": settings.source.identity(),
        "target": settings.target.identity(),
        "split_tables_larger_than": settings.split.larger_than_bytes,
        "split_max_parts": settings.split.max_parts,
        "schema_options": " ".join(settings.schema.options()),
        "filters": "" if settings.filters.is_empty else settings.filters.as_json(),
        "rename_schema": settings.naming.as_json(),
    }


def catalog_path(directory: Path) -> Path:
    """Where the run's catalog is kept."""
    return directory / "schema" / "source.db"


def read_setup(directory: Path) -> dict[str, Any] | None:
    """What the directory was set up for; None if there is no run in it."""
    path = catalog_path(directory)
    if not path.exists():
        return None
    store = Store(path)
    try:
        return store.setup()
    finally:
        store.close()


def read_naming(directory: Path) -> Naming:
    """What the run of the directory calls schemas on its target; the same names without a run, or
    with one of an older release."""
    setup = read_setup(directory)
    return Naming.from_json(setup["rename_schema"] if setup else "")


def open_directory(settings: CloneSettings, setup: dict[str, Any] | None) -> Store:
    """The catalog of the run that `require_usable` said is continued; without one, a new one."""
    if setup is None:
        clear(settings)
    return Store(catalog_path(settings.directory))


def require_usable(settings: CloneSettings, *, continues: bool) -> dict[str, Any] | None:
    """Raise if the directory can't be used for this; the setup of the run that is continued."""
    setup = read_setup(settings.directory)
    if setup and continues and not settings.restart:
        _check_pins(settings, setup)
        return setup
    if setup and not setup["finished_at"] and not settings.restart:
        raise WorkDirError(
            f"{settings.directory} holds an unfinished run of {setup['started_at']}, "
            f"{setup['source']} to {setup['target']}",
            hint="continue it: --resume; start over: --restart; or choose another --dir",
        )
    held = read_held(settings.directory)
    if held is not None and held.is_of_run and held.slot is not None:
        return None  # killed between its slot and its first row
    if settings.resume and not catalog_path(settings.directory).exists():
        raise WorkDirError(
            f"there is no run to resume in {settings.directory}",
            hint="check --dir, or leave out --resume to start a new run",
        )
    return None


def clear(settings: CloneSettings) -> None:
    """Remove the files of an earlier run."""
    for name in FILES:
        leftover = settings.directory / name
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def _check_pins(settings: CloneSettings, setup: dict[str, Any]) -> None:
    for name, value in pinned(settings).items():
        if setup[name] != value:
            option = _option(name)
            raise WorkDirError(
                f"{settings.directory} was set up for {option} {setup[name] or 'none'}, "
                f"now it is {value or 'none'}",
                hint=f"give {option} as before, start over with --restart, or choose another --dir",
                field=name,
                before=setup[name],
                now=value,
            )


def _option(name: str) -> str:
    """How people know a pinned field."""
    return "schema options" if name == "schema_options" else "--" + name.replace("_", "-")
