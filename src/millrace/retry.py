"""What is tried again, and when: the one table that decides.

Invariant: only errors that can go away by themselves are transient; whatever
is not listed is final, so a full disk or a refused row never loops.

Facts: PostgreSQL documentation, appendix "PostgreSQL Error Codes".
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from millrace.errors import ConnectionLost, MillraceError

T = TypeVar("T")

# SQLSTATE classes and codes after which the same statement may succeed on a new connection.
TRANSIENT_CLASSES = ("08",)  # connection exception
TRANSIENT_CODES = frozenset(
    {
        "57P01",  # admin_shutdown, also pg_terminate_backend
        "57P02",  # crash_shutdown
        "25P03",  # idle_in_transaction_session_timeout: whoever froze is late, no more
        "57P03",  # cannot_connect_now: starting up or in recovery
        "53300",  # too_many_connections: other sessions come and go
        "40001",  # serialization_failure, also a standby's recovery conflict
        "40P01",  # deadlock_detected
        "55P03",  # lock_not_available
        "58P01",  # undefined_file: seen while a server restarts
    }
)

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0


def is_transient_code(sqlstate: str | None) -> bool:
    """Whether an error with this SQLSTATE may go away; None means no answer came at all."""
    if sqlstate is None:
        return True
    return sqlstate[:2] in TRANSIENT_CLASSES or sqlstate in TRANSIENT_CODES


def is_transient(error: BaseException) -> bool:
    """Whether trying the same work again, on a new connection, can help."""
    if isinstance(error, ConnectionLost):
        return True
    return (
        isinstance(error, MillraceError)
        and "sqlstate" in error.facts
        and is_transient_code(error.facts["sqlstate"])
    )


def iter_pauses(attempts: int = ATTEMPTS) -> Iterator[float]:
    """Seconds to wait before each further attempt: doubling, with jitter."""
    pause = FIRST_PAUSE_SECONDS
    for _ in range(attempts - 1):
        yield pause * random.uniform(0.5, 1.0)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


def with_retries(
    work: Callable[[], T],
    *,
    attempts: int = ATTEMPTS,
    on_retry: Callable[[BaseException, float], None] = lambda error, pause: None,
) -> T:
    """Call `work` until it succeeds, fails for good, or the attempts are used up."""
    for pause in iter_pauses(attempts):
        try:
            return work()
        except MillraceError as error:
            if not is_transient(error):
                raise
            on_retry(error, pause)
            time.sleep(pause)
    return work()
