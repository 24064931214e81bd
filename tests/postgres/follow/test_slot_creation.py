"""Making a slot while transactions are open: it says what it waits for, and leaves nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.errors import ServerError
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.wire import slot_creation
from millrace.postgres.wire.connect import connect
from millrace.postgres.wire.slot_creation import NewSlot, SlotSnapshot, create_slot
from millrace.postgres.wire.slot_wait import read_slot_wait, shorten_query
from millrace.postgres.wire.walsender import open_replication

SLOT = "millrace_waits"


@pytest.fixture(params=["16", "18", "system"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of each version, since it is the server's doing."""
    cluster: Cluster = request.getfixturevalue(
        {"16": "source_cluster", "18": "target_cluster", "system": "system_cluster"}[request.param]
    )
    name = f"waits_{request.param}"
    yield cluster.create_database(name)
    with psycopg.connect(cluster.uri(name), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
    cluster.drop_database(name)


@contextmanager
def open_transaction(uri: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction with an id, which a slot's creation has to wait for."""
    with psycopg.connect(uri, application_name="payroll") as connection:
        connection.execute("SELECT pg_current_xact_id(), 'secret'")
        yield connection
        connection.rollback()


def _slots(uri: str) -> list[str]:
    with psycopg.connect(uri) as connection:
        rows = connection.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
        ).fetchall()
    return [row[0] for row in rows]


def _publications(uri: str) -> list[str]:
    with psycopg.connect(uri) as connection:
        return [row[0] for row in connection.execute("SELECT pubname FROM pg_publication")]


class Creation(threading.Thread):
    """Makes a slot, until it is there or told to stop."""

    def __init__(self, uri: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self._dsn = Dsn.parse(uri)
        self._more = more
        self.stopped = threading.Event()
        self.made: NewSlot | None = None
        self.error: ServerError | None = None

    def run(self) -> None:
        session = open_replication(self._dsn, "test", "UTF8")
        try:
            self.made = create_slot(
                session,
                self._dsn,
                SLOT,
                "pgoutput",
                snapshot=SlotSnapshot.EXPORT,
                is_stopped=self.stopped.is_set,
                **self._more,
            )
        except ServerError as error:
            self.error = error
        finally:
            session.finish()


def test_a_creation_says_what_it_waits_for_and_goes_on(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_creation, "FIRST_WORD_SECONDS", 0.0)
    with open_transaction(database) as blocker:
        creation = Creation(database)
        creation.start()
        wait_for(lambda: f"process {blocker.info.backend_pid}" in caplog.text)
    creation.join()
    assert creation.made is not None
    assert creation.made.snapshot
    told = next(line for line in caplog.messages if "process" in line)
    assert "application 'payroll'" in told
    assert "idle in transaction" in told
    assert "SELECT pg_current_xact_id(), ?" in told
    assert "secret" not in caplog.text
    # One that waits for nothing says nothing.
    caplog.clear()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (SLOT,))
    monkeypatch.setattr(slot_creation, "FIRST_WORD_SECONDS", 60.0)
    with caplog.at_level(logging.INFO):
        creation = Creation(database)
        creation.start()
        creation.join()
    assert creation.made is not None
    assert not caplog.messages


def test_a_creation_that_is_late_or_stopped_leaves_nothing(database: str) -> None:
    with open_transaction(database) as blocker:
        # Time enough to come to where it waits.
        late = Creation(database, timeout_seconds=3.0)
        late.start()
        late.join()
        assert late.error is not None
        assert "could not be created within 3 seconds" in late.error.message
        assert f"process {blocker.info.backend_pid}" in late.error.message
        assert "--slot-timeout" in late.error.hint
        wait_for(lambda: _slots(database) == [])
        stopped = Creation(database)
        stopped.start()
        wait_for(lambda: _slots(database) == [SLOT])
        stopped.stopped.set()
        stopped.join()
        assert stopped.error is not None
        wait_for(lambda: _slots(database) == [])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_meanwhile_leaves_no_slot(
    database: str, tmp_path: Path, how: signal.Signals
) -> None:
    with open_transaction(database):
        process = subprocess.Popen(
            [*MILLRACE, "stream", "setup", "--slot-name", SLOT],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MILLRACE_SOURCE": database, "MILLRACE_DIR": str(tmp_path)},
        )
        try:
            wait_for(lambda: _slots(database) == [SLOT])
            process.send_signal(how)
            code = process.wait(DEADLINE_SECONDS)
        finally:
            process.kill()
            process.wait()
        assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
        # The transaction is still open: nothing but the end of the process ends the creation.
        wait_for(lambda: _slots(database) == [])
        if how != signal.SIGKILL:
            assert _publications(database) == []


def test_a_prepared_transaction_is_named() -> None:
    with open_cluster(16, settings={"max_prepared_transactions": "2"}) as cluster:
        with psycopg.connect(cluster.uri()) as connection:
            connection.execute("SELECT pg_current_xact_id()")
            connection.execute("PREPARE TRANSACTION 'of yesterday'")
        creation = Creation(cluster.uri())
        creation.start()
        with connect(Dsn.parse(cluster.uri()), "test") as connection:
            waits = wait_for(lambda: _blocked(connection))
            assert "prepared transaction 'of yesterday'" in waits
            connection.execute("ROLLBACK PREPARED 'of yesterday'")
        creation.join()
        assert creation.made is not None


def _blocked(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (SLOT,)
    ).fetchone()
    if row is None or row[0] is None:
        return ""
    found = read_slot_wait(connection, row[0])
    return found.describe() if found.blockers else ""


_SHORTENED: list[tuple[str, str]] = [
    ("SELECT  1\n FROM t", "SELECT ? FROM t"),
    ("UPDATE t SET a = 'it''s', b = $x$ y $x$ WHERE c=1.5", "UPDATE t SET a = ?, b = ? WHERE c=?"),
    ("INSERT INTO t1 VALUES (E'cut off", "INSERT INTO t1 VALUES (?"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "shown"), _SHORTENED)
def test_a_query_is_shown_without_its_values(query: str, shown: str) -> None:
    assert shorten_query(query) == shown
    assert len(shorten_query(query * 20)) <= 80
