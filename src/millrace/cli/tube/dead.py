"""`millrace tube dead`, `retry`, `discard`: ids that could not be delivered.

Invariant: a dead letter that is retried is in the tube again in the same transaction.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from millrace.cli.options import AsJson
from millrace.cli.tube.options import Schema, Source, TubeArgument, open_tube
from millrace.tube.delivery.dead import discard_dead, read_dead, retry_dead

Keys = Annotated[
    list[str], typer.Option("--key", help="Only this id; may be repeated. Without it, all of them.")
]


def dead(
    tube: TubeArgument, source: Source = "", schema: Schema = "", as_json: AsJson = False
) -> None:
    """Show the ids that could not be delivered, each with its error."""
    with open_tube(tube, source, schema, is_read_only=True) as found:
        letters = read_dead(*found)
    if as_json:
        rows = [asdict(one) | {"last_at": one.last_at.isoformat()} for one in letters]
        print(json.dumps(rows))
        return
    for one in letters:
        print(f"{one.table} {one.key} (shard {one.shard}, {one.tries} tries): {one.error}")


def retry(
    tube: TubeArgument,
    source: Source = "",
    schema: Schema = "",
    key: Keys = [],  # noqa: B006
) -> None:
    """Touch dead letters again, so that they are delivered anew."""
    with open_tube(tube, source, schema) as found:
        print(f"{retry_dead(*found, key or None)} touched again")


def discard(
    tube: TubeArgument,
    source: Source = "",
    schema: Schema = "",
    key: Keys = [],  # noqa: B006
) -> None:
    """Forget dead letters: their documents stay as they are."""
    with open_tube(tube, source, schema) as found:
        print(f"{discard_dead(*found, key or None)} discarded")
