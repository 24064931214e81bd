"""What a contestant costs: wall time, CPU and peak memory of its process tree, CPU of the servers.

Invariant: every process a contestant starts is counted, also one that outlives its parent, as
Spark's JVM and Python workers may. The contestant runs under a wrapper (this module as a program)
that is the subreaper of them all: the kernel hands it the orphans, it waits for each, and so its
RUSAGE_CHILDREN is their sum, without the wrapper itself. One kind escapes it: the child of a
process that ignores SIGCHLD is forgotten when it ends. PySpark's daemon does so to its workers; for
those the sampler keeps the last CPU time it saw. They idle before they end, so little is lost.

Memory is the sum of proportional set sizes (PSS): pages shared by forked workers count once.

Facts: prctl(2), PR_SET_CHILD_SUBREAPER; getrusage(2), RUSAGE_CHILDREN; proc(5), stat, smaps_rollup.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from millrace.postgres.program.embedded import Cluster

PR_SET_CHILD_SUBREAPER = 36
SAMPLE_SECONDS = 0.1
# Reading the PSS of a large JVM takes milliseconds; sampling may take 2 % of one core, not more.
SAMPLE_SHARE = 0.02
# How long processes may live on after the contestant's own exit.
LINGER_SECONDS = 30


@dataclass(frozen=True)
class Usage:
    """The cost of one run."""

    exit_code: int
    wall_seconds: float
    client_cpu_seconds: float
    peak_memory_bytes: int
    # The same without Java's processes; its peak need not be at the same moment.
    peak_beside_jvm_bytes: int = 0
    killed_processes: int = 0
    # When the contestant itself ended, by the clock that never goes back.
    ended_at: float = 0.0
    source_cpu_seconds: float = 0.0
    target_cpu_seconds: float = 0.0
    # CPU the machine spent on neither contestant nor servers: a high value spoils the wall time.
    other_cpu_seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """What can be compared with another run's."""
        return {name: value for name, value in asdict(self).items() if name != "ended_at"}


def run_measured(
    command: Sequence[str],
    work_dir: Path,
    *,
    source_pid: int,
    target_pid: int,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
) -> Usage:
    """Run a contestant in `work_dir` to its end; its output goes to the file `log` there."""
    report = work_dir / "usage.json"
    wrapper = [sys.executable, "-m", "bench.measure", str(report), str(timeout_seconds), *command]
    before = server_cpu_seconds(source_pid), server_cpu_seconds(target_pid), _machine_cpu_seconds()
    with (work_dir / "log").open("wb") as log:
        subprocess.run(wrapper, cwd=work_dir, env=env, stdout=log, stderr=log, check=True)
    after = server_cpu_seconds(source_pid), server_cpu_seconds(target_pid), _machine_cpu_seconds()
    source, target, machine = (b - a for a, b in zip(before, after, strict=True))
    usage = Usage(**json.loads(report.read_text()))
    other = max(0.0, machine - source - target - usage.client_cpu_seconds)
    return replace(
        usage, source_cpu_seconds=source, target_cpu_seconds=target, other_cpu_seconds=other
    )


def quiet(*clusters: Cluster) -> None:
    """What earlier runs left for the disk is written: it would be paid for by the next one."""
    for cluster in clusters:
        cluster.execute("CHECKPOINT")
    os.sync()


def server_cpu_seconds(postmaster_pid: int) -> float:
    """CPU of a server since its start: the postmaster, its children, and those that have ended.

    Looked at again if a child came or went meanwhile: it would be counted twice, or not at all.
    """
    postmaster = psutil.Process(postmaster_pid)
    while True:
        before = {child.pid for child in postmaster.children(recursive=True)}
        total = _cpu_seconds(postmaster_pid) + sum(map(_cpu_seconds, before))
        if before == {child.pid for child in postmaster.children(recursive=True)}:
            return total


def postmaster_pid(data_dir: Path) -> int:
    return int((data_dir / "postmaster.pid").read_text().splitlines()[0])


class _Sampler(threading.Thread):
    """Watches all descendants of this process: the peak of their memory, CPU nobody waits for."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.peak_beside_jvm_bytes = 0
        self.unwaited_cpu_seconds: dict[int, float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        pause = SAMPLE_SECONDS
        while not self._ended.wait(pause):
            started = time.thread_time()  # on a busy machine it waits as well, which costs nothing
            processes = psutil.Process().children(recursive=True)
            self._note_memory({each: _memory_bytes(each) for each in processes})
            for process in processes:
                if _is_unwaited(process):
                    self.unwaited_cpu_seconds[process.pid] = _cpu_seconds(process.pid)
            pause = max(SAMPLE_SECONDS, (time.thread_time() - started) / SAMPLE_SHARE)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _note_memory(self, memory: Mapping[psutil.Process, int]) -> None:
        beside = sum(size for process, size in memory.items() if not _is_jvm(process))
        self.peak_bytes = max(self.peak_bytes, sum(memory.values()))
        self.peak_beside_jvm_bytes = max(self.peak_beside_jvm_bytes, beside)


class _Wrapper:
    """Runs one command as the subreaper of all it starts."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._killed = 0
        self._reaped: set[int] = set()

    def run(self, command: Sequence[str]) -> Usage:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or we could not wait ourselves
        signal.signal(signal.SIGALRM, self._kill_all)
        sampler = _Sampler()
        started = time.monotonic()
        process = subprocess.Popen(command)
        sampler.start()
        signal.setitimer(signal.ITIMER_REAL, self._timeout_seconds)
        exit_code, ended = self._wait_for_all(process.pid)
        sampler.stop()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        seen = sampler.unwaited_cpu_seconds.items()
        unwaited = sum(seconds for pid, seconds in seen if pid not in self._reaped)
        return Usage(
            exit_code=exit_code,
            wall_seconds=ended - started,
            client_cpu_seconds=children.ru_utime + children.ru_stime + unwaited,
            peak_memory_bytes=sampler.peak_bytes,
            peak_beside_jvm_bytes=sampler.peak_beside_jvm_bytes,
            killed_processes=self._killed,
            ended_at=ended,
        )

    def _wait_for_all(self, main_pid: int) -> tuple[int, float]:
        exit_code, ended = -1, 0.0
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return exit_code, ended
            self._reaped.add(pid)
            if pid == main_pid:
                exit_code, ended = os.waitstatus_to_exitcode(status), time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, LINGER_SECONDS)

    def _kill_all(self, *_: object) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
                self._killed += 1


def _memory_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except psutil.Error:  # it ended meanwhile
        return 0
    return getattr(memory, "pss", memory.rss)


def _is_jvm(process: psutil.Process) -> bool:
    try:
        return process.name() == "java"
    except psutil.Error:  # it ended meanwhile
        return False


def _is_unwaited(process: psutil.Process) -> bool:
    try:
        status = Path(f"/proc/{process.ppid()}/status").read_text()
    except (psutil.Error, OSError):
        return False
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and of the children it has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ended meanwhile
        return 0.0
    # Fields 14 to 17 of proc(5); the second, the name in brackets, may hold blanks.
    ticks = stat.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _machine_cpu_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


if __name__ == "__main__":
    report_file, timeout, *argv = sys.argv[1:]
    Path(report_file).write_text(json.dumps(asdict(_Wrapper(float(timeout)).run(argv))))
