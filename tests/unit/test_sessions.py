"""Sessions are opened in few places, each of which puts our settings in place."""

from __future__ import annotations

import re
from pathlib import Path

import millrace
from millrace.postgres.wire.connect import session_sql

# The embedded servers, the demos' applications and analysts, and who looks for a pooler with one
# statement, play others' parts; PgBouncer's console is no PostgreSQL.
_PLACES = {"postgres/wire/connect.py", "postgres/wire/libpq.py", "postgres/wire/walsender.py"}
_OTHERS = {
    "postgres/program/embedded.py",
    "demo/shop.py",
    "demo/library.py",
    "cli/demo/consolidate.py",
    "tube/delivery/session.py",
    "follow/pause.py",
}
_TIMEOUTS = ("statement", "lock", "idle_in_transaction_session", "idle_session", "transaction")


def test_sessions_are_opened_only_where_timeouts_are_turned_off() -> None:
    root = Path(millrace.__file__).parent
    opening = re.compile(
        r"psycopg\.connect\(|Session\.connect\(|PGconn\.connect\(|psycopg2|asyncpg|adbc"
    )
    found = {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*.py")
        if opening.search(path.read_text())
    }
    assert found.keys() == _PLACES | _OTHERS
    for place in _PLACES:
        assert "session_sql(" in found[place]
    for name in _TIMEOUTS:
        assert f"set_config('{name}_timeout', '0', false)" in session_sql(180000)
