"""TRUNCATE on the target.

Invariant: exactly the rows go that went on the source, however the target is partitioned; where
that can't be said, nothing goes, and there is an error.

A partition of the source is one of the target if name and bounds are the same. If all that were
truncated are, those are truncated; the root itself if it has no others, because foreign keys ask
for that. Otherwise the rows go that meet the bounds. If there are no others in the table, it is
truncated.

Which rows a hash partition holds is not known on another server: its bounds name the source's
table, and hashes of some types differ. But partitions that complete each other hold, together,
whatever their parent does.

Facts: ruleutils.c, pg_get_partition_constraintdef(); partbounds.c, get_qual_for_hash(); heap.c,
heap_truncate_check_FKs().
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from psycopg.pq.abc import PGconn

from millrace.apply.prepare import TruncatedPartitions, TruncateWork
from millrace.apply.target_table import TargetTable
from millrace.errors import ApplyError, ServerError
from millrace.lsn import render_lsn
from millrace.postgres.pgoutput.messages import Partition
from millrace.postgres.quote import literal, qualified
from millrace.postgres.schema_rename import rename_in_sql
from millrace.postgres.wire.libpq import execute

# Without the parent's OID, which is another one on every server.
_HASH: Final = re.compile(r"satisfies_hash_partition\('\d+'::oid, (\d+), (\d+), ")
_SAME_HASH: Final = r"satisfies_hash_partition(\1, \2, "
_NOTHING_ELSE: Final = re.compile(r"\btrue\b|\bAND\b|[() ]")
_QUOTES: Final = ("'", '"')
# feature_not_supported: TRUNCATE of a table that another one references
_REFERENCED: Final = "0A000"

# Without locks on partitions that are not meant.
_LEAVES: Final = """
WITH RECURSIVE tree (oid) AS (
    SELECT {root}::pg_catalog.regclass::oid
    UNION ALL
    SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT n.nspname, c.relname,
       CASE WHEN (n.nspname, c.relname) IN ({names})
            THEN coalesce(pg_get_partition_constraintdef(c.oid), '') END
  FROM tree JOIN pg_class c ON c.oid = tree.oid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind <> 'p'
"""


def truncate(session: PGconn, work: TruncateWork) -> None:
    """Do it, in the session's transaction."""
    names = [_name(table) for table in work.tables]
    # (name, condition)
    some_rows: list[tuple[str, str]] = []
    for one in work.partitions:
        tables = _find_tables(session, one)
        if tables is not None:
            names += tables
            continue
        condition = _condition(one, work.lsn)
        if _has_others(session, one.table, condition):
            some_rows.append((_name(one.table), condition))
        else:
            names.append(_name(one.table))
    # Several at once: they may reference each other. Tables that the source did not name are never
    # emptied, so no CASCADE.
    restart = " RESTART IDENTITY" if work.restart_identity else ""
    statement = f"TRUNCATE {', '.join(names)}{restart}"
    if work.is_whole and not some_rows and _is_possible(session, statement):
        return
    # A table that a foreign key points to can't be truncated without the other one, which is
    # another worker's, or keeps some rows, or is not followed.
    for name in names:
        execute(session, f"DELETE FROM {name}")
    for name, condition in some_rows:
        execute(session, f"DELETE FROM {name} WHERE {condition}")


def _is_possible(session: PGconn, statement: str) -> bool:
    """Whether it was; else nothing has happened."""
    execute(session, "SAVEPOINT millrace_truncate")
    try:
        execute(session, statement)
    except ServerError as error:
        if error.facts.get("sqlstate") != _REFERENCED:
            raise
        execute(session, "ROLLBACK TO SAVEPOINT millrace_truncate")
        return False
    execute(session, "RELEASE SAVEPOINT millrace_truncate")
    return True


def covering_condition(conditions: Iterable[str]) -> str | None:
    """What exactly those rows meet that are in one of the partitions with these conditions; None
    if that can't be said on another server."""
    # By the rest of the condition: how much of it the hashes make up.
    shares: dict[str, Fraction] = {}
    for condition in conditions:
        rest, share = _without_hashes(condition)
        shares[rest] = shares.get(rest, Fraction(0)) + share
    if any(share != 1 for share in shares.values()):
        return None
    return " OR ".join(f"({rest})" for rest in shares)


def _name(table: TargetTable) -> str:
    return ("" if table.is_partitioned else "ONLY ") + qualified(table.schema, table.name)


def _find_tables(session: PGconn, truncated: TruncatedPartitions) -> list[str] | None:
    """The tables of the target that hold the rows of the partitions and no others."""
    table = truncated.table
    if not table.is_partitioned:
        return None
    bounds = _read_leaves(session, truncated)
    wanted = {(one.schema, one.name): one for one in truncated.partitions}
    if not all(_is_same(partition, bounds.get(name)) for name, partition in wanted.items()):
        return None
    if set(bounds) == set(wanted):
        return [_name(table)]
    if any(partition.is_rehashed for partition in truncated.partitions):
        return None
    return [f"ONLY {qualified(*truncated.naming.target(*name))}" for name in wanted]


def _read_leaves(
    session: PGconn, truncated: TruncatedPartitions
) -> dict[tuple[str, str], str | None]:
    """The bounds of leaves below the table by name; None for those that are not asked for. Names
    are the source's, those in the bounds too."""
    table, naming = truncated.table, truncated.naming
    names = ", ".join(
        f"({literal(one.schema)}, {literal(one.name)})" for one in truncated.partitions
    )
    root = naming.source(table.schema, table.name) or (table.schema, table.name)
    query = _LEAVES.format(root=literal(qualified(*root)), names=names)
    if naming.is_identity:
        result = execute(session, query)[0]
    else:
        execute(session, f"SAVEPOINT millrace_names; {rename_in_sql(naming)}")
        result = execute(session, query)[0]
        execute(session, "ROLLBACK TO SAVEPOINT millrace_names; RELEASE SAVEPOINT millrace_names")
    found: dict[tuple[str, str], str | None] = {}
    for row in range(result.ntuples):
        schema, name, bounds = (_text(result.get_value(row, column)) for column in range(3))
        found[schema or "", name or ""] = bounds
    return found


def _text(value: bytes | None) -> str | None:
    # A name that is not ours to read is none of those that were asked for.
    return None if value is None else value.decode(errors="replace")


def _is_same(partition: Partition, there: str | None) -> bool:
    """Without a condition, the name must do: the source had dropped it before it was asked."""
    here = partition.condition
    if here is None or there is None:
        return there is not None
    return _HASH.sub(_SAME_HASH, here) == _HASH.sub(_SAME_HASH, there)


def _condition(truncated: TruncatedPartitions, lsn: int) -> str:
    conditions = [one.condition for one in truncated.partitions]
    known = [one for one in conditions if one is not None]
    found = covering_condition(known) if len(known) == len(conditions) else None
    if found is None:
        label = truncated.label
        names = ", ".join(f"{one.schema}.{one.name}" for one in truncated.partitions)
        if any(one.is_rehashed for one in truncated.partitions):
            hint = "hashes differ here; make a new clone, and DELETE rows of such partitions"
        else:
            hint = (
                f"give {label} partitions of the same names and bounds on the target, then run the"
                " same command again"
            )
        raise ApplyError(
            f"{label}: TRUNCATE of {names} at {render_lsn(lsn)}: the rows of these partitions "
            "cannot be identified on the target",
            hint=hint,
            table=label,
            lsn=render_lsn(lsn),
        )
    return found


def _has_others(session: PGconn, table: TargetTable, condition: str) -> bool:
    query = f"SELECT FROM {_name(table)} WHERE ({condition}) IS NOT TRUE LIMIT 1"
    return bool(execute(session, query)[0].ntuples)


def _without_hashes(condition: str) -> tuple[str, Fraction]:
    """(the condition with everything true about hashes, which share of its rows they let pass).

    Hashes are conditions among others, joined by AND.
    """
    share = Fraction(1)
    while (match := _HASH.search(condition)) is not None:
        share /= int(match[1])
        condition = (
            condition[: match.start()] + "true" + condition[_end_of_call(condition, match) :]
        )
    if not _NOTHING_ELSE.sub("", condition):
        condition = "true"
    return condition, share


def _end_of_call(text: str, match: re.Match[str]) -> int:
    """Behind the closing parenthesis."""
    depth, quote = 1, ""
    for at in range(match.end(), len(text)):
        one = text[at]
        if quote:
            quote = "" if one == quote else quote
        elif one in _QUOTES:
            quote = one
        elif one in "()":
            depth += 1 if one == "(" else -1
            if not depth:
                return at + 1
    return len(text)
