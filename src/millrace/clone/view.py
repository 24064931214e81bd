"""What a run sees of its source: a snapshot and what was read under it.

Invariant: rows are read under the snapshot that the run was planned under, unless the user vouches
that nobody writes. A run that has read every row needs none any more: it sees what it has kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from millrace.clone.settings import CloneSettings
from millrace.clone.source import read_source
from millrace.config.dsn import Dsn
from millrace.errors import SnapshotLost, WorkDirError
from millrace.filter.apply import read_decision
from millrace.filter.decide import Decision
from millrace.postgres.catalog.relations import read_sequences
from millrace.postgres.wire.connect import connect, translated
from millrace.relation import Sequence, SourceCatalog
from millrace.snapshot.export import HeldSnapshot, ReleasedSnapshot, open_snapshot
from millrace.snapshot.holder import SnapshotHolder

log = logging.getLogger(__name__)

# A table truncated between snapshot and lock makes the snapshot useless for it; take a new one.
SNAPSHOT_ATTEMPTS = 5
WAYS_OUT = (
    "two ways out: start over with --restart; or, if nobody has written to the source since, "
    "continue with --resume --not-consistent"
)
WAYS_OUT_OF_A_STREAM = (
    "rows read under another snapshot would not fit the stream of this directory: start over "
    "with clone --follow --restart"
)


@dataclass(frozen=True)
class View:
    """The source as a run sees it."""

    snapshot: HeldSnapshot | ReleasedSnapshot
    catalog: SourceCatalog
    decision: Decision


def open_view(
    settings: CloneSettings,
    snapshot_id: str | None,
    target_encoding: str,
    renew: Callable[[], str] | None = None,
) -> View:
    """Under a snapshot in which every table is locked and none was rewritten since. `renew`
    makes another process hold a new one; without it, it is exported here."""
    given = snapshot_id
    for attempt in range(1, SNAPSHOT_ATTEMPTS + 1):
        if given is None and renew is not None:
            given = renew()
        snapshot = _open_snapshot(settings, given)
        try:
            log.info("using snapshot %s", snapshot.id)
            decision = read_decision(snapshot.connection, settings.filters)
            catalog = read_source(
                snapshot.connection, settings, decision, target_encoding=target_encoding
            )
            if not catalog.rewritten:
                return View(snapshot, catalog, decision)
            names = ", ".join(catalog.rewritten[:5])
            is_fixed = given is not None and renew is None and not settings.not_consistent
            if is_fixed or attempt == SNAPSHOT_ATTEMPTS:
                raise SnapshotLost(
                    f"truncated or rewritten after the snapshot was taken: {names}",
                    hint="take a new one when no TRUNCATE or ALTER TABLE runs on the source",
                )
        except BaseException:
            snapshot.close()
            raise
        snapshot.close()
        given = None
        log.warning("truncated or rewritten meanwhile, taking a new snapshot: %s", names)
    raise AssertionError("unreachable")


def kept_view(
    settings: CloneSettings, snapshot_id: str, catalog: SourceCatalog, decision: Decision
) -> View:
    """Without a snapshot, for a run that has every row."""
    log.info("every row is copied: the run continues without snapshot %s", snapshot_id)
    sequences = _as_of_now(settings.source, catalog.sequences)
    return View(ReleasedSnapshot(snapshot_id), replace(catalog, sequences=sequences), decision)


def choose_snapshot(
    settings: CloneSettings, setup: dict[str, Any] | None, held: SnapshotHolder | None
) -> str | None:
    """The snapshot to take part in; None to export one."""
    given = settings.snapshot or (held.id if held else None)
    if settings.not_consistent:
        return given
    before = setup["snapshot"] if setup else None
    if before and given and before != given:
        raise WorkDirError(
            f"{settings.directory} was set up for snapshot {before}, now it is {given}",
            hint=f"use the same snapshot; if that is gone, {WAYS_OUT}",
            field="snapshot",
        )
    return given or before


def _open_snapshot(settings: CloneSettings, given: str | None) -> HeldSnapshot:
    """With --not-consistent, any other is as good as one that is gone."""
    try:
        return open_snapshot(settings.source, given)
    except SnapshotLost as error:
        if not settings.not_consistent:
            error.hint = WAYS_OUT
            raise
        log.warning("snapshot %s is gone; --not-consistent: taking a new one", given)
    return open_snapshot(settings.source)


def _as_of_now(source: Dsn, sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    """Sequences know no snapshot: as they are now, they are not behind the copied rows. One
    that the source has no more stays as it was."""
    with connect(source, "sequences") as connection, translated("reading the source's sequences"):
        now = {sequence.oid: sequence for sequence in read_sequences(connection)}
    return tuple(
        replace(one, last_value=now[one.oid].last_value, is_called=now[one.oid].is_called)
        if one.oid in now
        else one
        for one in sequences
    )
