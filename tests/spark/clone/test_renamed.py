"""Clones whose schemas have other names on the target."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.fixtures import create_museum_roles, load_museum
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import rows
from tests.fixtures.stream.followed import ACCOUNTS, SCHEMA, Followed, Silent, writing
from tests.fixtures.stream.rerouted import rerouted
from tests.fixtures.stream.syncing import request, wait_until_done
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for
from tests.spark.clone.test_museum import (
    LARGE_OBJECTS,
    OUR_SCHEMA,
    SEQUENCES_OF,
    dumped,
    restored_by_pg_restore,
)
from tests.spark.clone.test_resume_without_snapshot import fail_at

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data, compare_schema
from millrace.compare.schema import ACL_PROPERTIES
from millrace.config.dsn import Dsn
from millrace.errors import PreflightError, WorkDirError
from millrace.follow.clone_follow import clone_and_follow
from millrace.follow.settings import FollowSettings, SlotSettings
from millrace.follow.slot import cleanup
from millrace.name import Naming
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import connect
from millrace.route import Route
from millrace.spark.session import Engine

# Two of them trade their names; public has a namesake on the target.
MUSEUM = Naming(
    {
        "museum": 'The "new" museum.\\%',
        "public": "shared",
        "select": "table",
        "table": "select",
        'we.ird"sch%ema\\': "plain",
    }
)


def run(uri: str, *statements: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def rename_back(uri: str, naming: Naming) -> None:
    """By hand, with nothing of ours."""
    run(
        uri,
        *(f"ALTER SCHEMA {ident(old)} RENAME TO {ident('aside ' + old)}" for old in ["public"]),
        *(f"ALTER SCHEMA {ident(n)} RENAME TO {ident('x' + o)}" for o, n in naming.schemas.items()),
        *(f"ALTER SCHEMA {ident('x' + o)} RENAME TO {ident(o)}" for o in naming.schemas),
        'DROP SCHEMA "aside public"',
    )


RENAMED = Naming({"public": "shop", "audit": "public"})
MORE = """
CREATE SCHEMA audit;
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN audit.amount AS numeric(12, 2) CHECK (VALUE > 0);
CREATE TABLE felt (id int, m mood, note text, PRIMARY KEY (id, m)) PARTITION BY LIST (m);
CREATE TABLE felt_sad PARTITION OF felt FOR VALUES IN ('sad');
CREATE TABLE felt_rest PARTITION OF felt FOR VALUES IN ('ok', 'happy');
INSERT INTO felt SELECT i, (ARRAY['sad', 'ok', 'happy'])[1 + i % 3]::mood, 'n' || i
  FROM generate_series(1, 300) i;
CREATE SEQUENCE ticket;
CREATE TABLE audit.entry (id serial PRIMARY KEY, account int REFERENCES account, a audit.amount,
    feeling mood DEFAULT 'ok', pair text GENERATED ALWAYS AS (account::text || a::text) STORED);
CREATE INDEX entry_happy ON audit.entry (a) WHERE feeling = 'happy'::mood;
CREATE MATERIALIZED VIEW total AS SELECT feeling, count(*) FROM audit.entry GROUP BY 1;
CREATE FUNCTION audit.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER quiet BEFORE INSERT ON audit.entry FOR EACH ROW WHEN (NEW.feeling <> 'sad'::mood)
    EXECUTE FUNCTION audit.nothing();
CREATE POLICY glad ON audit.entry USING (feeling <> 'sad'::mood);
CREATE TABLE bare (t text);
INSERT INTO bare VALUES ('one');
"""


def millrace(*arguments: str) -> str:
    command = [*MILLRACE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_clone_under_other_names_is_followed_under_writers_and_cut_over(
    source_db: str, target_db: str, tmp_path: Path, engine: Engine
) -> None:
    run(source_db, SCHEMA + MORE)
    source, target, directory = Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work"
    settings = CloneSettings(Route(source, target, directory, naming=RENAMED))
    slot = SlotSettings("renamed_slot", identity_full=True)
    cloned, failures = threading.Event(), []

    def follow_clone() -> None:
        follow = FollowSettings(Route(source, target, directory), apply_jobs=2)
        try:
            clone_and_follow(
                settings, follow, slot, engine, Silent(), on_cloned=lambda _: cloned.set()
            )
        except BaseException as error:
            failures.append(error)
            cloned.set()

    stream = threading.Thread(target=follow_clone, daemon=True)
    followed = Followed(source_db, target_db, directory, slot.name, engine, threads=[stream])
    try:
        with writing(source_db, 71, truncates=False, pause_seconds=0.1) as written:
            wait_for(lambda: written() > 10)
            stream.start()
            assert cloned.wait(DEADLINE_SECONDS)
            assert not failures, failures
            run(target_db, "CREATE TABLE shop.later (id int PRIMARY KEY, m shop.mood)")
            run(
                source_db,
                'TRUNCATE "Loose one"',
                "TRUNCATE felt_sad",
                "UPDATE felt SET m = 'sad', note = 'moved' WHERE id < 20",
                "INSERT INTO audit.entry (account, a) SELECT 1, i FROM generate_series(1, 50) i",
                "UPDATE audit.entry SET feeling = 'happy' WHERE id % 2 = 0",
                "DELETE FROM bare",
                "INSERT INTO bare VALUES ('two')",
                "SELECT nextval('ticket') FROM generate_series(1, 77)",
                "CREATE TABLE later (id int PRIMARY KEY, m mood)",
                "INSERT INTO later VALUES (1, 'ok')",
            )
            asked = request(followed, "account")
            assert wait_until_done(followed, asked).rows == ACCOUNTS
            before = written()
            wait_for(lambda: written() > before + 20)
            wait_for(lambda: rows(target_db, "SELECT * FROM shop.later") == [(1, "ok")])
        assert stream.is_alive(), failures
        ends = ["--source", source_db, "--target", target_db, "--dir", str(directory)]
        report = json.loads(millrace("cutover", *ends, "--json", "--quiet"))
        stream.join(DEADLINE_SECONDS)
        assert not failures, failures
        assert report["equal"], report
        assert rows(target_db, "SELECT last_value, is_called FROM shop.ticket") == [(77, True)]
        assert rows(target_db, "SELECT count(*) FROM shop.total") == [(2,)]
        # The target had a public with grants of its own.
        assert "equal" in millrace("compare", "schema", "--no-acl", *ends)
        millrace("stream", "cleanup", *ends)
        query = "SELECT relreplident FROM pg_class WHERE relname = 'bare'"
        assert rows(target_db, query) == rows(source_db, query) == [("d",)]
    finally:
        followed.stop()
        with connect(source, "test") as here, connect(target, "test") as there:
            cleanup(here, there, slot.name, source.identity())


def drop_columns_with_names(uri: str) -> None:
    """Values of these types are names of objects: they are refused."""
    kinds = (
        "'^_?reg(class|proc|procedure|oper|operator|type|config|dictionary|collation|namespace)$'"
    )
    found = rows(
        uri,
        "SELECT a.attrelid::regclass::text, a.attname FROM pg_attribute a JOIN pg_type t"
        " ON t.oid = a.atttypid JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'"
        f" WHERE t.typname ~ {kinds} AND c.relnamespace = 'museum'::regnamespace AND a.attnum > 0",
    )
    run(uri, *(f"ALTER TABLE {table} DROP COLUMN {ident(column)}" for table, column in found))


def test_museum_under_other_names_is_what_pg_restore_brings_once_it_is_renamed_back(
    source_db: str,
    target_db: str,
    target_cluster: Cluster,
    engine: Engine,
    reporter: object,
    tmp_path: Path,
) -> None:
    load_museum(source_db)
    create_museum_roles(target_db)
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    settings = CloneSettings(Route(source, target, tmp_path / "work", naming=MUSEUM))
    with pytest.raises(PreflightError, match=r"museum\.every_type\.c_regclass"):
        clone(settings, engine, reporter)  # type: ignore[arg-type]
    drop_columns_with_names(source_db)
    clone(settings, engine, reporter)  # type: ignore[arg-type]
    names = {name for (name,) in rows(target_db, "SELECT nspname FROM pg_namespace")}
    assert names >= set(MUSEUM.schemas.values())
    assert "museum" not in names

    schema = compare_schema(Route(source, target, naming=MUSEUM))
    assert (schema.differences, schema.notes) == ((), ())
    assert sum(schema.objects.values()) > 2500
    compared = compare_data(CompareSettings(Route(source, target, naming=MUSEUM)), engine)
    assert [(one.label, one.problem) for one in compared if not one.is_equal] == []
    assert len(compared) > 100
    assert compare_schema(Route(source, target)).differences != ()

    with pytest.raises(WorkDirError, match="--rename-schema"):
        clone(rerouted(settings, naming=Naming(), resume=True), engine, reporter)  # type: ignore[arg-type]

    oracle = target_cluster.create_database("museum_oracle")
    try:
        restored_by_pg_restore(source_db, oracle, target_cluster, tmp_path)
        rename_back(target_db, MUSEUM)
        # The search path of a function is text; it was mapped.
        ours = [
            line.replace("'The \"new\" museum.\\%'", "'museum'")
            if "SET search_path" in line
            else line
            for line in dumped(target_cluster, target_db, target_cluster)
        ]
        theirs = dumped(target_cluster, oracle, target_cluster)
        assert ours == theirs
        for query in (LARGE_OBJECTS, SEQUENCES_OF):
            assert rows(target_db, query) == rows(oracle, query)
        assert rows(target_db, OUR_SCHEMA) == [(0,)]
    finally:
        target_cluster.drop_database("museum_oracle")


def test_a_clone_under_other_names_is_resumed_and_restarted(
    source_db: str,
    target_db: str,
    tmp_path: Path,
    engine: Engine,
    reporter: Reporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(source_db, SCHEMA + MORE)
    source, target = Dsn.parse(source_db), Dsn.parse(target_db)
    settings = CloneSettings(Route(source, target, tmp_path / "work", naming=RENAMED))
    fail_at("post-data.begin", settings, engine, reporter, monkeypatch)
    restarted = replace(settings, restart=True)
    fail_at("foreign-key.begin", restarted, engine, reporter, monkeypatch)
    with pytest.raises(WorkDirError, match="--rename-schema"):
        clone(rerouted(settings, naming=Naming({"audit": "x"}), resume=True), engine, reporter)
    # The definitions are those of the process before: what the source has now does not matter.
    run(source_db, "DROP INDEX audit.entry_happy")
    clone(replace(settings, resume=True), engine, reporter)
    query = "SELECT indexdef FROM pg_indexes WHERE indexname = 'entry_happy'"
    assert rows(target_db, query) == [
        (
            "CREATE INDEX entry_happy ON public.entry USING btree (a)"
            " WHERE (feeling = 'happy'::shop.mood)",
        )
    ]
    compared = compare_data(CompareSettings(Route(source, target, naming=RENAMED)), engine)
    assert all(one.is_equal for one in compared)
    # Once more over a target that has it all.
    again = rerouted(settings, directory=tmp_path / "again", drop_if_exists=True)
    clone(again, engine, reporter)
    assert compare_schema(Route(source, target, naming=RENAMED), ACL_PROPERTIES).differences == ()
