"""Many databases into one: each copied, followed, halted, resumed and removed by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.engines.direct_engine import DirectEngine
from tests.fixtures.stream.followed import SCHEMA, writing
from tests.fixtures.stream.syncing import run_sql
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.consolidate.check import check_all
from millrace.consolidate.comparison import compare_sources
from millrace.consolidate.config import Consolidation, read_config
from millrace.consolidate.control import pause, resume, resync, wait
from millrace.consolidate.foreign_key_index import ForeignKeyIndexes, read_missing
from millrace.consolidate.registry import SourceState, source_directory
from millrace.consolidate.remove import remove_source
from millrace.consolidate.run import Consolidator, Service
from millrace.consolidate.status import SourceStatus, read_records, read_status
from millrace.errors import ApplyError, PreflightError, ServerError, WorkDirError
from millrace.follow.bound_copy import read_stream
from millrace.follow.slot import cleanup
from millrace.log import LogSettings
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.slot import read_slot
from millrace.postgres.wire.wal_end import read_end
from millrace.workdir.sentinel import Sentinel

MORE = """
CREATE INDEX transfer_plain ON transfer (amount);
CREATE UNIQUE INDEX transfer_note ON transfer (id, amount);
ALTER TABLE transfer ADD FOREIGN KEY (source) REFERENCES account;
CREATE INDEX transfer_source ON transfer (source);
CREATE VIEW rich AS SELECT id FROM account WHERE balance > 1000;
CREATE SCHEMA audit;
CREATE TABLE audit.log (id int PRIMARY KEY, t text);
INSERT INTO audit.log VALUES (1, 'x');
"""


@dataclass
class Warehouse:
    """Sources, a target, a file, and a work directory."""

    directory: Path
    path: Path
    target: str
    sources: dict[str, str] = field(default_factory=dict)
    engine: DirectEngine = field(default_factory=DirectEngine)

    @property
    def config(self) -> Consolidation:
        return read_config(self.path)

    def write(self, **extra: str) -> None:
        """The file, with more keys for some sources."""
        lines = [f"target = {json.dumps(self.target)}"]
        for name, uri in self.sources.items():
            lines += [f"[source.{json.dumps(name)}]", f"uri = {json.dumps(uri)}"]
            more = extra.get(name, "")
            lines += [more] if "ddl =" in more else [more, 'ddl = "halt"']
        self.path.write_text("\n".join(lines))

    @contextmanager
    def running(self, service: Service = Service.BOTH) -> Iterator[None]:
        """`consolidate run`, on a thread."""
        stop = threading.Event()
        consolidator = Consolidator(
            self.path, self.directory, self.engine, LogSettings(), service=service
        )
        failures: list[BaseException] = []

        def run() -> None:
            try:
                consolidator.run(stop)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not failures, failures

    def status(self, name: str) -> SourceStatus:
        return next(one for one in read_status(self.directory, self.config) if one.name == name)

    def wait_for_state(self, name: str, state: SourceState) -> SourceStatus:
        wait_for(lambda: self.status(name).state == state, f"{name} is {state}")
        return self.status(name)

    def wait(self) -> None:
        wait_for(lambda: read_status(self.directory, self.config)[0].is_running)
        wait(self.config, self.directory, timeout_seconds=DEADLINE_SECONDS)

    def assert_equal(self, *names: str) -> None:
        for name, found in compare_sources(self.config, self.directory, names, self.engine):
            assert found, name
            assert all(one.is_equal for one in found), (name, found)

    def received(self, name: str) -> int | None:
        with Sentinel(source_directory(self.directory, name)) as sentinel:
            return sentinel.read().flushed_lsn

    def query(self, text: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.target) as connection:
            return connection.execute(text).fetchall()


@pytest.fixture
def warehouse(
    source_cluster: Cluster,
    target_cluster: Cluster,
    target_db: str,
    receivers: None,
    tmp_path: Path,
) -> Iterator[Warehouse]:
    """Two databases of one name on two servers, and a third with an odd name."""
    found = Warehouse(tmp_path / "work", tmp_path / "sources.toml", target_db)
    with ExitStack() as stack:
        places = {"shop": source_cluster, "shop 2": target_cluster, "Ä-crm": source_cluster}
        for name, cluster in places.items():
            database = "consolidated_shop" if "shop" in name else "consolidated-crm"
            uri = cluster.create_database(database)
            stack.callback(cluster.drop_database, database)
            run_sql(uri, SCHEMA + MORE)
            found.sources[name] = uri
        stack.callback(_remove_streams, found)
        found.write()
        yield found


def _remove_streams(warehouse: Warehouse) -> None:
    for name, uri in warehouse.sources.items():
        setup = read_stream(source_directory(warehouse.directory, name))
        if setup is not None:
            with (
                connect(Dsn.parse(uri), "test") as here,
                connect(Dsn.parse(warehouse.target), "test") as there,
            ):
                cleanup(here, there, setup.slot_name, setup.source)


def test_sources_are_copied_and_followed_under_writers_each_into_its_own_schemas(
    warehouse: Warehouse,
) -> None:
    run_sql(warehouse.target, "DROP ROLE IF EXISTS bi", "CREATE ROLE bi")
    warehouse.write(**{"Ä-crm": 'schemas = {public = "crm", audit = ""}\nviews = "drop"'})
    text = warehouse.path.read_text()
    warehouse.path.write_text(f'readers = ["bi"]\n{text}')
    assert [one for one in check_all(warehouse.config, warehouse.directory)] == []
    with ExitStack() as writers:
        for number, uri in enumerate(warehouse.sources.values()):
            writers.enter_context(writing(uri, number, truncates=False, pause_seconds=0.05))
        with warehouse.running():
            warehouse.wait()
            first = [warehouse.status(name).changes or 0 for name in warehouse.sources]
            wait_for(
                lambda: all(
                    (warehouse.status(name).changes or 0) > before + 50
                    for name, before in zip(warehouse.sources, first, strict=True)
                )
            )
            writers.close()
            warehouse.wait()
    warehouse.assert_equal()
    tables = warehouse.query(
        "SELECT n.nspname, count(*) FILTER (WHERE relkind = 'r'),"
        " count(*) FILTER (WHERE relkind = 'v'), bool_and(has_table_privilege('bi', c.oid,"
        " 'SELECT')) FILTER (WHERE relkind = 'r') FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname !~ '^pg_|^information_schema|^replication|^millrace' GROUP BY 1 ORDER BY 1"
    )
    assert tables == [
        ("crm", 4, 0, True),
        ("shop 2_audit", 1, 0, True),
        ("shop 2_public", 4, 1, True),
        ("shop_audit", 1, 0, True),
        ("shop_public", 4, 1, True),
    ]
    indexes = {
        row[0]
        for row in warehouse.query(
            "SELECT indexname FROM pg_indexes WHERE schemaname = 'shop_public'"
            " AND tablename = 'transfer'"
        )
    }
    assert indexes == {"transfer_pkey", "transfer_note", "transfer_source"}
    run_sql(warehouse.target, "DROP OWNED BY bi; DROP ROLE bi")


def test_a_change_of_structure_halts_its_source_alone_and_exactly_there(
    warehouse: Warehouse,
) -> None:
    shop, other, _ = warehouse.sources.values()
    with warehouse.running():
        warehouse.wait()
        # All in what would be one batch: what comes before is applied.
        run_sql(
            shop,
            "INSERT INTO account VALUES (1001, 1)",
            "ALTER TABLE account ADD COLUMN extra int",
            "INSERT INTO account VALUES (1002, 2, 22)",
            "INSERT INTO seat VALUES (99, 99)",
        )
        run_sql(other, "INSERT INTO account VALUES (1001, 1)")
        status = warehouse.wait_for_state("shop", SourceState.HALTED)
        assert "public.account" in status.error
        assert "extra" in status.error
        with pytest.raises(ApplyError, match="source shop is halted"):
            warehouse.wait()
        wait_for(
            lambda: (
                warehouse.query('SELECT 1 FROM "shop 2_public".account WHERE id = 1001') == [(1,)]
            )
        )
        assert warehouse.query("SELECT id FROM shop_public.account WHERE id > 1000") == [(1001,)]
        assert warehouse.query("SELECT id FROM shop_public.seat WHERE id = 99") == []
        # It is still received.
        received = warehouse.status("shop")

        def writes_and_lags() -> bool:
            # The lag of before may be that of a batch which was applied in part since then.
            run_sql(shop, "UPDATE account SET balance = 7")
            return (warehouse.status("shop").lag_bytes or 0) > (received.lag_bytes or 0)

        wait_for(writes_and_lags)
        # Somebody resumes it before it is mended: it halts again.
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.HALTED)
        run_sql(warehouse.target, "ALTER TABLE shop_public.account ADD COLUMN extra int")
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
    warehouse.assert_equal()


def test_a_paused_source_is_received_and_not_applied_also_by_the_next_process(
    warehouse: Warehouse,
) -> None:
    shop = warehouse.sources["shop"]
    with warehouse.running():
        warehouse.wait()
        pause(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.PAUSED)
        run_sql(shop, "INSERT INTO seat VALUES (50, 50)")
    with pytest.raises(WorkDirError, match="nothing runs"):
        wait(warehouse.config, warehouse.directory, timeout_seconds=1)
    with warehouse.running():
        warehouse.wait_for_state("Ä-crm", SourceState.FOLLOWING)
        warehouse.wait_for_state("shop", SourceState.PAUSED)
        with pytest.raises(ApplyError, match="paused"):
            warehouse.wait()
        assert warehouse.query("SELECT FROM shop_public.seat WHERE id = 50") == []
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
    warehouse.assert_equal("shop")


def test_a_source_is_added_resynced_and_removed_while_the_others_are_followed(
    warehouse: Warehouse,
) -> None:
    late = warehouse.sources.pop("shop 2")
    warehouse.write()
    with warehouse.running():
        warehouse.wait()
        assert warehouse.query("SELECT FROM pg_namespace WHERE nspname = 'shop 2_public'") == []
        warehouse.sources["shop 2"] = late
        warehouse.write()
        warehouse.wait_for_state("shop 2", SourceState.FOLLOWING)
        run_sql(warehouse.target, 'DELETE FROM "shop 2_public".seat WHERE id < 5')
        resync(warehouse.config, warehouse.directory, "shop 2", {("public", "seat")})
        warehouse.wait()
        warehouse.assert_equal()
        run_sql(warehouse.target, "CREATE SCHEMA ana")
        run_sql(warehouse.target, "CREATE VIEW ana.mine AS SELECT * FROM shop_public.seat")
        arguments = (
            Dsn.parse(warehouse.sources["shop"]),
            Dsn.parse(warehouse.target),
            warehouse.directory,
            "shop",
        )
        with pytest.raises(PreflightError, match=r"view ana\.mine"):
            remove_source(*arguments, cascades=False)
        assert warehouse.status("shop").state == SourceState.FOLLOWING
        removed = remove_source(*arguments, cascades=True)
        assert "replication slot millrace_shop" in removed
        assert "schema shop_public on the target" in removed
        # The file still has it, and it is neither begun again nor waited for.
        warehouse.wait()
        assert warehouse.status("shop").state == SourceState.REMOVED
        with pytest.raises(WorkDirError, match="removed already"):
            remove_source(*arguments, cascades=True)
        del warehouse.sources["shop"]
        warehouse.write()
        wait_for(lambda: "shop" not in read_records(warehouse.directory))
        assert warehouse.query("SELECT FROM pg_views WHERE schemaname = 'ana'") == []
        run_sql(late, "INSERT INTO seat VALUES (77, 77)")
        warehouse.wait()
    warehouse.assert_equal()


def test_one_service_receives_and_another_applies(warehouse: Warehouse) -> None:
    shop = warehouse.sources["shop"]
    with warehouse.running(Service.REPLAY):
        with warehouse.running(Service.RECEIVE):
            warehouse.wait()
            run_sql(shop, "INSERT INTO seat VALUES (60, 60)")
            warehouse.wait()
            assert warehouse.query("SELECT 1 FROM shop_public.seat WHERE id = 60") == [(1,)]
        run_sql(shop, "INSERT INTO seat VALUES (61, 61)")
        with pytest.raises(ServerError, match="not yet applied: shop"):
            wait(warehouse.config, warehouse.directory, timeout_seconds=1)
    with warehouse.running(Service.RECEIVE):
        setup = read_stream(source_directory(warehouse.directory, "shop"))
        assert setup is not None
        with connect(Dsn.parse(shop), "test") as connection:
            end = read_end(connection)
            # The source can let go of it, although nobody applies.
            wait_for(lambda: read_slot(connection, setup.slot_name).confirmed_lsn >= end)
    with warehouse.running():
        warehouse.wait()
    warehouse.assert_equal()


def test_foreign_keys_get_their_indexes_while_all_is_quiet(warehouse: Warehouse) -> None:
    key = "ALTER TABLE transfer ADD CONSTRAINT to_whom FOREIGN KEY (target) REFERENCES account"
    run_sql(warehouse.sources["shop"], key)
    warehouse.sources = {"shop": warehouse.sources["shop"]}
    warehouse.write()
    with warehouse.running():
        warehouse.wait()
    target, schemas = Dsn.parse(warehouse.target), {"shop_public", "shop_audit"}
    busy = ForeignKeyIndexes(target, lambda: schemas, lambda: False)
    assert busy.build_missing() == 0
    asked = iter([True])
    given_up = ForeignKeyIndexes(target, lambda: schemas, lambda: next(asked, False))
    with psycopg.connect(warehouse.target) as writer:
        # A build waits for whoever writes, so it is under way when a source lags.
        writer.execute("LOCK TABLE shop_public.transfer IN ROW EXCLUSIVE MODE")
        assert given_up.build_missing() == 0
    invalid = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid"
    assert warehouse.query(invalid) == [("shop_public.millrace_fk_to_whom",)]
    quiet = ForeignKeyIndexes(target, lambda: schemas, lambda: True)
    assert quiet.build_missing() == 1
    assert warehouse.query(invalid) == []
    with connect(target, "test") as connection:
        assert read_missing(connection, schemas) == []
    assert quiet.build_missing() == 0


SIDE_EFFECTS = """
CREATE EXTENSION vector;
CREATE TABLE piece (id int PRIMARY KEY, place vector(2));
CREATE FUNCTION boom() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''fired''; END';
CREATE TRIGGER boom AFTER DELETE ON piece FOR EACH ROW EXECUTE FUNCTION boom();
ALTER TABLE piece ENABLE ALWAYS TRIGGER boom;
COMMENT ON TRIGGER boom ON piece IS 'x';
CREATE FUNCTION seen() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';
CREATE EVENT TRIGGER consolidated_seen ON ddl_command_end EXECUTE FUNCTION seen();
CREATE POLICY mine ON piece USING (id = current_setting('app.tenant')::int);
COMMENT ON POLICY mine ON piece IS 'x';
ALTER TABLE piece ENABLE ROW LEVEL SECURITY;
CREATE PUBLICATION theirs FOR TABLE piece;
COMMENT ON PUBLICATION theirs IS 'x';
CREATE FOREIGN DATA WRAPPER far;
CREATE SERVER far FOREIGN DATA WRAPPER far;
CREATE USER MAPPING FOR postgres SERVER far OPTIONS (password 'secret');
CREATE FOREIGN TABLE away (i int) SERVER far;
CREATE VIEW view_of_away AS SELECT * FROM away;
COMMENT ON TABLE piece IS 'kept';
INSERT INTO piece VALUES (1, '[1,2]');
"""


def test_what_acts_by_itself_or_is_about_roles_and_credentials_is_left_out(
    warehouse: Warehouse,
) -> None:
    warehouse.sources = {"shop": warehouse.sources["shop"]}
    run_sql(warehouse.sources["shop"], SIDE_EFFECTS)
    warehouse.write()
    found = check_all(warehouse.config, warehouse.directory)
    assert all(one.problem.is_warning for one in found)
    said = " ".join(one.problem.what for one in found)
    assert "policies of 1 tables" in said
    assert "1 foreign tables" in said
    with warehouse.running():
        warehouse.wait()
    warehouse.assert_equal()
    assert warehouse.query(
        "SELECT (SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal)"
        " + (SELECT count(*) FROM pg_event_trigger) + (SELECT count(*) FROM pg_policy)"
        " + (SELECT count(*) FROM pg_class WHERE relrowsecurity)"
        " + (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM pg_foreign_server)"
        " + (SELECT count(*) FROM pg_foreign_data_wrapper)"
        " + (SELECT count(*) FROM pg_class WHERE relname ~ 'away'),"
        " obj_description('shop_public.piece'::regclass), (SELECT extnamespace::regnamespace::text"
        " FROM pg_extension WHERE extname = 'vector')"
    ) == [(0, "kept", "public")]


def test_every_problem_of_every_server_is_reported_at_once(warehouse: Warehouse) -> None:
    warehouse.sources["away"] = "host=127.0.0.1 port=1 dbname=x"
    warehouse.write(
        shop='schemas = {public = "one", audit = "one_audit"}',
        **{"Ä-crm": 'schemas = {public = "one", audit = "", nowhere = "x"}'},
    )
    run_sql(warehouse.target, 'CREATE SCHEMA "shop 2_public"')
    run_sql(warehouse.target, 'CREATE TABLE "shop 2_public".taken (i int)')
    text = warehouse.path.read_text()
    warehouse.path.write_text(f'readers = ["nobody_of_that_name"]\n{text}')
    found = [
        f"{one.source}: {one.problem.what}"
        for one in check_all(warehouse.config, warehouse.directory)
    ]
    for part in (
        "away: ",
        "Ä-crm: source Ä-crm has no schema nowhere",
        "shop 2: there is a schema shop 2_public already",
        ": there is no role nobody_of_that_name",
    ):
        assert any(part in one for one in found), (part, found)
