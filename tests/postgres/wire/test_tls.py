"""Encrypted connections: a part travels over them, and what the user asked of TLS is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.tls import open_tls_cluster, tls_uri

from millrace.clone.copy_task import CopyTask, copy_parts, part_statements
from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres import run_record as record
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.program.dump import dump_schema
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect, resolve
from millrace.snapshot.export import open_snapshot
from millrace.split.plan import plan_parts


@pytest.fixture(scope="module")
def tls_cluster() -> Iterator[Cluster]:
    with open_tls_cluster() as cluster:
        yield cluster


@pytest.fixture
def tls_db(tls_cluster: Cluster) -> Iterator[Dsn]:
    tls_cluster.create_database("tls")
    yield Dsn.parse(tls_uri(tls_cluster, "tls"))
    tls_cluster.drop_database("tls")


def is_encrypted(dsn: Dsn) -> bool:
    with connect(dsn, "test") as connection:
        row = connection.execute(
            "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        ).fetchone()
    return bool(row and row[0])


@pytest.mark.parametrize(("encrypted", "cuts"), [("source", []), ("target", [10_000])])
def test_part_travels_over_an_encrypted_connection(
    tls_db: Dsn, source_db: str, target_db: str, encrypted: str, cuts: list[int]
) -> None:
    source = tls_db if encrypted == "source" else Dsn.parse(source_db)
    target = tls_db if encrypted == "target" else Dsn.parse(target_db)
    assert is_encrypted(tls_db)
    ddl = "CREATE TABLE public.t (id int PRIMARY KEY, v text, b bytea)"
    checksum = "SELECT count(*), md5(string_agg(t::text, ',' ORDER BY id)) FROM public.t"
    with connect(source, "test") as at_source, connect(target, "test") as at_target:
        at_source.execute(ddl)
        at_source.execute(
            "INSERT INTO public.t SELECT g, repeat('x', g % 50), decode(md5(g::text), 'hex')"
            " FROM generate_series(1, 50000) g"
        )
        at_target.execute(ddl)
        epoch = record.open_run(at_target, record.RunRecord("tls", "the source"))
        (table,) = catalog.read_tables(at_source)
        parts = tuple(part_statements(table, part) for part in plan_parts(table, cuts))
        with open_snapshot(source) as snapshot:
            task = CopyTask("tls", epoch, source, target, snapshot.id, "UTF8", parts)
            outcomes = copy_parts(task)
            again = copy_parts(task)
        assert [outcome.error for outcome in outcomes] == [None] * len(parts)
        assert [outcome.rows for outcome in again] == [outcome.rows for outcome in outcomes]
        arrived = at_target.execute(checksum).fetchone()
        assert arrived == at_source.execute(checksum).fetchone()
        assert arrived is not None
        assert arrived[0] == 50_000


def test_resolved_connection_keeps_what_was_asked_of_tls(tls_cluster: Cluster, tls_db: Dsn) -> None:
    root = str(tls_cluster.data_dir / "server.crt")
    resolved = resolve(tls_db.with_(sslmode="verify-ca", sslrootcert=root))
    assert resolved.parameters["sslmode"] == "verify-ca"
    assert resolved.parameters["sslrootcert"] == root
    assert is_encrypted(resolved)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"sslmode": "verify-full", "sslrootcert": "{root}"}, "does not match host name"),
        ({"sslmode": "verify-ca", "sslrootcert": "/nonexistent"}, "does not exist"),
    ],
)
def test_certificate_that_does_not_fit_is_refused(
    tls_cluster: Cluster, tls_db: Dsn, parameters: dict[str, str], told: str
) -> None:
    root = str(tls_cluster.data_dir / "server.crt")
    asked = {name: value.replace("{root}", root) for name, value in parameters.items()}
    with pytest.raises(ServerError, match=told):
        connect(tls_db.with_(**asked), "test")


def test_server_without_tls_is_refused_if_tls_is_required(source_cluster: Cluster) -> None:
    dsn = Dsn.parse(source_cluster.uri(tcp=True) + "?sslmode=require")
    with pytest.raises(ServerError, match="SSL") as caught:
        connect(dsn, "test")
    assert caught.value.exit_code == 5


def test_schema_is_dumped_over_an_encrypted_connection(
    tls_cluster: Cluster, tls_db: Dsn, tmp_path: Path
) -> None:
    with connect(tls_db, "test") as connection:
        connection.execute("CREATE TABLE public.t (id int PRIMARY KEY)")
    archive = dump_schema(tls_cluster.installation, tls_db, None, tmp_path / "schema.dump")
    described = [entry.description for entry in archive.entries("pre-data")]
    assert "TABLE" in described
