"""Running pg_dump and its like, and being the one who ends them.

Invariant: a signal of the terminal reaches this process, not the programs it runs: what becomes of
them is decided here. A process that ignores Ctrl-C, as background jobs of a script and `nohup` do,
does not lose its pg_dump by it. None of them outlives a process that ends in order.

Facts: pg_dump takes SIGINT even where it was started with SIGINT ignored (parallel.c,
set_cancel_handler()). Ctrl-C goes to every process of the terminal's foreground group
(termios(3), ISIG).
"""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Mapping, Sequence

_running: set[subprocess.Popen[str]] = set()


def run_program(
    command: Sequence[str], environment: Mapping[str, str], *, umask: int = -1
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in a process group of its own; stop it if we are stopped."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Whatever encoding the text is in, its bytes come through.
        encoding="utf-8",
        errors="surrogateescape",
        env=environment,
        umask=umask,
        process_group=0,
    )
    _running.add(process)
    try:
        with process:
            try:
                out, err = process.communicate()
            except BaseException:
                process.kill()
                raise
    finally:
        _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@atexit.register
def _stop_all() -> None:
    """Those that threads wait for: a daemon thread does not see the end of the process."""
    for process in list(_running):
        process.kill()
        process.wait()
