"""Publications that can't break the source's statements, whatever its tables are like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from millrace.config.dsn import Dsn
from millrace.errors import PreflightError
from millrace.follow.publication import create_publications, find_unpublished, read_publications
from millrace.follow.published_table import PublishedTable, read_published_tables
from millrace.follow.slot import create_stream
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect

Connection = psycopg.Connection[tuple[Any, ...]]

GENERATED = "int GENERATED ALWAYS AS (a * 2)"
SCHEMA = f"""
CREATE TABLE keyed (id int PRIMARY KEY, v text);
CREATE TABLE bare (v text);
CREATE TABLE is_full (v text);
ALTER TABLE is_full REPLICA IDENTITY FULL;
CREATE TABLE by_index (a int NOT NULL UNIQUE, v text);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_a_key;
CREATE TABLE nothing (id int PRIMARY KEY, v text);
ALTER TABLE nothing REPLICA IDENTITY NOTHING;
CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, v text);
CREATE TABLE parent (id int PRIMARY KEY, v text);
CREATE TABLE child () INHERITS (parent);
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_bare (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_bare_1 PARTITION OF parted_bare FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_full (id int, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_full_1 PARTITION OF parted_full FOR VALUES FROM (0) TO (10);
ALTER TABLE parted_full REPLICA IDENTITY FULL;
ALTER TABLE parted_full_1 REPLICA IDENTITY FULL;
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, v text);
CREATE SCHEMA "Odd, name";
CREATE TABLE "Odd, name".t (id int PRIMARY KEY, v text);
CREATE TABLE made_key (a int, g {GENERATED} STORED NOT NULL, v text, PRIMARY KEY (a, g));
CREATE TABLE made_index (a int NOT NULL, g {GENERATED} STORED NOT NULL, v text);
CREATE UNIQUE INDEX made_index_g ON made_index (g);
ALTER TABLE made_index REPLICA IDENTITY USING INDEX made_index_g;
CREATE TABLE made_beside (a int PRIMARY KEY, g {GENERATED} STORED, v text);
CREATE TABLE made_full (a int, g {GENERATED} STORED, v text);
ALTER TABLE made_full REPLICA IDENTITY FULL;
"""
VIRTUAL = f"""
CREATE TABLE unseen_beside (a int PRIMARY KEY, g {GENERATED} VIRTUAL, v text);
CREATE TABLE unseen_full (a int, g {GENERATED} VIRTUAL, v text);
ALTER TABLE unseen_full REPLICA IDENTITY FULL;
CREATE TABLE unseen_bare (a int, g {GENERATED} VIRTUAL, v text);
"""
WITHOUT_IDENTITY = {"bare", "nothing", "deferred", "child", "parted_bare"}
WITH_IDENTITY = {"keyed", "is_full", "by_index", "parent", "parted", "parted_full_1", "t"}
WITH_IDENTITY |= {"made_beside", "made_full"}
GENERATED_KEYS = {"made_key", "made_index"}
STATEMENTS = ("INSERT INTO {} ({}) VALUES (1)", "UPDATE {} SET v = 'x'", "DELETE FROM {}")


@dataclass
class Server:
    """A database of one version, with every kind of table."""

    uri: str
    version: int
    slot: str

    @property
    def with_identity(self) -> set[str]:
        if self.version < 18:
            return WITH_IDENTITY
        return WITH_IDENTITY | GENERATED_KEYS | {"unseen_beside"}

    @property
    def without_identity(self) -> set[str]:
        if self.version < 18:
            return WITHOUT_IDENTITY | GENERATED_KEYS
        return WITHOUT_IDENTITY | {"unseen_full", "unseen_bare"}


@pytest.fixture(params=["system_cluster", "source_cluster", "target_cluster"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    cluster: Cluster = request.getfixturevalue(request.param)
    name = f"published_{request.param}"
    uri = cluster.create_database(name)
    with psycopg.connect(uri, autocommit=True) as connection:
        version = connection.info.server_version // 10000
        connection.execute(SCHEMA.encode())
        if version >= 18:
            connection.execute(VIRTUAL.encode())
    yield Server(uri, version, f"slot_{name}")
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
    cluster.drop_database(name)


def write_everywhere(connection: Connection) -> int:
    """Each statement on each table; the number of tables."""
    names = connection.execute(
        "SELECT c.oid::regclass::text, a.attname FROM pg_class c JOIN pg_attribute a"
        " ON a.attrelid = c.oid AND a.attnum = 1 WHERE c.relkind IN ('r', 'p')"
        " AND c.oid >= 16384 AND c.relnamespace <> 'pg_toast'::regnamespace"
    ).fetchall()
    for table, first in names:
        for statement in (*STATEMENTS, "TRUNCATE {} CASCADE"):
            connection.execute(statement.format(table, first).encode())
    return len(names)


def test_every_statement_of_the_source_continues_to_work(server: Server) -> None:
    """The oracle: each of them on every table, before and after."""
    with psycopg.connect(server.uri, autocommit=True) as connection:
        before = write_everywhere(connection)
        created = create_stream(Dsn.parse(server.uri), server.slot, "pgoutput")
        assert write_everywhere(connection) == before
        published = read_publications(connection, server.slot)
        names = dict(connection.execute("SELECT oid::int8, relname FROM pg_class").fetchall())
    assert published.is_for_all
    assert {names[oid] for oid in published.whole} == server.with_identity
    assert not published.inserts
    warnings = "\n".join(created.warnings)
    assert 'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL' in warnings
    assert '"public"."parted_full" has no primary key: set REPLICA IDENTITY FULL' in warnings
    assert len(created.warnings) == len(server.without_identity) + 1
    if server.version >= 18:
        assert '"public"."unseen_bare" REPLICA IDENTITY FULL' not in warnings
    else:
        assert '"public"."made_key" has a generated column in its key' in warnings


def test_what_a_warning_says_to_do_makes_the_table_whole(server: Server) -> None:
    with connect(Dsn.parse(server.uri), "test") as connection:
        for table in read_published_tables(connection):
            if not table.has_identity and not table.is_full_refused and not table.is_partitioned:
                statement = f"ALTER TABLE {table.label} REPLICA IDENTITY FULL"
                assert statement in (table.warning() or "")
                connection.execute(statement.encode())
        left = {t.name for t in read_published_tables(connection) if not t.has_identity}
        assert left == {"parted_bare"} | ({"unseen_full", "unseen_bare"} & server.without_identity)
        create_publications(connection, server.slot)
        write_everywhere(connection)


@pytest.fixture
def owner(server: Server) -> Iterator[str]:
    """A role that owns the tables, and may not publish all."""
    name = f"owner_{server.version}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN REPLICATION".encode())
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {name}".encode())
        connection.execute(f"GRANT ALL ON SCHEMA public TO {name}".encode())
        for kind in ("public", '"Odd, name"'):
            connection.execute(f"ALTER SCHEMA {kind} OWNER TO {name}".encode())
        for (table,) in connection.execute(
            "SELECT oid::regclass::text FROM pg_class WHERE relkind IN ('r', 'p')"
            " AND oid >= 16384 AND relnamespace <> 'pg_toast'::regnamespace"
        ).fetchall():
            connection.execute(f"ALTER TABLE {table} OWNER TO {name}".encode())
    yield name
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"REASSIGN OWNED BY {name} TO CURRENT_USER".encode())
        connection.execute(f"DROP OWNED BY {name}".encode())
        connection.execute(f"DROP ROLE {name}".encode())


def test_a_role_without_the_right_to_publish_all_lists_tables(server: Server, owner: str) -> None:
    dsn = Dsn.parse(server.uri).with_(user=owner)
    with connect(dsn, "test") as connection:
        create_publications(connection, server.slot)
        write_everywhere(connection)
        published = read_publications(connection, server.slot)
        names = dict(connection.execute("SELECT oid::int8, relname FROM pg_class").fetchall())
    assert not published.is_for_all
    assert {names[oid] for oid in published.whole} == server.with_identity
    # Inserts of its later partitions are sent, too.
    assert {names[oid] for oid in published.inserts} == server.without_identity | {"parted_full"}


def test_a_role_that_owns_nothing_is_told_what_it_takes(server: Server) -> None:
    name = f"stranger_{server.version}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        database = connection.info.dbname
        connection.execute(f"CREATE ROLE {name} LOGIN REPLICATION".encode())
        try:
            dsn = Dsn.parse(server.uri).with_(user=name)
            for _ in range(2):
                with connect(dsn, "test") as stranger:
                    with pytest.raises(PreflightError, match=f"{name} may not make") as caught:
                        create_publications(stranger, server.slot)
                    assert f'GRANT CREATE ON DATABASE "{database}"' in caught.value.hint
                connection.execute(f"GRANT CREATE ON DATABASE {database} TO {name}".encode())
        finally:
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())


def test_tables_that_came_after_the_publications_are_found(server: Server) -> None:
    with connect(Dsn.parse(server.uri), "test") as connection:

        def unpublished() -> set[str]:
            return {table.name for table in find_unpublished(connection, server.slot)}

        create_publications(connection, server.slot)
        assert unpublished() == set()
        connection.execute("SET search_path = public")
        connection.execute("CREATE TABLE late (id int PRIMARY KEY); CREATE TABLE late_bare (a int)")
        connection.execute("ALTER TABLE bare REPLICA IDENTITY FULL")
        connection.execute("DROP TABLE keyed; CREATE TABLE keyed (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE late_child (PRIMARY KEY (id)) INHERITS (parent)")
        assert unpublished() == {"late", "bare", "keyed", "late_child"}
        for name in publication_names(server.slot):
            connection.execute(f"DROP PUBLICATION {name}".encode())
        keyed = connection.execute("SELECT 'parted'::regclass::oid::int8").fetchone()
        assert keyed is not None
        create_publications(connection, server.slot, keyed)
        assert not read_publications(connection, server.slot).is_for_all
        assert len(find_unpublished(connection, server.slot, keyed)) == 0


def test_a_warning_names_what_is_in_the_way() -> None:
    table = PublishedTable(1, "s", "t", False, False, False, is_full_refused=True)
    assert "add a primary key" in (table.warning() or "")
