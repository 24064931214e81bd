"""REPLICA IDENTITY FULL on tables that have none: set for a stream, and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from millrace.config.dsn import Dsn
from millrace.errors import PreflightError, ServerError
from millrace.follow import replica_identity
from millrace.follow.publication import read_own_publications
from millrace.follow.published_table import read_published_tables
from millrace.follow.settings import SlotSettings
from millrace.follow.setup import open_slot_snapshot
from millrace.follow.slot import cleanup, create_stream
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.slot import read_slot
from millrace.route import Route

SCHEMA = """
CREATE TABLE keyed (id int PRIMARY KEY, v text);
CREATE TABLE bare (v text);
CREATE TABLE nothing (id int PRIMARY KEY, v text);
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
CREATE TABLE parted (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE made (a int NOT NULL, g int GENERATED ALWAYS AS (a * 2) STORED NOT NULL, v text);
CREATE UNIQUE INDEX made_g ON made (g);
ALTER TABLE made REPLICA IDENTITY USING INDEX made_g;
CREATE TABLE "Odd, name" (v text);
"""
VIRTUAL = "CREATE TABLE unseen (a int, g int GENERATED ALWAYS AS (a * 2) VIRTUAL, v text)"
SET = {"bare", "nothing", "parted", "parted_1", "Odd, name"}


class Server:
    """A database of one version, and the identities of its tables."""

    def __init__(self, uri: str, slot: str) -> None:
        self.dsn, self.uri, self.slot = Dsn.parse(uri), uri, slot
        with psycopg.connect(uri, autocommit=True) as connection:
            self.version = connection.info.server_version // 10000
            connection.execute(SCHEMA.encode())
            if self.version >= 18:
                connection.execute(VIRTUAL.encode())
        self.before = self.identities()

    def identities(self) -> dict[str, tuple[str, str | None]]:
        with psycopg.connect(self.uri) as connection:
            rows = connection.execute(
                "SELECT c.relname, c.relreplident, x.relname FROM pg_class c"
                " LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisreplident"
                " LEFT JOIN pg_class x ON x.oid = i.indexrelid"
                " WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace"
            ).fetchall()
        return {name: (identity, index) for name, identity, index in rows}

    def full(self) -> set[str]:
        return {name for name, (identity, _) in self.identities().items() if identity == "f"}

    @property
    def expected(self) -> set[str]:
        return SET | ({"made"} if self.version < 18 else set())

    def write(self) -> None:
        with psycopg.connect(self.uri, autocommit=True) as connection:
            for table in ("keyed", "bare", "nothing", "parted", "made", '"Odd, name"'):
                connection.execute(f"UPDATE {table} SET v = 'x'".encode())
                connection.execute(f"DELETE FROM {table}".encode())


@pytest.fixture(params=["system_cluster", "source_cluster", "target_cluster"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    cluster: Cluster = request.getfixturevalue(request.param)
    name = f"identity_{request.param}"
    opened = Server(cluster.create_database(name), f"slot_{name}")
    yield opened
    with connect(opened.dsn, "test") as connection:
        cleanup(connection, None, opened.slot)
    cluster.drop_database(name)


@pytest.mark.parametrize("plugin", ["pgoutput", "test_decoding"])
def test_tables_get_it_for_the_stream_and_lose_it_with_the_stream(
    server: Server, plugin: str
) -> None:
    if plugin == "test_decoding" and server.version != 15:
        pytest.skip("the servers of the wheel have no other plugin")
    created = create_stream(server.dsn, server.slot, plugin, identity_full=True)
    expected = server.expected - (set() if plugin == "pgoutput" else {"made"})
    assert server.full() == expected
    warned = {"unseen"} if server.version >= 18 else set()
    assert len(created.warnings) == len(warned) + 1  # of partitions that are added later
    server.write()
    with connect(server.dsn, "test") as connection:
        tables = read_published_tables(connection, plugin=plugin)
        assert {t.name for t in tables if not t.has_identity} == warned
        names = read_own_publications(connection)
        assert {slot for _, slot in names} == {server.slot}
        # What somebody has changed since stays.
        connection.execute("ALTER TABLE public.bare REPLICA IDENTITY NOTHING")
        removed = cleanup(connection, None, server.slot)
        assert read_own_publications(connection) == []
    assert 'REPLICA IDENTITY FULL of "public"."Odd, name"' in removed
    assert server.identities() == server.before | {"bare": ("n", None)}
    server.write()


def test_a_start_that_fails_takes_it_back(source_db: str, target_db: str, tmp_path: Path) -> None:
    server, target = Server(source_db, "slot_failing"), Server(target_db, "slot_target")
    settings = SlotSettings(server.slot, identity_full=True)
    seen: list[set[str]] = []

    def begin() -> None:
        with open_slot_snapshot(Route(server.dsn, target.dsn, tmp_path), settings):  # fmt: skip
            seen.append(server.full())
            # As the clone would leave it.
            with connect(target.dsn, "test") as connection:
                connection.execute("ALTER TABLE public.bare REPLICA IDENTITY FULL")
            raise RuntimeError("the copy failed")

    with pytest.raises(RuntimeError):
        begin()
    assert seen == [server.expected]
    assert server.identities() == server.before
    assert target.identities() == target.before
    with connect(server.dsn, "test") as connection:
        assert read_slot(connection, server.slot) is None


def test_a_table_that_stays_locked_is_told_and_the_rest_is_put_back(
    source_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.follow.slot_making import making_slot

    server = Server(source_db, "slot_locked")
    monkeypatch.setattr(replica_identity, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(replica_identity, "LOCK_PAUSE_SECONDS", 0.01)
    with psycopg.connect(source_db) as reader:
        reader.execute("SELECT FROM parted_1")
        with (
            pytest.raises(ServerError, match=r'"public"\."parted_1" was locked by others'),
            making_slot(tmp_path, server.dsn, server.slot),
        ):
            create_stream(server.dsn, server.slot, "pgoutput", identity_full=True)
    assert server.identities() == server.before
    with connect(server.dsn, "test") as connection:
        assert read_own_publications(connection) == []


def test_a_role_that_may_not_is_told(source_db: str) -> None:
    server = Server(source_db, "slot_role")
    name = f"stranger_{server.dsn.parameters['dbname']}"
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN".encode())
        try:
            with connect(server.dsn, "test") as owner:
                tables = read_published_tables(owner)
                owner.execute(f"CREATE PUBLICATION {publication_names(server.slot)[1]}".encode())
            with (
                connect(server.dsn.with_(user=name), "test") as stranger,
                pytest.raises(PreflightError, match="may not change the replica identity"),
            ):
                replica_identity.set_full(stranger, server.slot, tables)
        finally:
            connection.execute(f"DROP ROLE {name}".encode())
