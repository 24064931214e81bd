"""`millrace ping`: do both servers answer?

Invariant: exit code 0 means that a session of each given server was opened and has answered.
"""

from __future__ import annotations

import json

from millrace.cli import options
from millrace.errors import ConfigError
from millrace.log import setup_logging
from millrace.postgres.wire.connect import connect, translated


def ping(
    source: options.Source = "", target: options.Target = "", as_json: options.AsJson = False
) -> None:
    """Check that both servers answer, with the connection strings of a clone.

    `clone --dry-run` checks everything else that a clone needs. Exit code 5 if a server does not
    answer.
    """
    setup_logging(quiet=True)
    given = {"source": source, "target": target}
    if not any(given.values()):
        raise ConfigError("neither --source nor --target is given")
    versions = {side: _version(uri, side) for side, uri in given.items() if uri}
    if as_json:
        print(json.dumps(versions))
        return
    for side, version in versions.items():
        print(f"{side}: PostgreSQL {version}")


def _version(uri: str, side: str) -> str:
    dsn = options.parse_dsn(uri, side)
    with connect(dsn, "ping") as connection, translated(f"asking the {side}"):
        row = connection.execute("SHOW server_version").fetchone()
    assert row is not None
    return str(row[0])
