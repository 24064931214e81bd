"""Roles between real servers: memberships arrive, whoever granted them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.sql import execute, rows

from millrace.clone.roles import copy_roles
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.postgres.connect import connect
from millrace.postgres.embedded import Cluster, open_cluster

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
    settings = CloneSettings(Dsn.parse(source), Dsn.parse(target), tmp_path)
    with connect(Dsn.parse(target), "test") as connection:
        copy_roles(target_cluster.installation, settings, connection)
    assert rows(target, MEMBERS) == [("readers", "alice", False), ("readers", "the reader", False)]
