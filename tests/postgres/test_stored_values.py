"""Stored rows as text: out of the server's own files; the server prints them, too, and is right."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fixtures.decode.made_records import MadeRecords, stored
from tests.fixtures.decode.stored_rows import describe_table, iter_tuples, read_chunks, read_rows
from tests.fixtures.type_values import NUMERICS, QUERIES, SENT, TEXTS, VALUES, VECTORS

from millrace.postgres.pgoutput.messages import (
    Begin,
    Commit,
    encode_begin,
    encode_commit,
    encode_frame,
)
from millrace.postgres.program.embedded import Cluster
from millrace.wal.output.columnar import ColumnarWriter
from millrace.wal.output.frames import FrameFormat
from millrace.wal.output.lines import LineFormat, render_line
from millrace.wal.output.pgoutput import PgOutput
from millrace.wal.output.row_change import RowChange
from millrace.wal.output.test_decoding import TestDecoding
from millrace.wal.output.type_name import format_type
from millrace.wal.read.record import Records
from millrace.wal.read.version import VERSIONS
from millrace.wal.row import row_kernel
from millrace.wal.row.descriptor import RowDescriptor
from millrace.wal.row.heap_tuple import HeapTuple, deform
from millrace.wal.row.row_columns import StoredRows, add_chunks, render_rows
from millrace.wal.row.toast import RowValue, ToastValues
from millrace.wal.types.column import NULL
from millrace.wal.types.registry import REGISTERED, Renderers
from millrace.wal.types.settings import OutputSettings

Server = psycopg.Connection[Any]

MORE_VALUES = {
    "money": ["0", "-1", "1234567.89", "-92233720368547758.08", "0.05"],
    "jsonb": [
        "{}", "[]", "null", "true", '""', "-1.50e3", '{"b": [1, 2.50, null, true, {}], "a": "é"}',
        '"\\u0001\\t\\"\\\\/"', '{"": {"": []}}', "[[[[1]]]]", '{"k": 1, "k": 2, "longer key": 3}',
        "[" + ",".join(map(str, range(200))) + "]", "12345678901234567890.12345",
        "{" + ",".join(f'"k{n}": "v{n}"' for n in range(100)) + "}",
    ],
    "jsonpath": [
        "$", "strict $.a", "$.a[*] ? (@ > 1)", '$."x y".**{2 to last}.b', "$[1, 2 to last].size()",
        '$ ? (@.a like_regex "^a" flag "imsxq" && !(@.b == true || exists (@.c)))',
        "-$.a + (2 * 3) - +1", '$.a.datetime("HH")', "$.datetime()", "(1).type()", "$x.keyvalue()",
        '($ starts with "a") is unknown', "null", "$.*", "$.**", "$.**{last}", "$.**{3}",
        "$.**{1 to 3}", "1.50 * (2 % 3)", "(1+2)*3", '$.a.b ? (@ == "é")', "$[last - 1].double()",
        "$.abs().floor().ceiling()", '$ ? (@ like_regex "a")', "$ ? (@ != $y && @ <> false)",
        "(-1).abs()", "-(-(1))", "1 / 2 - 3 <= 4", "$[$.a to $.b]",
    ],
    "mood": ["sad", "it's", 'happy "x"', "é"],
    "pair": ["(1,a,sad)", "(,,)", '(2,"a ""quoted"", \\\\one(",\"it\'s\")', '(3,"","é")'],
    "positive": ["1", "77"],
    "pairs": ["(1,b,)"],
    "positives": ["{1,2}", "{}"],
    "textrange": ["[a,b)", "empty", '["a b","c,d"]', "(,)", '["",z)', '["""","\\\\"]'],
    "textmultirange": ["{}", "{[a,b),(c,d]}", '{["a ""b","c,d"],(x,)}'],
    "mood[]": ["{sad,\"it's\"}", '{{"happy \\"x\\""},{NULL}}'],
    "pair[]": ['{"(1,a,sad)","(,,)",NULL}'],
    "int4range[]": ['{"[1,3)",empty}'],
    "int4multirange[]": ['{"{[1,3),[5,7)}","{}"}'],
    "numeric[][]": ["{{1.50,NULL},{NaN,-2}}", "[0:0][3:4]={{1,2}}"],
    "box[]": ["{(1,2),(3,4);(5,6),(7,8)}"],
    "jsonb[]": ['{"{\\"a\\": 1}",null,"[]"}'],
    "regclass": ["pg_class", "wide"],
    "regtype": ["integer", "text[]", "-"],
    "regproc": ["now", "-", "12"],
    "regoper": ["0", "!!"],
    "regnamespace": ["pg_catalog"],
    "regrole": ["postgres"],
    "aclitem": ["postgres=arw*d/postgres", "=X/postgres", "postgres=C*T*c/postgres"],
}  # fmt: skip

# Since version 17.
NEW_METHODS = [
    "$.bigint().boolean().date().integer().number().string()",
    "$.decimal(4,2)",
    "$.decimal()",
    "$.decimal(4)",
    "$.time(3).time_tz().timestamp(0)",
]

SETUP = """
CREATE TYPE mood AS ENUM ('sad', 'it''s', 'happy "x"', 'é');
CREATE TYPE pair AS (a int, b text, m mood);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN pairs AS pair;
CREATE DOMAIN positives AS int[];
CREATE TYPE textrange AS RANGE (subtype = text, collation = "C");
CREATE TYPE grown AS (x pair, gone int, y text[]);

CREATE TABLE composite (n int, v grown);
INSERT INTO composite VALUES (1, ROW(ROW(1, 'a b', 'sad'), 2, '{a,"b c",NULL}')),
                             (2, ROW(NULL, 3, NULL)), (3, NULL);
ALTER TYPE grown DROP ATTRIBUTE gone;
ALTER TYPE grown ADD ATTRIBUTE "new one" numeric;
INSERT INTO composite VALUES (4, ROW(NULL, '{}', 1.50));

CREATE TABLE altered (n int, "select" smallint, gone text, v name);
INSERT INTO altered VALUES (1, 2, 'dropped', 'x'), (2, NULL, NULL, NULL);
ALTER TABLE altered DROP COLUMN gone;
ALTER TABLE altered ADD COLUMN i int DEFAULT 7, ADD COLUMN t text DEFAULT 'it''s a default',
    ADD COLUMN d float8, ADD COLUMN "Numbers" numeric[] DEFAULT '{1.5,NULL}',
    ADD COLUMN c "char" DEFAULT 'c', ADD COLUMN p pair DEFAULT '(1,x,sad)',
    ADD COLUMN l text DEFAULT repeat('long', 40);
INSERT INTO altered VALUES (3, 4, 'y', 8, NULL, -0.5, NULL, NULL, NULL, NULL);

CREATE TABLE toasted (n int, v text, e text, b bytea, j jsonb);
ALTER TABLE toasted ALTER e SET STORAGE external;
INSERT INTO toasted SELECT n, repeat('abc', n * 5000), repeat(md5(n::text), n * 200),
    decode(string_agg(md5((n * 1000 + k)::text), ''), 'hex'), jsonb_agg(md5(k::text))
  FROM generate_series(1, 4) n, generate_series(1, 300) k GROUP BY n ORDER BY n;
INSERT INTO toasted VALUES (5, 'it''s' || E'\\n\\t\\\\', '', NULL, '{}');

CREATE TABLE wide (n int, b bool, i2 int2, i8 int8, f4 float4, f8 float8, t varchar(9), u uuid,
    ts timestamp, tz timestamptz, d date, num numeric, bits varbit, m mood, p positive,
    PRIMARY KEY (n, t));
INSERT INTO wide SELECT n, n % 3 = 0, CASE WHEN n % 5 > 0 THEN -n END, n * 1e12::int8, n / 7.0,
    exp(n % 50 - 25), 't''' || n, md5(n::text)::uuid, 'epoch'::timestamp + n * interval '997 hours',
    '1900-01-01'::timestamptz + n * interval '9973 hours', '0100-01-01 BC'::date + n * 3607,
    (n - 50) * 1000.125::numeric ^ (n % 7 - 2), n::bit(11)::varbit, 'sad', n
  FROM generate_series(1, 300) n;
"""

STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"date_style": "SQL, DMY", "interval_style": "sql_standard", "time_zone": "America/New_York",
     "bytea_output": "escape", "extra_float_digits": 0},
    {"date_style": "Postgres, MDY", "interval_style": "postgres_verbose",
     "time_zone": "Europe/Berlin", "extra_float_digits": -3},
    {"date_style": "German, DMY", "interval_style": "iso_8601", "time_zone": "Asia/Kolkata"},
    {"time_zone": "America/St_Johns", "extra_float_digits": 3},
    {"date_style": "Postgres, DMY", "time_zone": "<+05>-05"},
    {"date_style": "SQL, MDY", "time_zone": "Asia/Tehran"},
)  # fmt: skip


@dataclass(frozen=True)
class Names:
    """What the server calls its objects."""

    server: Server

    def find(self, kind: str, oid: int) -> str | None:
        if kind == "regrole":
            query = "SELECT rolname FROM pg_authid WHERE oid = %s"
        else:
            assert kind in REGISTERED
            query = f"SELECT nullif(%s::oid::{kind}::text, '-')"
        row = self.server.execute(query, (oid,)).fetchone()
        return row[0] if row else None


def fill(server: Server, table: str, type_name: str, values: list[str]) -> None:
    server.execute(f"CREATE TABLE {table} (n int, v {type_name})")
    server.execute(
        f"INSERT INTO {table} SELECT n, v::{type_name} FROM unnest(%s::text[])"
        " WITH ORDINALITY AS u (v, n) ORDER BY n",
        (values,),
    )


@pytest.fixture(scope="module", params=["source_cluster", "target_cluster"], ids=["16", "18"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    cluster: Cluster = request.getfixturevalue(request.param)
    uri = cluster.create_database("stored_values")
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(SETUP)
        for number, (type_name, values) in enumerate({**VALUES, **MORE_VALUES}.items()):
            # Queries are never stored out of line.
            short = [v for v in values if type_name != "tsquery" or len(v) < 1000]
            fill(connection, f"values_{number}", type_name, short)
        if connection.info.server_version >= 170000:
            fill(connection, "intervals", "interval", ["infinity", "-infinity"])
            fill(connection, "paths", "jsonpath", NEW_METHODS)
        connection.execute("CHECKPOINT")
        yield connection
    cluster.drop_database("stored_values")


def tables(server: Server) -> list[str]:
    rows = server.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        " AND relkind = 'r' ORDER BY 1"
    )
    return [name for (name,) in rows]


def under(server: Server, style: dict[str, Any]) -> OutputSettings:
    """The settings, which are the server's from now on."""
    found = OutputSettings(server_version=server.info.server_version // 10000, **style)
    for name, value in (
        ("DateStyle", found.date_style),
        ("IntervalStyle", found.interval_style),
        ("TimeZone", found.time_zone),
        ("bytea_output", found.bytea_output),
        ("extra_float_digits", str(found.extra_float_digits)),
    ):
        server.execute("SELECT set_config(%s, %s, false)", (name, value))
    return found


def printed(server: Server, table: str, descriptor: RowDescriptor) -> list[tuple[Any, ...]]:
    """As the server prints each value of the table."""
    names = ['"' + column.name + '"' for column in descriptor.live_columns]
    shown = ", ".join(
        f"CASE WHEN {n} IS DISTINCT FROM NULL THEN format('%s', {n}) END" for n in names
    )
    return server.execute(f"SELECT {shown} FROM {table} ORDER BY ctid").fetchall()


def one_by_one(
    renderers: Renderers, descriptor: RowDescriptor, rows: list[list[RowValue]]
) -> list[tuple[str | None, ...]]:
    return [
        tuple(
            renderers.render(column.type, value).decode() if isinstance(value, bytes) else None
            for column, value in zip(descriptor.columns, row, strict=True)
            if column.type is not None
        )
        for row in rows
    ]


def by_column(
    server: Server, renderers: Renderers, table: str, descriptor: RowDescriptor
) -> list[tuple[str | None, ...]]:
    chunks: dict[int, ToastValues] = {}
    add_chunks(together(read_chunks(server, table)), chunks)
    rows = together([one for _, one in iter_tuples(server, table)])
    texts = []
    for column in render_rows(renderers, descriptor, rows, chunks):
        if column is not None:
            data = column.data.tobytes()
            places = zip(column.at.tolist(), column.size.tolist(), strict=True)
            texts.append([None if n == NULL else data[a : a + n].decode() for a, n in places])
    return list(zip(*texts, strict=True))


def together(rows: list[HeapTuple]) -> StoredRows:
    """One behind the other, as if they were all of one epoch."""
    data = [stored(row) for row in rows]
    size = np.array([len(one) for one in data], np.int64)
    at = np.cumsum(size) - size
    buffer = np.frombuffer(b"".join(data), np.uint8)
    return StoredRows(buffer, at, size - 5, np.zeros(len(rows), np.int64))


@pytest.mark.parametrize("style", STYLES, ids=[str(n) for n in range(len(STYLES))])
def test_stored_values_are_printed_as_the_server_does(
    server: Server, style: dict[str, Any]
) -> None:
    renderers = Renderers(under(server, style), Names(server))
    for table in tables(server):
        descriptor = describe_table(server, table)
        expected = printed(server, table, descriptor)
        rows = read_rows(server, table, descriptor.columns)
        assert one_by_one(renderers, descriptor, rows) == expected, table
        assert by_column(server, renderers, table, descriptor) == expected, table


def test_types_are_named_as_the_server_does(server: Server) -> None:
    version = server.info.server_version // 10000
    for table in tables(server):
        for column in describe_table(server, table).live_columns:
            assert column.type is not None
            (name,) = server.execute("SELECT format_type(%s, NULL)", (column.type.oid,)).fetchone()
            assert format_type(column.type, version) == name


EXTENSION_VALUES = {
    "hstore": ["", 'a=>1, "b c"=>NULL', '"q\\"\\\\"=>"é, =>"', "a=>" + "x" * 300],
    "ltree": ["", "Top", "Top.Science.a_1", ".".join(["level"] * 40)],
    "citext": ["", "MiXed"],
    "xml": ["<a/>", '<?xml version="1.0" encoding="UTF-8"?><a>é</a>', "x<b/>y", "\n<a/>",
            '<?xml version="1.1"?><a/>', '<?xml version="1.0" standalone="yes"?>\n<a/>',
            '<?xml version="1.0"?>\n<a/>', "<?xml-stylesheet href='x'?><a/>"],
    '"char"': ["a", ""],
    "aclitem": ["postgres=arw*d/postgres"],
    "interval": ["2562047788:00:54.775807"],
    "hstore[]": ['{"a=>1"}'],
}  # fmt: skip


def test_types_of_extensions_and_of_version_15(system_cluster: Cluster) -> None:
    uri = system_cluster.create_database("stored_extensions")
    with psycopg.connect(uri, autocommit=True) as connection:
        for name in ("hstore", "ltree", "citext"):
            connection.execute(f"CREATE EXTENSION {name}")
        for number, (type_name, values) in enumerate(EXTENSION_VALUES.items()):
            fill(connection, f"values_{number}", type_name, values)
        connection.execute("CHECKPOINT")
        renderers = Renderers(under(connection, {}), Names(connection))
        for table in tables(connection):
            descriptor = describe_table(connection, table)
            expected = printed(connection, table, descriptor)
            rows = read_rows(connection, table, descriptor.columns)
            assert one_by_one(renderers, descriptor, rows) == expected, table
    system_cluster.drop_database("stored_extensions")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20).map(str) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "numeric": NUMERICS,
    "tsquery": QUERIES,
    "tsvector": VECTORS,
    "varbit": st.text("01", max_size=40),
    "jsonb": JSON,
    "text[]": st.lists(st.none() | TEXTS, max_size=5),
}


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.fixed_dictionaries(
        {name: st.lists(one, min_size=5, max_size=40) for name, one in SENT.items()}
    ),
    st.fixed_dictionaries(
        {name: st.lists(one, min_size=5, max_size=30) for name, one in DRAWN.items()}
    ),
    st.sampled_from(STYLES),
)
def test_random_values_are_printed_as_the_server_does(
    server: Server,
    sent: dict[str, list[bytes]],
    drawn: dict[str, list[Any]],
    style: dict[str, Any],
) -> None:
    renderers = Renderers(under(server, style))
    server.execute("CREATE SCHEMA random; SET search_path = random, public")
    try:
        for number, (type_name, values) in enumerate(drawn.items()):
            fill_drawn(server, f"drawn_{number}", type_name, values)
        for number, (type_name, data) in enumerate(sent.items()):
            fill_sent(server, f"sent_{number}", type_name, data)
        server.execute("CHECKPOINT")
        for number in range(len(drawn) + len(sent)):
            is_drawn = number < len(drawn)
            table = f"drawn_{number}" if is_drawn else f"sent_{number - len(drawn)}"
            descriptor = describe_table(server, table)
            expected = printed(server, table, descriptor)
            rows = read_rows(server, table, descriptor.columns)
            assert one_by_one(renderers, descriptor, rows) == expected, table
            assert by_column(server, renderers, table, descriptor) == expected, table
    finally:
        server.execute("DROP SCHEMA random CASCADE; RESET search_path")


def fill_drawn(server: Server, table: str, type_name: str, values: list[Any]) -> None:
    server.execute(f"CREATE TABLE {table} (n int, v {type_name})")
    shown = [psycopg.types.json.Json(v) if type_name == "jsonb" else v for v in values]
    with server.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO {table} VALUES (%s, %s::{type_name})", list(enumerate(shown))
        )


def fill_sent(server: Server, table: str, type_name: str, sent: list[bytes]) -> None:
    """Bytes go to the server as they are."""
    row = server.execute(
        "SELECT oid::int8, typarray::int8 FROM pg_type WHERE oid = %s::regtype", (type_name,)
    ).fetchone()
    assert row is not None
    server.execute(f"CREATE TABLE {table} (n int, v {type_name})")
    array = struct.pack(">iiIii", 1, 0, row[0], len(sent), 1)
    array += b"".join(struct.pack(">i", len(data)) + data for data in sent)
    result = server.pgconn.exec_params(
        f"INSERT INTO {table} SELECT n, v FROM unnest($1) WITH ORDINALITY AS u (v, n)".encode(),
        [array],
        param_types=[row[1]],
        param_formats=[1],
    )
    assert result.status == psycopg.pq.ExecStatus.COMMAND_OK, result.error_message


class Ending(Enum):
    COMMIT = "commit"


OTHER = b"something else\n"
OTHER_NUMBER, TOAST_NUMBER, SKIPPED_NUMBER = 0, 1, 2


class MadeSource:
    """Pieces of made records; relations by number, special ones first."""

    def __init__(self, pieces: list[Records], relations: list[RowDescriptor]) -> None:
        self._pieces = pieces
        self._relations = relations

    def records(self, piece: int) -> Records:
        return self._pieces[piece]

    def relation(self, number: int) -> tuple[int, RowDescriptor | None]:
        roles = {
            OTHER_NUMBER: row_kernel.SPECIAL,
            TOAST_NUMBER: row_kernel.TOAST,
            SKIPPED_NUMBER: row_kernel.SKIP,
        }
        if number in roles:
            return roles[number], None
        return row_kernel.TABLE, self._relations[number - 3]

    def render_other(self, *_: Any) -> bytes:
        return OTHER

    def render_ending(self, *_: Any) -> bytes:
        raise AssertionError


class Script:
    """Changes as records, and beside them what they say."""

    def __init__(self, server: Server) -> None:
        self.made = [MadeRecords(VERSIONS[1]), MadeRecords(VERSIONS[1], 0x2_00000028)]
        self.relations = [describe_table(server, n) for n in ("wide", "toasted", "altered")]
        self.rows = [
            [one for _, one in iter_tuples(server, n)] for n in ("wide", "toasted", "altered")
        ]
        self.chunks = read_chunks(server, "toasted")
        self.transactions: list[Any] = []
        self.said: list[tuple[int, int, RowChange | None]] = []
        self.toast = ToastValues()

    def begin(self) -> None:
        xid = 700 + len(self.transactions)
        self.toast.forget()
        self.transactions.append(
            SimpleNamespace(
                ending=Ending.COMMIT, xid=xid, first_lsn=xid * 16, commit_lsn=xid * 16 + 8,
                end_lsn=xid * 16 + 12, committed_at=xid * 1000, references=[],
            )
        )  # fmt: skip

    def note(self, piece: int, record: int, number: int) -> int:
        """A record is one of the transaction's; its position."""
        references = self.transactions[-1].references
        if not references or references[-1].piece != piece:
            references.append(SimpleNamespace(piece=piece, indices=[], relations=[]))
        references[-1].indices.append(record)
        references[-1].relations.append(number)
        return self.made[piece].first_lsn + 100 * record

    def say(
        self, lsn: int, kind: str, number: int, new: HeapTuple | None, old: HeapTuple | None
    ) -> None:
        relation = self.relations[number]
        values = [
            None if row is None else self.toast.complete(deform(row, relation.columns))
            for row in (new, old)
        ]
        change = RowChange(kind, relation, *values)
        self.said.append((len(self.transactions) - 1, lsn, change))

    def store_chunks(self, piece: int) -> None:
        for chunk in self.chunks:
            self.note(piece, self.made[piece].insert(chunk), TOAST_NUMBER)
            self.toast.add(chunk)

    def insert(self, piece: int, number: int, row: HeapTuple) -> None:
        lsn = self.note(piece, self.made[piece].insert(row), number + 3)
        self.say(lsn, "I", number, row, None)
        self.toast.forget()

    def multi_insert(self, piece: int, number: int, rows: list[HeapTuple], is_last: bool) -> None:
        lsn = self.note(piece, self.made[piece].multi_insert(rows, is_last=is_last), number + 3)
        for row in rows:
            self.say(lsn, "I", number, row, None)
        if is_last:
            self.toast.forget()

    def update(self, piece: int, number: int, new: HeapTuple, old: HeapTuple | None) -> None:
        lsn = self.note(piece, self.made[piece].update(new, old), number + 3)
        self.say(lsn, "U", number, new, old)
        self.toast.forget()

    def delete(self, piece: int, number: int, old: HeapTuple | None) -> None:
        lsn = self.note(piece, self.made[piece].delete(old), number + 3)
        self.say(lsn, "D", number, None, old)
        self.toast.forget()

    def hold(self, piece: int, number: int, row: HeapTuple) -> int:
        return self.note(piece, self.made[piece].insert(row, is_speculative=True), number + 3)

    def confirm(self, piece: int, number: int, lsn: int, row: HeapTuple) -> None:
        self.note(piece, self.made[piece].confirm(), number + 3)
        self.say(lsn, "I", number, row, None)
        self.toast.forget()

    def cancel(self, piece: int, number: int) -> None:
        self.note(piece, self.made[piece].cancel(), number + 3)
        self.toast.forget()

    def other(self, piece: int) -> None:
        self.note(piece, self.made[piece].confirm(), OTHER_NUMBER)
        self.said.append((len(self.transactions) - 1, 0, None))

    def finish(self) -> MadeSource:
        for transaction in self.transactions:
            for one in transaction.references:
                one.indices = np.array(one.indices, np.int64)
                one.relations = np.array(one.relations, np.int32)
        return MadeSource([made.records() for made in self.made], self.relations)


def play(server: Server) -> Script:
    """All kinds of changes, in transactions that span pieces."""
    script = Script(server)
    wide, toasted, altered = script.rows
    script.begin()
    script.store_chunks(0)
    script.multi_insert(0, 1, toasted[:3], is_last=False)
    script.multi_insert(0, 1, toasted[3:], is_last=True)
    script.update(0, 1, toasted[0], None)  # what is out of line was left alone
    script.delete(0, 0, wide[7])
    script.begin()
    script.begin()
    script.other(0)
    for row in wide[:200]:
        script.insert(0, 0, row)
    script.note(0, script.made[0].insert(altered[0]), SKIPPED_NUMBER)
    script.store_chunks(0)
    held = script.hold(0, 1, toasted[1])
    script.confirm(1, 1, held, toasted[1])
    script.update(1, 0, wide[201], wide[200])
    script.delete(1, 2, None)
    script.begin()
    script.store_chunks(1)
    script.hold(1, 1, toasted[2])
    script.cancel(1, 1)
    script.insert(1, 1, toasted[2])
    script.multi_insert(1, 2, altered, is_last=True)
    script.update(1, 2, altered[2], altered[1])
    script.other(1)
    return script


def plain_lines(script: Script, renderers: Renderers) -> bytes:
    text = TestDecoding(renderers)
    out = []
    for number, one in enumerate(script.transactions):
        out.append(render_line(one.first_lsn, one.xid, text.begin(one.xid)))
        for of, lsn, change in script.said:
            if of == number:
                shown = None if change is None else render_line(lsn, one.xid, text.change(change))
                out.append(shown or OTHER)
        out.append(render_line(one.end_lsn, one.xid, text.commit(one.xid)))
    return b"".join(out)


def plain_frames(script: Script, renderers: Renderers) -> bytes:
    messages = PgOutput(renderers)
    out, described = [], set()
    for number, one in enumerate(script.transactions):
        begin = Begin(one.commit_lsn, one.committed_at, one.xid)
        out.append(encode_frame(encode_begin(begin), one.first_lsn))
        for of, lsn, change in script.said:
            if of != number:
                continue
            if change is None:
                out.append(OTHER)
                continue
            if change.relation.oid not in described:
                described.add(change.relation.oid)
                out.append(encode_frame(messages.relation(change.relation), lsn))
            message = messages.change(change)
            out.append(b"" if message is None else encode_frame(message, lsn))
        commit = Commit(one.commit_lsn, one.end_lsn, one.committed_at)
        out.append(encode_frame(encode_commit(commit), one.end_lsn))
    return b"".join(out)


def test_rows_by_column_are_those_of_the_plain_way(server: Server) -> None:
    renderers = Renderers(under(server, {}))
    script = play(server)
    lines, frames = plain_lines(script, renderers), plain_frames(script, renderers)
    source = script.finish()
    for format_, expected in ((LineFormat(renderers), lines), (FrameFormat(renderers), frames)):
        writer = ColumnarWriter(format_, source)
        found = b"".join(part.tobytes() for part in writer.write(script.transactions))
        assert found == expected
    assert b"unchanged-toast-datum" in lines
    assert b"(no-tuple-data)" in lines
