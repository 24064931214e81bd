"""COPY from server to server: every row or an error, over every kind of connection."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import psycopg
import pytest
from psycopg.pq.abc import PGconn
from tests.fixtures.proxy import open_proxy
from tests.fixtures.saboteur import WAIT_AT, open_saboteur
from tests.fixtures.tls import open_tls_cluster, tls_uri

from millrace.config.dsn import Dsn
from millrace.errors import ConnectionLost, InvariantError, MillraceError, ServerError
from millrace.postgres.program.embedded import Cluster
from millrace.postgres.wire.libpq import execute, open_session
from millrace.postgres.wire.relay import CHUNK_BYTES, HOLD, CopyResult, relay
from millrace.retry import is_transient

BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "
ROUTES = ("socket", "tcp", "tls-source", "tls-target")


@dataclass(frozen=True)
class Route:
    """A database on each side, and how the relay reaches them."""

    name: str
    source_cluster: Cluster
    target_cluster: Cluster
    database: str
    stack: ExitStack

    @property
    def source(self) -> str:
        """For the test's own sessions."""
        return self.source_cluster.uri(self.database)

    @property
    def target(self) -> str:
        return self.target_cluster.uri(self.database)

    def dsn(self, side: str) -> Dsn:
        cluster = self.source_cluster if side == "source" else self.target_cluster
        if self.name == f"tls-{side}":
            return Dsn.parse(tls_uri(cluster, self.database))
        return Dsn.parse(cluster.uri(self.database, tcp=self.name != "socket"))

    def open(self, source: Dsn | None = None, target: Dsn | None = None) -> tuple[PGconn, PGconn]:
        """A session on each side, as a task opens them; the target is in a transaction."""
        pair = (
            open_session(source or self.dsn("source"), "copy-out", "UTF8"),
            open_session(target or self.dsn("target"), "copy-in", "UTF8"),
        )
        for side, connection in zip(("source", "target"), pair, strict=True):
            assert bool(connection.ssl_in_use) == (self.name == f"tls-{side}")
            self.stack.callback(connection.finish)
        execute(pair[1], "BEGIN")
        return pair


@pytest.fixture(scope="module")
def tls_cluster() -> Iterator[Cluster]:
    with open_tls_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module", params=ROUTES)
def clusters(
    request: pytest.FixtureRequest, source_cluster: Cluster, target_cluster: Cluster
) -> Iterator[tuple[str, Cluster, Cluster]]:
    """The databases of a route are made once: there are many tests, and each empties them."""
    source, target = source_cluster, target_cluster
    if request.param == "tls-source":
        source = request.getfixturevalue("tls_cluster")
    if request.param == "tls-target":
        target = request.getfixturevalue("tls_cluster")
    for cluster in (source, target):
        cluster.create_database("relay")
    yield request.param, source, target
    for cluster in (source, target):
        cluster.drop_database("relay")


@pytest.fixture
def route(clusters: tuple[str, Cluster, Cluster]) -> Iterator[Route]:
    with ExitStack() as stack:
        route = Route(*clusters, "relay", stack)
        for uri in (route.source, route.target):
            run(uri, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
        yield route


def run(uri: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements; the rows of the last, if it has any."""
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def copy_query(
    pair: tuple[PGconn, PGconn], query: str, into: str = "public.t", form: str = "binary"
) -> CopyResult:
    return relay(
        *pair,
        f"{BEGIN}COPY ({query}) TO STDOUT (FORMAT {form})",
        f"COPY {into} FROM STDIN (FORMAT {form})",
    )


@pytest.mark.parametrize(
    ("clusters", "form"),
    [("socket", "binary"), ("tcp", "text"), ("tls-source", "binary"), ("tls-target", "text")],
    indirect=["clusters"],
)
def test_every_row_arrives(route: Route, form: str) -> None:
    columns = "id int, t text, b bytea, a int[], at timestamptz"
    run(route.target, f"CREATE UNLOGGED TABLE t ({columns})")
    pair = route.open()
    query = r"""SELECT g AS id, nullif(repeat(E'x\\\n\t', g % 9), '') AS t, int8send(g) AS b,
        ARRAY[g, NULL, -g] AS a, timestamptz 'epoch' + g * interval '1 s' AS at
        FROM generate_series(1, 300000) g"""
    copied = copy_query(pair, query, form=form)
    execute(pair[1], "COMMIT")
    assert copied.rows == 300_000
    checksum = "SELECT count(*), sum(hashtextextended(r::text, 0)) FROM {} r"
    assert run(route.source, checksum.format(f"({query})")) == run(
        route.target, checksum.format("t")
    )


@pytest.mark.parametrize("form", ["binary", "text"])
def test_no_rows_are_no_rows(route: Route, form: str) -> None:
    run(route.target, "CREATE TABLE t (id int)")
    pair = route.open()
    assert copy_query(pair, "SELECT 1 WHERE false", form=form).rows == 0
    execute(pair[1], "COMMIT")
    assert run(route.target, "SELECT count(*) FROM t") == [(0,)]


def test_rows_without_columns_arrive(route: Route) -> None:
    run(route.target, "CREATE TABLE t ()")
    pair = route.open()
    copied = copy_query(pair, "SELECT FROM generate_series(1, 1000)", form="text")
    execute(pair[1], "COMMIT")
    assert copied.rows == 1000
    assert run(route.target, "SELECT count(*) FROM t") == [(1000,)]


@pytest.mark.parametrize("clusters", ["socket", "tls-target"], indirect=True)
def test_value_of_64_megabytes_arrives(route: Route) -> None:
    run(
        route.target,
        "CREATE TABLE t (id int, b bytea)",
        "ALTER TABLE t ALTER b SET STORAGE EXTERNAL",
    )
    pair = route.open()
    big = "decode(repeat(md5('x') || md5('y'), 2 * 1024 * 1024), 'hex')"
    copied = copy_query(pair, f"SELECT 1, {big} UNION ALL SELECT 2, ''")
    execute(pair[1], "COMMIT")
    assert copied.rows == 2
    assert copied.bytes > 64 * 1024 * 1024
    digest = "SELECT md5({}), length({})"
    assert run(route.target, digest.format("b", "b") + " FROM t WHERE id = 1") == run(
        route.source, digest.format(big, big)
    )


@pytest.mark.parametrize(
    ("query", "sqlstate"),
    [
        ("SELECT 1 / 0", "22012"),
        ("SELECT * FROM missing", "42P01"),
        ("SELEC", "42601"),
        ("SELECT 1 / (g - 100000) FROM generate_series(1, 300000) g", "22012"),
        ("SELECT 1 / (g - 300000) FROM generate_series(1, 300000) g", "22012"),
    ],
    ids=["first row", "missing table", "syntax", "row 100000", "last row"],
)
def test_error_of_the_source_is_reported_and_nothing_is_stored(
    route: Route, query: str, sqlstate: str
) -> None:
    run(route.target, "CREATE TABLE t (id int)")
    pair = route.open()
    with pytest.raises(ServerError) as caught:
        copy_query(pair, query)
    assert caught.value.facts["sqlstate"] == sqlstate
    assert "source" in str(caught.value)
    assert not is_transient(caught.value)
    for connection in pair:
        connection.finish()
    assert run(route.target, "SELECT count(*) FROM t") == [(0,)]


@pytest.mark.parametrize("size", [10, 256, 1000, 20_000])
@pytest.mark.parametrize("rows", [1, 5000], ids=["few rows", "many rows"])
def test_long_error_of_the_source_is_reported_as_its_own(
    route: Route, rows: int, size: int
) -> None:
    run(
        route.source,
        "CREATE FUNCTION fail(size int) RETURNS int LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION '%', repeat('x', size) USING ERRCODE = 'QQ001'; END $$",
    )
    run(route.target, "CREATE TABLE t (id int)")
    pair = route.open()
    query = (
        f"SELECT CASE WHEN g < {rows} THEN g ELSE public.fail({size}) END"
        f" FROM generate_series(1, {rows}) g"
    )
    with pytest.raises(MillraceError) as caught:
        copy_query(pair, query)
    assert caught.value.facts.get("sqlstate") == "QQ001", caught.value.message[:300]
    assert "source" in caught.value.message


def test_error_of_the_source_is_not_mistaken_for_bytes_of_a_row(route: Route) -> None:
    """The last row before the error looks like another error."""
    run(route.target, "CREATE TABLE t (b bytea)")
    pair = route.open()
    forged = error_message(b"57P01", b"value of a row")
    query = (
        f"SELECT CASE WHEN g < 10 THEN '\\x{forged.hex()}'::bytea ELSE"
        " convert_to((1 / (g - 10))::text, 'UTF8') END FROM generate_series(1, 10) g"
    )
    with pytest.raises(MillraceError) as caught:
        copy_query(pair, query)
    assert caught.value.facts["sqlstate"] == "22012"
    assert "value of a row" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "sqlstate"),
    [
        ("t (id int8 CHECK (id <> 1))", "23514"),
        ("t (id int8 CHECK (id < 100000))", "23514"),
        ("t (id int8 CHECK (id < 199999))", "23514"),
        ("t (id int4)", "22P03"),
        ("t (id int8, UNIQUE (id))", "23505"),
    ],
    ids=["first row", "row 100000", "last rows", "type", "unique"],
)
def test_error_of_the_target_is_reported_and_nothing_is_stored(
    route: Route, table: str, sqlstate: str
) -> None:
    run(route.target, f"CREATE TABLE {table}")
    pair = route.open()
    with pytest.raises(ServerError) as caught:
        copy_query(pair, "SELECT g % 200000 FROM generate_series(1::int8, 200001) g")
    assert caught.value.facts["sqlstate"] == sqlstate
    assert "target" in str(caught.value)
    assert not is_transient(caught.value)
    for connection in pair:
        connection.finish()
    assert run(route.target, "SELECT count(*) FROM t") == [(0,)]


def test_error_of_the_target_stops_the_copy_early(route: Route) -> None:
    """Much more than the buffers hold is still to come: the source can't have finished."""
    run(route.target, "CREATE TABLE t (id int8 CHECK (id <> 1))")
    pair = route.open()
    with pytest.raises(ServerError):
        copy_query(pair, "SELECT g FROM generate_series(1::int8, 2000000) g")
    (state,) = run(
        route.source,
        f"SELECT state, query FROM pg_stat_activity WHERE pid = {pair[0].backend_pid}",
    )
    assert state[0] == "active"
    assert "generate_series" in str(state[1])


def test_error_of_the_target_after_the_last_row_is_reported(route: Route) -> None:
    """A constraint trigger runs when all rows are in."""
    run(
        route.target,
        "CREATE TABLE t (id int8)",
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'QQ002'; END $$",
        "CREATE TRIGGER refuse AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION refuse()",
    )
    pair = route.open()
    with pytest.raises(ServerError) as caught:
        copy_query(pair, "SELECT g::int8 FROM generate_series(1, 10) g")
    assert caught.value.facts["sqlstate"] == "QQ002"


def test_target_that_can_not_start_is_reported(route: Route) -> None:
    pair = route.open()
    with pytest.raises(ServerError) as caught:
        copy_query(pair, "SELECT 1", into="missing")
    assert caught.value.facts["sqlstate"] == "42P01"
    assert "target" in str(caught.value)


@pytest.mark.parametrize(
    ("victim", "at"),
    [
        ("source", 1),
        ("source", 50_000),
        ("source", 100_000),
        ("target", 50_000),
        ("target", 100_000),
    ],
)
def test_terminated_session_is_a_lost_connection(route: Route, victim: str, at: int) -> None:
    run(route.target, "CREATE TABLE t (id int, waited text)")
    pair = route.open()
    application = "millrace copy-out" if victim == "source" else "millrace copy-in"
    uri = route.source if victim == "source" else route.target
    query = f"SELECT g, {WAIT_AT % at} FROM generate_series(1, 100000) g"
    with open_saboteur(route.source, uri, application), pytest.raises(MillraceError) as caught:
        copy_query(pair, query)
    assert isinstance(caught.value, ConnectionLost)
    assert caught.value.facts["sqlstate"] in ("57P01", None)
    assert is_transient(caught.value)
    for connection in pair:
        connection.finish()
    assert run(route.target, "SELECT count(*) FROM t") == [(0,)]


@pytest.mark.parametrize("cut_after", [20_000, 2_000_000])
def test_cut_wire_to_the_source_is_a_lost_connection(route: Route, cut_after: int) -> None:
    run(route.target, "CREATE TABLE t (id int, v text)")
    if route.name == "socket":
        pytest.skip("only TCP can be cut")
    with open_proxy(route.source_cluster.port, cut_after=cut_after) as port:
        pair = route.open(source=route.dsn("source").with_(port=str(port)))
        query = "SELECT g, repeat('x', 90) FROM generate_series(1, 100000) g"
        with pytest.raises(MillraceError) as caught:
            copy_query(pair, query)
    assert isinstance(caught.value, ConnectionLost)
    assert is_transient(caught.value)


@pytest.mark.parametrize("cut_after", [20_000, 2_000_000])
def test_cut_wire_to_the_target_is_a_lost_connection(route: Route, cut_after: int) -> None:
    run(route.target, "CREATE TABLE t (id int, v text)")
    if route.name == "socket":
        pytest.skip("only TCP can be cut")
    with open_proxy(route.target_cluster.port, cut_after=cut_after, side="client") as port:
        pair = route.open(target=route.dsn("target").with_(port=str(port)))
        query = "SELECT g, repeat('x', 90) FROM generate_series(1, 100000) g"
        with pytest.raises(MillraceError) as caught:
            copy_query(pair, query)
    assert isinstance(caught.value, ConnectionLost)
    assert is_transient(caught.value)
    assert run(route.target, "SELECT count(*) FROM t") == [(0,)]


def test_rows_that_look_like_the_end_of_a_stream_do_not_end_it(route: Route) -> None:
    """Values of many sizes, around what is held back and around the size of a read, each with
    every pattern right before the true end."""
    run(route.target, "CREATE TABLE t (n int, b bytea)")
    step = 1 if route.name == "socket" else 17
    edge = CHUNK_BYTES + HOLD
    sizes = list(
        chain(
            range(0, 601, step),
            range(max(601, HOLD - 300), HOLD + 300, step),
            range(edge - 300, edge + 300, step * 3),
        )
    )
    generator = random.Random(1)
    patterns = [*HOSTILE, generator.randbytes(1000)]
    wanted = []
    pair = route.open()
    longest = [pattern * (edge * 2 // len(pattern)) for pattern in patterns]
    values = ", ".join(f"({n}, '\\x{value.hex()}'::bytea)" for n, value in enumerate(longest))
    run(
        route.source,
        "CREATE TABLE hostile (n int, b bytea)",
        f"INSERT INTO hostile VALUES {values}",
    )
    for number, size in enumerate(sizes):
        chosen = number % len(patterns)
        value = longest[chosen]
        wanted.append((size, hashlib.md5(value[len(value) - size :]).hexdigest()))
        copied = copy_query(
            pair,
            f"SELECT {number}, substring(b FROM length(b) - {size} + 1) FROM public.hostile"
            f" WHERE n = {chosen}",
        )
        assert copied.rows == 1, size
    execute(pair[1], "COMMIT")
    assert run(route.target, "SELECT length(b), md5(b) FROM t ORDER BY n") == wanted


def test_many_hostile_rows_arrive(route: Route) -> None:
    """Whatever the network cuts the stream into, some read ends within a pattern."""
    columns = "CREATE TABLE t (n int, b bytea)"
    run(route.source, columns)
    run(route.target, columns)
    generator = random.Random(2)
    with (
        psycopg.connect(route.source) as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY t FROM STDIN (FORMAT binary)") as copy,
    ):
        copy.set_types(["int4", "bytea"])
        for n in range(20_000):
            pattern = generator.choice(HOSTILE)
            copy.write_row((n, generator.randbytes(generator.randrange(40)) + pattern))
    source, target = route.open()
    binary = "(FORMAT binary)"
    copied = relay(
        source,
        target,
        f"{BEGIN}COPY public.t TO STDOUT {binary}",
        f"COPY public.t FROM STDIN {binary}",
    )
    execute(target, "COMMIT")
    assert copied.rows == 20_000
    checksum = "SELECT count(*), md5(string_agg(md5(b), '' ORDER BY n)) FROM t"
    assert run(route.source, checksum) == run(route.target, checksum)


def test_both_connections_serve_again_after_a_success(route: Route) -> None:
    run(route.target, "CREATE TABLE t (id int)")
    pair = route.open()
    for rows in (3, 0, 100_000, 1):
        assert copy_query(pair, f"SELECT g FROM generate_series(1, {rows}) g").rows == rows
        state = execute(pair[0], "SELECT pg_current_xact_id_if_assigned() IS NULL")
        assert state[0].get_value(0, 0) == b"t"
        assert pair[0].transaction_status == 0, "the source is idle, with no transaction"
    execute(pair[1], "COMMIT")
    assert run(route.target, "SELECT count(*) FROM t") == [(100_004,)]


def test_target_that_stores_fewer_rows_is_no_success(route: Route) -> None:
    run(
        route.target,
        "CREATE TABLE t (id int)",
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.id = 7 THEN RETURN NULL; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER skip BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION skip()",
    )
    pair = route.open()
    with pytest.raises(InvariantError, match="sent 10 rows, the target stored 9"):
        copy_query(pair, "SELECT g FROM generate_series(1, 10) g")


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


def error_message(sqlstate: bytes, text: bytes) -> bytes:
    return message(b"E", b"SERROR\0VERROR\0C" + sqlstate + b"\0M" + text + b"\0\0")


def _whole_ending() -> bytes:
    """What ends a stream, with another nonce."""
    column = b"?column?\0" + struct.pack(">ihihih", 0, 0, 25, -1, -1, 0)
    return b"".join(
        [
            message(b"c", b""),
            message(b"C", b"COPY 1\0"),
            message(b"Z", b"T"),
            message(b"C", b"ROLLBACK\0"),
            message(b"T", struct.pack(">h", 1) + column),
            message(b"D", struct.pack(">hi", 1, 32) + b"0" * 32),
            message(b"C", b"SELECT 1\0"),
            message(b"Z", b"I"),
        ]
    )


HOSTILE = [
    _whole_ending(),
    message(b"c", b"") + message(b"C", b"COPY 1\0"),
    message(b"C", b"SELECT 1\0") + message(b"Z", b"I"),
    message(b"Z", b"I"),
    message(b"Z", b"E"),
    message(b"c", b""),
    message(b"d", b"\xff\xff"),
    error_message(b"57P01", b"terminating connection"),
    b"\xff\xff",
    b"\0",
]
