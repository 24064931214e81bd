"""Owners of schemas that the target has: set where that is possible, told where it is not."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from tests.fixtures.sql import execute, rows

from millrace.clone.schema.database import set_schema_owners
from millrace.config.dsn import Dsn
from millrace.postgres.catalog import describe
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect

OWNERS = (
    "SELECT nspname::text, pg_get_userbyid(nspowner)::text FROM pg_namespace"
    " WHERE nspname IN ('public', 'shared') ORDER BY 1"
)


@pytest.fixture
def roles(target_cluster: Cluster, target_db: str) -> Iterator[str]:
    execute(
        target_db,
        "CREATE ROLE new_owner",
        "CREATE ROLE plain_user LOGIN IN ROLE new_owner",
        "CREATE SCHEMA shared",
    )
    yield target_db
    execute(
        target_db, "DROP OWNED BY new_owner, plain_user CASCADE", "DROP ROLE plain_user, new_owner"
    )


def test_owner_is_set_if_the_target_has_the_role(
    roles: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(Dsn.parse(roles), "test") as target:
        set_schema_owners(target, {"public": "new_owner", "shared": "missing one", "gone": "x"})
    assert rows(roles, OWNERS) == [("public", "new_owner"), ("shared", "postgres")]
    (warning,) = caplog.records
    assert "schema shared stays with postgres" in warning.getMessage()
    assert "missing one" in warning.getMessage()


def test_owner_that_may_not_be_set_is_a_warning(
    roles: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(Dsn.parse(roles).with_(user="plain_user"), "test") as target:
        set_schema_owners(target, {"shared": "new_owner"})
    assert ("shared", "postgres") in rows(roles, OWNERS)
    (warning,) = caplog.records
    assert "must be owner of schema shared" in warning.getMessage()


def test_public_schema_as_initdb_made_it_has_no_owner_to_restore(source_db: str) -> None:
    execute(source_db, "CREATE SCHEMA shared")

    def owners() -> dict[str, str]:
        with connect(Dsn.parse(source_db), "test") as source:
            names = catalog.read_schemas(source)
            return {names[oid]: owner for oid, owner in catalog.read_schema_owners(source).items()}

    assert owners() == {"shared": "postgres"}
    execute(source_db, "ALTER SCHEMA public OWNER TO postgres")
    assert owners() == {"public": "postgres", "shared": "postgres"}


def test_public_schema_as_initdb_made_it_is_described_alike_before_and_since_15(
    source_db: str,
) -> None:
    def owner(server_version: int) -> str:
        with psycopg.connect(source_db) as connection:
            (found,) = connection.execute(describe._schemas(server_version)).fetchall()
            return str(found[7])

    # What 14 asks is asked of 16: there, public can be the first superuser's as well.
    assert (owner(140000), owner(160000)) == ("pg_database_owner", "as initdb made it")
    execute(source_db, "ALTER SCHEMA public OWNER TO postgres")
    assert (owner(140000), owner(160000)) == ("as initdb made it", "postgres")
