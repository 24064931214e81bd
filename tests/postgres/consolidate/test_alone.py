"""What happens to a source happens to it alone, and nobody is told that it is well."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from tests.fixtures.stream.syncing import run_sql
from tests.fixtures.wait import wait_for
from tests.postgres.consolidate.test_consolidate import Warehouse, warehouse  # noqa: F401

from millrace.config.dsn import Dsn
from millrace.consolidate.control import pause, resume, resync
from millrace.consolidate.registry import FILE, Registry, SourceState, source_directory
from millrace.consolidate.remove import remove_source
from millrace.consolidate.run import Consolidator
from millrace.errors import ApplyError, EngineLost, PreflightError, ServerError
from millrace.follow import lookout
from millrace.follow.bound_copy import read_stream
from millrace.log import LogSettings
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.slot import read_slot
from millrace.postgres.wire.wal_end import read_end


@pytest.fixture
def shop(warehouse: Warehouse) -> str:  # noqa: F811
    """The only source of the file."""
    warehouse.sources = {"shop": warehouse.sources["shop"]}
    warehouse.write()
    return warehouse.sources["shop"]


@contextmanager
def _mute_server() -> Iterator[str]:
    """Takes connections, and answers nothing for as long as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"host=127.0.0.1 port={listener.getsockname()[1]} dbname=x connect_timeout=0"


def _remove(warehouse: Warehouse, name: str) -> list[str]:  # noqa: F811
    source, target = Dsn.parse(warehouse.sources[name]), Dsn.parse(warehouse.target)
    return remove_source(source, target, warehouse.directory, name, cascades=False)


def test_a_source_that_does_not_answer_keeps_nobody_waiting_and_is_no_secret(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
) -> None:
    with ExitStack() as stack:
        with _mute_server() as mute:
            warehouse.sources = {"away": mute, "shop": shop}
            warehouse.write()
            stack.enter_context(warehouse.running())
            warehouse.wait_for_state("shop", SourceState.FOLLOWING)
            assert warehouse.status("away").state == SourceState.COPYING
        # Now it refuses.
        warehouse.wait_for_state("away", SourceState.FAILED)
        with pytest.raises(ApplyError, match="source away is failed"):
            warehouse.wait()
        assert _remove(warehouse, "away") == []
        del warehouse.sources["away"]
        warehouse.write()
        warehouse.wait()
    warehouse.assert_equal("shop")


def test_a_paused_source_is_received_by_the_next_process(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
) -> None:
    with warehouse.running():
        warehouse.wait()
        pause(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.PAUSED)
    run_sql(shop, "INSERT INTO seat VALUES (50, 50)")
    with warehouse.running(), connect(Dsn.parse(shop), "test") as connection:
        end = read_end(connection)

        def is_received() -> bool:
            slot = read_slot(connection, "millrace_shop")
            assert slot is not None
            return (slot.confirmed_lsn or 0) >= end

        wait_for(is_received, "a paused source is received")
        assert warehouse.query("SELECT FROM shop_public.seat WHERE id = 50") == []
        # Who resumes may wait at once.
        resume(warehouse.directory, "shop")
        warehouse.wait()
    warehouse.assert_equal("shop")


def test_a_copy_made_anew_takes_back_its_own_and_nothing_of_the_analysts(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookout, "MANY_LOOK_SECONDS", 0.5)

    def fail(description: str) -> None:
        if description.startswith("copy"):
            raise PreflightError("the test has had enough")

    warehouse.engine.before_task = fail
    run_sql(warehouse.target, "CREATE SCHEMA ana; CREATE TABLE ana.mine (id int PRIMARY KEY)")
    run_sql(warehouse.target, "INSERT INTO ana.mine VALUES (1)")
    with warehouse.running():
        warehouse.wait_for_state("shop", SourceState.FAILED)
        run_sql(warehouse.target, "CREATE VIEW ana.seats AS SELECT * FROM shop_public.seat")
        # Since it was planned, the source has lost a table and got one that the analysts have, too.
        run_sql(shop, "DROP TABLE audit.log; CREATE SCHEMA ana; CREATE TABLE ana.mine (id int)")
        warehouse.engine.before_task = lambda description: None
        resume(warehouse.directory, "shop")
        wait_for(lambda: "view ana.seats" in warehouse.status("shop").error, "it is refused")
        run_sql(warehouse.target, "DROP VIEW ana.seats")
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        # Nor do schemas that come later meet those of others.
        run_sql(shop, "CREATE SCHEMA later; CREATE TABLE later.seat (id int PRIMARY KEY)")
        run_sql(warehouse.target, "CREATE SCHEMA later; CREATE TABLE later.seat (id int)")
        run_sql(shop, "INSERT INTO later.seat VALUES (1)")
        assert "later.seat" in warehouse.wait_for_state("shop", SourceState.HALTED).error
    assert warehouse.query("SELECT count(*) FROM later.seat") == [(0,)]
    assert warehouse.query("SELECT id FROM ana.mine") == [(1,)]
    there = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace::regnamespace::text"
    assert warehouse.query(f"{there} = 'shop_ana'") == [("mine",)]
    assert warehouse.query(f"{there} = 'shop_audit'") == []
    assert len(warehouse.query(f"{there} = 'shop_public'")) == 4


def test_a_source_is_removed_in_the_middle_of_its_copy(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def block(description: str) -> None:
        if description.startswith("copy"):
            copying.set()
            go_on.wait()
            raise ServerError("nobody waits for it any more")

    warehouse.engine.before_task = block
    try:
        with warehouse.running(), ThreadPoolExecutor() as threads:
            copying.wait()
            removing = threads.submit(_remove, warehouse, "shop")
            wait_for(removing.done, "it is removed")
            removing.result()
            del warehouse.sources["shop"]
    finally:
        go_on.set()
    with connect(Dsn.parse(shop), "test") as connection:
        assert read_slot(connection, "millrace_shop") is None
        assert connection.execute("SELECT FROM pg_publication").fetchall() == []
    assert warehouse.query("SELECT FROM pg_namespace WHERE nspname ~ '^shop'") == []
    assert not source_directory(warehouse.directory, "shop").exists()


def test_tables_that_come_or_are_made_anew_are_waited_for_or_halt_the_source(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookout, "MANY_LOOK_SECONDS", 2.0)
    with warehouse.running():
        warehouse.wait()
        run_sql(shop, "DROP TABLE seat; CREATE TABLE seat (id int PRIMARY KEY, place int UNIQUE)")
        run_sql(shop, "INSERT INTO seat VALUES (1, 10)")
        warehouse.wait()
        warehouse.assert_equal("shop")
        # Without a row, nothing in the stream says that it is there.
        run_sql(shop, "CREATE TABLE late (id int PRIMARY KEY)")
        with pytest.raises(ApplyError, match=r"halted.*public\.late"):
            warehouse.wait()
        run_sql(warehouse.target, "CREATE TABLE shop_public.late (id int PRIMARY KEY)")
        run_sql(shop, "INSERT INTO late VALUES (1)")
        resume(warehouse.directory, "shop")
        warehouse.wait()
        run_sql(shop, "INSERT INTO account VALUES (2001, 1)", "DROP TABLE late")
        with pytest.raises(ApplyError, match=r"halted: public\.late was dropped"):
            warehouse.wait()
        assert warehouse.query("SELECT FROM shop_public.account WHERE id = 2001")
        run_sql(warehouse.target, "DROP TABLE shop_public.late")
        resume(warehouse.directory, "shop")
        warehouse.wait()
    warehouse.assert_equal("shop")


def test_what_the_file_says_now_must_be_what_was_copied(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
) -> None:
    warehouse.write(shop='schemas = {audit = ""}')
    with warehouse.running():
        warehouse.wait()
    # Lost, with all that was decided.
    for path in warehouse.directory.glob(f"{FILE}*"):
        path.unlink()
    run_sql(shop, "CREATE INDEX seat_plain ON seat (place, id)", "CREATE TABLE gone (i int)")
    run_sql(warehouse.target, "CREATE TABLE shop_public.gone (i int)")
    with warehouse.running():
        warehouse.wait()
        assert warehouse.status("shop").state == SourceState.FOLLOWING
        # All of it is copied again, but for what is left out, and what is no longer there.
        run_sql(warehouse.target, "DELETE FROM shop_public.seat WHERE id < 5")
        run_sql(warehouse.target, "DELETE FROM shop_public.account WHERE id < 5")
        for uri, table in ((shop, "gone"), (warehouse.target, "shop_public.gone")):
            run_sql(uri, f"DROP TABLE {table}")
        queued = resync(warehouse.config, warehouse.directory, "shop", ())
        assert {one.name for one in queued} == {"account", "transfer", "Loose one", "seat"}
        warehouse.wait()
        warehouse.assert_equal("shop")
        warehouse.sources = {"away": "host=127.0.0.1 port=1 dbname=x"}
        warehouse.write()
        assert "no longer in" in warehouse.wait_for_state("shop", SourceState.FAILED).error
    warehouse.sources = {"shop": shop}
    warehouse.write(shop='schemas = {audit = ""}\ncolumns."public.seat".leave_out = ["place"]')
    with warehouse.running():
        wait_for(lambda: "other filters, columns or hash key" in warehouse.status("shop").error)
        warehouse.write(shop='schemas = {audit = ""}')
        resume(warehouse.directory, "shop")
        warehouse.wait()
    with Registry(warehouse.directory) as registry:
        assert registry.require("shop").plan.naming.schema("public") == "shop_public"
    assert read_stream(source_directory(warehouse.directory, "shop")) is not None


def test_a_process_that_has_lost_its_engine_ends(
    warehouse: Warehouse,  # noqa: F811
    shop: str,
) -> None:
    def lose(description: str) -> None:
        raise EngineLost(f"{description}: gone")

    warehouse.engine.before_task = lose
    consolidator = Consolidator(
        warehouse.path, warehouse.directory, warehouse.engine, LogSettings()
    )
    with pytest.raises(EngineLost, match="gone"):
        consolidator.run(threading.Event())
    assert warehouse.status("shop").state == SourceState.FAILED
