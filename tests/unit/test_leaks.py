"""What a test leaves open fails that very test, and no later one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LEAKY = """
import logging, os, signal, socket, subprocess, sys, threading

import pytest
from tests.fixtures import leaks

leaks._GRACE_SECONDS = 0.2
held = []

class Cycle:
    def __init__(self):
        self.itself = self
        self.socket = socket.socket()

def test_file(tmp_path): held.append((tmp_path / "file").open("w"))
def test_socket_in_a_cycle(): Cycle()
def test_skipped_with_a_socket():
    held.append(socket.socket())
    pytest.skip("nothing to do")
def test_thread(): threading.Thread(target=threading.Event().wait, daemon=True).start()
def test_child_that_runs(): held.append(subprocess.Popen(["sleep", "600"]))
def test_child_that_nobody_waited_for():
    child = subprocess.Popen(["true"])
    held.append(child)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
def test_log_handler(): logging.getLogger().addHandler(logging.NullHandler())
def test_log_level(): logging.getLogger("millrace").setLevel(7)
def test_signal_handler(): signal.signal(signal.SIGTERM, lambda *_: None)

@pytest.fixture(scope="module")
def wide():
    Cycle.left = socket.socket()
    yield

def test_wide_fixture(wide): pass

def test_nothing(): pass
def test_wide_fixture_is_not_ours(wide): pass
def test_closed():
    with socket.socket(), subprocess.Popen(["true"]): pass
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
@pytest.mark.usefixtures("in_this_process")
def test_handlers_are_put_back():
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, lambda *_: None)
def test_child_is_interrupted_as_usual():
    code = "import signal; print(*(signal.getsignal(n) == signal.SIG_IGN for n in (1, 2, 3)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert out == "False False False\\n"
def test_end():
    for one in held:
        if isinstance(one, subprocess.Popen):
            one.kill()
            one.wait()
        else:
            one.close()
"""

BLAMED = {
    "test_file": "descriptor",
    "test_socket_in_a_cycle": "ResourceWarning",
    "test_skipped_with_a_socket": "descriptor",
    "test_thread": "thread",
    "test_child_that_runs": "child",
    "test_child_that_nobody_waited_for": "has ended",
    "test_log_handler": "logger root",
    "test_log_level": "logger millrace",
    "test_signal_handler": "SIGTERM",
    # The last one that has to do with it.
    "test_end": "fixture wide",
}


def test_what_a_test_leaves_open_fails_that_test(tmp_path: Path) -> None:
    """In a job of a script, with everything ignored that such jobs ignore."""
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    ended = subprocess.run(
        [
            *("/bin/sh", "-c", "trap '' HUP INT QUIT; exec \"$@\"", "sh"),
            *(sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider"),
            *("-p", "tests.fixtures.leaks", "-q", "--rootdir", str(tmp_path), str(tmp_path)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^_+ (.+) _+$\n((?:(?!^_+ ).*\n)*)", ended.stdout, re.MULTILINE)
    blamed = {title.removeprefix("ERROR at teardown of "): text for title, text in found}
    assert blamed.keys() >= BLAMED.keys(), ended.stdout
    for name, reason in BLAMED.items():
        assert reason in blamed[name], ended.stdout
    assert f", {len(BLAMED)} errors in" in ended.stdout
    assert " failed" not in ended.stdout, ended.stdout
