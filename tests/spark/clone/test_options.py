"""Every option of a clone, by what is different with it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.cloning import DEPOT, Cloner, assert_equal_data
from tests.fixtures.sql import execute, rows

from millrace.clone.progress import Progress
from millrace.clone.run import clone
from millrace.clone.schema.entries import SchemaSettings
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import PreflightError
from millrace.postgres.program.embedded import Cluster
from millrace.route import Route
from millrace.spark.session import Engine

Rows = list[tuple[Any, ...]]


class Silent:
    """A reporter that shows nothing."""

    def update(self, progress: Progress) -> None:
        return


# One fact for each option: what an option does to its own, and that it leaves the others alone.

CABINET = """
CREATE SCHEMA cabinet AUTHORIZATION cabinet_owner;
CREATE COLLATION cabinet.bytewise (provider = libc, locale = 'C');
CREATE TABLE cabinet.drawers (id int PRIMARY KEY, label text NOT NULL);
INSERT INTO cabinet.drawers SELECT i, 'drawer ' || i FROM generate_series(1, 40) AS i;
CREATE INDEX drawers_label ON cabinet.drawers (label) TABLESPACE cabinet_space;
CREATE TABLE cabinet.spare (id int PRIMARY KEY USING INDEX TABLESPACE cabinet_space)
    TABLESPACE cabinet_space;
CREATE FUNCTION cabinet.knock() RETURNS text LANGUAGE sql AS 'SELECT ''come in''::text';
ALTER TABLE cabinet.drawers OWNER TO cabinet_owner;
ALTER FUNCTION cabinet.knock OWNER TO cabinet_owner;
GRANT USAGE ON SCHEMA cabinet TO cabinet_reader;
GRANT SELECT ON cabinet.drawers TO cabinet_reader;
REVOKE EXECUTE ON FUNCTION cabinet.knock FROM PUBLIC;
COMMENT ON TABLE cabinet.drawers IS 'where things are';
COMMENT ON INDEX cabinet.drawers_label IS 'on an index built by us';
COMMENT ON CONSTRAINT drawers_pkey ON cabinet.drawers IS 'on a constraint built by us';
SELECT lo_from_bytea(7001, '\\x00ff'), lo_from_bytea(7002, 'second');
COMMENT ON LARGE OBJECT 7001 IS 'a large comment';
ALTER LARGE OBJECT 7001 OWNER TO cabinet_owner;
GRANT SELECT ON LARGE OBJECT 7001 TO cabinet_reader;
CREATE EXTENSION vector;
COMMENT ON EXTENSION vector IS 'arrows';
DO $$ BEGIN
    EXECUTE format('COMMENT ON DATABASE %I IS %L', current_database(), 'the whole cabinet');
    EXECUTE format('ALTER DATABASE %I SET work_mem = %L', current_database(), '5MB');
END $$;
"""

FACTS = {
    "owners": """
        SELECT nspname, pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'cabinet'
        UNION ALL SELECT relname, pg_get_userbyid(relowner) FROM pg_class
        WHERE relname IN ('drawers', 'drawers_label', 'spare')
        UNION ALL SELECT proname, pg_get_userbyid(proowner) FROM pg_proc WHERE proname = 'knock'
        UNION ALL SELECT oid::text, pg_get_userbyid(lomowner) FROM pg_largeobject_metadata
        WHERE oid = 7001""",
    "acl": """
        SELECT name, grantee, privilege_type FROM (
            SELECT nspname, nspowner, nspacl FROM pg_namespace WHERE nspname = 'cabinet'
            UNION ALL SELECT relname, relowner, relacl FROM pg_class WHERE relname = 'drawers'
            UNION ALL SELECT proname, proowner, coalesce(proacl, acldefault('f', proowner))
            FROM pg_proc WHERE proname = 'knock'
            UNION ALL SELECT oid::text, lomowner, lomacl FROM pg_largeobject_metadata
        ) AS o (name, owner, acl), LATERAL (
            SELECT coalesce(rolname, 'PUBLIC') AS grantee, privilege_type
            FROM aclexplode(acl) AS a LEFT JOIN pg_roles AS r ON r.oid = a.grantee
            WHERE a.grantee <> owner) AS a""",
    "comments": """
        SELECT classoid::regclass::text, description FROM pg_description
        WHERE objoid >= 16384 AND classoid NOT IN ('pg_extension'::regclass, 'pg_am'::regclass)
        UNION ALL SELECT classoid::regclass::text, description FROM pg_description
        WHERE classoid = 'pg_largeobject'::regclass
        UNION ALL SELECT 'pg_database', description FROM pg_shdescription
        WHERE objoid = (SELECT oid FROM pg_database WHERE datname = current_database())""",
    "tablespaces": """
        SELECT relname, spcname FROM pg_class AS c JOIN pg_tablespace AS t ON t.oid = reltablespace
        WHERE relname ~ '^(drawers|spare)'""",
    "large objects": "SELECT oid::int8, lo_get(oid) FROM pg_largeobject_metadata",
    "extensions": "SELECT extname FROM pg_extension",
    "extension comments": """
        SELECT obj_description(oid, 'pg_extension') FROM pg_extension WHERE extname = 'vector'""",
    "collations": "SELECT collname FROM pg_collation WHERE oid >= 16384",
    # The tables are too small for autovacuum.
    "statistics": """
        SELECT DISTINCT starelid::regclass::text FROM pg_statistic WHERE starelid >= 16384""",
    "database properties": """
        SELECT setconfig FROM pg_db_role_setting
        WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())""",
    "rows": "SELECT id, label FROM cabinet.drawers",
    "indexes": "SELECT indexname FROM pg_indexes WHERE schemaname = 'cabinet'",
}


def facts(uri: str) -> dict[str, Rows]:
    return {name: sorted(rows(uri, query)) for name, query in FACTS.items()}


@pytest.fixture(scope="module")
def cabinet(source_cluster: Cluster, target_cluster: Cluster) -> Iterator[str]:
    """The database, and on both servers the roles and the tablespace it needs."""
    for cluster in (source_cluster, target_cluster):
        space = cluster.socket_dir / "cabinet_space"
        make_folder(space, cluster)
        execute(
            cluster.uri(),
            "CREATE ROLE cabinet_owner",
            "CREATE ROLE cabinet_reader",
            f"CREATE TABLESPACE cabinet_space LOCATION '{space}'",
        )
    uri = source_cluster.create_database("cabinet")
    execute(uri, CABINET)
    yield uri
    source_cluster.drop_database("cabinet")
    for cluster in (source_cluster, target_cluster):
        execute(
            cluster.uri(),
            "DROP TABLESPACE cabinet_space",
            "DROP ROLE cabinet_owner",
            "DROP ROLE cabinet_reader",
        )


def make_folder(path: Path, cluster: Cluster) -> None:
    """A folder that belongs to the account the server runs under, and goes when it goes."""
    path.mkdir()
    owner = cluster.socket_dir.stat()
    os.chown(path, owner.st_uid, owner.st_gid)


@pytest.fixture(scope="module")
def plain(
    cabinet: str,
    target_cluster: Cluster,
    engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Rows]]:
    """What a clone without options brings."""
    target = target_cluster.create_database("cabinet_plain")
    directory = tmp_path_factory.mktemp("cabinet")
    clone(CloneSettings(Route(Dsn.parse(cabinet), Dsn.parse(target), directory)), engine, Silent())
    yield facts(target)
    target_cluster.drop_database("cabinet_plain")


def test_clone_without_options_brings_everything(cabinet: str, plain: dict[str, Rows]) -> None:
    there = facts(cabinet)
    assert {name: there[name] for name in there if name != "statistics"} == {
        name: plain[name] for name in plain if name != "statistics"
    }
    assert all(plain.values())


def without(word: str) -> Callable[[Rows], Rows]:
    return lambda before: [row for row in before if word not in row]


def nothing(_: Rows) -> Rows:
    return []


def all_mine(before: Rows) -> Rows:
    return [(name, "postgres") for name, _ in before]


VECTOR_OWN_COMMENT = [("vector data type and ivfflat and hnsw access methods",)]

# Which facts change, and into what.
CHANGES: dict[str, dict[str, Callable[[Rows], Rows]]] = {
    "no_owner": {"owners": all_mine},
    "no_acl": {"acl": lambda _: [("knock", "PUBLIC", "EXECUTE")]},
    "no_comments": {"comments": nothing, "extension comments": lambda _: VECTOR_OWN_COMMENT},
    "no_tablespaces": {"tablespaces": nothing},
    "skip_extensions": {"extensions": without("vector"), "extension comments": nothing},
    "skip_extension_comments": {"extension comments": lambda _: VECTOR_OWN_COMMENT},
    "skip_collations": {"collations": nothing},
    "skip_large_objects": {
        "large objects": nothing,
        "owners": without("7001"),
        "acl": without("7001"),
        "comments": without("pg_largeobject"),
    },
    "skip_vacuum": {"statistics": nothing},
    "skip_database_properties": {
        "database properties": nothing,
        "comments": without("pg_database"),
    },
}


@pytest.mark.parametrize("option", CHANGES)
def test_option_leaves_out_what_it_names_and_nothing_else(
    cabinet: str, plain: dict[str, Rows], target_db: str, cloner: Cloner, option: str
) -> None:
    if hasattr(SchemaSettings, option):
        cloner(cabinet, target_db, schema=SchemaSettings(**{option: True}))
    else:
        cloner(cabinet, target_db, **{option: True})
    expected = plain | {name: change(plain[name]) for name, change in CHANGES[option].items()}
    assert facts(target_db) == expected


def test_no_tablespaces_needs_no_tablespace_on_the_target(
    cabinet: str, target_db: str, target_cluster: Cluster, cloner: Cloner
) -> None:
    execute(target_cluster.uri(), "ALTER TABLESPACE cabinet_space RENAME TO another_space")
    try:
        with pytest.raises(PreflightError, match="tablespace cabinet_space does not exist"):
            cloner(cabinet, target_db)
        cloner(cabinet, target_db, schema=SchemaSettings(no_tablespaces=True))
    finally:
        execute(target_cluster.uri(), "ALTER TABLESPACE another_space RENAME TO cabinet_space")
    assert rows(target_db, "SELECT count(*) FROM cabinet.drawers") == [(40,)]


def test_skip_extensions_uses_the_one_that_the_target_has(
    source_db: str, target_db: str, cloner: Cloner, engine: Engine
) -> None:
    execute(
        source_db,
        "CREATE EXTENSION vector",
        "CREATE TABLE points (id int PRIMARY KEY, at vector(3))",
        "INSERT INTO points SELECT i, format('[%s,%s,0.1]', i, i / 7.0)::vector"
        " FROM generate_series(1, 500) AS i",
        "CREATE INDEX nearest ON points USING hnsw (at vector_l2_ops)",
    )
    execute(target_db, "CREATE SCHEMA ext", "CREATE EXTENSION vector SCHEMA public")
    result = cloner(source_db, target_db, schema=SchemaSettings(skip_extensions=True))
    assert result.summary is not None
    assert [table.format for table in result.summary.tables] == ["text"]
    assert_equal_data(source_db, target_db, engine)
    assert rows(target_db, "SELECT indexdef FROM pg_indexes WHERE indexname = 'nearest'") == rows(
        source_db, "SELECT indexdef FROM pg_indexes WHERE indexname = 'nearest'"
    )


@pytest.mark.usefixtures("cabinet")
@pytest.mark.parametrize("no_owner", [False, True])
def test_owner_comes_with_a_schema_that_the_target_has(
    source_db: str, target_db: str, cloner: Cloner, no_owner: bool
) -> None:
    execute(
        source_db,
        "ALTER SCHEMA public OWNER TO cabinet_owner",
        "CREATE SCHEMA shared AUTHORIZATION cabinet_reader",
        "CREATE TABLE shared.t (id int)",
    )
    execute(target_db, "CREATE SCHEMA shared")
    owners = (
        "SELECT nspname, pg_get_userbyid(nspowner) FROM pg_namespace"
        " WHERE nspname IN ('public', 'shared') ORDER BY 1"
    )
    expected = rows(target_db if no_owner else source_db, owners)
    cloner(source_db, target_db, schema=SchemaSettings(no_owner=no_owner))
    assert rows(target_db, owners) == expected


# Roles

ROLE = """
    SELECT rolname, rolsuper, rolcreatedb, rolcanlogin, rolconnlimit, rolpassword, rolvaliduntil,
        shobj_description(r.oid, 'pg_authid'),
        (SELECT setconfig FROM pg_db_role_setting WHERE setrole = r.oid AND setdatabase = 0),
        ARRAY(SELECT pg_get_userbyid(roleid)::text FROM pg_auth_members
              WHERE member = r.oid ORDER BY 1)
    FROM pg_authid AS r WHERE rolname = '{}'"""
KEEPER = 'the "keeper"'
KEEPER_IDENT = '"the ""keeper"""'


@pytest.fixture
def roles(source_cluster: Cluster, target_cluster: Cluster) -> Iterator[None]:
    """Roles on the source; on the target, one that has the same name and is another."""
    known = rows(target_cluster.uri(), "SELECT rolname FROM pg_roles")
    execute(
        source_cluster.uri(),
        "CREATE ROLE keepers",
        f"CREATE ROLE {KEEPER_IDENT} LOGIN CREATEDB CONNECTION LIMIT 5 PASSWORD 'of the keeper'"
        " VALID UNTIL '2040-01-01' IN ROLE keepers",
        f"ALTER ROLE {KEEPER_IDENT} SET work_mem = '7MB'",
        f"COMMENT ON ROLE {KEEPER_IDENT} IS 'keeps'",
        "CREATE ROLE settled SUPERUSER LOGIN PASSWORD 'of the source'",
        "ALTER ROLE settled SET work_mem = '7MB'",
        "COMMENT ON ROLE settled IS 'on the source'",
        "GRANT pg_read_server_files, keepers TO settled",
    )
    execute(
        target_cluster.uri(),
        "CREATE ROLE settled CONNECTION LIMIT 2 PASSWORD 'of the target'",
        "COMMENT ON ROLE settled IS 'on the target'",
    )
    yield
    execute(
        source_cluster.uri(), f"DROP ROLE {KEEPER_IDENT}", "DROP ROLE keepers", "DROP ROLE settled"
    )
    # A clone with roles brings those of other tests as well.
    for (name,) in rows(target_cluster.uri(), "SELECT rolname FROM pg_roles"):
        if (name,) not in known:
            execute(target_cluster.uri(), 'DROP ROLE "' + name.replace('"', '""') + '"')


def test_requirements_choose_the_version_of_an_extension(
    system_cluster: Cluster, cloner: Cloner
) -> None:
    source, target = (system_cluster.create_database(f"pins_{side}") for side in ("one", "two"))
    available = rows(
        source,
        "SELECT e.default_version, array_agg(v.version) FROM pg_available_extensions e"
        " JOIN pg_available_extension_versions v USING (name) WHERE name = 'hstore' GROUP BY 1",
    )
    if not available:
        pytest.skip("the server of the system has no contrib modules")
    ((default, versions),) = available
    older = min(set(versions) - {default})
    execute(source, "CREATE SCHEMA things", "CREATE EXTENSION hstore SCHEMA things")
    execute(source, "CREATE TABLE t (h things.hstore)", "INSERT INTO t VALUES ('a => 1')")
    cloner(source, target, requirements={"hstore": older})
    query = "SELECT extversion, extnamespace::regnamespace::text FROM pg_extension"
    assert rows(target, f"{query} WHERE extname = 'hstore'") == [(older, "things")]
    assert rows(target, "SELECT h::text FROM t") == [('"a"=>"1"',)]


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize("passwords", [True, False], ids=["with passwords", "without passwords"])
def test_roles_come_as_they_are_where_the_target_lacks_them(
    source_db: str, target_db: str, cloner: Cloner, passwords: bool
) -> None:
    execute(source_db, "CREATE TABLE kept (id int)", f"ALTER TABLE kept OWNER TO {KEEPER_IDENT}")
    settled = rows(target_db, ROLE.format("settled"))
    with pytest.raises(PreflightError, match='role the "keeper"'):
        cloner(source_db, target_db)

    cloner(source_db, target_db, roles=True, role_passwords=passwords)
    expected = rows(source_db, ROLE.format(KEEPER))[0]
    assert expected[5].startswith("SCRAM-SHA-256$")
    if not passwords:
        expected = (*expected[:5], None, *expected[6:])
    assert rows(target_db, ROLE.format(KEEPER)) == [expected]
    assert rows(target_db, "SELECT tableowner FROM pg_tables WHERE tablename = 'kept'") == [
        (KEEPER,)
    ]
    assert rows(target_db, ROLE.format("settled")) == settled


# A clone over an older clone

DEPOT_CHANGED = """
ALTER TYPE depot.state ADD VALUE 'lost';
ALTER TABLE depot.things ADD colour text DEFAULT 'grey';
ALTER DOMAIN depot.weight ADD CHECK (VALUE < 1000000);
CREATE TABLE depot.days_3 PARTITION OF depot.days FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');
CREATE TABLE depot.added (id int PRIMARY KEY);
CREATE OR REPLACE FUNCTION depot.total() RETURNS numeric LANGUAGE sql AS 'SELECT 0.0';
CREATE OR REPLACE VIEW depot.heavy AS SELECT id, weight, colour FROM depot.things;
ALTER PUBLICATION depot_publication ADD TABLE depot.added;
DELETE FROM depot.things WHERE id % 3 = 0;
UPDATE depot.things SET weight = weight + 1;
INSERT INTO depot.added VALUES (1), (2);
REFRESH MATERIALIZED VIEW depot.totals;
SELECT lo_put(8001, 0, 'FIRST'), lo_unlink(8002), lo_from_bytea(8003, 'third');
SELECT nextval('depot.ticket');
"""

LARGE_OBJECTS = "SELECT oid::int8, lo_get(oid) FROM pg_largeobject_metadata ORDER BY 1"


def dumped(uri: str, tools: Cluster) -> str:
    """The schema as pg_dump prints it, less what names the dump itself."""
    program = tools.installation.program("pg_dump")
    output = subprocess.run(
        [program, "--schema-only", uri], capture_output=True, text=True, check=True
    ).stdout
    return re.sub(r"(?m)^(\\(un)?restrict|-- Dumped (from|by)) .*$", "", output)


def test_drop_if_exists_replaces_an_older_clone_and_spares_what_the_source_lacks(
    source_db: str, target_db: str, target_cluster: Cluster, cloner: Cloner, engine: Engine
) -> None:
    execute(source_db, DEPOT)
    cloner(source_db, target_db)
    execute(
        target_db,
        "CREATE TABLE depot.own (id int)",
        "INSERT INTO depot.own VALUES (1)",
        "SELECT lo_from_bytea(9001, 'own')",
    )
    execute(source_db, *DEPOT_CHANGED.strip().splitlines())
    with pytest.raises(PreflightError, match="not empty"):
        cloner(source_db, target_db)

    cloner(source_db, target_db, drop_if_exists=True)
    assert rows(target_db, "SELECT id FROM depot.own") == [(1,)]
    assert rows(target_db, "SELECT lo_get(9001)") == [(b"own",)]
    execute(target_db, "DROP TABLE depot.own", "SELECT lo_unlink(9001)")
    assert_equal_data(source_db, target_db, engine)
    assert dumped(target_db, target_cluster) == dumped(source_db, target_cluster)
    # What the first clone made and the source has no more stays: nobody knows it is ours.
    assert rows(target_db, LARGE_OBJECTS) == [(8001, b"FIRST"), (8002, b"second"), (8003, b"third")]
    for query in ("SELECT * FROM depot.totals ORDER BY 1", "SELECT last_value FROM depot.ticket"):
        assert rows(target_db, query) == rows(source_db, query)


def test_drop_if_exists_replaces_a_subscription(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(
        source_db,
        "CREATE SUBSCRIPTION news CONNECTION 'dbname=nowhere' PUBLICATION p"
        " WITH (connect = false, slot_name = 'news')",
    )
    query = "SELECT subname::text, subslotname::text FROM pg_subscription"
    try:
        cloner(source_db, target_db)
        cloner(source_db, target_db, drop_if_exists=True)
        assert rows(target_db, query) == [("news", "news")]
    finally:
        for uri in (source_db, target_db):
            execute(uri, "ALTER SUBSCRIPTION news SET (slot_name = NONE)", "DROP SUBSCRIPTION news")


def test_schema_is_restored_with_the_currency_of_the_target(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(source_db, "CREATE MATERIALIZED VIEW v AS SELECT current_setting('lc_monetary') AS m")
    execute(
        target_db,
        f"ALTER DATABASE {Dsn.parse(target_db).parameters['dbname']} SET lc_monetary = 'POSIX'",
    )
    cloner(source_db, target_db)
    assert rows(target_db, "SELECT m FROM v") == [("POSIX",)]


def test_event_trigger_that_forbids_drops_does_not_stop_the_clone(
    source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(
        source_db,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE EXCEPTION 'nothing is dropped here'; END $$",
        "CREATE EVENT TRIGGER refuse ON sql_drop EXECUTE FUNCTION refuse()",
    )
    cloner(source_db, target_db)
    assert rows(target_db, "SELECT evtname, evtenabled FROM pg_event_trigger") == [("refuse", "O")]
    assert rows(target_db, "SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'") == [(0,)]
