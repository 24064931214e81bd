"""Other servers, and other ways to reach them: versions, standbys, extensions, TLS, passfiles."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures import create_museum_roles, load_museum
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import wait_for

from millrace.clone.progress import Reporter
from millrace.clone.run import CloneResult, clone
from millrace.clone.schema.entries import SchemaSettings
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data
from millrace.config.dsn import Dsn
from millrace.demo.shop import create_shop
from millrace.errors import ServerError
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.route import Route
from millrace.spark.session import Engine
from millrace.split.plan import SplitSettings

PASSWORD = "tr1cky: \\ pass'word"

Cloner = Callable[..., CloneResult]


@pytest.fixture
def cloner(engine: Engine, reporter: Reporter, tmp_path: Path) -> Cloner:
    """Clones one database into another; all rows are compared."""

    def run(source: str, target: str, **options: Any) -> CloneResult:
        settings = CloneSettings(
            Route(Dsn.parse(source), Dsn.parse(target), tmp_path / "work"), **options
        )
        result = clone(settings, engine, reporter)
        compared = compare_data(CompareSettings(Route(settings.source, settings.target)), engine)
        assert [one.label for one in compared if not one.is_equal] == []
        return result

    return run


@pytest.fixture
def system_dbs(system_cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Two databases of the system's server."""
    names = ("system_one", "system_two")
    one, two = (system_cluster.create_database(name) for name in names)
    yield one, two
    for name in names:
        system_cluster.drop_database(name)


# Versions


def dumped(uri: str, tools: Cluster) -> str:
    """The schema as pg_dump prints it, less what names the dump itself."""
    program = tools.installation.program("pg_dump")
    output = subprocess.run(
        [program, "--schema-only", uri], capture_output=True, text=True, check=True
    ).stdout
    return re.sub(r"(?m)^(\\(un)?restrict|-- Dumped (from|by)) .*$", "", output)


@pytest.mark.slow
def test_museum_of_the_systems_server_moves_to_a_newer_one(
    system_dbs: tuple[str, str],
    target_db: str,
    target_cluster: Cluster,
    cloner: Cloner,
    tmp_path: Path,
) -> None:
    source, _ = system_dbs
    load_museum(source)
    create_museum_roles(target_db)
    cloner(source, target_db)

    archive = tmp_path / "oracle.dump"
    programs = target_cluster.installation
    oracle = target_cluster.create_database("versions_oracle")
    try:
        for command in (
            [programs.program("pg_dump"), "-Fc", "-f", archive, source],
            [programs.program("pg_restore"), "--exit-on-error", "-d", oracle, archive],
        ):
            subprocess.run(command, check=True)
        assert dumped(target_db, target_cluster) == dumped(oracle, target_cluster)
    finally:
        target_cluster.drop_database("versions_oracle")


def test_target_may_be_older_with_a_warning(
    source_db: str, system_dbs: tuple[str, str], cloner: Cloner
) -> None:
    _, target = system_dbs
    create_shop(source_db, megabytes=2)
    result = cloner(source_db, target)
    assert [w.what for w in result.warnings if "is older than the source's 16" in w.what]
    views = "SELECT * FROM shop.monthly_sales ORDER BY 1"
    assert rows(target, views) == rows(source_db, views)


def test_the_newest_server_can_be_cloned_to_an_old_one(
    target_cluster: Cluster, system_dbs: tuple[str, str], cloner: Cloner
) -> None:
    _, target = system_dbs
    source = target_cluster.create_database("newest")
    try:
        execute(
            source,
            "CREATE TYPE mood AS ENUM ('sad', 'ok')",
            "CREATE TABLE simple (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, m mood NOT NULL,"
            " t text UNIQUE, twice int GENERATED ALWAYS AS (length(t) * 2) STORED)",
            "INSERT INTO simple (m, t) SELECT 'ok', 'text ' || i FROM generate_series(1, 500) AS i",
            "CREATE VIEW few AS SELECT id FROM simple WHERE id < 10",
        )
        result = cloner(source, target)
        assert [w.what for w in result.warnings if "is older than the source's 18" in w.what]
        assert rows(target, "SELECT count(*), sum(twice) FROM simple") == rows(
            source, "SELECT count(*), sum(twice) FROM simple"
        )
    finally:
        target_cluster.drop_database("newest")


# Extensions


def test_columns_of_contributed_types_travel_as_text(
    system_dbs: tuple[str, str], system_cluster: Cluster, cloner: Cloner
) -> None:
    source, target = system_dbs
    available = {name for (name,) in rows(source, "SELECT name FROM pg_available_extensions")}
    if not {"hstore", "citext"} <= available:
        pytest.skip("the system's server has no contributed extensions")
    execute(
        source,
        "CREATE SCHEMA extensions",
        "CREATE EXTENSION hstore SCHEMA extensions",
        "CREATE EXTENSION citext SCHEMA extensions",
        "CREATE TABLE things (name extensions.citext PRIMARY KEY, attributes extensions.hstore)",
        "INSERT INTO things SELECT 'Name ' || i, extensions.hstore('K' || i, '\"v\" => \\' || i)"
        " FROM generate_series(1, 300) AS i",
        "CREATE INDEX things_gin ON things USING gin (attributes extensions.gin_hstore_ops)",
    )
    result = cloner(source, target)
    assert result.summary is not None
    assert [table.format for table in result.summary.tables] == ["text"]
    found = "SELECT name FROM things WHERE name OPERATOR(extensions.=) 'nAmE 7'"
    assert rows(target, found) == [("Name 7",)]
    extensions = "SELECT extname, extversion, extnamespace::regnamespace::text FROM pg_extension"
    assert sorted(rows(target, extensions)) == sorted(rows(source, extensions))


# Some rows and a sequence of the extension belong to its user.
EXTENSION = """
CREATE TABLE settings (
    id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, name text, own bool DEFAULT true
);
INSERT INTO settings (name, own) VALUES ('made by the extension', false);
CREATE SEQUENCE ticket;
CREATE TABLE internal (n int);
INSERT INTO internal VALUES (1);
SELECT pg_catalog.pg_extension_config_dump('settings', 'WHERE own');
SELECT pg_catalog.pg_extension_config_dump('settings_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('ticket', '');
"""


@pytest.fixture
def extension_dbs(target_cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Two databases that know an extension of ours; a server has a path for them from 18 on."""
    folder = target_cluster.socket_dir / "own"
    (folder / "extension").mkdir(parents=True)
    control = folder / "extension" / "tuned.control"
    control.write_text("default_version = '1.0'\nrelocatable = false\nschema = tuned\n")
    (folder / "extension" / "tuned--1.0.sql").write_text(EXTENSION)
    uris = []
    for name in ("tuned_source", "tuned_target"):
        uris.append(target_cluster.create_database(name))
        path = f"$system:{folder}"
        execute(uris[-1], f"ALTER DATABASE {name} SET extension_control_path = '{path}'")
    execute(
        uris[0],
        "CREATE EXTENSION tuned",
        "INSERT INTO tuned.settings (name) SELECT 'by the user ' || i FROM generate_series(1, 5) i",
        "SELECT setval('tuned.ticket', 77)",
        "CREATE TABLE mine (id int PRIMARY KEY)",
    )
    yield uris[0], uris[1]
    for name in ("tuned_source", "tuned_target"):
        target_cluster.drop_database(name)
    subprocess.run(["rm", "-r", folder], check=True)


SETTINGS_ROWS = "SELECT id, name, own FROM tuned.settings ORDER BY id"


def test_rows_that_an_extension_keeps_for_its_user_arrive_once(
    extension_dbs: tuple[str, str], cloner: Cloner
) -> None:
    source, target = extension_dbs
    cloner(source, target)
    assert len(rows(target, SETTINGS_ROWS)) == 6
    assert rows(target, SETTINGS_ROWS) == rows(source, SETTINGS_ROWS)


def test_sequences_that_an_extension_keeps_for_its_user_are_set(
    extension_dbs: tuple[str, str], cloner: Cloner
) -> None:
    source, target = extension_dbs
    cloner(source, target)
    for query in (
        "SELECT last_value, is_called FROM tuned.ticket",
        "SELECT last_value, is_called FROM tuned.settings_id_seq",
    ):
        assert rows(target, query) == rows(source, query)


def test_skipped_extension_leaves_its_rows_behind(
    extension_dbs: tuple[str, str], engine: Engine, reporter: Reporter, tmp_path: Path
) -> None:
    source, target = extension_dbs
    settings = CloneSettings(
        Route(Dsn.parse(source), Dsn.parse(target), tmp_path / "work"),
        schema=SchemaSettings(skip_extensions=True),
    )
    clone(settings, engine, reporter)
    assert rows(target, "SELECT count(*) FROM pg_extension WHERE extname = 'tuned'") == [(0,)]
    assert rows(target, "SELECT count(*) FROM mine") == [(0,)]


# Standbys


def test_source_may_be_a_standby(
    source_cluster: Cluster, source_db: str, target_db: str, cloner: Cloner
) -> None:
    execute(
        source_db,
        "CREATE TABLE logged (id int PRIMARY KEY, t text)",
        "INSERT INTO logged SELECT i, repeat('x', i % 100) FROM generate_series(1, 5000) AS i",
        "CREATE SEQUENCE counted",
        "SELECT setval('counted', 55)",
        "SELECT lo_from_bytea(5001, 'large')",
        "CREATE UNLOGGED TABLE unlogged (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int)",
        "CREATE INDEX unlogged_n ON unlogged (n)",
        "INSERT INTO unlogged (n) SELECT generate_series(1, 10)",
    )
    name = Dsn.parse(source_db).parameters["dbname"]
    with open_cluster(16, base_backup_of=source_cluster) as standby:
        assert rows(standby.uri(name), "SELECT pg_is_in_recovery()") == [(True,)]
        result = cloner(standby.uri(name), target_db, split=SplitSettings(100_000))
    assert result.summary is not None
    assert {t.name: t.parts > 1 for t in result.summary.tables}["logged"]
    assert rows(target_db, "SELECT count(*) FROM logged") == [(5000,)]
    assert rows(target_db, "SELECT last_value, lo_get(5001) FROM counted") == [(55, b"large")]
    # What is unlogged is empty on a standby; the table itself comes whole.
    indexes = "SELECT indexname FROM pg_indexes WHERE tablename = 'unlogged' ORDER BY 1"
    assert rows(target_db, indexes) == [("unlogged_n",), ("unlogged_pkey",)]
    assert rows(target_db, "SELECT count(*) FROM unlogged") == [(0,)]
    assert [warning.what for warning in result.warnings if "unlogged" in warning.what]


# TLS, service files, passfiles


@contextmanager
def password_asked(cluster: Cluster, user: str, *, kind: str = "host") -> Iterator[None]:
    """A superuser who has to give a password over TCP; with `hostssl`, over TLS."""
    hba = cluster.data_dir / "pg_hba.conf"
    before = hba.read_text()
    lines = f"{kind} all {user} 127.0.0.1/32 scram-sha-256\nhost all {user} 127.0.0.1/32 reject\n"
    execute(cluster.uri(), f"CREATE ROLE {user} SUPERUSER LOGIN PASSWORD $${PASSWORD}$$")
    try:
        write_and_reload(cluster, hba, lines + before)
        wait_for(lambda: not may_connect(cluster.uri(user=user, tcp=True)))
        yield
    finally:
        write_and_reload(cluster, hba, before)
        execute(cluster.uri(), f"DROP ROLE {user}")


def write_and_reload(cluster: Cluster, path: Path, text: str) -> None:
    path.write_text(text)
    execute(cluster.uri(), "SELECT pg_reload_conf()")


def may_connect(uri: str) -> bool:
    try:
        with psycopg.connect(uri):
            return True
    except psycopg.OperationalError:
        return False


@pytest.fixture
def tls_cluster(
    system_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Path]]:
    """The system's server with TLS on, a user who must use it, and the root certificate."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "server.crt", folder / "server.key"
    subprocess.run(
        ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-subj", "/CN=millrace",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key],
        check=True, capture_output=True,
    )  # fmt: skip
    owner = system_cluster.data_dir.stat()
    for path in (certificate, key):
        copy = system_cluster.data_dir / path.name
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.chown(copy, owner.st_uid, owner.st_gid)
    uri = system_cluster.uri()
    execute(uri, "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
    wait_for(lambda: rows(uri, "SHOW ssl") == [("on",)])
    with password_asked(system_cluster, "tls_user", kind="hostssl"):
        yield system_cluster, certificate
    execute(uri, "ALTER SYSTEM RESET ssl", "SELECT pg_reload_conf()")


def tls_uri(cluster: Cluster, database: str, certificate: Path) -> str:
    uri = cluster.uri(database, user="tls_user", password=PASSWORD, tcp=True)
    return f"{uri}?sslmode=verify-full&sslrootcert={certificate}"


def fill_for_relay(uri: str) -> None:
    """Binary and text, values longer than any buffer, a table in several parts, large objects."""
    execute(
        uri,
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE bin (id int PRIMARY KEY, t text, b bytea)",
        "INSERT INTO bin SELECT i, repeat('long ', i), sha512(int4send(i))"
        " FROM generate_series(1, 3000) AS i",
        "INSERT INTO bin VALUES (0, repeat('wide', 500000), NULL)",
        "CREATE TABLE txt (id int PRIMARY KEY, p pair)",
        "INSERT INTO txt SELECT i, (i, E'\\\\ \\t \\n')::pair FROM generate_series(1, 3000) AS i",
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "SELECT lo_from_bytea(4001, convert_to(repeat('lo', 1000000), 'UTF8'))",
    )


@pytest.mark.parametrize("encrypted", ["source", "target", "both"])
def test_clone_over_tls(
    tls_cluster: tuple[Cluster, Path], system_dbs: tuple[str, str], cloner: Cloner, encrypted: str
) -> None:
    cluster, certificate = tls_cluster
    source, target = system_dbs
    fill_for_relay(source)
    over_tls = [tls_uri(cluster, f"system_{name}", certificate) for name in ("one", "two")]
    assert rows(over_tls[0], "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [
        (True,)
    ]
    cloner(
        over_tls[0] if encrypted != "target" else source,
        over_tls[1] if encrypted != "source" else target,
        split=SplitSettings(1_000_000),
    )
    assert rows(target, "SELECT count(*) FROM bin") == [(3001,)]
    assert rows(target, "SELECT length(lo_get(4001))") == [(2_000_000,)]


def test_clone_over_tls_to_a_newer_server(
    tls_cluster: tuple[Cluster, Path], system_dbs: tuple[str, str], target_db: str, cloner: Cloner
) -> None:
    cluster, certificate = tls_cluster
    source, _ = system_dbs
    fill_for_relay(source)
    cloner(tls_uri(cluster, "system_one", certificate), target_db)
    assert rows(target_db, "SELECT count(*) FROM bin") == [(3001,)]


def test_service_file_and_passfile_are_read_once_by_the_driver(
    source_cluster: Cluster,
    target_cluster: Cluster,
    source_db: str,
    target_db: str,
    engine: Engine,
    cloner: Cloner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_for_relay(source_db)
    names = [Dsn.parse(uri).parameters["dbname"] for uri in (source_db, target_db)]
    service_file, passfile = tmp_path / "services.conf", tmp_path / "pgpass"
    service_file.write_text(
        f"[busy]\nhost=127.0.0.1\nport={source_cluster.port}\ndbname={names[0]}\nuser=asked_user\n"
    )
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    passfile.write_text(
        f"127.0.0.1:{source_cluster.port}:*:asked_user:{escaped}\n"
        f"127.0.0.1:{target_cluster.port}:{names[1]}:asked_user:{escaped}\n"
    )
    passfile.chmod(0o600)
    engine.wait()  # so that Spark's workers do not get these variables
    monkeypatch.setenv("PGSERVICEFILE", str(service_file))
    target = target_cluster.uri(names[1], user="asked_user", tcp=True)
    with password_asked(source_cluster, "asked_user"), password_asked(target_cluster, "asked_user"):
        monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
        with pytest.raises(ServerError, match="no password supplied") as raised:
            cloner("service=busy", target)
        assert ".pgpass" in raised.value.hint
        monkeypatch.setenv("PGPASSFILE", str(passfile))
        cloner("service=busy", target)
        assert rows(target_db, "SELECT count(*) FROM bin") == [(3001,)]
        execute(target_db, "REASSIGN OWNED BY asked_user TO postgres")
