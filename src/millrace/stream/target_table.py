"""Tables of the target as apply has to know them.

Invariant: a column takes part only if the target can store it as it is sent; equality is the one
of the column's own type, found without a search path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.catalog import NEVER_NULL

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target."""

    name: str
    type_oid: int
    # With its modifier and, where it is not the type's own, its collation: as in CREATE TABLE.
    definition: str
    # OPERATOR(schema.=), or None for a type without equality.
    equality: str | None
    is_generated: bool
    is_identity_always: bool


@dataclass(frozen=True)
class TargetTable:
    """A table of the target."""

    schema: str
    name: str
    is_partitioned: bool
    columns: tuple[TargetColumn, ...]
    # Column names of each unique index over plain columns.
    unique_keys: tuple[tuple[str, ...], ...]
    # Of these, the ones that tell any two rows apart at any time: they are not deferrable, and no
    # column can be null. The primary key first.
    telling_keys: tuple[tuple[str, ...], ...]
    # Of the unique ones, those by which a row is found with the columns' own equality.
    lookup_keys: tuple[tuple[str, ...], ...]
    # Of all indexes that can refuse a row, those over expressions and exclusion included.
    unique_index_count: int
    # Some of its triggers fire for replicated changes too.
    has_triggers: bool = False

    def column(self, name: str) -> TargetColumn | None:
        return next((column for column in self.columns if column.name == name), None)


# A type's default btree operator class is declared for the type, for what it is coerced to
# without a function (varchar to text), or for a pseudo-type.
_COLUMNS = """
    SELECT a.attname, a.atttypid::int8,
           format_type(a.atttypid, a.atttypmod)
           || CASE WHEN a.attcollation <> 0 AND a.attcollation <> t.typcollation
                   THEN format(' COLLATE %%I.%%I', cn.nspname, co.collname) ELSE '' END,
           (SELECT format('OPERATOR(%%I.%%s)', n.nspname, o.oprname)
              FROM pg_opclass AS c
              JOIN pg_amop AS m ON m.amopfamily = c.opcfamily AND m.amopstrategy = 3
               AND m.amoplefttype = c.opcintype AND m.amoprighttype = c.opcintype
              JOIN pg_operator AS o ON o.oid = m.amopopr
              JOIN pg_namespace AS n ON n.oid = o.oprnamespace
             WHERE c.opcdefault AND c.opcmethod = 403
               AND c.opcintype IN (b.oid,
                   CASE b.typtype WHEN 'e' THEN 'anyenum'::regtype
                                  WHEN 'r' THEN 'anyrange'::regtype
                                  WHEN 'c' THEN 'record'::regtype
                                  WHEN 'm' THEN to_regtype('anymultirange')
                                  ELSE CASE WHEN b.typcategory = 'A' THEN 'anyarray'::regtype
                                            WHEN b.oid = 'varchar'::regtype THEN 'text'::regtype
                                       END END)
             ORDER BY c.opcintype = b.oid DESC LIMIT 1),
           a.attgenerated <> '', a.attidentity = 'a'
      FROM pg_attribute AS a
      JOIN pg_type AS t ON t.oid = a.atttypid
      JOIN LATERAL (
           WITH RECURSIVE base (oid, typtype, typbasetype, typcategory) AS (
               SELECT t.oid, t.typtype, t.typbasetype, t.typcategory
               UNION ALL
               SELECT d.oid, d.typtype, d.typbasetype, d.typcategory
                 FROM base JOIN pg_type AS d ON d.oid = base.typbasetype
                WHERE base.typtype = 'd'
           ) SELECT * FROM base WHERE typtype <> 'd') AS b ON true
      LEFT JOIN pg_collation AS co ON co.oid = a.attcollation
      LEFT JOIN pg_namespace AS cn ON cn.oid = co.collnamespace
     WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
     ORDER BY a.attnum
"""
_UNIQUE = f"""
    SELECT i.indisprimary,
           i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL,
           array(SELECT a.attname::text FROM unnest(i.indkey[0:i.indnkeyatts - 1])
                   WITH ORDINALITY AS k (number, place)
                   JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number
                  ORDER BY k.place),
           i.indimmediate
           AND NOT EXISTS (SELECT FROM unnest(i.indkey[0:i.indnkeyatts - 1]) AS k (number)
                             JOIN pg_attribute AS a ON a.attrelid = i.indrelid
                              AND a.attnum = k.number
                            WHERE NOT {NEVER_NULL}),
           NOT EXISTS (SELECT FROM unnest(i.indkey[0:i.indnkeyatts - 1], i.indclass[0:],
                                          i.indcollation[0:]) AS k (number, class, locale)
                         JOIN pg_opclass AS c ON c.oid = k.class
                         JOIN pg_attribute AS a ON a.attrelid = i.indrelid
                          AND a.attnum = k.number
                        WHERE NOT c.opcdefault OR c.opcmethod <> 403
                           OR k.locale <> a.attcollation)
      FROM pg_index AS i
     WHERE i.indrelid = %s AND i.indisvalid AND (i.indisunique OR i.indisexclusion)
     ORDER BY i.indisprimary DESC, 4 DESC, i.indexrelid
"""


def read_target_table(connection: Connection, schema: str, name: str) -> TargetTable | None:
    """The table of this name, if it can take rows."""
    found = connection.execute(
        "SELECT c.oid::int8, c.relkind, EXISTS (SELECT FROM pg_trigger AS g"
        " WHERE g.tgenabled IN ('A', 'R') AND (g.tgrelid = c.oid"
        " OR g.tgrelid IN (SELECT p.relid FROM pg_partition_tree(c.oid) AS p)))"
        " FROM pg_class AS c JOIN pg_namespace AS n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"
        " AND c.relkind IN ('r', 'p')",
        (schema, name),
    ).fetchone()
    if found is None:
        return None
    oid, kind, has_triggers = found
    columns = tuple(TargetColumn(*row) for row in connection.execute(_COLUMNS, (oid,)))
    unique = connection.execute(_UNIQUE, (oid,)).fetchall()
    return TargetTable(
        schema,
        name,
        kind == "p",
        columns,
        tuple(tuple(row[2]) for row in unique if row[1]),
        tuple(tuple(row[2]) for row in unique if row[1] and row[3]),
        tuple(tuple(row[2]) for row in unique if row[1] and row[4]),
        len(unique),
        has_triggers,
    )


def read_type_names(connection: Connection, oids: list[int]) -> dict[int, str]:
    """How the target calls its built-in types."""
    rows = connection.execute(
        "SELECT oid::int8, format_type(oid, NULL) FROM pg_type WHERE oid = ANY (%s::oid[])", (oids,)
    )
    return dict(rows.fetchall())
