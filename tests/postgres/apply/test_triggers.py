"""Triggers and rules of the target that fire always: not for what is applied."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.stream.stream_pair import StreamPair
from tests.fixtures.wait import wait_for

from millrace import failpoint
from millrace.apply import task as apply_task
from millrace.apply import trigger_silence as silence
from millrace.config.dsn import Dsn
from millrace.errors import ApplyError, ServerError
from millrace.postgres.program.embedded import Cluster


@pytest.fixture
def pair(source_db: str, target_db: str, tmp_path: Path) -> Iterator[StreamPair]:
    """How values travel makes no difference here."""
    opened = StreamPair(source_db, target_db, tmp_path, binary=True)
    yield opened
    opened.close()


AUDITED = (
    "CREATE TABLE item (id int PRIMARY KEY, name text UNIQUE, v int)",
    "CREATE TABLE m (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (1000) PARTITION BY HASH (id)",
    "CREATE TABLE m2a PARTITION OF m2 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
)
AUDIT = """
CREATE TABLE audit (at text, what text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
  $$BEGIN INSERT INTO public.audit VALUES (TG_RELID::regclass::text, TG_NAME || ' ' || TG_OP);
    RETURN NULL; END$$;
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
"""
ROWS = "CREATE TRIGGER {} AFTER INSERT OR UPDATE OR DELETE ON {} FOR EACH ROW EXECUTE FUNCTION {}()"
STATES = (
    "SELECT t.tgrelid::regclass::text, t.tgname, t.tgenabled FROM pg_trigger t"
    " WHERE NOT tgisinternal UNION ALL SELECT r.ev_class::regclass::text, r.rulename, r.ev_enabled"
    " FROM pg_rewrite r WHERE r.rulename <> '_RETURN' ORDER BY 1, 2"
)


def begin_audited(pair: StreamPair) -> None:
    on_target = [
        AUDIT,
        ROWS.format("always", "item", "note"),
        "ALTER TABLE item ENABLE ALWAYS TRIGGER always",
        ROWS.format("origin", "item", "note"),
        'CREATE TRIGGER "Eats ""all" BEFORE INSERT ON item FOR EACH ROW EXECUTE FUNCTION refuse()',
        'ALTER TABLE item ENABLE REPLICA TRIGGER "Eats ""all"',
        "CREATE TRIGGER emptied AFTER TRUNCATE ON item EXECUTE FUNCTION note()",
        "ALTER TABLE item ENABLE ALWAYS TRIGGER emptied",
        "CREATE RULE also AS ON UPDATE TO item DO ALSO INSERT INTO audit VALUES ('rule', 'u')",
        "ALTER TABLE item ENABLE ALWAYS RULE also",
        "CREATE RULE never AS ON DELETE TO item DO INSTEAD NOTHING",
        "ALTER TABLE item ENABLE REPLICA RULE never",
        ROWS.format("tree", "m", "note"),
        "ALTER TABLE m2a ENABLE ALWAYS TRIGGER tree",
        "CREATE TRIGGER leaf AFTER TRUNCATE ON m1 EXECUTE FUNCTION note()",
        "ALTER TABLE m1 ENABLE REPLICA TRIGGER leaf",
    ]
    pair.begin(*AUDITED, on_target="; ".join(on_target))


def change_everything(pair: StreamPair) -> None:
    pair.run(
        "INSERT INTO item SELECT i, 'n' || i, 0 FROM generate_series(1, 20) i",
        "INSERT INTO m SELECT i, 'v' FROM generate_series(90, 120) i",
    )
    pair.follow()
    pair.run(
        "UPDATE item SET v = 1 WHERE id < 5",
        [
            "UPDATE item SET name = 'x' WHERE id = 6",
            "UPDATE item SET name = 'n6' WHERE id = 7",
            "UPDATE item SET name = 'n7' WHERE id = 6",
        ],
        "DELETE FROM item WHERE id > 10",
        "UPDATE m SET id = id + 100",
        "DELETE FROM m WHERE id > 210",
        "INSERT INTO m VALUES (1, 'new')",
    )
    pair.follow()
    pair.assert_equal()
    pair.run("TRUNCATE item, m1", "INSERT INTO item VALUES (1, 'a', 1)")
    pair.follow()
    pair.assert_equal()


def test_triggers_and_rules_that_fire_always_are_silent_for_what_is_applied(
    pair: StreamPair, caplog: pytest.LogCaptureFixture
) -> None:
    begin_audited(pair)
    before = pair.target.execute(STATES).fetchall()
    with caplog.at_level(logging.INFO):
        change_everything(pair)
    assert pair.target.execute("SELECT * FROM audit").fetchall() == []
    assert pair.target.execute(STATES).fetchall() == before
    assert "public.item: disabled while changes are applied: rule also, rule never" in caplog.text
    # Everybody else's statements meet them as ever.
    pair.target.execute("UPDATE item SET v = 2")
    pair.target.execute("TRUNCATE item")
    found = pair.target.execute("SELECT at, what FROM audit ORDER BY 1, 2").fetchall()
    assert found == [
        ("item", "always UPDATE"),
        ("item", "emptied TRUNCATE"),
        ("item", "origin UPDATE"),
        ("rule", "u"),
    ]


def test_triggers_are_silent_on_another_version_too(
    source_db: str, system_cluster: Cluster, tmp_path: Path
) -> None:
    """ALTER TABLE takes the triggers of partitions along, or not, as the version has it."""
    target = system_cluster.create_database("silent")
    pair = StreamPair(source_db, target, tmp_path, binary=True)
    try:
        begin_audited(pair)
        pair.target.execute("ALTER TABLE ONLY m ENABLE REPLICA TRIGGER tree")
        before = pair.target.execute(STATES).fetchall()
        change_everything(pair)
        assert pair.target.execute("SELECT * FROM audit").fetchall() == []
        assert pair.target.execute(STATES).fetchall() == before
    finally:
        pair.close()
        system_cluster.drop_database("silent")


def test_triggers_of_foreign_keys_that_fire_always_are_silent(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent ON DELETE CASCADE"
        " DEFERRABLE INITIALLY DEFERRED)",
        on_target="""DO $$ DECLARE one record; BEGIN
            FOR one IN SELECT tgrelid::regclass AS place, tgname FROM pg_trigger LOOP
                EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', one.place, one.tgname);
            END LOOP; END $$""",
    )
    enabled = "SELECT count(*) FROM pg_trigger WHERE tgenabled = 'A'"
    before = pair.target.execute(enabled).fetchone()
    assert before == (4,)
    pair.run(
        ["INSERT INTO parent VALUES (1), (2)", "INSERT INTO child VALUES (1, 1), (2, 2), (3, 2)"]
    )
    pair.follow()
    pair.run("DELETE FROM parent WHERE id = 2", "UPDATE child SET p = NULL WHERE id = 1")
    pair.follow()
    pair.assert_equal()
    assert pair.target.execute(enabled).fetchone() == before


def test_triggers_marked_as_ours_see_what_is_applied(pair: StreamPair) -> None:
    """Tubes on a followed target; the partitions that a trigger is cloned to need no mark."""
    begin_audited(pair)
    pair.target.execute(
        "CREATE FUNCTION ours() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO public.audit VALUES ('ours', TG_OP); RETURN NULL; END$$;"
        "COMMENT ON FUNCTION ours() IS 'millrace: fires for applied changes (a test)';"
        + ROWS.format("ours", "m", "ours")
        + "; ALTER TABLE m ENABLE ALWAYS TRIGGER ours;"
        "ALTER TABLE m1 ENABLE ALWAYS TRIGGER ours; ALTER TABLE m2a ENABLE ALWAYS TRIGGER ours;"
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON item DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION ours(); ALTER TABLE item ENABLE ALWAYS TRIGGER late"
    )
    change_everything(pair)
    query = "SELECT what, count(*) FROM audit WHERE at = 'ours' GROUP BY 1 ORDER BY 1"
    found = dict(pair.target.execute(query).fetchall())
    # Rows of item: 20 and 1. Of m: 31 and 1, and those that moved from one partition to another.
    assert found["INSERT"] >= 20 + 1 + 31 + 1
    assert found["DELETE"] >= 5
    assert pair.target.execute("SELECT count(*) FROM audit WHERE at <> 'ours'").fetchone() == (0,)


def test_a_role_that_may_not_silence_a_trigger_is_told_which(pair: StreamPair) -> None:
    begin_audited(pair)
    pair.run("INSERT INTO m VALUES (1, 'a')")
    pair.follow()
    pair.target.execute(
        "CREATE ROLE applier LOGIN; GRANT SET ON PARAMETER session_replication_role TO applier;"
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO applier;"
        "GRANT EXECUTE ON FUNCTION pg_replication_origin_session_setup,"
        " pg_replication_origin_session_progress, pg_replication_origin_xact_setup TO applier"
    )
    try:
        dsn = Dsn.parse(pair.target.info.dsn).with_(user="applier")
        pair.run("INSERT INTO item VALUES (1, 'a', 1)")
        with pytest.raises(ApplyError, match=r"public\.item.*trigger always") as caught:
            pair.follow(target=dsn)
        assert 'ALTER TABLE ONLY "public"."item" ENABLE RULE "also"' in caught.value.hint
    finally:
        pair.target.execute("DROP OWNED BY applier; DROP ROLE applier")
    pair.apply()
    pair.assert_equal()


def test_a_trigger_that_comes_in_the_middle_of_a_batch_does_not_fire(
    pair: StreamPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when the batch began, and is when its first row is written."""
    begin_audited(pair)
    pair.target.execute("ALTER TABLE item DISABLE TRIGGER always")
    pair.run("INSERT INTO item VALUES (1, 'a', 1)", "INSERT INTO m VALUES (1, 'a')")
    enabled: list[str] = []

    def enable(name: str) -> None:
        if name == "apply.after_begin" and not enabled:
            enabled.append(name)
            pair.target.execute("ALTER TABLE item ENABLE ALWAYS TRIGGER always")

    monkeypatch.setattr(failpoint, "hit", enable)
    pair.follow()
    pair.assert_equal()
    assert enabled
    assert pair.target.execute("SELECT * FROM audit").fetchall() == []


def test_nobody_else_ever_sees_a_trigger_disabled(
    pair: StreamPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there is nothing to put back for whoever dies while changes are applied."""
    begin_audited(pair)
    before = pair.target.execute(STATES).fetchall()
    seen = []

    def look(name: str) -> None:
        if name.startswith("apply."):
            seen.append((name, pair.target.execute(STATES).fetchall() == before))

    monkeypatch.setattr(failpoint, "hit", look)
    pair.run("INSERT INTO m VALUES (1, 'a'), (200, 'b')", "UPDATE m SET v = 'c'")
    pair.follow()
    assert ("apply.after_update", True) in seen
    assert all(is_same for _, is_same in seen)


def test_waiting_for_another_writer_is_told(
    pair: StreamPair,
    target_db: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin_audited(pair)
    pair.run("INSERT INTO item VALUES (1, 'a', 1)")
    monkeypatch.setattr(silence, "LOCK_WAIT", "100ms")
    with psycopg.connect(target_db, application_name="somebody") as other:
        other.execute("INSERT INTO item VALUES (2, 'b', 2)")
        thread = threading.Thread(target=pair.follow, daemon=True)
        thread.start()
        wait_for(lambda: "waiting for a lock to silence" in caplog.text)
        other.rollback()
        thread.join()
    assert "(somebody)" in caplog.text
    pair.assert_equal()


def test_truncates_and_inserts_in_one_batch_do_not_wait_for_themselves(pair: StreamPair) -> None:
    """What is read of a table while the batch that has locked it is open must not wait."""
    pair.begin(
        *AUDITED,
        on_target=f"{AUDIT}; {ROWS.format('always', 'item', 'note')};"
        "ALTER TABLE item ENABLE ALWAYS TRIGGER always",
    )
    pair.run("INSERT INTO m SELECT i, 'v' FROM generate_series(90, 120) i")
    pair.follow()
    for _ in range(4):
        pair.run(
            "TRUNCATE m1",
            "INSERT INTO m SELECT i, 'v' FROM generate_series(1, 9) i",
            "TRUNCATE item, m2a",
            "INSERT INTO m SELECT i, 'w' FROM generate_series(200, 209) i",
            "INSERT INTO item VALUES (1, 'a', 1)",
        )
    outcomes: list[BaseException | None] = []

    def follow() -> None:
        try:
            pair.follow(chunk_bytes=100)
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    wait_for(lambda: outcomes, "the batch waits for itself")
    thread.join()
    assert outcomes == [None]
    pair.assert_equal()


def test_a_wait_for_the_catalog_ends_with_an_error(
    pair: StreamPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin(*AUDITED)
    pair.run("INSERT INTO item VALUES (1, 'a', 1)")
    monkeypatch.setattr(apply_task, "CATALOG_LOCK_TIMEOUT", "100ms")
    monkeypatch.setattr(apply_task, "with_retries", lambda work, on_retry: work())
    with pair.target.transaction():
        pair.target.execute("LOCK TABLE pg_catalog.pg_inherits IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(ServerError, match=r"looking up public\.item .*lock timeout") as caught:
            pair.follow()
    assert "pg_locks" in caught.value.hint
    pair.apply()
    pair.assert_equal()


def test_what_fires_always_is_named_when_a_stream_begins(
    pair: StreamPair, caplog: pytest.LogCaptureFixture
) -> None:
    begin_audited(pair)
    pair.target.execute(
        "CREATE FUNCTION ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';"
        "CREATE EVENT TRIGGER on_ddl ON ddl_command_end EXECUTE FUNCTION ddl();"
        "CREATE EVENT TRIGGER quiet ON ddl_command_end EXECUTE FUNCTION ddl();"
        "ALTER EVENT TRIGGER on_ddl ENABLE ALWAYS"
    )
    silence.warn_of_loud(pair.target)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told[:-1]] == ["public.item", "public.m1", "public.m2a"]
    assert "applied: rule also, rule never, trigger Eats" in caplog.text
    assert [text for text in told if "on_ddl" in text]
    assert "quiet" not in caplog.text
