"""Sessions: what they are set to, and how they are ended."""

from __future__ import annotations

import psycopg

from millrace.config.dsn import Dsn
from millrace.postgres.connect import cancel_sessions, connect
from millrace.postgres.libpq import execute, open_session


def test_commits_are_waited_for_where_the_server_would_not(target_db: str) -> None:
    name = Dsn.parse(target_db).parameters["dbname"]
    with connect(Dsn.parse(target_db), "test") as connection:
        for setting, expected in (("off", "local"), ("remote_write", "remote_write")):
            connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = {setting}")
            with connect(Dsn.parse(target_db), "test") as fresh:
                assert fresh.execute("SHOW synchronous_commit").fetchone() == (expected,)


def test_money_looks_the_same_whatever_the_database_says(source_db: str, target_db: str) -> None:
    for uri in (source_db, target_db):
        dsn = Dsn.parse(uri)
        with psycopg.connect(uri, autocommit=True) as connection:
            name = dsn.parameters["dbname"]
            connection.execute(f"ALTER DATABASE {name} SET lc_monetary = 'POSIX'".encode())
        with connect(dsn, "test") as fresh:
            assert fresh.execute("SHOW lc_monetary").fetchone() == ("C",)
        bare = open_session(dsn, "test", "UTF8")
        assert execute(bare, "SHOW lc_monetary")[0].get_value(0, 0) == b"C"
        bare.finish()


def test_sessions_that_are_ended_are_gone_afterwards(target_db: str) -> None:
    dsn = Dsn.parse(target_db)
    with psycopg.connect(target_db, autocommit=True) as other:
        names = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
        for round_ in range(20):
            busy = connect(dsn, f"index {round_}run")
            other_run = connect(dsn, f"index {round_}other")
            # Something to roll back.
            busy.execute("BEGIN")
            busy.execute("CREATE TABLE public.half AS SELECT generate_series(1, 1000)")
            assert cancel_sessions(dsn, f"millrace % {round_}run%") == 1
            found = {name for (name,) in other.execute(names)}
            assert f"millrace index {round_}run" not in found
            assert f"millrace index {round_}other" in found
            busy.close()
            other_run.close()
    assert cancel_sessions(dsn, "millrace nobody%") == 0
