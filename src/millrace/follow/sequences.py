"""The target's sequences, set to the source's values: logical replication does not send them.

Invariant: when a stream has ended, each sequence gives the value next that the source's would
have given, or a later one if somebody still writes there. Before that, one is moved in its own
direction only, so a value that the target has given is never given again.

Sequences that filters leave out are not touched, nor are those that only the target has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import psycopg

from millrace.clone.finish.sequence import set_sequences
from millrace.errors import MillraceError
from millrace.follow.background import in_background
from millrace.follow.settings import FollowSettings
from millrace.name import Naming
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.wire.connect import connect, translated
from millrace.relation import Sequence

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]


def set_final_sequences(settings: FollowSettings) -> int:
    """Make them what the source's are, forward or backward; how many. Everything must have been
    applied before: what rows need, the source has drawn."""
    left_out, naming = settings.left.sequences, settings.naming
    with _both_sides(settings) as (here, there):
        wanted = [one for one in _read(here, "source") if _name(one) not in left_out]
        found = _read_target(there, naming)
        chosen = [one for one in wanted if _name(one) in found]
        _set(there, chosen, naming)
    if lacking := sorted(".".join(_name(one)) for one in wanted if _name(one) not in found):
        log.warning("the target lacks sequences of the source: %s", ", ".join(lacking))
    return len(chosen)


def bring_sequences_forward(settings: FollowSettings) -> int:
    """Move those that the source's are ahead of; how many."""
    left_out, naming = settings.left.sequences, settings.naming
    with _both_sides(settings) as (here, there):
        increments = _read_increments(here)
        found = _read_target(there, naming)
        behind = [
            one
            for one in _read(here, "source")
            if _name(one) not in left_out
            and _name(one) in found
            and _is_ahead(one, found[_name(one)], increments.get(one.oid, 1))
        ]
        _set(there, behind, naming)
    return len(behind)


def following_sequences(
    settings: FollowSettings, on_failure: Callable[[], None]
) -> AbstractContextManager[None]:
    """Meanwhile, bring them forward every so often."""
    seconds = settings.sequence_seconds
    if not seconds:
        return nullcontext()
    return in_background("sequences", lambda: _bring_forward(settings), seconds, on_failure)


def _bring_forward(settings: FollowSettings) -> None:
    """It is for an end that nobody planned; a server that is away is asked again later."""
    try:
        moved = bring_sequences_forward(settings)
        log.debug("advanced %d sequences", moved)
    except MillraceError as error:
        log.warning("sequences were not advanced: %s", error)


@contextmanager
def _both_sides(settings: FollowSettings) -> Iterator[tuple[Connection, Connection]]:
    with (
        connect(settings.source, "sequences") as here,
        connect(settings.target, "sequences") as there,
    ):
        yield here, there


def _read_target(target: Connection, naming: Naming) -> dict[tuple[str, str], Sequence]:
    """By their names on the source."""
    named = {naming.source(*_name(one)): one for one in _read(target, "target")}
    return {name: one for name, one in named.items() if name is not None}


def _set(target: Connection, sequences: list[Sequence], naming: Naming) -> None:
    set_sequences(target, [replace(one, schema=naming.schema(one.schema)) for one in sequences])


def _is_ahead(source: Sequence, target: Sequence, increment: int) -> bool:
    """Whether the source's gives its next value later than the target's, in its direction."""
    sign = 1 if increment > 0 else -1
    return (sign * source.last_value, source.is_called) > (
        sign * target.last_value,
        target.is_called,
    )


def _read(connection: Connection, side: str) -> list[Sequence]:
    with translated(f"reading the {side}'s sequences"):
        return catalog.read_sequences(connection)


def _read_increments(connection: Connection) -> dict[int, int]:
    with translated("reading the source's sequences"):
        rows = connection.execute("SELECT seqrelid::int8, seqincrement FROM pg_sequence").fetchall()
    return {oid: increment for oid, increment in rows}


def _name(one: Sequence) -> tuple[str, str]:
    return one.schema, one.name
