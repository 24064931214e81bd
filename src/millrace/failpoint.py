"""Named places where a test can make the process die or fail.

Invariant: without `MILLRACE_FAILPOINTS` in the environment, `hit` does nothing.

`MILLRACE_FAILPOINTS=copy.before-commit=kill` kills the process there with
SIGKILL; `=error` raises ConnectionLost, `=error*2` only the first two times in
this process; `=stop` stops it (SIGSTOP), as a frozen machine would; `=full` is what a full disk
says to a write.
A trailing `@FILE` makes the point fire only as long as FILE exists, and removes
it first, so that exactly one process of many dies.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter

from millrace.errors import ConfigError, ConnectionLost

VARIABLE = "MILLRACE_FAILPOINTS"

_hits: Counter[str] = Counter()
_counting = threading.Lock()


def hit(name: str) -> None:
    """Do what the environment asks for at this place, usually nothing."""
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    for item in setting.split(","):
        point, _, action = item.partition("=")
        if point == name:
            _act(name, action)


def _act(name: str, action: str) -> None:
    action, _, marker = action.partition("@")
    if marker and not _take(marker):
        return
    action, _, times = action.partition("*")
    with _counting:
        _hits[name] += 1
        is_over = times and _hits[name] > int(times)
    if is_over:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        # To this thread, so that it goes not one step further; the others stop with it.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif action == "error":
        raise ConnectionLost(f"failpoint {name}")
    else:
        raise ConfigError(f"{VARIABLE}: unknown action {action!r} for {name}")


def _take(marker: str) -> bool:
    try:
        os.unlink(marker)
    except FileNotFoundError:
        return False
    return True
