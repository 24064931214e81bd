"""The options of tube commands, and what becomes of them.

Invariant: an option has one name and one meaning in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from millrace.cli.options import parse_dsn
from millrace.errors import ConfigError
from millrace.postgres.wire.connect import connect
from millrace.tube.delivery.tube import Connection, Tube, find_tube
from millrace.tube.install import require_primary

Source = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_SOURCE",
        metavar="URI",
        help="The database with the tubes: a libpq URI or keyword string.",
        show_default=False,
    ),
]
Schema = Annotated[
    str,
    typer.Option(
        "--schema",
        help="Where tubes are installed; needed only where there are several.",
        show_default=False,
    ),
]
TubeArgument = Annotated[str, typer.Argument(metavar="TUBE", help="Name of the tube, as it is.")]
TubeName = Annotated[
    str, typer.Option("--tube", metavar="NAME", help="The tube.", show_default=False)
]
Enrich = Annotated[
    str,
    typer.Option(
        metavar="SQL",
        show_default=False,
        help="A SELECT that returns the rows of the keys in $1, an array, with the key and"
        " whatever else belongs to a document; or python:module:function, called with an"
        " Arrow batch of keys. A key without a row is a deletion.",
    ),
]
SinkAddress = Annotated[
    str,
    typer.Option(
        metavar="URI",
        show_default=False,
        help="Where documents go: postgresql://.../database?table=NAME, jsonl:FILE,"
        " tantivy:DIR, or a sink of another package.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="All tubes of this TOML file, instead of one by --tube.",
        show_default=False,
    ),
]


def require_tube_options(**given: str) -> None:
    """What a single tube needs."""
    missing = [f"--{name}" for name, value in given.items() if not value]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint="give --tube, --enrich and --sink, or --config with a file that has them",
        )


def refuse_beside_config(context: typer.Context, *names: str) -> None:
    """What a file says can't be said beside it; defaults, of settings too, are no matter."""
    sources = {name: context.get_parameter_source(name) for name in names}
    found = [f"--{name}" for name, one in sources.items() if one and one.name == "COMMANDLINE"]
    if found:
        raise ConfigError(
            f"{', '.join(found)} can't be used with --config",
            hint="the file says what each tube is delivered with",
        )


@contextmanager
def open_tube(
    tube: str, source: str, schema: str, *, is_read_only: bool = False
) -> Iterator[tuple[Connection, Tube]]:
    """A session on a tube's database; a standby is for reading only."""
    with connect(parse_dsn(source, "source"), "tube") as session:
        if not is_read_only:
            require_primary(session)
        yield session, find_tube(session, tube, schema or None)
