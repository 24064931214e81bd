"""Each source held against its schemas on the target.

Invariant: equal is said of a source only if all its tables were compared under one snapshot of it
while nothing of it was left to apply. Under writers that is not so, and a difference may be lag.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from millrace.compare.run import CompareSettings, compare_data
from millrace.compare.task import TableComparison
from millrace.consolidate.config import Consolidation
from millrace.consolidate.control import settings_of
from millrace.consolidate.status import read_records
from millrace.engine import Engine


def compare_sources(
    consolidation: Consolidation, directory: Path, names: tuple[str, ...], engine: Engine
) -> Iterator[tuple[str, list[TableComparison]]]:
    """One after the other: those named, or all that were not removed."""
    gone = {name for name, record in read_records(directory).items() if record.is_gone}
    for name in names or (one for one in consolidation.sources if one not in gone):
        settings = settings_of(consolidation, directory, name)
        yield name, compare_data(CompareSettings(settings.route), engine)
