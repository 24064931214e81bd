"""Can these columns be left out, or arrive as digests? What the source's catalog has against it.

Invariant: a column passes only if the target's table takes what comes in its place, and nothing
there is computed, constrained or distributed by the value that a digest stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from millrace.clone.problem import Problem
from millrace.filter.rules import FilterRules
from millrace.postgres.digest import DIGITS
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

# For a varchar, the modifier is its length and 4.
_COLUMN = """
SELECT format_type(a.atttypid, a.atttypmod),
       a.atttypid IN ('text'::regtype, 'bytea'::regtype)
       OR (a.atttypid = 'varchar'::regtype AND a.atttypmod NOT BETWEEN 0 AND %(digits)s + 3)
       OR EXISTS (SELECT FROM pg_type t WHERE t.oid = a.atttypid AND t.typname = 'citext'),
       array(SELECT format('check %%s', k.conname) FROM pg_constraint k
              WHERE k.conrelid = a.attrelid AND a.attnum = ANY(k.conkey) AND k.contype = 'c'),
       array(SELECT format('generated column %%s', g.attname)
               FROM pg_attrdef d JOIN pg_depend p ON p.classid = 'pg_attrdef'::regclass
                AND p.objid = d.oid AND p.refclassid = 'pg_class'::regclass
                AND p.refobjid = a.attrelid AND p.refobjsubid = a.attnum
               JOIN pg_attribute g ON g.attrelid = d.adrelid AND g.attnum = d.adnum
              WHERE g.attgenerated <> '' AND g.attnum <> a.attnum),
       EXISTS (SELECT FROM pg_partitioned_table p
                WHERE p.partrelid = a.attrelid AND (a.attnum = ANY(p.partattrs)
                      OR 0 = ANY(p.partattrs)))
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND a.attname = %(column)s
   AND a.attnum > 0 AND NOT a.attisdropped
"""
_NOT_NULL = """
SELECT FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_type t ON t.oid = a.atttypid
 WHERE n.nspname = %s AND c.relname = %s AND a.attname = %s AND NOT a.attisdropped
   AND (a.attnotnull OR t.typnotnull) AND NOT a.atthasdef AND a.attidentity = ''
"""
# Both ends of each foreign key, column by column.
_FOREIGN_KEYS = """
SELECT k.conname, n.nspname, c.relname, a.attname, fn.nspname, f.relname, fa.attname
  FROM pg_constraint k
  CROSS JOIN LATERAL unnest(k.conkey, k.confkey) AS u (here, there)
  JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class f ON f.oid = k.confrelid JOIN pg_namespace fn ON fn.oid = f.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = u.here
  JOIN pg_attribute fa ON fa.attrelid = f.oid AND fa.attnum = u.there
 WHERE k.contype = 'f' AND k.conparentid = 0
"""


def check_left_out(source: Connection, rules: FilterRules) -> Iterator[Problem]:
    """Columns that can't be empty on the target."""
    with translated("reading columns that are left out"):
        for rule in rules.of("exclude-column"):
            names = tuple(part.text for part in rule.parts)
            if source.execute(_NOT_NULL, names).rowcount:
                yield Problem(
                    "source",
                    f"{'.'.join(names)} is NOT NULL and has no default, so it can't be left out",
                    "hash it instead: a digest without the key says nothing; or give it a default",
                )


def check_hashes(source: Connection, rules: FilterRules) -> Iterator[Problem]:
    """Every problem of every column that is to be hashed."""
    hashed = {tuple(part.text for part in rule.parts) for rule in rules.of("hash-column")}
    if not hashed:
        return
    wheres = {
        (rule.parts[0].text, rule.parts[1].text): rule.predicate for rule in rules.of("table-where")
    }
    with translated("reading columns that are to be hashed"):
        for schema, table, column in sorted(hashed):
            names = {"schema": schema, "table": table, "column": column, "digits": DIGITS}
            row = source.execute(_COLUMN, names).fetchone()
            yield from _of_column(f"{schema}.{table}.{column}", row)
            if column.lower() in wheres.get((schema, table), "").lower():
                yield _problem(f"{schema}.{table}.{column}", "[table-where] reads it")
        for name, *ends in source.execute(_FOREIGN_KEYS):
            here, there = tuple(ends[:3]), tuple(ends[3:])
            if (here in hashed) is not (there in hashed):
                label = ".".join(here if here in hashed else there)
                yield _problem(label, f"foreign key {name} has an end that is not hashed")


def _of_column(label: str, row: tuple[Any, ...] | None) -> Iterator[Problem]:
    if row is None:
        yield Problem("source", f"{label}, which is to be hashed, is not there", "correct the name")
        return
    type_name, is_fit, checks, generated, is_partition_key = row
    if not is_fit:
        yield Problem(
            "source",
            f"{label} is {type_name}, which has no room for a digest: text, bytea, citext, and "
            f"varchar without a limit or with {DIGITS} at least have",
            "leave the column out instead, or give it another type",
        )
    for what in (*checks, *generated):
        yield _problem(label, f"{what} reads it")
    if is_partition_key:
        yield _problem(label, "the table is partitioned by it")


def _problem(label: str, why: str) -> Problem:
    return Problem(
        "source", f"{label} can't be hashed: {why}", "leave the column out instead, or drop that"
    )
