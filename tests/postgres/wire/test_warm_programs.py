"""A program that is forked from a warm process is the one that Python would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

pytestmark = pytest.mark.usefixtures("receivers")

# A variable that Python reads when it starts: such a program is not forked.
COLD = {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def is_forked(process: subprocess.Popen[str]) -> bool:
    return process.pid not in {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("version",),
        ("clone", "--no-such-option"),
        ("clone", "--source", "host=/nowhere", "--target", "host=/nowhere", "--dir", "here"),
        ("list", "progress", "--dir", "here"),
    ],
)
def test_output_exit_code_environment_and_folder_are_the_same(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    found = []
    for more in ({}, COLD):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        process = subprocess.Popen(
            [*MILLRACE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ
            | more
            | {"MILLRACE_CONFIG": os.devnull, "XDG_STATE_HOME": str(folder), "COLUMNS": "120"},
        )
        assert is_forked(process) == (more is not COLD)
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
        made = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        found.append((process.returncode, out, err.replace(str(folder), ""), made))
    assert found[0] == found[1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_and_what_it_started(
    source_db: str, tmp_path: Path, how: signal.Signals
) -> None:
    command = [*MILLRACE, "snapshot", "--source", source_db, "--dir", str(tmp_path)]
    holds = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'millrace snapshot%'"
    with psycopg.connect(source_db, autocommit=True) as connection:

        def is_held() -> bool:
            return connection.execute(holds).fetchone() is not None

        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            wait_for(lambda: is_held() or process.poll() is not None)
            family = psutil.Process(process.pid).children(recursive=True)
            assert os.getsid(process.pid) == process.pid
            process.send_signal(how)
            code = process.wait(DEADLINE_SECONDS)
        # Otherwise it is asked to end, and ends well.
        assert code == (-signal.SIGKILL if how == signal.SIGKILL else 0)
        psutil.wait_procs(family, DEADLINE_SECONDS)
        wait_for(lambda: not is_held())
