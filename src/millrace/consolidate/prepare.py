"""What must be on the sources before they are copied.

Invariant: a source that was begun is left alone: its publications are those of its slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from millrace.consolidate.config import Consolidation, Ddl
from millrace.consolidate.plan import read_plan
from millrace.consolidate.status import read_records
from millrace.ddl.capture import LeftOut
from millrace.follow.setup import published
from millrace.follow.slot import prepare_source
from millrace.postgres.wire.connect import connect, resolve


def prepare_sources(consolidation: Consolidation, directory: Path) -> Iterator[tuple[str, str]]:
    """For each source, what was done or what a person should know."""
    begun = read_records(directory)
    for name, source in consolidation.sources.items():
        if name in begun:
            yield name, "was begun; nothing is changed"
            continue
        dsn = resolve(source.dsn)
        with connect(dsn, "prepare") as connection:
            plan = read_plan(connection, source)
        rules = plan.filters(source)
        capture = LeftOut.of(rules) if source.ddl is Ddl.REPLAY else None
        wanted = published(dsn, rules)
        for warning in prepare_source(dsn, source.slot, source.plugin, wanted, capture=capture):
            yield name, f"warning: {warning}"
        yield name, "is prepared"
