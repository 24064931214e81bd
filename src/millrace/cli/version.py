"""`millrace version`.

Facts: the version is that of the installed package.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from millrace import __version__

# Not the one of `cli.options`: that imports what other commands need.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    print(json.dumps({"millrace": __version__}) if as_json else f"millrace {__version__}")
