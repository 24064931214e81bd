"""The tables of one side as `compare data` reads them: what is stored, what identifies rows.

Invariant: each function reads its whole kind in one query, or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.postgres.catalog.relations import NEVER_NULL
from millrace.postgres.catalog.schemas import USER_SCHEMA

Connection = psycopg.Connection[tuple[Any, ...]]

# Virtual generated columns (18) are computed from the others whenever they are read.
_COMPARED_RELATIONS = f"""
SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text,
       coalesce(array_agg(a.attname::text ORDER BY a.attnum)
                FILTER (WHERE a.attnum IS NOT NULL), '{{}}'),
       coalesce(array_agg(format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum)
                FILTER (WHERE a.attnum IS NOT NULL), '{{}}'),
       EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                AND e.objid = c.oid AND e.deptype = 'e')
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       AND a.attgenerated IN ('', 's')
 WHERE c.relkind IN ('r', 'p') AND {USER_SCHEMA}
 GROUP BY c.oid, n.nspname
 ORDER BY c.oid"""

_COMPUTED_COLUMNS = """
SELECT a.attrelid::int8, a.attname::text, array_agg(b.attname::text)
  FROM pg_attribute a
  JOIN pg_attrdef g ON g.adrelid = a.attrelid AND g.adnum = a.attnum
  JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = g.oid
       AND d.refclassid = 'pg_class'::regclass AND d.refobjid = a.attrelid
  JOIN pg_attribute b ON b.attrelid = d.refobjid AND b.attnum = d.refobjsubid
 WHERE a.attgenerated <> '' AND b.attnum <> a.attnum
 GROUP BY 1, 2"""

_ROW_KEYS = f"""
SELECT DISTINCT ON (i.indrelid) i.indrelid::int8,
       (SELECT array_agg(a.attname::text ORDER BY k.place)
          FROM unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
         WHERE k.place <= i.indnkeyatts)
  FROM pg_index i
  JOIN pg_class c ON c.oid = i.indrelid
  JOIN pg_class x ON x.oid = i.indexrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND {USER_SCHEMA}
   AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
   AND NOT EXISTS (SELECT FROM unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
                     JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
                    WHERE k.place <= i.indnkeyatts AND NOT {NEVER_NULL})
 ORDER BY i.indrelid, i.indisprimary DESC, i.indnkeyatts, x.relname"""


@dataclass(frozen=True)
class ComparedRelation:
    """A table, or partitioned table, as `compare data` reads it."""

    oid: int
    schema: str
    name: str
    # r table, p partitioned table
    kind: str
    # Name and type of every column that is stored, generated ones too.
    columns: tuple[tuple[str, str], ...]
    # A primary key, or unique and never null; () if none identifies rows.
    key: tuple[str, ...]
    of_extension: bool = False

    @property
    def label(self) -> str:
        """The name as people write it."""
        return f"{self.schema}.{self.name}"


def read_compared_relations(connection: Connection) -> list[ComparedRelation]:
    """What `compare data` must know of either side: kinds, columns, keys."""
    keys = {oid: tuple(key) for oid, key in connection.execute(_ROW_KEYS)}
    return [
        ComparedRelation(
            oid, schema, name, kind, tuple(zip(columns, types, strict=True)), keys.get(oid, ()), of
        )
        for oid, schema, name, kind, columns, types, of in connection.execute(_COMPARED_RELATIONS)
    ]


def read_computed_columns(connection: Connection) -> dict[int, dict[str, list[str]]]:
    """By the table's OID, for each generated column those that it is computed from."""
    computed: dict[int, dict[str, list[str]]] = {}
    for oid, name, read in connection.execute(_COMPUTED_COLUMNS):
        computed.setdefault(oid, {})[name] = read
    return computed


def read_partition_oids(connection: Connection, labels: list[str]) -> set[int]:
    """The tables with these names, and all partitions below them."""
    rows = connection.execute(
        "SELECT c.oid::int8, t.relid::oid::int8 FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " LEFT JOIN LATERAL pg_partition_tree(c.oid) t ON true"
        " WHERE n.nspname || '.' || c.relname = ANY(%s) AND c.relkind IN ('r', 'p')",
        (labels,),
    )
    return {oid for row in rows for oid in row if oid is not None}
