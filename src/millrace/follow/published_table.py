"""Tables of the source as they can be published: what identifies their rows.

Invariant: a table has an identity here only if the source names a row of it, and of everything
below it, by values that it sends, and if publishing that makes no statement on it fail.

Up to version 17, pgoutput sends no generated columns. From 18 on our publications send stored ones;
a table that has a virtual one may not be published with REPLICA IDENTITY FULL.

Nothing here waits for a lock on a table: the application may hold one for long, and the end of a
stream would wait as long. So trees are read from pg_inherits, not with pg_partition_tree(), which
locks what it returns, and which does not go by the snapshot of the transaction.

Facts: partitionfuncs.c, pg_partition_tree(); pg_inherits.c, find_inheritance_children_extended().
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from millrace.postgres.catalog.schemas import IS_BORN_PARTITION, USER_SCHEMA, USER_TABLE
from millrace.postgres.quote import qualified
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

# A table that has no parent represents all below, also for what is attached later. What is said of
# it is said of everything below it. %(unsent)s are the kinds of generated columns that may not be
# in a key, %(refused)s those that a table with REPLICA IDENTITY FULL may not have.
_TABLES = f"""
WITH RECURSIVE part (root, oid) AS (
    SELECT top.oid, top.oid FROM pg_class top
     WHERE top.relkind IN ('r', 'p') AND NOT top.relispartition
    UNION ALL
    SELECT part.root, i.inhrelid
      FROM part JOIN pg_inherits i ON i.inhparent = part.oid AND NOT i.inhdetachpending
      JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
), one AS (
    SELECT c.oid, c.relname, c.relreplident, s.nspname,
           c.relkind = 'r' AND c.relispartition AND c.relpersistence = 'p' AS is_leaf,
           identity.is_there AS has_index,
           coalesce(identity.is_generated, false) AS has_unsent_key,
           EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND NOT a.attisdropped
                      AND a.attgenerated::text = ANY(%(refused)s)) AS is_full_refused,
           EXISTS (SELECT FROM pg_index i
                    WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate
                      AND NOT EXISTS (
                            SELECT FROM pg_attribute a
                             WHERE a.attrelid = c.oid
                               AND a.attnum = ANY(i.indkey[0:i.indnkeyatts - 1])
                               AND a.attgenerated::text = ANY(%(unsent)s))) AS has_key,
           (SELECT min(i.xmin::text) FROM pg_inherits i WHERE i.inhrelid = c.oid) AS link,
           (SELECT min(i.inhparent::int8) FROM pg_inherits i WHERE i.inhrelid = c.oid) AS parent,
           {IS_BORN_PARTITION} AS is_born
      FROM pg_class c
      JOIN pg_namespace s ON s.oid = c.relnamespace
      LEFT JOIN LATERAL (
           SELECT true AS is_there, bool_or(EXISTS (
                    SELECT FROM pg_attribute a
                     WHERE a.attrelid = c.oid AND a.attnum = ANY(i.indkey[0:i.indnkeyatts - 1])
                       AND a.attgenerated::text = ANY(%(unsent)s))) AS is_generated
             FROM pg_index i
            WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate AND
                  CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                      WHEN 'i' THEN i.indisreplident END
           HAVING count(*) > 0) AS identity ON true
     WHERE c.relkind IN ('r', 'p')
), told AS (
    SELECT one.*, CASE one.relreplident WHEN 'f' THEN NOT one.is_full_refused
                  ELSE one.has_index IS TRUE AND NOT one.has_unsent_key END AS has_identity
      FROM one
)
SELECT c.oid::int8, n.nspname, c.relname, c.relkind = 'p', told.has_key,
       below.have_identity, below.has_unsent_key, below.is_full_refused, below.tree, below.bare,
       below.links, below.parents, below.attached, below.schemas, below.names, below.leaves
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN told ON told.oid = c.oid
  JOIN (SELECT part.root, bool_and(leaf.has_identity) AS have_identity,
               bool_or(leaf.has_unsent_key) AS has_unsent_key,
               bool_or(leaf.is_full_refused) AS is_full_refused,
               array_agg(leaf.oid::int8) AS tree,
               array_agg(leaf.oid::int8) FILTER (WHERE NOT leaf.has_identity) AS bare,
               array_agg(coalesce(leaf.link, '')) AS links, array_agg(leaf.parent) AS parents,
               array_agg(leaf.oid::int8) FILTER (WHERE NOT leaf.is_born) AS attached,
               array_agg(leaf.nspname::text) AS schemas, array_agg(leaf.relname::text) AS names,
               array_agg(leaf.oid::int8) FILTER (WHERE leaf.is_leaf) AS leaves
          FROM part JOIN told leaf ON leaf.oid = part.oid
         GROUP BY part.root) AS below ON below.root = c.oid
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
   AND {USER_SCHEMA}
   AND {USER_TABLE}
 ORDER BY n.nspname, c.relname
"""


@dataclass(frozen=True)
class PublishedTable:
    """A table as it is published: alone, or for all its partitions."""

    oid: int
    schema: str
    name: str
    is_partitioned: bool
    has_key: bool
    has_identity: bool
    # Its key has a generated column that is not sent.
    has_unsent_key: bool = False
    # With REPLICA IDENTITY FULL, its updates and deletes would fail once they are published.
    is_full_refused: bool = False
    # The table and everything below it; and of these the ones without an identity.
    tree: tuple[int, ...] = field(default=(), compare=False)
    bare: tuple[int, ...] = field(default=(), compare=False)
    # What distinguishes the attachment of each one to the table above from an earlier or later one.
    links: dict[int, str] = field(default_factory=dict, compare=False)
    # Of the partitions, the table above each one, and those that were tables of their own before.
    parents: dict[int, int | None] = field(default_factory=dict, compare=False)
    attached: frozenset[int] = field(default=frozenset(), compare=False)
    # The names of the whole tree, quoted; and the partitions that hold rows and can be published.
    labels: dict[int, str] = field(default_factory=dict, compare=False)
    leaves: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def label(self) -> str:
        return qualified(self.schema, self.name)

    @property
    def is_by_leaves(self) -> bool:
        """Whether its leaves are published in its place. A later partition has an identity of its
        own only by the root's primary key: any other identity is not inherited."""
        return self.is_partitioned and not self.has_key

    def path(self, oid: int) -> set[int]:
        """A partition and everything above it, this table included."""
        found: set[int] = set()
        one: int | None = oid
        while one is not None and one not in found:
            found.add(one)
            one = self.parents.get(one) if one != self.oid else None
        return found

    def attached_above(self, oid: int) -> set[int]:
        """What was attached of a partition's path to this table, itself included."""
        return self.path(oid) & self.attached

    def warning(self) -> str | None:
        """What a person should know before following this table."""
        if not self.has_identity:
            return (
                f"{self.label} {self._lack()}: its updates and deletes can't be followed, only "
                f"inserts and TRUNCATE; to follow them, {self._remedy()}; a running stream "
                "then copies the table again"
            )
        if self.is_by_leaves:
            return (
                f"{self.label} has no primary key: set REPLICA IDENTITY FULL on every partition "
                "that is added later, before it has rows; as long as one lacks it, updates and "
                "deletes of the whole table are not followed, and a running stream then copies "
                "the table again"
            )
        return None

    def _lack(self) -> str:
        what = "has no primary key and no other replica identity"
        if self.has_unsent_key:
            what = "has a generated column in its key, which is not sent"
        return f"or a partition of it {what}" if self.is_partitioned else what

    def _remedy(self) -> str:
        if self.is_full_refused:
            return (
                "add a primary key and set REPLICA IDENTITY DEFAULT (a table with a virtual "
                "generated column can't be published with REPLICA IDENTITY FULL)"
            )
        full = f"ALTER TABLE {self.label} REPLICA IDENTITY FULL"
        if self.is_partitioned:
            return f"for it and each partition: {full}"
        return full


def read_published_tables(
    connection: Connection,
    oids: Collection[int] | None = None,
    *,
    plugin: str = "pgoutput",
    sends_generated: bool = True,
) -> list[PublishedTable]:
    """The tables that can be followed; with `oids`, those among them, or with a partition
    among them. `sends_generated`: the publications send stored generated columns, if the server
    knows how to."""
    unsent, refused = _unusable(connection.info.server_version, plugin, sends_generated)
    with translated("reading the source's tables"):
        rows = connection.execute(_TABLES, {"unsent": unsent, "refused": refused}).fetchall()
    tables = [_published_table(*row) for row in rows]
    wanted = None if oids is None else set(oids)
    return [t for t in tables if wanted is None or not wanted.isdisjoint(t.tree)]


def _published_table(*row: Any) -> PublishedTable:
    *facts, tree, bare, links, parents, attached, schemas, names, leaves = row
    table = PublishedTable(*facts)
    return replace(
        table,
        tree=tuple(tree),
        bare=tuple(bare or ()),
        links={oid: link for oid, link in zip(tree, links, strict=True) if link},
        parents=dict(zip(tree, parents, strict=True)),
        attached=frozenset(attached or ()) - {table.oid},
        labels=dict(zip(tree, map(qualified, schemas, names), strict=True)),
        leaves=frozenset(leaves or ()),
    )


def _unusable(version: int, plugin: str, sends_generated: bool) -> tuple[list[str], list[str]]:
    """The kinds of generated columns, as in pg_attribute.attgenerated, that a key may not have, and
    that a table with REPLICA IDENTITY FULL may not have."""
    if plugin != "pgoutput":
        return [], []  # they send whatever is stored
    if version < 180000:
        return ["s", "v"], []
    kinds = ["v"] if sends_generated else ["s", "v"]
    return kinds, kinds
