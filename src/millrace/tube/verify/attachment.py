"""Whether tables are still attached as they were: what triggers would not see.

Invariant: it only reads the catalog. Every way in which a write could leave no pod, that the
catalog shows, is a problem with the statement that mends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.tube import Connection, Tube, TubeTable

_EVENTS = ("insert", "update", "delete", "truncate")
# pg_trigger.tgenabled
_ALWAYS, _DISABLED = "A", "D"


@dataclass(frozen=True)
class Problem:
    """Of one table, with what mends it."""

    table: str
    what: str
    hint: str
    # Its keys can't be read, so its documents can't be compared.
    is_unreadable: bool = False


def find_problems(connection: Connection, tube: Tube) -> list[Problem]:
    """All there are; none if every write to its tables leaves a pod."""
    with translated("looking at triggers"):
        found = _dropped(connection, tube)
        for table in tube.tables:
            found += _key(connection, table) + _triggers(connection, tube, table)
    return found


def _dropped(connection: Connection, tube: Tube) -> list[Problem]:
    """Tables that were dropped, and perhaps made anew under their name: those have no triggers."""
    here = ident(tube.schema)
    rows = connection.execute(
        f"SELECT t.tbl::oid::text FROM {here}._tube_tables t JOIN {here}._tube_tubes u"
        " ON u.id = t.tube WHERE u.name = %s"
        " AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.tbl)".encode(),
        (tube.name,),
    ).fetchall()
    return [
        Problem(
            f"oid {oid}",
            "the table was dropped",
            "if it was made anew, attach it with `millrace tube attach`, and backfill it",
        )
        for (oid,) in rows
    ]


def _key(connection: Connection, table: TubeTable) -> list[Problem]:
    rows = connection.execute(
        "SELECT a.attname::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped",
        (table.schema, table.name),
    ).fetchall()
    names = {row[0] for row in rows}
    return [
        Problem(
            table.label,
            f"its key has a column {name}, which is gone or has another name",
            "attach it again with --key, and backfill it: touches were lost",
            is_unreadable=True,
        )
        for name in table.key
        if name not in names
    ]


def _triggers(connection: Connection, tube: Tube, table: TubeTable) -> list[Problem]:
    """Of the table, and of every partition."""
    rows = connection.execute(
        "WITH place AS (SELECT c.oid, c.relkind FROM pg_class c JOIN pg_namespace n"
        "  ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s),"
        " relation AS (SELECT p.oid, true AS is_root FROM place p"
        "  UNION ALL SELECT t.relid, false FROM place p, pg_partition_tree(p.oid) t"
        "  JOIN pg_class c ON c.oid = t.relid AND c.relkind IN ('r', 'p')"
        "  WHERE p.relkind = 'p' AND t.relid <> p.oid)"
        " SELECT r.is_root, n.nspname || '.' || c.relname,"
        " coalesce(json_object_agg(substr(f.proname, length(%s) + 1), g.tgenabled)"
        "  FILTER (WHERE f.oid IS NOT NULL), '{}')"
        " FROM relation r JOIN pg_class c ON c.oid = r.oid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " LEFT JOIN (pg_trigger g JOIN pg_proc f ON f.oid = g.tgfoid"
        "  JOIN pg_namespace h ON h.oid = f.pronamespace AND h.nspname = %s)"
        "  ON g.tgrelid = r.oid AND starts_with(f.proname, %s)"
        " GROUP BY 1, 2 ORDER BY 1 DESC, 2",
        (
            table.schema,
            table.name,
            f"_tube_{table.id}_",
            tube.schema,
            f"_tube_{table.id}_",
        ),
    ).fetchall()
    found = []
    for is_root, name, enabled in rows:
        found += _of_relation(tube, table, name, enabled, is_root=is_root)
    return found


def _of_relation(
    tube: Tube, table: TubeTable, name: str, enabled: dict[str, str], *, is_root: bool
) -> list[Problem]:
    attach = f"`millrace tube attach {tube.name} {table.label} ...` again, as before"
    missing = [one for one in _EVENTS if one not in enabled]
    asleep = [one for one in _EVENTS if enabled.get(one, _ALWAYS) != _ALWAYS]
    rows = {enabled.get(f"row_{one}") for one in _EVENTS[:3]}
    if not is_root and missing and rows == {_ALWAYS}:
        return [
            Problem(
                name,
                "a later partition: a TRUNCATE of it by name would leave no pod",
                f"SELECT {ident(tube.schema)}.tube_partitions_refresh('{tube.name}')",
            )
        ]
    found = []
    if missing:
        found.append(Problem(name, f"it has no trigger for {', '.join(missing).upper()}", attach))
    if asleep:
        how = "disabled" if {enabled[one] for one in asleep} == {_DISABLED} else "not always fired"
        found.append(
            Problem(name, f"its triggers for {', '.join(asleep).upper()} are {how}", attach)
        )
    return found
