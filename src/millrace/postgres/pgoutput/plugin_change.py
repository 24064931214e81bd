"""The content of messages of text plugins, whichever plugin wrote them.

Facts: values are text as PostgreSQL prints it, NULL, or not sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.errors import FormatError
from millrace.postgres.pgoutput.messages import Unchanged

Row = dict[str, str | Unchanged | None]


@dataclass(frozen=True)
class BeginText:
    """The start of a transaction; what the plugin does not send is 0."""

    xid: int
    commit_lsn: int = 0
    committed_at_microseconds: int = 0


@dataclass(frozen=True)
class CommitText:
    """The end of a transaction; what the plugin does not send is 0."""

    xid: int
    committed_at_microseconds: int
    commit_lsn: int = 0
    end_lsn: int = 0


@dataclass(frozen=True)
class RowText:
    """A row's insert (I), update (U) or delete (D)."""

    kind: str
    schema: str
    table: str
    new: Row | None
    # The old key or row; None if the plugin has none.
    old: Row | None
    # Whether columns missing from `new` were left out because they are unchanged.
    may_omit: bool


@dataclass(frozen=True)
class TruncateText:
    """TRUNCATE of tables, as (schema, name)."""

    tables: tuple[tuple[str, str], ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True)
class MessageText:
    """What an application wrote by pg_logical_emit_message: no change of a table."""


ChangeText = BeginText | CommitText | RowText | TruncateText | MessageText


def bad_text(plugin: str, expected: str, at: int, text: str) -> FormatError:
    """No part of the text is quoted: it holds values."""
    return FormatError(
        f"message of {plugin}: expected {expected} at offset {at} of {len(text)}", offset=at
    )
