"""Installing, upgrading and removing tubes, and their command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.tube.tubes import TubeDatabase
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.errors import ConfigError
from millrace.postgres.program.embedded import Cluster
from millrace.tube.install import find_schema, install, render_sql, uninstall

ITEM = "CREATE TABLE item (id bigint PRIMARY KEY, name text, n int)"
LEGACY = Path(__file__).parents[2] / "fixtures" / "tube" / "legacy_tube.sql"


def everything(connection: psycopg.Connection[tuple[object, ...]], schema: str) -> list[object]:
    found = connection.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = %s::regnamespace"
        " UNION ALL SELECT c.relname FROM pg_class c WHERE c.relnamespace ="
        " %s::regnamespace ORDER BY 1",
        (schema, schema),
    )
    return [row[0] for row in found]


def test_installing_again_changes_nothing_and_loses_no_pod(tubes: TubeDatabase) -> None:
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 3, 'n IS NULL')")
    tubes.run("SELECT tube_table_ensure_attached('pods', 'item', 1)", "INSERT INTO item VALUES (1)")
    tubes.run("GRANT EXECUTE ON FUNCTION tube_list TO pg_monitor")
    before = everything(tubes.connection, "tube")
    install(tubes.connection)
    assert everything(tubes.connection, "tube") == before
    assert tubes.rows(
        "SELECT proacl::text ~ 'pg_monitor' FROM pg_proc WHERE proname = 'tube_list'"
    ) == [True]
    tubes.run("INSERT INTO item VALUES (2)")
    assert tubes.pods() == [("I", 1, [1]), ("I", 1, [2])]


def test_removing_leaves_nothing_and_asks_before_tubes_go(tubes: TubeDatabase) -> None:
    tubes.run(ITEM)
    tubes.attach()
    with pytest.raises(ConfigError, match="has tubes: pods"):
        uninstall(tubes.connection, "tube", drop_tubes=False)
    uninstall(tubes.connection, "tube", drop_tubes=True)
    assert everything(tubes.connection, "tube") == []
    tubes.run("INSERT INTO item VALUES (1)")


@pytest.mark.parametrize("cluster", ["system_cluster", "source_cluster", "target_cluster"])
def test_psql_installs_inside_somebody_elses_transaction(
    request: pytest.FixtureRequest, cluster: str, tmp_path: Path
) -> None:
    server: Cluster = request.getfixturevalue(cluster)
    name = f"tube_psql_{cluster.split('_')[0]}"
    uri = server.create_database(name)
    script = tmp_path / "all.sql"
    (tmp_path / "tube.sql").write_text(render_sql())
    script.write_text(
        '\\set ON_ERROR_STOP on\nBEGIN;\nCREATE SCHEMA "Q""s";\nSET LOCAL search_path ='
        ' "Q""s", public;\n'
        f"\\i {tmp_path / 'tube.sql'}\nSELECT tube_ensure_exists('pods');\nCREATE TABLE"
        f" public.item (id bigint);\n"
        "SELECT tube_table_ensure_attached('pods', 'public.item', 1);\nCOMMIT;\n"
        "INSERT INTO public.item VALUES (1);\n"
    )
    try:
        psql = server.installation.bindir / "psql"
        done = subprocess.run([psql, "-q", uri, "-f", script], capture_output=True, text=True)
        assert done.stderr == ""
        with psycopg.connect(uri) as connection:
            assert connection.execute('SELECT ids FROM "Q""s".pods').fetchall() == [([1],)]
            assert find_schema(connection, None) == 'Q"s'
    finally:
        server.drop_database(name)


@pytest.mark.parametrize("cluster", ["system_cluster", "source_cluster", "target_cluster"])
def test_an_installation_of_pg_tube_is_taken_over_with_its_pods(
    request: pytest.FixtureRequest, cluster: str
) -> None:
    server: Cluster = request.getfixturevalue(cluster)
    name = "tube_legacy"
    uri = server.create_database(name)
    connection = psycopg.connect(uri, autocommit=True)
    try:
        connection.execute("CREATE SCHEMA tube; SET search_path = tube, public")
        connection.execute(LEGACY.read_bytes())
        connection.execute("INSERT INTO item VALUES (1, 1), (2, 0)")
        connection.execute(
            "INSERT INTO live (op, shard, ids, payload) VALUES"
            " ('B', 5, '{7}', NULL), ('B', 5, '{}', '{\"type\": \"backfill_end\","
            ' "start_seq": "3"}\'),'
            " ('}', 5, '{}', '{\"start_seq\": \"2\"}'), ('}', 4, '{9}', NULL)"
        )
        install(connection)
        rows = connection.execute(
            "SELECT seq, op, shard, ids, payload FROM live ORDER BY seq"
        ).fetchall()
        assert rows == [
            (1, "I", 5, [1], None),
            (2, "B", 5, [7], None),
            (3, "B", 5, [], {"type": "backfill_end", "start_seq": "3"}),
            (4, "B", 5, [], {"type": "backfill_end", "start_seq": "2"}),
            (5, "B", 4, [], {"type": "backfill_end", "start_seq": "0"}),
        ]
        listed = connection.execute(
            "SELECT tube, predicate, partitions, tbl::text, shard FROM tube_list()"
        ).fetchall()
        assert listed == [("live", "n > 0", 2, "item", 5)]
        triggers = connection.execute(
            "SELECT tgname, tgenabled FROM pg_trigger WHERE tgrelid = 'item'::regclass"
            " AND tgname ~ 'live' ORDER BY 1"
        ).fetchall()
        assert triggers == [
            (f"item_live_after_{event}_trigger", "A") for event in ("delete", "insert", "update")
        ]
        connection.execute("UPDATE item SET n = 0 WHERE id = 1")  # leaves the predicate
        connection.execute("SELECT item_touch('{44}')")
        connection.execute("SELECT live_touch(5, '{45}', 'T')")
        (statement,) = connection.execute("SELECT tube_pods_sql('live', 2, 1)").fetchone() or ("",)
        found = connection.execute(statement.encode()).fetchall()
        assert [(row[0], row[1], row[3]) for row in found] == [
            (1, "I", "{1}"), (6, "U", "{1}"), (7, "T", "{44}"), (8, "T", "{45}"),
            (2, "B", "{7}"), (3, "B", "{}"), (4, "B", "{}"),
        ]  # fmt: skip
        seqs = [row[0] for row in found]
        deleted = connection.execute(
            "SELECT tube_pods_delete('live', 2, 1, %s)", (seqs,)
        ).fetchone()
        assert deleted == (7,)
        old = connection.execute(
            "SELECT count(*) FROM pg_proc WHERE proname IN ('_tube_partitions', 'live_trigger')"
        ).fetchone()
        assert old == (0,)
        # What was in the parent is drained: it is truncated, too.
        connection.execute("DELETE FROM live; SELECT tube_rotate('live')")
        size = connection.execute("SELECT pg_relation_size('live')").fetchone()
        assert size == (0,)
        install(connection)
    finally:
        connection.close()
        server.drop_database(name)


def test_an_ordinary_role_can_install_and_use_tubes(source_cluster: Cluster) -> None:
    name = "tube_ordinary"
    source_cluster.create_database(name)
    source_cluster.execute(f"CREATE ROLE {name} LOGIN; ALTER DATABASE {name} OWNER TO {name}")
    try:
        with psycopg.connect(source_cluster.uri(name, user=name), autocommit=True) as connection:
            install(connection)
            connection.execute("SET search_path = tube; CREATE TABLE item (id uuid PRIMARY KEY)")
            connection.execute("SELECT tube_ensure_exists('pods')")
            connection.execute("SELECT tube_table_ensure_attached('pods', 'item', 1)")
            connection.execute("INSERT INTO item VALUES (gen_random_uuid())")
            connection.execute("TRUNCATE item; SELECT tube_backfill_step2()")
            assert connection.execute("SELECT count(*) FROM pods").fetchone() == (2,)
            connection.execute("DELETE FROM pods")
            assert connection.execute("SELECT tube_rotate(max_age => '0')").fetchone() == (0,)
            assert connection.execute("SELECT tube_rotate(max_age => '0')").fetchone() == (1,)
            row = connection.execute("SELECT tube_epoch(), tube_epoch(true)").fetchone()
            assert row is not None
            assert row[0] < row[1]
            uninstall(connection, "tube", drop_tubes=True)
    finally:
        source_cluster.drop_database(name)
        source_cluster.execute(f"DROP ROLE {name}")


def test_a_dump_restores_tubes_that_work(tubes_16: TubeDatabase, tmp_path: Path) -> None:
    tubes = tubes_16
    tubes.run(ITEM, "SELECT tube_ensure_exists('pods', 2)")
    tubes.run("SELECT tube_table_attach('pods', 'item', 1, routing => 'n')")
    tubes.run("INSERT INTO item VALUES (1, 'a', 5)")
    name = f"{tubes.name}_restored"
    uri = tubes.cluster.create_database(name)
    try:
        bindir = tubes.cluster.installation.bindir
        dump = tmp_path / "dump"
        subprocess.run([bindir / "pg_dump", "-Fc", "-f", dump, tubes.uri], check=True)
        subprocess.run([bindir / "pg_restore", "--exit-on-error", "-d", uri, dump], check=True)
        with psycopg.connect(uri, autocommit=True) as restored:
            restored.execute("INSERT INTO item VALUES (2, 'b', 6)")
            found = restored.execute("SELECT op, shard, ids FROM tube.pods ORDER BY seq").fetchall()
            assert found == [("I", 5, [1]), ("I", 6, [2])]
            restored.execute("SET search_path = tube; SELECT tube_ensure_exists('pods', 3)")
            assert restored.execute("SELECT tbl::text FROM tube_list()").fetchall() == [
                ("public.item",)
            ]
    finally:
        tubes.cluster.drop_database(name)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["tube", *arguments], catch_exceptions=True)
    if code == 0:
        assert result.exception is None, result.exception
    else:
        assert getattr(result.exception, "exit_code", None) == code, result.exception
    return str(result.stdout)


def test_the_command_line_does_what_sql_does(
    tubes_16: TubeDatabase, in_this_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tubes = tubes_16
    monkeypatch.setenv("MILLRACE_SOURCE", tubes.uri)
    tubes.run(ITEM, "INSERT INTO item VALUES (1, 'a', 3), (2, 'b', 4)")
    run("install")
    run("create", "pods", "--partitions", "2")
    run("attach", "pods", "public.item", "--routing", "n", "--key", "id")
    run("touch", "pods", "public.item", "1", "2")
    run("pods-insert", "pods", "--query", "SELECT id FROM public.item ORDER BY id", "--shard", "0")
    assert tubes.pods() == [("T", 3, [1]), ("T", 4, [2]), ("B", 0, [1, 2])]
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["tube"], listed["tbl"], listed["routing"], listed["key"]) == (
        "pods",
        "item",
        "n",
        ["id"],
    )
    done = json.loads(run("backfill", "pods", "public.item", "--json", "--quiet"))
    assert (done["state"], done["ids"]) == ("done", 2)
    stats = json.loads(run("stats", "--json"))
    assert [row["backfill_count"] for row in stats["partitions"]] == ["1", "1"]
    assert [row["state"] for row in stats["backfills"]] == ["done"]
    assert "pods" in run("list")
    run("backfill", "pods", "public.item", "--cancel", code=2)
    run("attach", "nope", "public.item", code=2)
    run("attach", "pods", "public.nope", code=2)
    run("attach", "pods", "public.item", "--shard", "1", "--predicate", "nope", code=2)
    run("list", "--schema", "nope", code=3)
    run("uninstall", code=2)
    run("detach", "pods", "public.item")
    run("drop", "pods")
    run("uninstall")
    run("list", code=3)
    assert "CREATE OR REPLACE FUNCTION tube_pods_insert" in run("install", "--print")
