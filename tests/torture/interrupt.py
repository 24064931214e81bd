"""Bringing a process to a moment, and doing to it what is to be done there.

Invariant: a moment is the process's own (a place in the code, a byte on its wire, work committed),
not the clock's; whoever is not there to be killed is told, not counted.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import psutil
from tests.fixtures.wait import POLL_SECONDS, wait_for
from tests.torture.program import Program
from tests.torture.proxy import Proxy
from tests.torture.schedule import SIDES, After, Interruption, Kind

BYTES = {After.SOURCE_BYTES: "source", After.TARGET_BYTES: "target"}
SIGNALS = {Kind.TERMINATE: signal.SIGTERM, Kind.INTERRUPT: signal.SIGINT, Kind.QUIT: signal.SIGQUIT}
# How long a worker may take to come.
VICTIM_SECONDS = 5


class CampaignFailed(AssertionError):
    """Two sides that differ, or a process that ended in a way it must not."""


class Servers(Protocol):
    """What can be done to more than the process."""

    @property
    def proxies(self) -> Mapping[str, Proxy]: ...

    def restart_target(self) -> None: ...

    def restart_source(self, mode: str = "fast") -> None: ...


def wait_until(
    program: Program,
    interruption: Interruption,
    proxies: Mapping[str, Proxy],
    count_done: Callable[[], int],
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """True at the moment; False if the process ended before it, or it can't come any more. A wire
    that is to be cut at some byte is cut then."""
    moment = interruption.moment
    if moment.after is After.FAILPOINT:
        program.arm(moment.failpoint)
        if not first_of(program, lambda: program.has_hit(moment.failpoint), is_over):
            program.disarm()
            return False
        # It may have ended just behind its last failpoint.
        wait_for(lambda: program.stopped() or program.exit_code is not None, "it is stopped")
        return program.exit_code is None
    # What passes before the process has said a word is still of the one before it.
    if not first_of(program, lambda: program.printed() != "", is_over):
        return False
    if moment.after in (After.PARTS, After.TRANSACTIONS):
        wanted = count_done() + moment.number
        return first_of(program, lambda: count_done() >= max(wanted, 1), is_over)
    proxy = proxies[BYTES[moment.after]]
    if SIDES.get(interruption.kind) == BYTES[moment.after]:
        proxy.arm(moment.number, every=interruption.patient)
        reached = first_of(program, lambda: not proxy.is_armed(), is_over)
        proxy.disarm()
        return reached
    goal = proxy.passed_bytes() + moment.number
    return first_of(program, lambda: proxy.passed_bytes() >= goal, is_over)


def first_of(
    program: Program,
    what: Callable[[], bool],
    is_over: Callable[[], bool] = lambda: False,
    why: str = "the moment, or the end",
) -> bool:
    """True when `what` comes true, False when the process ends or it is over."""
    result: list[bool] = []

    def look() -> bool:
        program.watch()
        if program.exit_code is not None:
            result.append(False)
        elif what():
            result.append(True)
        elif is_over():
            result.append(False)
        return bool(result)

    wait_for(look, why)
    return result[0]


def interrupt(program: Program, interruption: Interruption, servers: Servers) -> bool:
    """Do it; False if there is nobody to do it to."""
    kind = interruption.kind
    if kind is Kind.KILL_DRIVER:
        program.process.kill()
    elif kind in SIGNALS:
        # A terminal sends the others to all processes, a supervisor SIGTERM to one.
        if kind is Kind.TERMINATE:
            program.process.send_signal(signal.SIGTERM)
        else:
            program.signal_group(SIGNALS[kind])
    elif kind in SIDES:
        if BYTES.get(interruption.moment.after) != SIDES[kind]:
            servers.proxies[SIDES[kind]].cut()
    elif kind is Kind.RESTART_TARGET:
        servers.restart_target()
    elif kind in (Kind.RESTART_SOURCE, Kind.CRASH_SOURCE):
        # A server that shuts down waits for its receiver.
        program.go_on()
        servers.restart_source("fast" if kind is Kind.RESTART_SOURCE else "immediate")
    else:
        return _kill(_find(program, kind))
    return True


def _find(program: Program, kind: Kind) -> psutil.Process | None:
    """Whom to kill, if it is there."""
    if kind is Kind.KILL_JVM:
        return program.jvm()
    if kind is Kind.KILL_WORKER:
        stopped = [p for p in program.stopped() if p.pid != program.process.pid]
        return stopped[0] if stopped else _victim(program, program.workers)
    groups = {
        Kind.KILL_DAEMON: program.daemons,
        Kind.KILL_RECEIVER: program.receivers,
        Kind.KILL_EXECUTOR: program.executors,
    }
    return _victim(program, groups[kind])


def _victim(program: Program, find: Callable[[], list[psutil.Process]]) -> psutil.Process | None:
    """One of them, as soon as there is one."""
    deadline = time.monotonic() + VICTIM_SECONDS
    while time.monotonic() < deadline and program.exit_code is None:
        if found := find():
            return found[0]
        if program.stopped():
            break  # none will come
        time.sleep(POLL_SECONDS)
    return None


def _kill(process: psutil.Process | None) -> bool:
    if process is None:
        return False
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True
