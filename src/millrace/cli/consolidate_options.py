"""Options that commands of `millrace consolidate` share.

Invariant: nothing is imported here that takes long to load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path,
    typer.Option(
        "--config",
        envvar="MILLRACE_CONSOLIDATE_CONFIG",
        metavar="FILE",
        help="The sources and the target: a TOML file.",
        resolve_path=True,
    ),
]
SourceName = Annotated[str, typer.Argument(metavar="SOURCE", help="Name of a source in the file.")]
DEFAULT_CONFIG = Path("sources.toml")
