"""Signals of a terminal, and of one that the program was told to ignore."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.config.dsn import Dsn
from millrace.log import LogSettings
from millrace.receive.loop import ReceiveSettings
from millrace.receive.process import Receiver
from millrace.spool.place import SpoolPlace

_IGNORING = ["/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh"]


@contextmanager
def dumping(
    source: str, target: str, directory: Path, *, ignoring: bool
) -> Iterator[tuple[subprocess.Popen[str], psycopg.Connection[Any]]]:
    """The program as a job of its own, while its pg_dump waits for a lock that we hold."""
    with psycopg.connect(source) as holder:
        # Of a partitioned table nobody but pg_dump asks anything that waits.
        holder.execute("CREATE TABLE t (id int) PARTITION BY RANGE (id)")
        holder.commit()
        holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        process = subprocess.Popen(
            [
                *(_IGNORING if ignoring else []),
                *(sys.executable, "-m", "millrace", "dump", "schema"),
                *("--source", source, "--target", target, "--dir", str(directory)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        with process:
            try:
                wait_for(lambda: _waits(holder), "pg_dump waits for the lock")
                yield process, holder
            finally:
                process.kill()


def _waits(connection: psycopg.Connection[Any]) -> bool:
    connection.execute("SELECT pg_stat_clear_snapshot()")
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'millrace schema%' AND wait_event_type = 'Lock'"
    ).fetchone()
    return row != (0,)


@pytest.mark.parametrize(
    ("ignoring", "number", "code"),
    [(False, signal.SIGINT, 130), (False, signal.SIGTERM, 143), (True, signal.SIGTERM, 143)],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM where Ctrl-C is ignored"],
)
def test_signal_ends_the_program_and_the_pg_dump_it_runs(
    source_db: str, target_db: str, tmp_path: Path, ignoring: bool, number: int, code: int
) -> None:
    with dumping(source_db, target_db, tmp_path, ignoring=ignoring) as (process, holder):
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, err.splitlines()[-1]) == (code, "millrace: stopped")
        wait_for(lambda: not _waits(holder), "pg_dump is gone")


def test_program_that_was_started_with_ctrl_c_ignored_goes_on(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    """As a background job of a script, and its pg_dump with it."""
    with dumping(source_db, target_db, tmp_path, ignoring=True) as (process, holder):
        os.killpg(process.pid, signal.SIGINT)
        # What takes the signal has done so when it has been given a processor some times.
        for _ in range(10):
            holder.execute("SELECT pg_sleep(0.1)")
        assert process.poll() is None
        assert _waits(holder)
        holder.rollback()
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0, err


def test_receiver_is_deaf_to_the_terminal_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would print a traceback for a Ctrl-C before the first line of ours."""
    # Spawned, as outside of these tests.
    monkeypatch.setattr("millrace.receive.process.multiprocessing", multiprocessing)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Dsn.parse(f"postgresql://127.0.0.1:{silent.getsockname()[1]}/db")
        place = SpoolPlace(tmp_path, "utf-8", "s")
        receiver = Receiver(ReceiveSettings(source, "slot"), place, LogSettings())
        receiver.start()
        assert receiver.pid is not None
        try:
            while not (found := _masks(receiver.pid))["SigIgn"] >> (signal.SIGINT - 1) & 1:
                for number in (signal.SIGINT, signal.SIGHUP):
                    assert found["SigBlk"] >> (number - 1) & 1
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        finally:
            os.kill(receiver.pid, signal.SIGKILL)
            receiver.stop()


def _masks(pid: int) -> dict[str, int]:
    """What the kernel says of a process's signals, all of one moment."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t") for line in lines)
    return {name: int(fields[name], 16) for name in ("SigBlk", "SigIgn")}
