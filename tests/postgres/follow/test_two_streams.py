"""Two streams into one target: each ends sessions of its own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from millrace.apply.position import drop_position, open_position, setup_position
from millrace.apply.task import apply_role
from millrace.config.dsn import Dsn
from millrace.engine import Engine
from millrace.follow.settings import FollowSettings
from millrace.follow.stream import open_catchup
from millrace.postgres.origin import stream_name
from millrace.postgres.wire.libpq import execute, open_session
from millrace.route import Route
from millrace.workdir.sentinel import Sentinel, StreamSetup

SOURCE = "postgresql://one/shop"
OTHER = "postgresql://two/shop"


@pytest.mark.parametrize(
    ("slot", "other_slot", "other_source"),
    [
        ("shop", "shop2", SOURCE),
        ("shop2", "shop", SOURCE),
        ("sho_", "shop", SOURCE),
        ("millrace", "millrace", OTHER),
        ("s" * 60 + "_a", "s" * 60 + "_b", SOURCE),
    ],
)
def test_a_stream_that_begins_ends_no_session_of_another(
    target_db: str, tmp_path: Path, slot: str, other_slot: str, other_source: str
) -> None:
    dsn = Dsn.parse(target_db)
    own, other = stream_name(SOURCE, slot, 16), stream_name(other_source, other_slot, 16)
    with psycopg.connect(target_db, autocommit=True) as target:
        left_behind, at_work = (_open_worker(target, dsn, name) for name in (own, other))
        try:
            _begin(dsn, slot, tmp_path)
            assert execute(at_work, "SELECT 1")
            # The position is free again.
            session = open_session(dsn, "test", "UTF8")
            open_position("origin", own).take(session)
            session.finish()
        finally:
            at_work.finish()
            left_behind.finish()
            for name in (own, other):
                drop_position(target, name)


def _open_worker(target: Any, dsn: Dsn, name: str) -> Any:
    """A session as a task opens it, with the stream's position in hand."""
    setup_position(target, name, 16)
    session = open_session(dsn, apply_role(name), "UTF8")
    open_position("origin", name).take(session)
    return session


def _begin(dsn: Dsn, slot: str, directory: Path) -> None:
    setup = StreamSetup(SOURCE, slot, "pgoutput", "UTF8", 16)
    settings = FollowSettings(Route(Dsn.parse(SOURCE), dsn, directory))
    engine = cast(Engine, SimpleNamespace(is_local=True))
    with Sentinel(directory) as sentinel:
        sentinel.write_setup(setup)
        with closing(open_catchup(settings, setup, engine, sentinel)):
            pass
