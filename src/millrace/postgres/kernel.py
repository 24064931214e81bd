"""Loops over bytes, compiled.

Invariant: a kernel takes and returns arrays and numbers, allocates at most its result, and lets
go of the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile with Numba; the machine code is kept on disk where a folder can be written."""
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder for the cache, as for an executor's unknown user
        return cast(F, njit(nogil=True)(function))
