"""`millrace` as a child process: its tree, its failpoints, its end.

Every failpoint is set to stop the process that comes to it, but only while its marker file exists.
So a test chooses the moment while the program runs: it makes the file, and waits until it is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from tests.fixtures.spark_folder import application_folder, remove_application_folder
from tests.fixtures.wait import DEADLINE_SECONDS, POLL_SECONDS
from tests.torture.failpoints import FAILPOINTS, OWN_SNAPSHOT, STREAM, TUBE

from millrace.failpoint import VARIABLE

EVERYWHERE = FAILPOINTS + OWN_SNAPSHOT + STREAM + TUBE
WITH_SPARK = (sys.executable, "-m", "millrace")
# Looking through all processes of the machine takes milliseconds.
WATCH_SECONDS = 0.1

# Millrace has two, Spark its own for a cluster.
_DAEMON = re.compile(r"\b(millrace\.|py)spark\.(stream_)?daemon\b")
_EXECUTOR = "CoarseGrainedExecutorBackend"
_FORKSERVER = "multiprocessing.forkserver"
_SNAPSHOT = "millrace.snapshot.process"


class Program:
    """One process of `millrace`, and what it started; `command` is how the program is called."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        marks: Path | None = None,
        command: tuple[str, ...] = WITH_SPARK,
        more_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._marks = marks
        self._watched_at = 0.0
        self._family: dict[int, psutil.Process] = {}
        self._folders: set[Path] = set()
        environment = {**os.environ, **(more_environment or {})}
        environment.pop(VARIABLE, None)
        if marks is not None:
            marks.mkdir(exist_ok=True)
            for name in EVERYWHERE:
                (marks / name).unlink(missing_ok=True)
            environment[VARIABLE] = ",".join(f"{p}=stop@{marks / p}" for p in EVERYWHERE)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 2 * DEADLINE_SECONDS) -> int:
        """Its exit code, when it has ended; continues whatever was stopped."""
        deadline = time.monotonic() + seconds
        while self.exit_code is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.printed()}"
            self.watch()
            time.sleep(POLL_SECONDS)
        assert self.exit_code is not None
        return self.exit_code

    # Its tree

    def watch(self) -> None:
        """To be called again and again: whoever comes is remembered."""
        if time.monotonic() > self._watched_at + WATCH_SECONDS:
            self.family()
            self._watched_at = time.monotonic()

    def family(self) -> list[psutil.Process]:
        """Itself and the living processes below; who was ever seen is remembered."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            below = top.children(recursive=True)
            # The snapshot process is meant to outlive whoever starts it.
            found = [top, *(one for one in below if _SNAPSHOT not in _command(one))]
        for process in found:
            self._family.setdefault(process.pid, process)
            if _name(process) == "java" and _EXECUTOR in _command(process):
                self._remember_folder(process)
        return [process for process in found if not is_gone(process)]

    def has_engine(self) -> bool:
        """Whether Spark was started, or what forks tasks in its place."""
        return self.jvm() is not None or any(_FORKSERVER in _command(p) for p in self.family())

    def jvm(self) -> psutil.Process | None:
        """The driver's."""
        executors = self.executors()
        found = (p for p in self.family() if _name(p) == "java" and p not in executors)
        return next(found, None)

    def executors(self) -> list[psutil.Process]:
        """JVMs of their own, if it runs on a cluster."""
        return [p for p in self.family() if _EXECUTOR in _command(p)]

    def daemons(self) -> list[psutil.Process]:
        """The parents of Spark's Python workers; a JVM starts them."""
        jvms = [p for p in (self.jvm(), *self.executors()) if p]
        return [child for jvm in jvms for child in _children(jvm) if _name(child) != "java"]

    def workers(self) -> list[psutil.Process]:
        """Spark's Python workers, also those that have lost their parent."""
        known = {*self.family(), *self.left_behind()} - set(self.daemons())
        return [process for process in known if _DAEMON.search(_command(process))]

    def forked(self) -> list[psutil.Process]:
        """What runs tasks in the place of Spark's workers."""
        servers = [p for p in self.family() if _FORKSERVER in _command(p)]
        return [child for server in servers for child in _children(server)]

    def receivers(self) -> list[psutil.Process]:
        """The process that fills the spool."""
        return [process for process in self.family() if "spawn_main" in _command(process)]

    def _remember_folder(self, executor: psutil.Process) -> None:
        """Spark keeps an application's folder below its own installation."""
        with contextlib.suppress(psutil.Error):
            if folder := application_folder(executor):
                self._folders.add(folder)

    def left_behind(self) -> list[psutil.Process]:
        """Whoever of the tree still runs after its end."""
        return [process for process in self._family.values() if not is_gone(process)]

    # Its failpoints

    def arm(self, failpoint: str) -> None:
        """Stop the next process that comes there."""
        assert self._marks is not None
        (self._marks / failpoint).touch()

    def disarm(self) -> None:
        for name in EVERYWHERE:
            if self._marks is not None:
                (self._marks / name).unlink(missing_ok=True)

    def has_hit(self, failpoint: str) -> bool:
        assert self._marks is not None
        return not (self._marks / failpoint).exists()

    def stopped(self) -> list[psutil.Process]:
        """Who of the tree is stopped, also if its parent has gone."""
        known = {*self.family(), *self.left_behind()}
        return [process for process in known if _status(process) == psutil.STATUS_STOPPED]

    def go_on(self) -> None:
        """Let every stopped process of the tree, or of what is left of it, run."""
        for process in {*self.family(), *self.left_behind()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def signal_group(self, number: int) -> None:
        """As a terminal does it: to all processes of the foreground."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Nothing of it is left."""
        self.family()
        for process in self.left_behind():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for folder in self._folders:
            remove_application_folder(folder)


def is_gone(process: psutil.Process) -> bool:
    """Ended; nobody may be there to collect an orphan."""
    return not process.is_running() or _status(process) in ("", psutil.STATUS_ZOMBIE)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return ""
