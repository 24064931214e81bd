"""The settings of a clone, as the user gave them.

Invariant: they are values: nothing here is looked up, and no step changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.clone.schema.entries import SchemaSettings
from millrace.clone.step import ALL, Step
from millrace.route import Route, RouteSettings
from millrace.split.plan import SplitSettings


@dataclass(frozen=True)
class CloneSettings(RouteSettings):
    """Flags of `millrace clone`, after environment and defaults."""

    route: Route
    table_jobs: int = 4
    index_jobs: int = 4
    restore_jobs: int = 4
    large_objects_jobs: int = 4
    split: SplitSettings = field(default_factory=SplitSettings)
    schema: SchemaSettings = field(default_factory=SchemaSettings)
    drop_if_exists: bool = False
    roles: bool = False
    role_passwords: bool = True
    skip_large_objects: bool = False
    skip_vacuum: bool = False
    skip_database_properties: bool = False
    # Take the planner's statistics from the source, if the target takes them (18).
    carries_statistics: bool = False
    fail_fast: bool = False
    snapshot: str | None = None
    # Hold the snapshot in a process of its own, for so long after the last process of the run;
    # None: in this one.
    snapshot_keep_seconds: float | None = None
    # The slot that a held snapshot must have come with, and its plugin; "" for any.
    slot_name: str = ""
    plugin: str = ""
    maintenance_work_mem: str = "1GB"
    steps: frozenset[Step] = ALL
    # Versions of extensions, by name.
    requirements: Mapping[str, str] = field(default_factory=dict)
    # Go on with the run in the work directory, or empty its target and start from zero.
    resume: bool = False
    restart: bool = False
    # The user vouches that nobody writes to the source: another snapshot is as good.
    not_consistent: bool = False

    def connections_needed(self) -> tuple[int, int]:
        """The most sessions open at once on source and on target."""
        moving = self.table_jobs + (0 if self.skip_large_objects else self.large_objects_jobs)
        source = moving + 3  # snapshot holder, pg_dump, sequences
        target = moving + max(self.index_jobs, self.restore_jobs) + self.table_jobs + 3
        return source, target
