"""Schemas under other names: what is refused beforehand, and what others see of a renaming."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.rerouted import rerouted
from tests.fixtures.wait import wait_for

from millrace.clone.naming_check import check_naming
from millrace.clone.problem import Problem
from millrace.clone.schema.mapping import run_mapped
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.filter.rules import parse_filters
from millrace.name import Naming
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.schema_rename import rename_back_sql, rename_in_sql
from millrace.postgres.wire.connect import connect
from millrace.route import Route


def check(
    source: str, target: str, naming: Naming, user: str = "postgres", **changes: Any
) -> list[Problem]:
    there = Dsn.parse(target).with_(user=user)
    route = Route(Dsn.parse(source), there, Path("unused"), naming=naming)
    settings = rerouted(CloneSettings(route), **changes)
    with connect(settings.source, "preflight") as here, connect(there, "preflight") as target_side:
        return check_naming(here, target_side, settings)


def schemas(uri: str) -> set[str]:
    found = rows(uri, "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information)'")
    return {name for (name,) in found}


def test_names_that_can_not_be_given_are_refused_with_what_fixes_them(
    source_db: str, target_db: str
) -> None:
    execute(
        source_db,
        "CREATE SCHEMA a",
        "CREATE SCHEMA b",
        "CREATE TYPE a.thing AS (n int, names regclass[])",
        "CREATE TABLE a.t (id int, what regclass, things a.thing, plain oid, who regrole)",
        "CREATE FUNCTION a.reads() RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM a.t'",
        "CREATE FUNCTION b.harmless() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    )
    execute(target_db, "CREATE SCHEMA used", "CREATE TYPE used.e AS ENUM ()", "CREATE SCHEMA free")

    def told(naming: dict[str, str], **changes: Any) -> list[str]:
        found = check(source_db, target_db, Naming(naming), **changes)
        assert all(problem.fix for problem in found)
        return [problem.what for problem in found if not problem.is_warning]

    assert check(source_db, target_db, Naming({"a": "a"})) == []
    (refused,) = told({"b": "free"})
    assert refused.endswith("a.t.what, a.t.things")
    filters = parse_filters("[exclude-table-data]\na.t\n", name="test")
    assert told({"b": "free"}, filters=filters) == []

    execute(source_db, "DROP TABLE a.t")
    assert told({"A": "x"}) == ["there is no schema A, which --rename-schema names"]
    assert told({"a": "b"}) == ["schemas a and b would both be called b on the target"]
    without = parse_filters("[exclude-schema]\nb\n", name="test")
    assert told({"a": "b"}, filters=without) == []
    assert told({"a": "b", "b": "a"}) == []
    assert told({"a": "used"}) == ["there is a schema used already, with objects in it"]
    assert told({"a": "used"}, drop_if_exists=True) == []
    assert "own tables in schema millrace" in told({"a": "millrace"})[0]

    (warning,) = check(source_db, target_db, Naming({"a": "free"}))
    assert warning.is_warning
    assert warning.what.endswith("a.reads()")


def test_who_may_not_rename_a_schema_is_told_before(
    source_db: str, target_db: str, target_cluster: Cluster
) -> None:
    execute(source_db, "CREATE SCHEMA a")
    execute(target_db, "CREATE SCHEMA a")
    target_cluster.execute("CREATE ROLE renamer LOGIN")
    try:
        naming = Naming({"a": "b"})
        (problem,) = check(source_db, target_db, naming, user="renamer")
        assert "schema a belongs to postgres" in problem.what
        assert problem.fix.startswith('ALTER SCHEMA "a" OWNER TO "renamer"')
        execute(target_db, 'ALTER SCHEMA "a" OWNER TO "renamer"')
        assert check(source_db, target_db, naming, user="renamer") == []
    finally:
        execute(target_db, "ALTER SCHEMA a OWNER TO postgres")
        target_cluster.execute("DROP ROLE renamer")


def test_others_see_the_targets_names_while_text_of_the_source_runs(target_db: str) -> None:
    naming = Naming({"public": "shop", "a": "b", "b": "a", "later": "made"})
    execute(
        target_db,
        "CREATE TABLE public.t AS SELECT 'own' AS who",
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.t AS SELECT 'ours' AS who",
        "CREATE SCHEMA a",
        "CREATE TABLE a.t AS SELECT 'called b there' AS who",
        "CREATE SCHEMA b",
        # It fires for what others do, not for what is ours.
        "CREATE FUNCTION public.no() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$BEGIN IF tg_tag = 'ALTER SCHEMA' THEN RAISE 'no'; END IF; END$$",
        "CREATE EVENT TRIGGER never ON ddl_command_start EXECUTE FUNCTION public.no()",
    )
    before = schemas(target_db)
    with psycopg.connect(target_db) as renamer:
        renamer.execute(rename_in_sql(naming).encode())
        assert renamer.execute("SELECT who FROM public.t").fetchone() == ("ours",)
        assert renamer.execute("SELECT who FROM b.t").fetchone() == ("called b there",)
        renamer.execute("CREATE SCHEMA later")
        renamer.execute("CREATE VIEW later.v AS SELECT * FROM public.t")
        # Another session reads and writes under the target's names, and waits for nobody.
        with psycopg.connect(target_db, options="-c lock_timeout=2s") as other:
            assert other.execute("SELECT who FROM public.t").fetchone() == ("own",)
            other.execute("INSERT INTO public.t VALUES ('more')")
        assert schemas(target_db) == before
        renamer.execute(rename_back_sql(naming).encode())
    assert schemas(target_db) == before | {"made"}
    assert "FROM shop.t" in rows(target_db, "SELECT pg_get_viewdef('made.v'::regclass)")[0][0]
    assert rows(target_db, "SELECT count(*) FROM public.t") == [(2,)]


def test_who_alters_a_schema_meanwhile_is_waited_for(target_db: str) -> None:
    execute(target_db, "CREATE SCHEMA shop")
    settings = SimpleNamespace(naming=Naming({"a": "shop"}), target=Dsn.parse(target_db))
    job = SimpleNamespace(settings=settings, extension_homes={}, role=lambda name: name)
    restoring = threading.Thread(
        target=run_mapped,
        args=(job, b"CREATE TABLE a.t ();", "restoring"),
        kwargs={"before": "", "after": ""},
    )
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    waiting += " AND datname = current_database()"
    with psycopg.connect(target_db) as other:
        other.execute("GRANT USAGE ON SCHEMA shop TO PUBLIC")
        restoring.start()
        wait_for(lambda: rows(target_db, waiting) == [(1,)])
    restoring.join()
    assert rows(target_db, "SELECT to_regclass('shop.t') IS NOT NULL") == [(True,)]


def test_an_extension_elsewhere_is_moved_in_and_out(system_cluster: Cluster) -> None:
    uri = system_cluster.create_database("moved_extension")
    try:
        execute(
            uri,
            "CREATE SCHEMA extensions",
            "CREATE SCHEMA shop",
            "CREATE EXTENSION citext SCHEMA extensions",
        )
        naming = Naming({"public": "shop"})
        homes = {"citext": "public", "plpgsql": "pg_catalog", "absent": "public"}
        with psycopg.connect(uri) as connection:
            connection.execute(rename_in_sql(naming, homes).encode())
            connection.execute("CREATE TABLE public.t (c public.citext)")
            connection.execute(rename_back_sql(naming, homes).encode())
        query = "SELECT format_type(atttypid, NULL) FROM pg_attribute WHERE attname = 'c'"
        query += " AND attrelid = 'shop.t'::regclass"
        assert rows(uri, query) == [("extensions.citext",)]
        # A home that is remembered from before the transaction would be that of somebody else.
        with psycopg.connect(uri) as connection:
            connection.execute("ALTER EXTENSION citext SET SCHEMA shop")
            connection.execute(rename_in_sql(naming, homes).encode())
            connection.execute("CREATE TABLE public.u (c public.citext)")
            connection.execute(rename_back_sql(naming, homes).encode())
        assert rows(uri, query.replace(".t'", ".u'")) == [("shop.citext",)]
    finally:
        system_cluster.drop_database("moved_extension")


@pytest.mark.parametrize("name", ["it's", 'a "b" c', "back\\slash", "percent%s", "$$"])
def test_any_name_can_be_given_and_taken_back(target_db: str, name: str) -> None:
    naming = Naming({name: "plain", "other": name})
    execute(target_db, "CREATE SCHEMA plain", "CREATE TABLE plain.t ()")
    before = schemas(target_db)
    with psycopg.connect(target_db) as connection:
        connection.execute(rename_in_sql(naming).encode())
        query = "SELECT nspname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace"
        query += " WHERE relname = 't'"
        assert connection.execute(query.encode()).fetchall() == [(name,)]
        connection.execute(rename_back_sql(naming).encode())
    assert schemas(target_db) == before
