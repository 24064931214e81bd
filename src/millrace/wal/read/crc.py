"""CRC-32C over a range of bytes, compiled.

Invariant: the same result with the processor's instruction and with the table.

Facts: Castagnoli's polynomial, reflected (0x82F63B78), begun with and finally inverted by all ones:
pg_crc32c.h. The instruction is in SSE 4.2; LLVM knows it as llvm.x86.sse42.crc32.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millrace.postgres.kernel import kernel, le32

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF


def _make_tables() -> Any:
    """Table k holds the effect of a byte that k further bytes follow."""
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        tables[0, byte] = crc
    for k in range(1, 8):
        before = tables[k - 1]
        tables[k] = before >> np.uint32(8) ^ tables[0][before & 0xFF]
    return tables


_TABLES = _make_tables()


@kernel
def table_crc(buffer: Any, begin: Any, end: Any, crc: Any) -> Any:
    """The running value, not inverted, after the bytes from `begin` to `end`."""
    crc = np.uint32(crc)
    at = begin
    while at + 8 <= end:
        low = np.uint32(le32(buffer, at)) ^ crc
        high = np.uint32(le32(buffer, at + 4))
        crc = (
            _TABLES[7, low & 0xFF]
            ^ _TABLES[6, low >> 8 & 0xFF]
            ^ _TABLES[5, low >> 16 & 0xFF]
            ^ _TABLES[4, low >> 24]
            ^ _TABLES[3, high & 0xFF]
            ^ _TABLES[2, high >> 8 & 0xFF]
            ^ _TABLES[1, high >> 16 & 0xFF]
            ^ _TABLES[0, high >> 24]
        )
        at += 8
    while at < end:
        crc = _TABLES[0, (crc ^ buffer[at]) & 0xFF] ^ crc >> np.uint32(8)
        at += 1
    return np.int64(crc)


def _make_intrinsic(bits: int) -> Any:
    """A function of a buffer, a place and the running value: the value after that many bits at
    the place, by one instruction."""
    # The instruction for 64 bits has the running value in 64, the others have it in 32.
    width = max(bits, 32)
    name = f"llvm.x86.sse42.crc32.{width}.{bits}"

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        word, running = ir.IntType(bits), ir.IntType(width)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), word.as_pointer())
        loaded = builder.load(place)
        loaded.align = 1
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(running, [running, word]), name
        )
        before = arguments[2] if width == 64 else builder.trunc(arguments[2], running)
        after = builder.call(function, [before, loaded])
        return after if width == 64 else builder.zext(after, ir.IntType(64))

    def crc_of(context: Any, buffer: Any, at: Any, crc: Any) -> Any:
        return types.int64(buffer, types.int64, types.int64), generate

    return intrinsic(crc_of)


_crc_of_8, _crc_of_4, _crc_of_1 = (_make_intrinsic(bits) for bits in (64, 32, 8))


@kernel
def instruction_crc(buffer: Any, begin: Any, end: Any, crc: Any) -> Any:
    """As `table_crc`, where the processor can."""
    at = begin
    while at + 8 <= end:
        crc = _crc_of_8(buffer, at, crc)
        at += 8
    if at + 4 <= end:
        crc = _crc_of_4(buffer, at, crc)
        at += 4
    while at < end:
        crc = _crc_of_1(buffer, at, crc)
        at += 1
    return crc


def has_instruction() -> bool:
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("sse4.2", False))


running_crc = instruction_crc if has_instruction() else table_crc


def crc32c(data: bytes) -> int:
    buffer = np.frombuffer(data, np.uint8)
    return int(running_crc(buffer, 0, len(buffer), _ONES)) ^ _ONES
