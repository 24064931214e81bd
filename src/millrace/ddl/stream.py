"""A stream whose DDL is replayed: what its tasks get for it, and what the target needs.

Invariant: our tables are on the target before a task needs them; tasks make none, because their
transactions are the application's.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from millrace.apply import table_state
from millrace.apply.task import ApplyTask
from millrace.config.dsn import Dsn
from millrace.ddl import history
from millrace.ddl.capture import LeftOut, install, is_installed
from millrace.ddl.replay import Replay
from millrace.ddl.settings import DdlSettings
from millrace.filter.rules import FilterRules
from millrace.name import Naming
from millrace.postgres.wire.connect import connect

log = logging.getLogger(__name__)


def with_ddl(task: ApplyTask, settings: DdlSettings, slot: str, naming: Naming) -> ApplyTask:
    """The task, and our tables on its target."""
    with connect(task.target, "setup") as connection:
        history.install(connection)
        table_state.install(connection)
    structure = Replay(task.stream, slot, settings.name, naming, settings.choices, settings.readers)
    return replace(task, structure=structure)


def begin_capture(source: Dsn, slot: str, filters: FilterRules) -> bool:
    """Capture DDL from now on; False if that is done already, because it was begun with the
    slot."""
    with connect(source, "setup") as connection:
        if is_installed(connection, slot):
            return False
        install(connection, slot, LeftOut.of(filters))
    log.warning("DDL of the source is captured from now on, and was not before")
    return True
