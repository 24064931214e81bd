"""The benchmark's stop-watch counts every process of a contestant."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from bench.measure import Usage, run_measured
from bench.yardstick import Yardstick

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROOT = Path(__file__).resolve().parents[3]
# The sampler looks every so often; the more processes the machine has, the longer it takes.
IDLE_SECONDS = 3
BURN = """
import os, signal, sys, time
def burn(seconds):
    while time.process_time() < seconds: pass
"""


def measure(script: str, tmp_path: Path, timeout_seconds: float = 60) -> Usage:
    return run_measured(
        [sys.executable, "-c", BURN + script],
        tmp_path,
        source_pid=os.getpid(),
        target_pid=os.getpid(),
        timeout_seconds=timeout_seconds,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_cpu_of_an_orphan_is_counted(tmp_path: Path) -> None:
    usage = measure("if os.fork() == 0: burn(0.5)", tmp_path)
    assert usage.exit_code == 0
    assert usage.client_cpu_seconds >= 0.5


def test_cpu_of_a_child_nobody_waits_for_is_counted(tmp_path: Path) -> None:
    script = f"""
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    burn(0.5)
    time.sleep({IDLE_SECONDS})
else:
    try: os.wait()
    except ChildProcessError: pass  # when it has ended
"""
    assert measure(script, tmp_path).client_cpu_seconds >= 0.5


def test_memory_is_the_sum_over_the_tree(tmp_path: Path) -> None:
    usage = measure(f"os.fork(); block = b'x' * 50_000_000; time.sleep({IDLE_SECONDS})", tmp_path)
    assert 100e6 < usage.peak_memory_bytes < 200e6
    assert usage.peak_beside_jvm_bytes == usage.peak_memory_bytes


def test_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    assert measure("sys.exit('no such table')", tmp_path).exit_code == 1
    assert (tmp_path / "log").read_text() == "no such table\n"


def test_contestant_that_does_not_end_is_killed(tmp_path: Path) -> None:
    usage = measure("os.fork(); time.sleep(600)", tmp_path, timeout_seconds=IDLE_SECONDS)
    assert usage.exit_code == -9
    assert usage.killed_processes == 2


def test_yardstick_is_the_mean_of_its_window() -> None:
    with Yardstick() as yardstick:
        pass
    yardstick._samples = [(float(at), 1.0 if at < 10 else 2.0) for at in range(20)]
    assert yardstick.milliseconds() == 1.5
    assert yardstick.milliseconds((10.0, 30.0)) == 2.0
    # Two are too few: the whole run tells more.
    assert yardstick.milliseconds((18.0, 30.0)) == 1.5
