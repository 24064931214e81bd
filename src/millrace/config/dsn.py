"""Connection strings: libpq's, with the password kept apart.

Invariant: no rendering of a Dsn for people (`str`, `repr`, `identity`, the
arguments of a program we start) contains a password. Only `conninfo()` and
`program_environment()` do, and their results go to libpq and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from millrace.errors import ConfigError
from millrace.log import redact

# The server is asked every so often if a silent connection still lives: a cut
# network is noticed after 10 + 6 * 10 seconds instead of hours.
DEFAULTS = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "10",
    "keepalives_count": "6",
    "gssencmode": "disable",
}


# Secrets for which libpq has no environment variable.
_NO_ARGUMENTS = frozenset(
    ("sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret")
)


def _without_values(error: ProgrammingError) -> str:
    """libpq's words without what it quotes: that may be a part of the password."""
    return re.sub(r'"[^"]*"', '"..."', redact(str(error)).strip())


@dataclass(frozen=True, repr=False)
class Dsn:
    """One database on one server, as a user named it."""

    parameters: dict[str, str]
    password: str = field(default="", repr=False)
    # Settings of the server for each session, which are secrets, too.
    settings: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str, *, what: str = "connection string") -> Dsn:
        """From a URI or a keyword/value string; PG* variables fill the rest at connect time."""
        try:
            given = {k: str(v) for k, v in conninfo_to_dict(text).items() if v is not None}
        except ProgrammingError as error:
            raise ConfigError(
                f"the {what} is not a PostgreSQL connection string: {_without_values(error)}",
                hint="write postgresql://user@host:5432/database or 'host=... dbname=...'",
            ) from None
        if not re.fullmatch(r"[\d,]*", given.get("port", "")):
            # What is there may be a piece of an unquoted password.
            raise ConfigError(
                f"the port in the {what} is not a number",
                hint="percent-encode /, @, : and % in a password, as %2F, %40, %3A and %25",
            )
        for secret in _NO_ARGUMENTS & given.keys():
            raise ConfigError(
                f"the {what} has {secret}, which can't be handed to pg_dump safely",
                hint="use a password file, or a client key without a passphrase (mode 0600)",
            )
        return cls(given, given.pop("password", ""))

    def conninfo(self, **more: str) -> str:
        """For libpq only: contains the password."""
        parameters = DEFAULTS | self.parameters | more
        if self.password:
            parameters["password"] = self.password
        if self.settings:
            given = [f"-c {name}={value}" for name, value in self.settings.items()]
            parameters["options"] = " ".join([parameters.get("options", ""), *given]).strip()
        return make_conninfo("", **parameters)

    def public_conninfo(self) -> str:
        """A keyword/value string without a password, for arguments of programs."""
        return make_conninfo("", **(DEFAULTS | self.parameters))

    def program_environment(self) -> dict[str, str]:
        """Variables for pg_dump and psql: how they get the password."""
        return {"PGPASSWORD": self.password} if self.password else {}

    def identity(self) -> str:
        """Host, port, database and user as a URI: what a run is pinned to."""
        p = self.parameters
        if p.get("service") and not p.get("host"):
            return f"service={p['service']}"
        user = quote(p.get("user", ""), safe="")
        host = quote(
            p.get("host", p.get("hostaddr", "")),
            safe=",.:/" if "/" not in p.get("host", "") else "",
        )
        port = f":{p['port']}" if p.get("port") else ""
        at = f"{user}@" if user else ""
        return f"postgresql://{at}{host}{port}/{quote(p.get('dbname', ''), safe='')}"

    def with_(self, **parameters: str) -> Dsn:
        """The same server with other parameters."""
        return Dsn(self.parameters | parameters, self.password, self.settings)

    def __str__(self) -> str:
        return self.identity()

    def __repr__(self) -> str:
        return f"Dsn({self.identity()})"

    def __hash__(self) -> int:
        settings = tuple(sorted(self.settings.items()))
        return hash((tuple(sorted(self.parameters.items())), self.password, settings))


# What belongs to the machine or the session that resolved it, not to the database.
_OF_THE_SESSION = frozenset(
    ("password", "passfile", "service", "servicefile", "application_name", "client_encoding")
)


def resolved(parameters: dict[str, Any], password: str) -> Dsn:
    """A Dsn that needs no environment: built from what libpq ended up using."""
    kept = {k: str(v) for k, v in parameters.items() if v and k not in _OF_THE_SESSION}
    if kept.get("sslcertmode") == "allow":
        del kept["sslcertmode"]  # the default, and unknown to programs older than 16
    return Dsn(kept, password)
