"""DDL of a source, replayed on the target at its place in the stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.ddl.ddl_warehouse import DdlWarehouse, open_warehouse
from tests.fixtures.stream.syncing import run_sql
from tests.fixtures.wait import wait_for

from millrace.consolidate.control import resume
from millrace.consolidate.ddl_control import await_ddl, decide_ddl, read_pending
from millrace.consolidate.registry import SourceState
from millrace.ddl.history import Action, Status
from millrace.errors import WorkDirError
from millrace.postgres.program.embedded import Cluster

SETUP = """
CREATE TABLE item (id int PRIMARY KEY, name text NOT NULL DEFAULT 'x');
INSERT INTO item SELECT i, 'item ' || i FROM generate_series(1, 100) i;
CREATE TABLE part (id int PRIMARY KEY, item int REFERENCES item);
INSERT INTO part SELECT i, i FROM generate_series(1, 100) i;
"""


@pytest.fixture
def warehouse(
    source_cluster: Cluster, target_db: str, receivers: None, tmp_path: Path
) -> Iterator[DdlWarehouse]:
    with open_warehouse(source_cluster, target_db, tmp_path, SETUP) as found:
        yield found


def test_ddl_runs_at_its_place_among_the_rows_of_its_transaction(warehouse: DdlWarehouse) -> None:
    with warehouse.running():
        warehouse.wait()
        warehouse.run_source(
            "INSERT INTO item VALUES (101, 'before')",
            "BEGIN; INSERT INTO item VALUES (102, 'same'); ALTER TABLE item ADD COLUMN size int"
            " DEFAULT 7; INSERT INTO item VALUES (103, 'after', 8); UPDATE item SET size = 9 WHERE"
            " id = 1; COMMIT",
            "CREATE TABLE note (id int PRIMARY KEY, t text); INSERT INTO note VALUES (1, 'a;b');"
            " ALTER TABLE note RENAME COLUMN t TO body; UPDATE note SET body = 'c'",
            "DO $$ BEGIN EXECUTE 'CREATE TABLE dyn (i int PRIMARY KEY)'; INSERT INTO dyn VALUES (1)"
            "; ALTER TABLE dyn ADD j text; UPDATE dyn SET j = 'x'; END $$",
            "CREATE TABLE made AS SELECT id, name FROM item WHERE id < 10",
            "CREATE SCHEMA extra; CREATE TABLE extra.t (i int PRIMARY KEY);"
            " INSERT INTO extra.t VALUES (1)",
            "ALTER SCHEMA extra RENAME TO more; INSERT INTO more.t VALUES (2)",
            "DROP TABLE part",
        )
        warehouse.wait()
        assert {one.status for one in warehouse.history()} == {Status.REPLAYED}
        warehouse.assert_equal()
    assert warehouse.query("SELECT body FROM shop_public.note") == [("c",)]
    assert warehouse.query("SELECT count(*) FROM shop_public.made") == [(9,)]
    assert warehouse.query("SELECT i FROM shop_more.t ORDER BY 1") == [(1,), (2,)]
    assert warehouse.query("SELECT to_regclass('shop_public.part')") == [(None,)]


def test_a_statement_that_fails_halts_its_source_until_it_is_edited_skipped_or_mended(
    warehouse: DdlWarehouse,
) -> None:
    run_sql(warehouse.target, "CREATE SCHEMA IF NOT EXISTS mine")
    with warehouse.running():
        warehouse.wait()
        run_sql(warehouse.target, "CREATE TABLE shop_public.taken (x int)")
        warehouse.run_source(
            "BEGIN; INSERT INTO item VALUES (201, 'torn'); CREATE TABLE taken (id int PRIMARY KEY);"
            " INSERT INTO taken VALUES (1); COMMIT"
        )
        status = warehouse.wait_for_state("shop", SourceState.HALTED)
        assert "CREATE TABLE public.taken" in status.error
        assert "ddl edit shop" in status.hint
        # Nothing of its transaction is there.
        assert warehouse.query("SELECT FROM shop_public.item WHERE id = 201") == []
        pending = read_pending(warehouse.config, warehouse.directory, "shop")
        assert pending.statement.startswith("CREATE TABLE taken")
        with pytest.raises(WorkDirError, match="halted at"):
            decide_ddl(warehouse.config, warehouse.directory, "shop", Action.SKIP, lsn="0/1")
        # An edit that fails, too, is not the end.
        decide_ddl(
            warehouse.config,
            warehouse.directory,
            "shop",
            Action.EDIT,
            text="CREATE TABLE taken (i int)",
        )
        again = await_ddl(warehouse.config, warehouse.directory, "shop", pending)
        assert again is not None
        assert again.status is Status.FAILED
        assert again.statement == "CREATE TABLE taken (i int)"
        text = "DROP TABLE taken; CREATE TABLE taken (id int PRIMARY KEY)"
        decide_ddl(warehouse.config, warehouse.directory, "shop", Action.EDIT, text=text)
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
        # Skipped: somebody has done it by hand.
        run_sql(warehouse.target, "ALTER TABLE shop_public.taken ADD v text")
        warehouse.run_source("ALTER TABLE taken ADD v text", "INSERT INTO taken VALUES (2, 'x')")
        warehouse.wait_for_state("shop", SourceState.HALTED)
        decide_ddl(warehouse.config, warehouse.directory, "shop", Action.SKIP)
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
        # A difference that the statement leaves behind is seen.
        run_sql(warehouse.target, "ALTER TABLE shop_public.taken ADD strange int")
        warehouse.run_source("ALTER TABLE taken ADD w text")
        assert "column strange is on the target only" in (
            warehouse.wait_for_state("shop", SourceState.HALTED).error
        )
        run_sql(warehouse.target, "ALTER TABLE shop_public.taken DROP strange")
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
        warehouse.assert_equal()
    found = [(one.status, one.action_by is not None) for one in warehouse.history()]
    assert found == [(Status.EDITED, True), (Status.SKIPPED, True), (Status.REPLAYED, False)]


def test_views_of_others_and_locks_of_others_are_dealt_with(warehouse: DdlWarehouse) -> None:
    with warehouse.running():
        warehouse.wait()
        run_sql(
            warehouse.target,
            "CREATE SCHEMA IF NOT EXISTS mine",
            "CREATE VIEW mine.names AS SELECT id, name FROM shop_public.item",
            "CREATE VIEW mine.counted AS SELECT count(*) AS n FROM mine.names",
            "COMMENT ON VIEW mine.names IS 'kept'",
        )
        with psycopg.connect(warehouse.target) as reader:
            reader.execute("SELECT count(*) FROM shop_public.item")
            warehouse.run_source("ALTER TABLE item ALTER COLUMN id TYPE bigint")
            wait_for(
                lambda: (history := warehouse.history()) and history[-1].status is Status.BLOCKED
            )
            reader.rollback()
        warehouse.wait()
        assert warehouse.query("SELECT n FROM mine.counted") == [(100,)]
        described = "SELECT obj_description('mine.names'::regclass, 'pg_class')"
        assert warehouse.query(described) == [("kept",)]
        warehouse.run_source("ALTER TABLE item DROP COLUMN name CASCADE")
        assert "mine.names" in warehouse.wait_for_state("shop", SourceState.HALTED).error
        assert warehouse.query("SELECT n FROM mine.counted") == [(100,)]
        run_sql(warehouse.target, "DROP SCHEMA mine CASCADE")
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
        warehouse.assert_equal()


def test_capture_never_fails_or_delays_the_application_and_what_it_loses_halts_the_source(
    warehouse: DdlWarehouse,
) -> None:
    run_sql(warehouse.source, "DROP ROLE IF EXISTS plain", "CREATE ROLE plain LOGIN")
    run_sql(warehouse.source, "GRANT CREATE, USAGE ON SCHEMA public TO plain")
    with warehouse.running():
        warehouse.wait()
        # A role without any rights on our schema, in odd ways.
        with psycopg.connect(warehouse.source, user="plain", autocommit=True) as plain:
            plain.execute('SET search_path = "$user", public')
            plain.execute("CREATE TABLE own (id int PRIMARY KEY); INSERT INTO own VALUES (1)")
            with pytest.raises(psycopg.errors.UndefinedTable):
                plain.execute("ALTER TABLE own ADD a int; ALTER TABLE nowhere ADD b int")
            plain.execute("BEGIN; ALTER TABLE own ADD a int; ROLLBACK")
            assert plain.execute("SHOW search_path").fetchone() == ('"$user", public',)
        # Two at once: the second does not wait for the publication that the first one has locked.
        with (
            psycopg.connect(warehouse.source) as one,
            psycopg.connect(warehouse.source) as other,
        ):
            one.execute("CREATE TABLE first (id int PRIMARY KEY)")
            other.execute("CREATE TABLE second (id int PRIMARY KEY)")
            other.execute("INSERT INTO second VALUES (1)")
            other.commit()
            one.execute("INSERT INTO first VALUES (1)")
        run_sql(warehouse.source, "UPDATE second SET id = 2")
        warehouse.wait()
        wait_for(lambda: warehouse.query("SELECT id FROM shop_public.second") == [(2,)])
        warehouse.assert_equal()
        # What can't be written down leaves a mark.
        run_sql(
            warehouse.source,
            "ALTER TABLE millrace.sql_ddl_statements ADD CONSTRAINT broken CHECK (false) NOT VALID",
            "CREATE TABLE lost (id int PRIMARY KEY)",
            "ALTER TABLE millrace.sql_ddl_statements DROP CONSTRAINT broken",
        )
        assert "could not record" in warehouse.wait_for_state("shop", SourceState.HALTED).error
        # With it, its search path is lost.
        text = "CREATE TABLE public.lost (id int PRIMARY KEY)"
        decide_ddl(warehouse.config, warehouse.directory, "shop", Action.EDIT, text=text)
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
        warehouse.assert_equal()
    run_sql(warehouse.source, "DROP OWNED BY plain; DROP ROLE plain")
