"""What differs between the majors in the bytes of WAL.

Invariant: a page whose magic is not in the table is refused; nothing is read with the layout of
another major.

Facts: XLOG_PAGE_MAGIC in xlog_internal.h, pg_control.h, xact.h, heapam_xlog.h, relmapper.c of each
branch. A magic is stable within a major, but minor releases may add block references.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WalVersion:
    """One major, and its layouts."""

    major: int
    magic: int
    # A dropped statistics entry in a commit: the object id has 32 bits, or 64 since 18.
    stats_item_bytes: int
    # The whole file of a relation map.
    relmap_bytes: int
    # wal_level is in checkpoints and in END_OF_RECOVERY.
    checkpoint_has_wal_level: bool
    # An in-place update brings its invalidations along, and decoding ignores it.
    inplace_has_invalidations: bool


VERSIONS = (
    WalVersion(15, 0xD110, 12, 512, False, False),
    WalVersion(16, 0xD113, 12, 524, False, False),
    WalVersion(17, 0xD116, 12, 524, True, False),
    WalVersion(18, 0xD118, 16, 524, True, True),
)

# Majors that are recognised only to be named when they are refused.
_OTHER_MAGICS = {
    0xD106: 13,
    0xD10D: 14,
    0xD121: 19,
}


def version_of_magic(magic: int) -> WalVersion | None:
    return next((v for v in VERSIONS if v.magic == magic), None)


def name_of_magic(magic: int) -> str:
    """For a message: which version it is, as far as we know."""
    if known := version_of_magic(magic) or _OTHER_MAGICS.get(magic):
        major = known if isinstance(known, int) else known.major
        return f"page magic 0x{magic:04X}, PostgreSQL {major}"
    swapped = (magic & 0xFF) << 8 | magic >> 8
    if version_of_magic(swapped):
        return f"page magic 0x{magic:04X}, of a big-endian server"
    return f"page magic 0x{magic:04X}"
