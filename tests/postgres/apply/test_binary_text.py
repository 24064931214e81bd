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
from tests.fixtures.type_values import NUMERICS, QUERIES, SENT, TEXTS, VALUES, VECTORS

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


@pytest.mark.parametrize("type_name", SENT)
def test_random_bytes_mean_what_the_server_says(
    server: psycopg.Connection[Any], type_name: str
) -> None:
    @EXACT
    @given(st.lists(SENT[type_name], min_size=1, max_size=100))
    def run(sent: list[bytes]) -> None:
        check_sent(server, type_name, sent)

    run()


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
