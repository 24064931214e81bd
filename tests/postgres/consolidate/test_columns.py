"""Columns and tables of a source: their shape, digests in their place, and workers for each."""

from __future__ import annotations

from tests.fixtures.stream.followed import writing
from tests.fixtures.stream.syncing import run_sql
from tests.fixtures.wait import wait_for
from tests.postgres.consolidate.test_consolidate import Warehouse, warehouse  # noqa: F401

from millrace.config.dsn import Dsn
from millrace.consolidate.check import check_all
from millrace.consolidate.comparison import compare_sources
from millrace.consolidate.control import pause, resume, resync
from millrace.consolidate.registry import SourceState, source_directory
from millrace.consolidate.remove import remove_source
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.wal_end import read_end

CHANGED = (
    # What is done on the source; a row before it; the row that can't be applied; what is said.
    (
        "ALTER TABLE thing DROP COLUMN note",
        "INSERT INTO thing VALUES (1, 1, 'one', 'low')",
        "INSERT INTO thing VALUES (2, 2, 'low')",
        "the source's rows have no column note, and the target has",
    ),
    (
        "ALTER TABLE thing ALTER amount TYPE bigint",
        "INSERT INTO thing VALUES (3, 3, 'low')",
        "INSERT INTO thing VALUES (4, 4, 'low')",
        "column amount is bigint, and integer on the target",
    ),
    (
        "ALTER TABLE thing ALTER grade TYPE other USING 'low'",
        "INSERT INTO thing VALUES (5, 5, 'low')",
        "INSERT INTO thing VALUES (6, 6, 'low')",
        "column grade is shop_public.other, and shop_public.grade on the target",
    ),
    (
        "ALTER TABLE thing RENAME amount TO sum",
        "INSERT INTO thing VALUES (7, 7, 'low')",
        "INSERT INTO thing VALUES (8, 8, 'low')",
        'RENAME COLUMN "amount" TO "sum"',
    ),
    (
        "ALTER TABLE thing DROP CONSTRAINT thing_pkey, ADD PRIMARY KEY (id, sum)",
        "INSERT INTO thing VALUES (9, 9, 'low')",
        "INSERT INTO thing VALUES (10, 10, 'low')",
        "the primary key is (id, sum), and (id) on the target",
    ),
)


def test_rows_of_another_shape_halt_their_source_even_where_they_would_fit(
    warehouse: Warehouse,  # noqa: F811
) -> None:
    shop = warehouse.sources["shop"]
    warehouse.sources = {"shop": shop}
    warehouse.write()
    run_sql(
        shop,
        "CREATE TYPE grade AS ENUM ('low'); CREATE TYPE other AS ENUM ('low');"
        "CREATE DOMAIN amount_of AS int;"
        "CREATE TABLE thing (id int PRIMARY KEY, amount int, note text, grade grade);"
        "CREATE TABLE other_thing (id int PRIMARY KEY, a amount_of, g grade[], n numeric(9, 2))",
    )
    with warehouse.running():
        warehouse.wait()
        for change, before, after, words in CHANGED:
            run_sql(shop, before, change, after, "INSERT INTO seat VALUES (99, 99)")
            status = warehouse.wait_for_state("shop", SourceState.HALTED)
            assert words in f"{status.error} {status.hint}"
            last = warehouse.query("SELECT max(id) FROM shop_public.thing")[0][0]
            assert f"({last}," in before
            assert not warehouse.query("SELECT FROM shop_public.seat WHERE id = 99")
            run_sql(
                warehouse.target,
                f"SET search_path = shop_public; {change}",
            )
            resume(warehouse.directory, "shop")
            warehouse.wait_for_state("shop", SourceState.FOLLOWING)
            warehouse.wait()
            run_sql(shop, "DELETE FROM seat WHERE id = 99")
        # Types of the users' own, arrays of them and domains are the same here and there.
        run_sql(shop, "INSERT INTO other_thing VALUES (1, 1, '{low}', 1.5)")
        warehouse.wait()
    warehouse.assert_equal()


PEOPLE = """
CREATE TABLE person (
    id int PRIMARY KEY, mail text UNIQUE, pass text, seal bytea, born date,
    friend text REFERENCES person (mail) DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE visit (id int, mail text) PARTITION BY RANGE (id);
CREATE TABLE visit_1 PARTITION OF visit FOR VALUES FROM (0) TO (1000);
ALTER TABLE visit REPLICA IDENTITY FULL;
ALTER TABLE visit_1 REPLICA IDENTITY FULL;
INSERT INTO person SELECT i, CASE WHEN i > 1 THEN 'p' || i || '@ü.example' END, 'secret' || i,
    ('\\x0' || i)::bytea, '2000-01-01' FROM generate_series(1, 5) i;
INSERT INTO visit SELECT i, 'p' || i || '@ü.example' FROM generate_series(1, 5) i;
"""
HASHED = (
    'columns = { "public.person" = { hash = ["mail", "seal", "friend"], leave_out = ["pass"] },'
    ' "public.visit" = { hash = ["mail"] } }'
)


def test_columns_that_are_hashed_or_left_out_are_on_neither_target_nor_disk(
    warehouse: Warehouse,  # noqa: F811
) -> None:
    shop, crm = warehouse.sources["shop"], warehouse.sources["Ä-crm"]
    warehouse.sources = {"shop": shop, "Ä-crm": crm}
    warehouse.write(shop=HASHED, **{"Ä-crm": HASHED})
    for uri in (shop, crm):
        run_sql(uri, PEOPLE)
    assert not [one for one in check_all(warehouse.config, warehouse.directory) if one.source]
    assert not (warehouse.directory / "hash.key").exists()
    with warehouse.running():
        warehouse.wait()
        pause(warehouse.directory, "shop")
        run_sql(
            shop,
            "INSERT INTO person VALUES (9, 'nine@ü.example', 'clear9', '\\x09', NULL, NULL)",
            "UPDATE person SET friend = 'nine@ü.example', pass = 'clear1' WHERE id = 2",
            "UPDATE person SET mail = 'two@ü.example' WHERE id = 3",
            "DELETE FROM person WHERE id = 4",
            "INSERT INTO visit VALUES (9, 'nine@ü.example')",
            "UPDATE visit SET mail = NULL WHERE mail = 'p5@ü.example'",
        )
        spool = source_directory(warehouse.directory, "shop")
        end = _end_of(shop)
        wait_for(lambda: (warehouse.received("shop") or 0) >= end, "all is received")
        written = b"".join(one.read_bytes() for one in spool.rglob("*") if one.is_file())
        assert not [one for one in (b"nine@", b"clear9", b"clear1", b"two@") if one in written]
        resume(warehouse.directory, "shop")
        warehouse.wait()
        # Digests of one value are the same in every source, copied or changed.
        joined = warehouse.query(
            "SELECT v.id FROM shop_public.person p JOIN shop_public.visit v USING (mail) UNION ALL "
            'SELECT v.id FROM shop_public.person p JOIN "Ä-crm_public".visit v USING (mail)'
            " ORDER BY 1"
        )
        assert joined == [(2,), (2,), (5,), (9,)]
        assert warehouse.query(
            "SELECT id, length(mail), length(seal), pass FROM shop_public.person ORDER BY 1"
        ) == [(1, None, 32, None), *((one, 64, 32, None) for one in (2, 3, 5, 9))]
        resync(warehouse.config, warehouse.directory, "shop", [("public", "person")])
        warehouse.wait()
        warehouse.assert_equal()
        # A comparison sees a digest of something else.
        run_sql(warehouse.target, "UPDATE shop_public.visit SET mail = 'x' WHERE id = 2")
        differs = [
            one.label
            for _, found in compare_sources(
                warehouse.config, warehouse.directory, ("shop",), warehouse.engine
            )
            for one in found
            if not one.is_equal
        ]
        assert differs == ["public.visit_1"]
    (warehouse.directory / "hash.key").write_text("another key of sixteen bytes or more")
    with warehouse.running():
        status = warehouse.wait_for_state("shop", SourceState.FAILED)
    assert "hash key" in status.error


def test_columns_that_can_not_be_hashed_are_refused(
    warehouse: Warehouse,  # noqa: F811
) -> None:
    shop = warehouse.sources["shop"]
    warehouse.sources = {"shop": shop}
    run_sql(
        shop,
        PEOPLE,
        "ALTER TABLE person ADD CHECK (pass <> ''), ADD code varchar(8),"
        " ADD up text GENERATED ALWAYS AS (upper(pass)) STORED, ADD must text NOT NULL DEFAULT '';"
        "ALTER TABLE person ALTER must DROP DEFAULT",
    )
    warehouse.write(
        shop='columns = { "public.person" = { hash = ["mail", "pass", "code", "born", "gone"],'
        ' leave_out = ["must"] },'
        ' "public.visit" = { hash = ["id"] } }'
    )
    said = " ".join(one.problem.what for one in check_all(warehouse.config, warehouse.directory))
    for words in (
        "person.mail can't be hashed: foreign key person_friend_fkey has an end",
        "person.pass can't be hashed: check person_pass_check reads it",
        "person.pass can't be hashed: generated column up reads it",
        "person.code is character varying(8), which has no room",
        "person.born is date",
        "person.gone, which is to be hashed, is not there",
        "visit.id can't be hashed: the table is partitioned by it",
        "person.must is NOT NULL and has no default",
    ):
        assert words in said


# The origins of its four workers, and none of the source "shop 2".
WORKERS_OF_SHOP = "^millrace_shop_(?!2_).*_4_[0-3]$"


def test_a_busy_source_is_divided_by_its_tables(
    warehouse: Warehouse,  # noqa: F811
) -> None:
    shop, other, _ = warehouse.sources.values()
    warehouse.sources = {"shop": shop, "shop 2": other}
    warehouse.write(shop='order = "by-table"')
    with warehouse.running():
        warehouse.wait()
        # On the target first: a source that is seen without its table halts.
        run_sql(
            warehouse.target,
            *(f"CREATE TABLE shop_public.t{n} (id int PRIMARY KEY)" for n in range(6)),
        )
        run_sql(shop, *(f"CREATE TABLE t{n} (id int PRIMARY KEY)" for n in range(6)))
        warehouse.wait()
        with writing(shop, 1):
            for start in (1, 101):
                for n in range(6):
                    run_sql(shop, f"INSERT INTO t{n} SELECT generate_series({start}, {start} + 9)")
        run_sql(shop, "BEGIN; UPDATE t1 SET id = -id; TRUNCATE t2, t3, t4; COMMIT")
        warehouse.wait()
        warehouse.assert_equal()
        origins = warehouse.query(
            "SELECT count(*) FROM pg_replication_origin_status s JOIN pg_replication_origin o"
            f" ON o.roident = s.local_id WHERE o.roname ~ '{WORKERS_OF_SHOP}'"
        )
        assert origins == [(4,)]
        # Another number, and another order, begin anew.
        run_sql(shop, "ALTER TABLE t1 ADD COLUMN x int", "INSERT INTO t1 VALUES (999, 1)")
        assert "no column x" in warehouse.wait_for_state("shop", SourceState.HALTED).error
        run_sql(warehouse.target, "ALTER TABLE shop_public.t1 ADD COLUMN x int")
        resume(warehouse.directory, "shop")
        warehouse.wait_for_state("shop", SourceState.FOLLOWING)
        warehouse.wait()
    warehouse.assert_equal()
    warehouse.write()
    with warehouse.running():
        assert "4 workers" in warehouse.wait_for_state("shop", SourceState.FAILED).error
    warehouse.write(shop='order = "by-table"')
    remove_source(
        Dsn.parse(shop), Dsn.parse(warehouse.target), warehouse.directory, "shop", cascades=False
    )
    assert not warehouse.query(
        f"SELECT roname FROM pg_replication_origin WHERE roname ~ '{WORKERS_OF_SHOP}'"
    )


def _end_of(uri: str) -> int:
    with connect(Dsn.parse(uri), "test") as connection:
        return read_end(connection)
