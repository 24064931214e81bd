"""Binary values as text: the server prints them, too, and it is right."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.config.dsn import Dsn
from millrace.errors import FormatError
from millrace.postgres.binary_text import find_type, render_column
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.connect import connect

EXACT = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=["source_cluster", "target_cluster"], ids=["16", "18"])
def server(request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    cluster: Cluster = request.getfixturevalue(request.param)
    uri = cluster.create_database("binary_text")
    with connect(Dsn.parse(uri), "test") as connection:
        connection.autocommit = True
        yield connection
    cluster.drop_database("binary_text")


def check(server: psycopg.Connection[Any], type_name: str, values: list[str]) -> None:
    """Both our ways to print say what the server says."""
    row = server.execute(
        "SELECT typsend::text, t.oid::int8 FROM pg_type t WHERE t.oid = %s::regtype", (type_name,)
    ).fetchone()
    assert row is not None
    send, oid = row
    rows = server.execute(
        f"SELECT {send}(v), format('%%s', v) FROM"
        f" (SELECT v::{type_name} FROM unnest(%s::text[]) WITH ORDINALITY AS u (v, n) ORDER BY n)"
        " AS s",
        (values,),
    ).fetchall()
    compare(oid, [bytes(data) for data, _ in rows], [text for _, text in rows])


def check_sent(server: psycopg.Connection[Any], type_name: str, sent: list[bytes]) -> None:
    """Bytes go to the server as they are; it prints what they mean."""
    row = server.execute(
        "SELECT oid::int8, typarray::int8 FROM pg_type WHERE oid = %s::regtype", (type_name,)
    ).fetchone()
    assert row is not None
    oid, array_oid = row
    array = struct.pack(">iiIii", 1, 0, oid, len(sent), 1)
    array += b"".join(struct.pack(">i", len(data)) + data for data in sent)
    result = server.pgconn.exec_params(
        b"SELECT format('%s', v) FROM unnest($1) WITH ORDINALITY AS u (v, n) ORDER BY n",
        [array],
        param_types=[array_oid],
        param_formats=[1],
    )
    assert result.status == psycopg.pq.ExecStatus.TUPLES_OK, result.error_message
    printed = [(result.get_value(n, 0) or b"").decode() for n in range(result.ntuples)]
    compare(oid, sent, printed)


def compare(oid: int, sent: list[bytes], printed: list[str]) -> None:
    found = find_type(oid)
    assert found is not None
    assert [found.render(data) for data in sent] == printed
    buffer = np.frombuffer(b"..." + b"".join(sent) + b"..", np.uint8)
    size = np.array([len(data) for data in sent], np.int64)
    column = render_column(found, buffer, 3 + np.cumsum(size) - size, size, "utf-8")
    data = (buffer if column.data is None else column.data).tobytes()
    places = zip(column.at.tolist(), column.size.tolist(), strict=True)
    assert [data[at : at + size].decode() for at, size in places] == printed


FLOATS = [
    "0", "-0", "1", "-1", "0.1", "1e-4", "1e-5", "123456.7", "1e5", "1e6", "1e14", "1e15", "1e16",
    "1e22", "1e23", "9.5e22", "9007199254740992", "9007199254740994", "18014398509481984",
    "36028797018963968", "1e37", "8388608", "16777216", "33554432", "67108864", "99999.99",
    "NaN", "Infinity", "-Infinity", "1.1754944e-38", "3.4028235e38",
]  # fmt: skip

VALUES = {
    "bool": ["t", "f"],
    "int2": ["0", "-32768", "32767"],
    "int4": ["0", "-2147483648", "2147483647"],
    "int8": ["0", "-9223372036854775808", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "float4": [*FLOATS, "1.4e-45"],
    "float8": [*FLOATS, "5e-324", "2.2250738585072014e-308", "1.7976931348623157e308"],
    "numeric": [
        "0",
        "0.00",
        "-0.1",
        "1",
        "10000",
        "100000000",
        "0.0001",
        "0.00000000000000000001",
        "12345678901234567890.123456789",
        "-9999.9999",
        "1.10",
        "1000000.000",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e1000",
        "1e-1000",
        "9" * 500 + "." + "7" * 300,
    ],
    "text": ["", "a", "é\n\t\\", "日本語", "😀"],
    "varchar(10)": ["", "abc"],
    "bpchar": ["", "abc  "],
    "char(5)": ["", "abc"],
    "name": ["", "x" * 63],
    '"char"': ["", "a", "\\377", "\\200"],
    "bytea": ["\\x", "\\x00ff", "\\xdeadbeef"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "date": [
        "2000-01-01",
        "1999-12-31",
        "2000-02-29",
        "1900-02-28",
        "0001-01-01",
        "0001-12-31 BC",
        "4713-01-01 BC",
        "5874897-12-31",
        "10000-01-01",
        "infinity",
        "-infinity",
        "2024-12-31",
    ],
    "time": ["00:00", "24:00", "23:59:59.999999", "12:00:00.1", "01:02:03.000450"],
    "timetz": [
        "00:00+00",
        "24:00-15:59",
        "12:30:00.5+05:30",
        "01:02:03-00:00:01",
        "01:02:03+15:59:59",
    ],
    "timestamp": [
        "2000-01-01",
        "1999-12-31 23:59:59.999999",
        "4713-01-01 BC",
        "0001-12-31 23:59:59.5 BC",
        "294276-12-31 23:59:59.999999",
        "infinity",
        "-infinity",
        "10000-01-01 00:00:00.1",
    ],
    "timestamptz": [
        "2000-01-01",
        "1999-12-31 23:59:59.999999+02",
        "4713-01-01 00:00+00 BC",
        "0044-03-15 12:00:00.25 BC",
        "294276-12-31 23:59:59.999999+00",
        "infinity",
        "-infinity",
    ],
    "interval": [
        "0",
        "1 year",
        "-1 year",
        "1 year -1 mon",
        "-1 year +1 mon",
        "1 mon -1 day",
        "1 day",
        "-1 day 1 second",
        "1 day -1 second",
        "-1 mon 1 day -00:00:01.5",
        "1 year 2 mons 3 days",
        "100:00:00.000001",
        "-0.1 s",
        "178000000 years",
        "-178956970 years -8 mons",
        "1 mon 1 day",
        "-2147483648 days",
        "2562047788:00:54.775807",
        "11 mons",
        "12 mons",
        "-13 mons",
    ],
    "json": ['{"a":  1}', "null"],
    "jsonb": ['{"b": [1, 2.50, null], "a": "é\\n"}', "1"],
    "jsonpath": ["$.a[*] ? (@ > 1)", 'strict $."x y"'],
    "inet": [
        "1.2.3.4",
        "1.2.3.4/24",
        "0.0.0.0/0",
        "::",
        "::1",
        "::2",
        "::/0",
        "::1.2.3.4",
        "1::",
        "::ffff:1.2.3.4",
        "2001:db8::1",
        "2001:db8:0:0:1:0:0:1",
        "1:2:3:4:5:6:7:8",
        "1:0:3:4:5:6:7:8",
        "fe80::1/64",
        "::ffff:0:1",
        "0:0:1::",
        "1:0:0:2::",
        "::1:0:0:0",
        "::1:2",
        "::0:ffff",
        "::1:0",
    ],
    "cidr": ["1.2.3.4", "1.2.3.0/24", "10.0.0.0/8", "::/0", "2001:db8::/32", "::1"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(11)": ["10101010101", "00000000000"],
    "bit(8)": ["10101010"],
    "varbit": ["", "1", "101", "111111111"],
    "point": ["(1,2)", "(-0,1e300)", "(NaN,Infinity)"],
    "line": ["{1,2,3}", "{0.5,-1,1e-10}"],
    "lseg": ["[(1,2),(3,4)]"],
    "box": ["(1,2),(3,4)"],
    "path": ["((1,2),(3,4))", "[(1,2),(3,4)]", "[(1,1)]"],
    "polygon": ["((1,2),(3,4),(5,6))", "((0,0))"],
    "circle": ["<(1,2),3>", "<(0,0),0>"],
    "tsvector": [
        "",
        "a b",
        "a:1A,2B b:3C c:4D",
        "'it''s' 'back\\\\slash' 'two words':16383",
        "é:1",
    ],
    "tsquery": [
        "",
        "a",
        "!a",
        "a & b",
        "a | b & c",
        "(a | b) & c",
        "!(a & b)",
        "!!a",
        "a <-> b <-> c",
        "a <-> (b <-> c)",
        "a <3> b",
        "a <0> b",
        "a:*AB & 'it''s':D",
        "(a <-> b) | !(c | d) & e",
        "a <-> (b & c)",
        "(a & b) <-> c",
        "!(a <-> b)",
        "(!a) <-> b",
        "a & (b & c)",
        "a|(b|c)",
        " & ".join(f"w{n}" for n in range(500)),
        "!" * 20 + "a",
    ],
    "pg_lsn": ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"],
    "xid": ["0", "4294967295"],
    "cid": ["7"],
    "tid": ["(0,1)", "(4294967295,65535)"],
    "xid8": ["0", "18446744073709551615"],
    "pg_snapshot": ["10:20:10,14,15", "5:5:"],
    "txid_snapshot": ["10:20:10,14,15"],
    "int2vector": ["", "1 2 -3"],
    "oidvector": ["", "1 4294967295"],
    "int4range": ["empty", "[1,5)", "(,)", "[3,)", "(,7)"],
    "int8range": ["[1,9223372036854775807)"],
    "numrange": ["[1.50,2.0]", "(1,2)", "(,NaN]"],
    "daterange": ["[2020-01-01,infinity)", "[0010-01-01 BC,2020-01-01)", "empty"],
    "tsrange": ["[2020-01-01 00:00,2020-01-02 12:30:00.5]", "(,infinity]"],
    "tstzrange": ["[2020-01-01 00:00,2020-01-02 12:30:00.5]", "(0001-01-01 BC,)"],
    "int4multirange": ["{}", "{[1,2),[5,6)}", "{(,)}"],
    "int8multirange": ["{[1,2)}"],
    "nummultirange": ["{[1.0,2),(3,4.5]}"],
    "datemultirange": ["{[2020-01-01,2020-01-05)}"],
    "tsmultirange": ["{[2020-01-01,2020-01-05)}"],
    "tstzmultirange": ["{[2020-01-01,2020-01-05),[2021-01-01,)}"],
}


@pytest.mark.parametrize("type_name", VALUES)
def test_values_are_printed_as_the_server_does(
    server: psycopg.Connection[Any], type_name: str
) -> None:
    check(server, type_name, VALUES[type_name])


@pytest.mark.parametrize("type_name", VALUES)
def test_arrays_are_printed_as_the_server_does(
    server: psycopg.Connection[Any], type_name: str
) -> None:
    delimiter = ";" if type_name == "box" else ","
    quoted = ['"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in VALUES[type_name]]
    flat = "{" + delimiter.join([*quoted, "NULL"]) + "}"
    twice = "{" + delimiter.join([flat, flat]) + "}"
    count = len(quoted) + 1
    shifted = f"[0:1][-3:{count - 4}]={twice}"
    check(server, f"{type_name}[]", ["{}", flat, twice, shifted])


def test_intervals_without_end(server: psycopg.Connection[Any]) -> None:
    if server.info.server_version < 170000:
        pytest.skip("infinite intervals came with version 17")
    check(server, "interval", ["infinity", "-infinity"])


def test_xml_of_a_server_that_has_it(system_cluster: Cluster) -> None:
    uri = system_cluster.create_database("binary_text_xml")
    with connect(Dsn.parse(uri), "test") as connection:
        connection.autocommit = True
        texts = [
            "<a/>",
            '<?xml version="1.0" encoding="UTF-8"?><a>é</a>',
            "x<b/>y",
            '<?xml version="1.1"?><a/>',
        ]
        check(connection, "xml", texts)
    system_cluster.drop_database("binary_text_xml")


def packed(layout: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(lambda values: struct.pack(layout, *values))


def of_bytes(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


DAYS = st.integers(-2451545, 2145031948) | st.sampled_from([2**31 - 1, -(2**31)])
MICROSECONDS = st.integers(-211813488000000000, 9223371331199999999) | st.sampled_from(
    [2**63 - 1, -(2**63)]
)
INT4 = st.integers(-(2**31), 2**31 - 1)
SMALL = st.integers(-100, 100)

# Everything that quoting has to do with, and letters.
TEXTS = st.text(st.sampled_from("aNnUuLl0 \t\n\r\v\f\"'\\{}[](),;:é😀"), max_size=12)

SENT: dict[str, st.SearchStrategy[bytes]] = {
    "int2": of_bytes(2),
    "int4": of_bytes(4),
    "int8": of_bytes(8),
    "oid": of_bytes(4),
    "float4": of_bytes(4) | packed(">f", st.floats(width=32)),
    "float8": of_bytes(8)
    | packed(">d", st.floats())
    | packed(">d", st.integers(2**52, 2**80).map(float))
    | packed(">d", st.integers(1, 40).map(lambda n: 10.0**n)),
    "date": packed(">i", DAYS),
    "time": packed(">q", st.integers(0, 86400000000)),
    "timetz": packed(">qi", st.integers(0, 86400000000), st.integers(-57599, 57599)),
    "timestamp": packed(">q", MICROSECONDS),
    "timestamptz": packed(">q", MICROSECONDS),
    "interval": packed(">qii", st.integers(-(2**62), 2**62) | SMALL, INT4 | SMALL, INT4 | SMALL),
    "uuid": of_bytes(16),
    "bytea": st.binary(max_size=50),
    "macaddr": of_bytes(6),
    "macaddr8": of_bytes(8),
    "pg_lsn": of_bytes(8),
    "inet": packed(">BBBB4s", st.just(2), st.integers(0, 32), st.just(0), st.just(4), of_bytes(4))
    | packed(
        ">BBBB8H",
        *(st.just(3), st.integers(0, 128), st.just(0), st.just(16)),
        *([st.sampled_from([0, 0, 0, 1, 0xFFFF, 0xAB12])] * 8),
    ),
    "point": of_bytes(16),
    "refcursor": TEXTS.map(str.encode),
}


@pytest.mark.parametrize("type_name", SENT)
def test_random_bytes_mean_what_the_server_says(
    server: psycopg.Connection[Any], type_name: str
) -> None:
    @EXACT
    @given(st.lists(SENT[type_name], min_size=1, max_size=100))
    def run(sent: list[bytes]) -> None:
        check_sent(server, type_name, sent)

    run()


NUMERICS = st.builds(
    lambda digits, scale, sign: f"{sign}{digits}e{-scale}",
    st.integers(0, 10**40),
    st.integers(-60, 60),
    st.sampled_from(["", "-"]),
)
LEXEMES = st.text(st.sampled_from("ab é'\\:*&|!<>()"), min_size=1, max_size=6).filter(
    lambda text: text.strip() != ""
)


def quoted_lexeme(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


QUERIES = st.recursive(
    LEXEMES.map(quoted_lexeme) | LEXEMES.map(lambda text: quoted_lexeme(text) + ":*AC"),
    lambda inner: (
        st.builds(
            lambda left, sign, right: f"({left}) {sign} ({right})",
            inner,
            st.sampled_from(["&", "|", "<->", "<2>"]),
            inner,
        )
        | inner.map(lambda one: f"!({one})")
    ),
    max_leaves=8,
)
VECTORS = st.lists(
    st.tuples(LEXEMES.map(quoted_lexeme), st.lists(st.integers(1, 16383), max_size=4)).map(
        lambda pair: (
            pair[0] + (":" + ",".join(f"{n}{'ABCD'[n % 4]}" for n in pair[1]) if pair[1] else "")
        )
    ),
    max_size=6,
).map(" ".join)


@pytest.mark.parametrize(
    ("type_name", "values"),
    [
        ("numeric", NUMERICS),
        ("tsquery", QUERIES),
        ("tsvector", VECTORS),
        ("varbit", st.text("01", max_size=40)),
    ],
    ids=["numeric", "tsquery", "tsvector", "varbit"],
)
def test_random_values(
    server: psycopg.Connection[Any], type_name: str, values: st.SearchStrategy[str]
) -> None:
    @EXACT
    @given(st.lists(values, min_size=1, max_size=50))
    def run(sent: list[str]) -> None:
        check(server, type_name, sent)

    run()


@EXACT
@given(st.data())
def test_random_arrays_of_text(server: psycopg.Connection[Any], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    lowers = data.draw(st.lists(st.integers(-2, 3), min_size=len(lengths), max_size=len(lengths)))

    def literal(left: list[int]) -> str:
        if not left:
            text = data.draw(st.none() | TEXTS | st.sampled_from(["null", "NULL", ""]))
            if text is None:
                return "NULL"
            return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return "{" + ",".join(literal(left[1:]) for _ in range(left[0])) + "}"

    bounds = "".join(f"[{low}:{low + n - 1}]" for n, low in zip(lengths, lowers, strict=True))
    check(server, "text[]", [f"{bounds}={literal(lengths)}"])


@pytest.mark.parametrize("oid", [790, 2205, 16400, 0, 1033])
def test_types_that_can_not_be_printed_are_unknown(oid: int) -> None:
    assert find_type(oid) is None


@given(st.sampled_from(sorted(range(16, 6200))), st.binary(max_size=60))
def test_damaged_bytes_are_a_format_error(oid: int, data: bytes) -> None:
    found = find_type(oid)
    if found is None:
        return
    with suppress(FormatError):
        assert isinstance(found.render(data), str)
