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
from millrace.consolidate.config import Consolidation, Ddl, Indexes, SourceConfig, Views
from millrace.consolidate.hash_key import find_key, rules_with_key, with_key
from millrace.consolidate.plan import SourcePlan
from millrace.consolidate.registry import source_directory
from millrace.ddl.decide import Choices
from millrace.ddl.settings import DdlSettings
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.log import LogSettings
from millrace.postgres.wire.connect import resolve
from millrace.route import Route

# The roles, privileges and properties of thirty databases are not those of the analysts' one.
SCHEMA = SchemaSettings(no_owner=True, no_acl=True, no_tablespaces=True)


# Nobody draws from the target's sequences.
SEQUENCE_SECONDS = 300.0


@dataclass(frozen=True)
class SourceSettings:
    """One source, with everything that was decided for it."""

    name: str
    route: Route
    slot: SlotSettings
    batch_seconds: float
    # How many workers apply its changes.
    workers: int
    log: LogSettings
    ddl: DdlSettings | None = None

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
            apply_jobs=self.workers,
            is_strict=True,
            is_one_of_many=True,
            one_by_one=one_by_one,
            batch_seconds=self.batch_seconds,
            sequence_seconds=SEQUENCE_SECONDS,
            # Others wait for the worker.
            stay_seconds=0.0,
            left=read_left(self.route.source, self.route.filters),
            ddl=self.ddl,
            log=self.log,
        )


def source_settings(
    source: SourceConfig,
    consolidation: Consolidation,
    plan: SourcePlan,
    directory: Path,
    log: LogSettings,
    target: Dsn | None = None,
    *,
    makes_key: bool = True,
) -> SourceSettings:
    """The settings of a source; resolves where it is."""
    key = find_key(consolidation, source, directory, makes=makes_key)
    route = Route(
        with_key(resolve(source.dsn), key),
        target or resolve(consolidation.target),
        source_directory(directory, source.name),
        plan.naming,
        rules_with_key(plan.filters(source), key),
    )
    ddl = ddl_settings(source, consolidation, plan) if source.ddl is Ddl.REPLAY else None
    slot = SlotSettings(source.slot, source.plugin, ddl=ddl is not None)
    return SourceSettings(
        source.name, route, slot, consolidation.batch_seconds, plan.workers, log, ddl
    )


def ddl_settings(
    source: SourceConfig, consolidation: Consolidation, plan: SourcePlan
) -> DdlSettings:
    """What is replayed is what a base copy would have."""
    choices = Choices(
        plan.filters(source),
        frozenset(old for old, new in source.schemas.items() if not new),
        has_views=source.views is Views.KEEP,
        has_all_indexes=source.indexes is Indexes.ALL,
    )
    return DdlSettings(source.name, choices, consolidation.readers)
