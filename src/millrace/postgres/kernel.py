"""Loops over bytes, compiled.

Invariant: a kernel takes and returns arrays and numbers, allocates at most its result, and lets
go of the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile with Numba; the machine code is kept on disk where a folder can be written.

    What is kept is made again when its own file changes, not when a kernel that it calls does.
    """
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder for the cache, as for an executor's unknown user
        return cast(F, njit(nogil=True)(function))


@kernel
def be16(buffer: Any, at: Any) -> Any:
    """The unsigned number in two bytes, the high one first, as PostgreSQL sends it."""
    return np.int64(buffer[at]) << 8 | np.int64(buffer[at + 1])


@kernel
def be32(buffer: Any, at: Any) -> Any:
    """The unsigned number in four bytes."""
    return be16(buffer, at) << 16 | be16(buffer, at + 2)


@kernel
def le16(buffer: Any, at: Any) -> Any:
    """The unsigned number in two bytes, the low one first, as most machines store it."""
    return np.int64(buffer[at]) | np.int64(buffer[at + 1]) << 8


@kernel
def le32(buffer: Any, at: Any) -> Any:
    """The unsigned number in four bytes."""
    return (
        np.int64(buffer[at])
        | np.int64(buffer[at + 1]) << 8
        | np.int64(buffer[at + 2]) << 16
        | np.int64(buffer[at + 3]) << 24
    )


@kernel
def le64(buffer: Any, at: Any) -> Any:
    """The number in eight bytes, with a sign."""
    return le32(buffer, at) | le32(buffer, at + 4) << 32
