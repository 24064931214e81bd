"""What clone and follow are asked for one source.

Invariant: the same file and plan give the same settings in every process, so that a copy that was
interrupted, the stream behind it and a comparison go by the same route.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millrace.clone.schema.entries import SchemaSettings
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.consolidate.config import Consolidation, SourceConfig
from millrace.consolidate.plan import SourcePlan
from millrace.consolidate.registry import source_directory
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.log import LogSettings
from millrace.postgres.wire.connect import resolve
from millrace.route import Route

# The roles, privileges and properties of thirty databases are not those of the analysts' one.
SCHEMA = SchemaSettings(no_owner=True, no_acl=True, no_tablespaces=True)


@dataclass(frozen=True)
class SourceSettings:
    """One source, with everything that was decided for it."""

    name: str
    route: Route
    slot: SlotSettings
    batch_seconds: float
    log: LogSettings

    @property
    def directory(self) -> Path:
        return self.route.place

    def clone(self, *, resume: bool = False, restart: bool = False) -> CloneSettings:
        return CloneSettings(
            self.route,
            schema=SCHEMA,
            skip_large_objects=True,
            skip_database_properties=True,
            resume=resume,
            restart=restart,
        )

    def follow(self, *, one_by_one: bool = False) -> FollowSettings:
        """Needs the source, if filters leave out rows: what they mean is asked there."""
        from millrace.follow.setup import read_left

        return FollowSettings(
            self.route,
            apply_jobs=1,
            one_by_one=one_by_one,
            batch_seconds=self.batch_seconds,
            # Others wait for the worker.
            stay_seconds=0.0,
            left=read_left(self.route.source, self.route.filters),
            log=self.log,
        )


def source_settings(
    source: SourceConfig,
    consolidation: Consolidation,
    plan: SourcePlan,
    directory: Path,
    log: LogSettings,
    target: Dsn | None = None,
) -> SourceSettings:
    """The settings of a source; resolves where it is."""
    route = Route(
        resolve(source.dsn),
        target or resolve(consolidation.target),
        source_directory(directory, source.name),
        plan.naming,
        plan.filters(source),
    )
    slot = SlotSettings(source.slot, source.plugin)
    return SourceSettings(source.name, route, slot, consolidation.batch_seconds, log)
