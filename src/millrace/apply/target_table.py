"""Tables of the target as apply has to know them.

Invariant: a column takes part only if the target can store it as it is sent; equality is the one
of the column's own type, found without a search path. Nothing here waits for a lock on a table:
the batch that is being applied may hold it, and would wait for what is read here.

So no function that opens a relation is called: pg_partition_tree() and its like lock every one
they return. Reading the catalogs' rows, format_type() and the reg... types lock nothing.

Facts: partitionfuncs.c, pg_partition_tree(); format_type.c; index.c, index_set_state_flags().
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.catalog.relations import NEVER_NULL

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target."""

    name: str
    type_oid: int
    # Its type, or what its domain is based on, with modifier and, where it is not the type's own,
    # collation: as in CREATE TABLE. A domain itself may refuse the NULL that stands for a value
    # that was not sent.
    definition: str
    # OPERATOR(schema.=), or None for a type without equality.
    equality: str | None
    is_generated: bool
    is_identity_always: bool
    # As in pg_attribute; and schema and name of its type, or of what its domain is based on.
    type_modifier: int
    type_schema: str
    type_name: str
    is_of_extension: bool


@dataclass(frozen=True)
class TargetTable:
    """A table of the target."""

    schema: str
    name: str
    is_partitioned: bool
    columns: tuple[TargetColumn, ...]
    primary_key: tuple[str, ...]
    # Column names of each unique index over plain columns.
    unique_keys: tuple[tuple[str, ...], ...]
    # Of these, the ones that identify a row at any time: they are not deferrable, and no
    # column can be null. The primary key first.
    telling_keys: tuple[tuple[str, ...], ...]
    # Of the unique ones, those by which a row is found with the columns' own equality.
    lookup_keys: tuple[tuple[str, ...], ...]
    # Of all indexes that can refuse a row, those over expressions and exclusion included, and
    # those that only some of its partitions have.
    unique_index_count: int
    # Some of its triggers fire for replicated changes too.
    has_triggers: bool = False

    def column(self, name: str) -> TargetColumn | None:
        return next((column for column in self.columns if column.name == name), None)


# A type's default btree operator class is declared for the type, for what it is coerced to
# without a function (varchar to text), or for a pseudo-type.
_COLUMNS = """
    SELECT a.attname, a.atttypid::int8,
           format_type(b.oid, b.modifier)
           || CASE WHEN a.attcollation <> 0 AND a.attcollation <> b.typcollation
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
           a.attgenerated <> '', a.attidentity = 'a', a.atttypmod,
           (SELECT nspname FROM pg_namespace WHERE oid = b.typnamespace), b.typname,
           EXISTS (SELECT FROM pg_depend AS e WHERE e.classid = 'pg_type'::regclass
                      AND e.objid IN (b.oid, b.typelem) AND e.deptype = 'e')
      FROM pg_attribute AS a
      JOIN pg_type AS t ON t.oid = a.atttypid
      JOIN LATERAL (
           WITH RECURSIVE base AS (
               SELECT t.oid, t.typtype, t.typbasetype, t.typcategory, t.typcollation, t.typtypmod,
                      t.typnamespace, t.typname, t.typelem, a.atttypmod AS modifier
               UNION ALL
               SELECT d.oid, d.typtype, d.typbasetype, d.typcategory, d.typcollation, d.typtypmod,
                      d.typnamespace, d.typname, d.typelem, base.typtypmod
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


# The table and all below it. Partitions only: rows of inheriting tables are sent under their own
# names.
_TREE = """
    WITH RECURSIVE tree (oid) AS (
        SELECT %(oid)s::oid
        UNION ALL
        SELECT i.inhrelid FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.oid
          JOIN pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
    )
"""
_HAS_TRIGGERS = f"""{_TREE}
    SELECT EXISTS (SELECT FROM pg_trigger AS g JOIN tree ON tree.oid = g.tgrelid
                    WHERE g.tgenabled IN ('A', 'R'))
"""
# One that is not valid, yet or because it was left unfinished, refuses rows as soon as it is
# ready. Indexes of partitions that are part of one above are that one.
_REFUSING = f"""{_TREE}
    SELECT count(*) FROM pg_index AS i JOIN tree ON tree.oid = i.indrelid
     WHERE (i.indisunique OR i.indisexclusion) AND i.indisready
       AND NOT EXISTS (SELECT FROM pg_inherits AS above JOIN pg_index AS whole
                           ON whole.indexrelid = above.inhparent
                        WHERE above.inhrelid = i.indexrelid AND whole.indisready)
"""


def read_target_table(connection: Connection, schema: str, name: str) -> TargetTable | None:
    """The table of this name, if it can take rows."""
    found = connection.execute(
        "SELECT c.oid::int8, c.relkind FROM pg_class AS c JOIN pg_namespace AS n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"
        " AND c.relkind IN ('r', 'p')",
        (schema, name),
    ).fetchone()
    if found is None:
        return None
    oid, kind = found
    columns = tuple(TargetColumn(*row) for row in connection.execute(_COLUMNS, (oid,)))
    unique = connection.execute(_UNIQUE, (oid,)).fetchall()
    return TargetTable(
        schema,
        name,
        kind == "p",
        columns,
        next((tuple(row[2]) for row in unique if row[0]), ()),
        tuple(tuple(row[2]) for row in unique if row[1]),
        tuple(tuple(row[2]) for row in unique if row[1] and row[3]),
        tuple(tuple(row[2]) for row in unique if row[1] and row[4]),
        _scalar(connection, _REFUSING, oid),
        _scalar(connection, _HAS_TRIGGERS, oid),
    )


def read_root(connection: Connection, schema: str, name: str) -> tuple[str, str] | None:
    """The topmost table that this one is a partition of; None for a table of its own."""
    row = connection.execute(
        "WITH RECURSIVE above (oid, depth) AS ("
        " SELECT i.inhparent, 1 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " JOIN pg_inherits AS i ON i.inhrelid = c.oid"
        " WHERE n.nspname = %s AND c.relname = %s AND c.relispartition"
        " UNION ALL SELECT i.inhparent, depth + 1 FROM above JOIN pg_class AS c"
        " ON c.oid = above.oid AND c.relispartition JOIN pg_inherits AS i ON i.inhrelid = c.oid)"
        " SELECT n.nspname, c.relname FROM above JOIN pg_class AS c ON c.oid = above.oid"
        " JOIN pg_namespace AS n ON n.oid = c.relnamespace ORDER BY depth DESC LIMIT 1",
        (schema, name),
    ).fetchone()
    return None if row is None else (row[0], row[1])


def _scalar(connection: Connection, query: str, oid: int) -> Any:
    row = connection.execute(query, {"oid": oid}).fetchone()
    assert row is not None
    return row[0]


def read_type_names(connection: Connection, oids: list[int]) -> dict[int, str]:
    """How the target calls its built-in types."""
    rows = connection.execute(
        "SELECT oid::int8, format_type(oid, NULL) FROM pg_type WHERE oid = ANY (%s::oid[])", (oids,)
    )
    return dict(rows.fetchall())
