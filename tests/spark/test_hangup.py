"""A terminal that is closed: whoever holds something on a server lets go of it."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
WAITING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'millrace%' AND wait_event_type = 'Lock'"
)


@contextmanager
def in_terminal(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program as the leader of a terminal's session; the terminal is closed at the end."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    closing = threading.Event()

    def read() -> None:
        while not closing.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 4096)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process
    finally:
        closing.set()
        reader.join()
        os.close(ours)


def test_a_closed_terminal_leaves_the_snapshot_and_its_slot_and_nothing_else(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    execute(source_db, "CREATE TABLE t (id int PRIMARY KEY)")
    slot = "hung_" + source_db.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(source_db) as holder:
        with in_terminal(
            "clone", "--follow", "--slot-name", slot, "--dir", str(tmp_path / "work"),
            "--source", source_db, "--target", target_db,
        ) as process:  # fmt: skip
            wait_for(lambda: rows(source_db, SLOTS) == [(slot,)] or process.poll())
            # Not before: the slot would wait for it.
            holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            wait_for(lambda: rows(source_db, WAITING) or process.poll())
            leader = psutil.Process(process.pid)
            family = wait_for(lambda: leader.children(recursive=True), "Spark is started")
        assert process.wait(DEADLINE_SECONDS) == 129
    psutil.wait_procs(family, timeout=DEADLINE_SECONDS)
    assert [one for one in family if one.is_running() and one.status() != "zombie"] == []
    assert rows(source_db, SLOTS) == [(slot,)]
    stop = [*MILLRACE, "snapshot", "--stop", "--dir", str(tmp_path / "work")]
    told = subprocess.run(stop, capture_output=True, text=True, check=True).stderr
    assert f"replication slot {slot} and its publications are dropped" in told
    assert rows(source_db, SLOTS) == []
    assert rows(source_db, "SELECT pubname FROM pg_publication") == []


def test_nohup_means_that_a_closed_terminal_is_nothing_to_us() -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "from millrace.cli.signals import noted_signals, stop_on_signals; stop_on_signals();"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "with noted_signals() as stop: os.kill(os.getpid(), signal.SIGHUP); print(stop.is_set())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
