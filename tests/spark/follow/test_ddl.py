"""`clone --follow --ddl` and `follow --ddl`, as they are typed: structure follows, at its place."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows

SCHEMA = """
CREATE TABLE kept (id int PRIMARY KEY, v text);
INSERT INTO kept SELECT g, 'row ' || g FROM generate_series(1, 500) AS g;
CREATE TABLE dropped (id int PRIMARY KEY);
CREATE TABLE renamed (id int PRIMARY KEY, v int, w int);
CREATE TABLE anew (id int PRIMARY KEY);
INSERT INTO renamed SELECT g, g, g FROM generate_series(1, 300) AS g;
INSERT INTO anew SELECT generate_series(1, 9);
CREATE VIEW shown AS SELECT id FROM kept;
"""
# Each string is a transaction: rows before, among and after what changes their table.
CHANGES = (
    """INSERT INTO kept VALUES (1001, 'before');
    ALTER TABLE kept ADD note text NOT NULL DEFAULT 'none';
    INSERT INTO kept VALUES (1002, 'after', 'mine');
    ALTER TABLE kept ALTER v TYPE varchar(40);
    UPDATE kept SET note = v WHERE id < 100""",
    # Values that only the source knows.
    "ALTER TABLE kept ADD code uuid DEFAULT gen_random_uuid()",
    """CREATE TABLE fresh (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text UNIQUE);
    INSERT INTO fresh (v) SELECT 'v' || g FROM generate_series(1, 200) AS g;
    ALTER TABLE fresh RENAME TO "Fresh one";
    DELETE FROM "Fresh one" WHERE id % 2 = 0""",
    "CREATE TABLE made AS SELECT id, v FROM kept WHERE id < 50",
    "CREATE INDEX ON kept (note)",
    """ALTER TABLE renamed RENAME TO "Renamed";
    ALTER TABLE "Renamed" ALTER v TYPE text USING 'v' || v;
    ALTER TABLE "Renamed" DROP COLUMN w;
    ALTER TABLE "Renamed" ADD COLUMN w int;
    UPDATE "Renamed" SET w = id WHERE id < 9""",
    "DROP TABLE anew; CREATE TABLE anew (id text PRIMARY KEY)",
    "INSERT INTO anew VALUES ('a'), ('b')",
    "UPDATE anew SET id = 'c' WHERE id = 'a'",
    "DROP TABLE dropped",
    "CREATE OR REPLACE VIEW shown AS SELECT id, v FROM kept",
    "UPDATE kept SET code = NULL WHERE id = 7",
)


class Followed:
    """Commands of one stream."""

    def __init__(self, source: str, target: str, directory: Path) -> None:
        self.source, self.target = source, target
        self._ends = ["--source", source, "--target", target]
        self._directory = ["--dir", str(directory)]

    def run(self, *command: str, has_directory: bool = True) -> subprocess.CompletedProcess[str]:
        words = [*MILLRACE, *command, *self._ends, *(self._directory if has_directory else [])]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def follow(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Up to where the source is now."""
        end = str(rows(self.source, "SELECT pg_current_wal_insert_lsn()")[0][0])
        return self.run(*command, "--endpos", end)

    def assert_equal(self) -> None:
        for what in ("schema", "data"):
            compared = self.run("compare", what, has_directory=False)
            assert compared.returncode == 0, compared.stdout + compared.stderr

    def cleanup(self) -> None:
        ended = self.run("stream", "cleanup")
        assert ended.returncode == 0, ended.stderr


def test_ddl_is_replayed_among_the_rows_and_one_that_fails_ends_follow_until_it_can_run(
    source_db: str, target_db: str, tmp_path: Path
) -> None:
    execute(source_db, SCHEMA)
    followed = Followed(source_db, target_db, tmp_path / "work")
    slot = "ddl_" + source_db.partition("?")[0].rpartition("/")[2]
    copied = followed.follow("clone", "--follow", "--ddl", "--slot-name", slot)
    assert copied.returncode == 0, copied.stderr
    try:
        execute(source_db, *CHANGES)
        # Nobody says --ddl again. A table whose values only the source knows is copied, and a copy
        # that is made now is newer than this end position.
        early = followed.follow("follow")
        assert early.returncode == 9, early.stderr
        assert "public.kept: its copy is not done" in early.stderr
        ended = followed.run("cutover", "--compare", "full")
        assert ended.returncode == 0, ended.stderr
        followed.assert_equal()

        execute(target_db, "CREATE TABLE taken (another text)")
        execute(
            source_db,
            "INSERT INTO kept VALUES (2001, 'before it')",
            "INSERT INTO kept VALUES (2002, 'with it'); CREATE TABLE taken (id int PRIMARY KEY)",
            "INSERT INTO taken VALUES (1)",
        )
        failed = followed.follow("follow")
        assert failed.returncode == 7, failed.stderr
        assert "CREATE TABLE taken (id int PRIMARY KEY)" in failed.stderr
        assert rows(target_db, "SELECT id FROM kept WHERE id > 2000") == [(2001,)]
        execute(target_db, "DROP TABLE taken")
        done = followed.follow("follow")
        assert done.returncode == 0, done.stdout + done.stderr
        followed.assert_equal()
    finally:
        followed.cleanup()
    assert rows(source_db, "SELECT count(*) FROM pg_event_trigger") == [(0,)]
