"""Stored rows and values that are damaged: an error, and nothing else."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError, FormatError
from millrace.wal.output.identifier import quote_identifier
from millrace.wal.output.lines import escape
from millrace.wal.output.row_change import RowChange
from millrace.wal.output.test_decoding import TestDecoding
from millrace.wal.row.compression import LZ4, PGLZ, decompress
from millrace.wal.row.descriptor import ColumnDescriptor, RowDescriptor, TypeDescriptor
from millrace.wal.row.heap_columns import COMPRESSED, EXTERNAL, MISSING, NULL, deform_columns
from millrace.wal.row.heap_tuple import HeapTuple, deform
from millrace.wal.row.toast import SpeculativeInsert, ToastValues
from millrace.wal.row.varlena import ToastPointer
from millrace.wal.types.registry import _FIXED, Renderers, _built_in
from millrace.wal.types.settings import OutputSettings

INT4 = TypeDescriptor(23, "int4", "pg_catalog", 4, True, "i")
INT2 = TypeDescriptor(21, "int2", "pg_catalog", 2, True, "s")
INT8 = TypeDescriptor(20, "int8", "pg_catalog", 8, True, "d")
TEXT = TypeDescriptor(25, "text", "pg_catalog", -1, False, "i")
STRING = TypeDescriptor(2275, "cstring", "pg_catalog", -2, False, "c")
TYPES = (INT2, TEXT, INT8, STRING, INT4, TEXT)
COLUMNS = tuple(ColumnDescriptor.of_type(n, f"c{n}", one) for n, one in enumerate(TYPES, 1))


@given(
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 40),
    st.binary(max_size=80),
)
def test_damaged_rows_are_an_error_or_the_same_both_ways(
    count: int, has_null: bool, hoff: int, body: bytes
) -> None:
    row = HeapTuple(count, int(has_null), hoff, body)
    data = b"junk" + struct.pack("<HHB", count, has_null, hoff) + body + b"behind"
    at, size = np.array([4]), np.array([len(body)])
    try:
        stored = deform_columns(np.frombuffer(data, np.uint8), at, size, COLUMNS)
    except FormatError:
        with pytest.raises(FormatError):
            deform(row, COLUMNS)
        return
    # What is compressed is decompressed by the plain way at once, and may be damaged.
    if COMPRESSED in stored.size or EXTERNAL in stored.size:
        return
    values = [
        None if n in (NULL, MISSING) else data[a : a + n]
        for a, n in zip(stored.at[:, 0].tolist(), stored.size[:, 0].tolist(), strict=True)
    ]
    assert deform(row, COLUMNS) == values


@given(st.sampled_from(sorted({*_FIXED, *_built_in(OutputSettings())})), st.binary(max_size=80))
def test_damaged_values_are_a_format_error(name: str, data: bytes) -> None:
    with suppress(FormatError):
        Renderers(OutputSettings()).render(
            TypeDescriptor(1, name, "pg_catalog", -1, False, "i"), data
        )


@given(st.binary(max_size=200), st.integers(0, 300), st.sampled_from([PGLZ, LZ4, 2]))
def test_damaged_compression_is_a_format_error(data: bytes, size: int, method: int) -> None:
    with suppress(FormatError):
        assert len(decompress(method, data, size)) == size


def test_lz4_is_the_raw_block() -> None:
    raw = b"the same again and again, the same again and again, the same again and again"
    packed = pa.Codec("lz4_raw").compress(raw, asbytes=True)
    assert decompress(LZ4, packed, len(raw)) == raw


def test_pglz_copies_what_overlaps() -> None:
    # Made by hand: two bytes, then a copy of 18 + 5 from 2 back.
    assert decompress(PGLZ, b"\x04ab\x0f\x02\x05", 25) == b"ab" * 12 + b"a"


def test_chunks_out_of_order_or_of_another_size_are_refused() -> None:
    toast = ToastValues()
    toast.add_chunk(5, 0, b"abc")
    with pytest.raises(FormatError, match="expected chunk 1"):
        toast.add_chunk(5, 2, b"def")
    with pytest.raises(FormatError, match="expected 4 bytes"):
        toast.find(ToastPointer(8, 4, 0, 5, 1))
    assert toast.find(ToastPointer(8, 4, 0, 6, 1)) is None


def test_a_confirmation_needs_an_insertion() -> None:
    held: SpeculativeInsert[int] = SpeculativeInsert(ToastValues())
    with pytest.raises(FormatError, match="speculative"):
        held.confirm()


def test_an_unknown_type_is_an_error_with_the_name_of_the_column() -> None:
    strange = TypeDescriptor(99999, "strange", "public", -1, False, "i")
    relation = RowDescriptor(1, "public", "t", (ColumnDescriptor.of_type(1, "c", strange),))
    plain = TestDecoding(Renderers(OutputSettings()))
    with pytest.raises(FormatError, match=r"column c of public\.t: .*public\.strange"):
        plain.change(RowChange("I", relation, [b"ab"], None))
    assert plain.change(RowChange("I", relation, [None], None)).endswith(b" c[strange]:null")
    raw = TestDecoding(Renderers(OutputSettings(), unknown_as_raw=True))
    assert raw.change(RowChange("I", relation, [b"ab"], None)).endswith(b":'\\x6162'")


def test_names_are_quoted_where_that_version_has_a_keyword() -> None:
    assert quote_identifier("json_value", 16) == "json_value"
    assert quote_identifier("json_value", 17) == '"json_value"'
    assert quote_identifier("system_user", 15) == "system_user"
    assert quote_identifier("select", 15) == '"select"'
    assert quote_identifier('a"B', 18) == '"a""B"'


def test_lines_are_escaped_as_copy_does() -> None:
    assert escape(b"a\tb\nc\\d\re\bf\x0bg\x0ch\x00") == b"a\\tb\\nc\\\\d\\re\\bf\\vg\\fh\x00"


@pytest.mark.parametrize(
    "wrong",
    [{"date_style": "Roman"}, {"time_zone": "Middle/Earth"}, {"interval_style": "long"},
     {"bytea_output": "base64"}, {"extra_float_digits": 4}],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
def test_settings_that_are_not_understood_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        OutputSettings(**wrong)  # type: ignore[arg-type]
