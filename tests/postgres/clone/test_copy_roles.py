"""Roles between real servers: memberships arrive, whoever granted them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import wait_for

from millrace.clone.schema.roles import copy_roles
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.postgres.program.dump import dump_roles
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.wire.connect import connect
from millrace.route import Route

MADE = ("shop", "helper", "lead", "readers", '"the reader"', "alice")
MEMBERS = (
    "SELECT pg_get_userbyid(roleid)::text, pg_get_userbyid(member)::text, admin_option"
    " FROM pg_auth_members WHERE pg_get_userbyid(roleid) = 'readers' ORDER BY 1, 2"
)


@pytest.fixture
def shop() -> Iterator[Cluster]:
    """A server whose first superuser is not called postgres."""
    with open_cluster(16) as cluster:
        cluster.execute("CREATE ROLE helper SUPERUSER LOGIN")
        execute(
            cluster.uri(user="helper"),
            "ALTER ROLE postgres RENAME TO shop",
            "CREATE ROLE readers",
            "CREATE ROLE lead",
            'CREATE ROLE "the reader"',
            "CREATE ROLE alice",
            'GRANT readers TO "the reader"',
            "GRANT readers TO lead WITH ADMIN OPTION",
            "SET ROLE lead",
            "GRANT readers TO alice",
        )
        yield cluster


@pytest.fixture
def target(target_cluster: Cluster) -> Iterator[str]:
    execute(target_cluster.uri(), "CREATE ROLE shop", "CREATE ROLE lead")
    yield target_cluster.uri()
    execute(target_cluster.uri(), *(f"DROP ROLE IF EXISTS {name}" for name in MADE))


def test_memberships_arrive_although_their_grantor_may_not_grant_on_the_target(
    shop: Cluster, target: str, target_cluster: Cluster, tmp_path: Path
) -> None:
    source = shop.uri(user="helper")
    # By a superuser it does not have, and by a role that is not enrolled there.
    grantors = {
        row[0] for row in rows(source, "SELECT grantor::regrole::text FROM pg_auth_members")
    }
    assert {"shop", "lead"} <= grantors
    settings = CloneSettings(Route(Dsn.parse(source), Dsn.parse(target), tmp_path))
    with connect(Dsn.parse(target), "test") as connection:
        copy_roles(target_cluster.installation, settings, connection)
    assert rows(target, MEMBERS) == [("readers", "alice", False), ("readers", "the reader", False)]


def test_timeouts_of_the_source_do_not_end_the_reading_of_roles(source_cluster: Cluster) -> None:
    names = ("statement_timeout", "lock_timeout", "transaction_timeout", "idle_session_timeout")
    known = rows(source_cluster.uri(), f"SELECT name FROM pg_settings WHERE name IN {names}")
    source_cluster.execute("CREATE ROLE hasty SUPERUSER LOGIN")
    for (name,) in known:
        source_cluster.execute(f"ALTER ROLE hasty SET {name} = '100ms'")
    hasty = Dsn.parse(source_cluster.uri(user="hasty"))
    scripts: list[str] = []
    reading = threading.Thread(
        target=lambda: scripts.append(
            dump_roles(source_cluster.installation, hasty, passwords=False)
        )
    )
    try:
        with connect(Dsn.parse(source_cluster.uri()), "test") as blocker:
            with blocker.transaction():
                blocker.execute("LOCK TABLE pg_auth_members IN ACCESS EXCLUSIVE MODE")
                reading.start()
                wait_for(lambda: _waits_for_long(blocker) or not reading.is_alive())
            reading.join()
    finally:
        source_cluster.execute("DROP ROLE hasty")
    assert "CREATE ROLE hasty" in scripts[0]


def _waits_for_long(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Whether somebody has waited for a lock for longer than its timeout."""
    connection.execute("SELECT pg_stat_clear_snapshot()")
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE usename = 'hasty'"
        " AND wait_event_type = 'Lock' AND query_start < clock_timestamp() - interval '0.5s')"
    ).fetchone()
    return row == (True,)
