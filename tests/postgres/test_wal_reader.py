"""WAL of real servers: our list of records is pg_waldump's."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.decode.waldump import dump_lines, record_lines

from millrace.lsn import parse_lsn
from millrace.postgres.program.embedded import Cluster
from millrace.wal.read.files import open_wal
from millrace.wal.read.reader import read_records

# Records of every size, with images, on several pages and in several segments.
_WORKLOAD = (
    "CREATE TABLE t (id int PRIMARY KEY, body text, amount numeric)",
    "INSERT INTO t SELECT g, repeat(md5(g::text), 3), g FROM generate_series(1, 5000) g",
    "CHECKPOINT",
    "UPDATE t SET amount = amount + 1 WHERE id % 3 = 0",
    "DELETE FROM t WHERE id % 7 = 0",
    "INSERT INTO t SELECT 9000, string_agg(md5(g::text), '') FROM generate_series(1, 4000) g",
    "SELECT pg_switch_wal()",
    "DO $$BEGIN INSERT INTO t VALUES (9001); BEGIN INSERT INTO t VALUES (9002), (9002); "
    "EXCEPTION WHEN unique_violation THEN NULL; END; INSERT INTO t VALUES (9003); END$$",
    "SELECT pg_logical_emit_message(true, 'long', repeat('z', 17000000))",
    "CREATE INDEX ON t (left(body, 40), amount)",
    "VACUUM FULL pg_class",
    "TRUNCATE t",
    "DROP TABLE t",
)


@pytest.mark.parametrize("server", ["source_cluster", "target_cluster", "system_cluster"])
def test_records_are_those_of_pg_waldump(request: pytest.FixtureRequest, server: str) -> None:
    cluster: Cluster = request.getfixturevalue(server)
    with psycopg.connect(cluster.uri(), autocommit=True) as connection:
        # In a segment that holds nothing else, so that there is little to read.
        connection.execute("SELECT pg_switch_wal()")
        start = _position(connection)
        for statement in _WORKLOAD:
            connection.execute(statement.encode())
        connection.execute("SELECT pg_switch_wal()")
        end = _position(connection)
    directory = Path(cluster.data_dir) / "pg_wal"
    records = read_records(open_wal([directory], start_lsn=start, end_lsn=end), start, end)
    expected = dump_lines(cluster.installation.bindir, directory, start, end)
    count = 0
    for line, own in zip_longest(expected, record_lines(records)):
        assert line == own
        count += 1
    assert count > 10_000
    assert records.version.major == cluster.version


def _position(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row
    return parse_lsn(row[0])
