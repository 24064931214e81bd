"""Filters from end to end: what is cloned with them is equal under them, and only under them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows
from tests.fixtures.stream.rerouted import rerouted
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace.clone.progress import Reporter
from millrace.clone.run import clone
from millrace.clone.settings import CloneSettings
from millrace.compare.run import CompareSettings, compare_data, compare_schema
from millrace.compare.task import RowDifference
from millrace.config.dsn import Dsn
from millrace.errors import ConfigError, WorkDirError
from millrace.filter.rules import FilterRules, parse_filters
from millrace.route import Route
from millrace.spark.session import Engine

SCHEMA = """
CREATE SCHEMA app;
CREATE SCHEMA log;
CREATE TYPE app.colour AS ENUM ('red', 'green', 'blue');
CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TABLE app.customer (
    id bigserial PRIMARY KEY, email text NOT NULL UNIQUE, region int, secret text DEFAULT 'none',
    initial text GENERATED ALWAYS AS (left(secret, 1)) STORED,
    shouted text GENERATED ALWAYS AS (upper(email)) STORED
);
CREATE INDEX customer_region ON app.customer (region);
CREATE TRIGGER customer_touch BEFORE UPDATE ON app.customer
    FOR EACH ROW EXECUTE FUNCTION app.touch();
CREATE TABLE log.ticket (id bigserial PRIMARY KEY);
-- Owned by one table, used by another.
CREATE SEQUENCE app.counter;
CREATE TABLE app.past (id bigint DEFAULT nextval('app.counter') PRIMARY KEY, t text);
ALTER SEQUENCE app.counter OWNED BY app.past.id;
CREATE TABLE app.young (id bigint DEFAULT nextval('app.counter') PRIMARY KEY, t text);
CREATE VIEW app.past_texts AS SELECT t FROM app.past;
CREATE FUNCTION app.text_of(app.past) RETURNS text LANGUAGE sql AS 'SELECT $1.t';
CREATE TABLE app.purchase (
    id int PRIMARY KEY, customer_id bigint REFERENCES app.customer,
    past_id bigint REFERENCES app.past, amount int
);
CREATE RULE purchase_log AS ON UPDATE TO app.purchase DO ALSO
    INSERT INTO app.young (t) SELECT t FROM app.past LIMIT 1;
CREATE MATERIALIZED VIEW app.totals AS SELECT customer_id, sum(amount) FROM app.purchase GROUP BY 1;
CREATE MATERIALIZED VIEW app.regions AS SELECT DISTINCT region FROM app.customer;
CREATE TABLE app.replicated (id int NOT NULL, t text);
CREATE UNIQUE INDEX replicated_id ON app.replicated (id);
ALTER TABLE app.replicated REPLICA IDENTITY USING INDEX replicated_id;
CREATE TABLE app.cached (id int PRIMARY KEY, t text);
-- Hashes of enums differ between servers: rows go through the partitioned table.
CREATE TABLE app.paint (id int, colour app.colour, secret text, PRIMARY KEY (id, colour))
    PARTITION BY HASH (colour);
CREATE TABLE app.paint_0 PARTITION OF app.paint FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE app.paint_1 PARTITION OF app.paint FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TABLE log.event (id serial PRIMARY KEY, t text);
CREATE VIEW log.events AS SELECT count(*) FROM log.event;
ALTER DEFAULT PRIVILEGES IN SCHEMA log GRANT SELECT ON TABLES TO pg_monitor;
CREATE EXTENSION vector;

INSERT INTO app.customer (email, region, secret)
    SELECT 'mail ' || i, i % 5, 'secret ' || i FROM generate_series(1, 500) AS i;
INSERT INTO app.past (t) SELECT 'past ' || i FROM generate_series(1, 20) AS i;
INSERT INTO app.young (t) SELECT 'young ' || i FROM generate_series(1, 20) AS i;
INSERT INTO app.purchase SELECT i, 1 + i % 500, 1 + i % 20, i FROM generate_series(1, 2000) AS i;
INSERT INTO app.replicated SELECT i, 'r' FROM generate_series(1, 50) AS i;
INSERT INTO app.cached SELECT i, 'c' FROM generate_series(1, 50) AS i;
INSERT INTO app.paint SELECT i, (enum_range(NULL::app.colour))[1 + i % 3], 's' || i
    FROM generate_series(1, 300) AS i;
INSERT INTO log.event (t) SELECT 'e' FROM generate_series(1, 100);
REFRESH MATERIALIZED VIEW app.totals;
REFRESH MATERIALIZED VIEW app.regions;
"""

FILTERS = """
[exclude-schema]
log

[exclude-table]
app.past

[exclude-table-data]
app.cached
app.regions

[exclude-index]
app.customer_region
app.replicated_id

[exclude-extension]
vector

[table-where]
app.purchase = customer_id IN (SELECT id FROM app.customer WHERE region = 1)
app.paint = id > 100
app.paint_1 = id % 2 = 0

[exclude-column]
app.customer.secret
app.paint.secret
"""

RULES = parse_filters(FILTERS, name="f.ini")


def differing_schema(source: str, target: str, rules: FilterRules) -> set[str]:
    found = compare_schema(Route(Dsn.parse(source), Dsn.parse(target), filters=rules))
    return {f"{one.kind} {one.name} {one.property}".strip() for one in found.differences}


def differing_data(
    source: str, target: str, engine: Engine, rules: FilterRules
) -> dict[str, tuple[RowDifference, ...]]:
    settings = CompareSettings(
        Route(Dsn.parse(source), Dsn.parse(target), filters=rules), rows=True
    )
    return {one.label: one.rows for one in compare_data(settings, engine) if not one.is_equal}


@pytest.fixture
def settings(source_db: str, target_db: str, tmp_path: Path) -> CloneSettings:
    execute(source_db, SCHEMA)
    return CloneSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "work", filters=RULES)
    )


def test_filtered_clone_is_equal_under_its_filters_and_under_no_others(
    settings: CloneSettings, engine: Engine, reporter: Reporter, source_db: str, target_db: str
) -> None:
    clone(settings, engine, reporter)
    assert rows(target_db, "SELECT count(*) FROM app.purchase") == [(400,)]
    assert rows(target_db, "SELECT DISTINCT secret, initial FROM app.customer") == [("none", "n")]

    assert differing_schema(source_db, target_db, RULES) == set()
    assert differing_data(source_db, target_db, engine, RULES) == {}

    assert differing_schema(source_db, target_db, FilterRules()) == {
        "schema log",
        "table app.past",
        "sequence app.counter owned by",
        "view app.past_texts",
        "function app.text_of(app.past)",
        "foreign key app.purchase.purchase_past_id_fkey",
        "rule app.purchase.purchase_log",
        "materialized view app.regions populated",
        "index app.customer_region",
        "index app.replicated_id",
        "table app.replicated replica identity",
        "extension vector",
    }
    assert set(differing_data(source_db, target_db, engine, FilterRules())) == {
        "app.customer",
        "app.past",
        "app.purchase",
        "app.cached",
        "app.paint",
        "log.event",
        "log.ticket",
    }


def test_what_filters_do_not_name_is_still_compared(
    settings: CloneSettings, engine: Engine, reporter: Reporter, source_db: str, target_db: str
) -> None:
    clone(settings, engine, reporter)
    execute(
        target_db,
        "INSERT INTO app.cached VALUES (7, 'stray')",
        "INSERT INTO app.purchase VALUES (1, 2, NULL, 1)",
        "UPDATE app.customer SET email = 'other' WHERE id = 3",
        "UPDATE app.customer SET secret = 'mine'",
        "DELETE FROM app.paint WHERE id = 200",
        "ALTER TABLE app.customer DROP CONSTRAINT customer_email_key",
        "CREATE TABLE app.own (id int)",
        # What is left out may be on the target for another reason.
        "CREATE TABLE app.past (id int, n int)",
        "CREATE SCHEMA log CREATE TABLE event (id int) CREATE TABLE own (id int)",
        "INSERT INTO log.own VALUES (1)",
    )
    assert differing_schema(source_db, target_db, RULES) == {
        "constraint app.customer.customer_email_key",
        "table app.own",
    }
    assert differing_data(source_db, target_db, engine, RULES) == {
        "app.cached": (RowDifference(("7",), "extra on target"),),
        "app.purchase": (RowDifference(("1",), "extra on target"),),
        "app.customer": (RowDifference(("3",), "different"),),
        "app.paint": (RowDifference(("200", "blue"), "missing on target"),),
        "app.own": (),
    }
    chosen = CompareSettings(
        Route(Dsn.parse(source_db), Dsn.parse(target_db), filters=RULES), tables=("app.past",)
    )
    with pytest.raises(ConfigError, match=r"no table app\.past .*--filters leaves it out"):
        compare_data(chosen, engine)


def millrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MILLRACE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "MILLRACE_CONFIG": os.devnull},
        timeout=DEADLINE_SECONDS,
    )


@pytest.mark.slow
def test_steps_with_filters_make_what_a_clone_with_filters_makes(
    source_db: str, target_db: str, engine: Engine, tmp_path: Path
) -> None:
    execute(source_db, SCHEMA, "COMMENT ON TABLE app.customer IS 'not wanted'")
    filters = tmp_path / "f.ini"
    filters.write_text(FILTERS)
    pinned = ["--source", source_db, "--target", target_db, "--dir", str(tmp_path / "work")]
    same = [*pinned, "--filters", str(filters), "--no-comments", "--not-consistent"]
    for step in (["dump", "schema"], ["restore", "pre-data"]):
        ended = millrace(*step, *same)
        assert ended.returncode == 0, ended.stderr
    without_filters = [*pinned, "--no-comments"]
    without_flag = [*pinned, "--filters", str(filters)]
    for wrong, told in (
        (without_filters, "set up for --filters"),
        (without_flag, "set up for schema options --no-comments"),
    ):
        ended = millrace("copy", "table-data", *wrong)
        assert ended.returncode == WorkDirError.exit_code, ended.stderr
        assert told in ended.stderr
    for step in (["copy", "data", "--table-jobs", "2"], ["restore", "post-data"]):
        ended = millrace(*step, *same)
        assert ended.returncode == 0, ended.stderr
    assert differing_schema(source_db, target_db, RULES) == set()
    # REFRESH is part of the schema; nobody asked for VACUUM or properties.
    assert differing_data(source_db, target_db, engine, RULES) == {}
    assert rows(target_db, "SELECT obj_description('app.customer'::regclass)") == [(None,)]

    sides = ["--source", source_db, "--target", target_db, "--filters", str(filters)]
    assert millrace("compare", "schema", *sides).returncode == 0
    assert millrace("compare", "schema", *sides[:4]).returncode == 9
    equal = millrace("compare", "data", "--jobs", "2", *sides)
    assert (equal.returncode, equal.stdout.split(":")[0]) == (0, "equal"), equal.stderr


def test_drop_if_exists_of_a_single_step_replaces_what_is_there(
    source_db: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path
) -> None:
    execute(source_db, "CREATE TABLE a (id int PRIMARY KEY)")
    execute(target_db, "CREATE TABLE a (other text); INSERT INTO a VALUES ('x')")
    asked = ["--source", source_db, "--target", target_db, "--dir", str(tmp_path / "work")]
    refused = millrace("copy", "schema", *asked)
    assert refused.returncode == 3
    assert "not empty" in refused.stderr
    ended = millrace("copy", "schema", "--drop-if-exists", *asked)
    assert ended.returncode == 0, ended.stderr
    assert differing_schema(source_db, target_db, FilterRules()) == set()


def test_drop_if_exists_spares_what_the_filters_leave_out(
    source_db: str, target_db: str, engine: Engine, reporter: Reporter, tmp_path: Path
) -> None:
    execute(
        source_db,
        "CREATE TABLE kept (id int PRIMARY KEY)",
        "INSERT INTO kept VALUES (1), (2)",
        "CREATE TABLE spared (id int PRIMARY KEY, kept_id int REFERENCES kept)",
        "INSERT INTO spared VALUES (1, 1)",
        "CREATE SCHEMA log CREATE TABLE event (id int PRIMARY KEY)",
    )
    whole = CloneSettings(Route(Dsn.parse(source_db), Dsn.parse(target_db), tmp_path / "first"))
    clone(whole, engine, reporter)
    execute(
        target_db,
        "INSERT INTO spared VALUES (2, 1)",
        "INSERT INTO log.event VALUES (7)",
        "DELETE FROM kept WHERE id = 2",
    )
    rules = parse_filters("[exclude-table]\npublic.spared\n[exclude-schema]\nlog\n", name="f.ini")
    again = rerouted(whole, directory=tmp_path / "second", filters=rules, drop_if_exists=True)
    clone(again, engine, reporter)
    assert rows(target_db, "SELECT id FROM kept ORDER BY 1") == [(1,), (2,)]
    assert rows(target_db, "SELECT id FROM spared ORDER BY 1") == [(1,), (2,)]
    assert rows(target_db, "SELECT id FROM log.event") == [(7,)]


def test_changed_filters_are_refused_by_a_run_that_goes_on(
    settings: CloneSettings, engine: Engine, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_FAILPOINTS", "pre-data.done=error")
    with pytest.raises(Exception, match="failpoint"):
        clone(settings, engine, reporter)
    monkeypatch.delenv("MILLRACE_FAILPOINTS")
    other = parse_filters("[exclude-table]\napp.past\n", name="g.ini")
    with pytest.raises(WorkDirError, match="--filters"):
        clone(rerouted(settings, filters=other, resume=True), engine, reporter)
