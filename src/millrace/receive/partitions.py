"""The source's partitions, and the roots under whose names their changes are applied.

Invariant: a change of a partition goes by the name of the topmost root, whatever became of the
partition since, as long as it was ever known here; what was recorded is not forgotten when the
source drops or detaches it.

Output plugins name the partition and not the root, because only then the server sends a TRUNCATE
of one partition. What belongs to which root is read from the catalog, which is that of now, while
the changes may be old. So everything is read when a connection begins, and again when a relation
turns up that is not known, or is described again. A partition that a publication lists, and that
is written down as a table of its own, was one when the stream began: it stays one, because nothing
tells when its attachment came in the stream. Without a record, one that was attached is taken for
such a table.

Facts: pgoutput.c, pgoutput_truncate() and get_rel_sync_entry(); ruleutils.c,
pg_get_partition_constraintdef(), which waits for the lock of its relation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from millrace.postgres.catalog.relations import FIRST_UNPINNED_OID, NEVER_NULL
from millrace.postgres.catalog.schemas import (
    DDL_TABLE,
    IS_BORN_PARTITION,
    USER_SCHEMA,
    USER_TABLE,
)
from millrace.postgres.pgoutput.messages import Partition, RelationVersion
from millrace.postgres.wire.connect import server_encoding, translated
from millrace.workdir.followed_table import FollowedTables

Connection = psycopg.Connection[tuple[Any, ...]]

# Each one is a lock until the statement ends.
_CONDITIONS_AT_ONCE: Final = 500
# What is read ahead is not waited for. What is needed is; the source cuts off a receiver that says
# nothing for `wal_sender_timeout`, one minute by default.
_NO_WAIT: Final = "50ms"
_WAIT: Final = "10s"

# As for a clone, hashes of built-in types depend on the bytes alone.
_PARTITIONS = f"""
SELECT c.oid::int8, n.nspname, c.relname, root.oid::int8, rn.nspname, root.relname,
       (SELECT coalesce(json_agg(key.names), '[]') FROM (
          SELECT (SELECT json_agg(a.attname) FROM pg_attribute a
                   WHERE a.attrelid = root.oid AND a.attnum = ANY(k.numbers)) AS names
            FROM pg_index i, LATERAL (SELECT i.indkey[0:i.indnkeyatts - 1]) AS k (numbers)
           WHERE i.indrelid = root.oid AND i.indisunique AND i.indisvalid AND i.indimmediate
             AND i.indpred IS NULL AND i.indexprs IS NULL
             AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = root.oid
                                AND a.attnum = ANY(k.numbers) AND NOT {NEVER_NULL})
           ORDER BY i.indexrelid) AS key),
       EXISTS (SELECT FROM pg_partition_ancestors(c.oid) above
                 JOIN pg_partitioned_table p ON p.partrelid = above.relid
                WHERE p.partstrat = 'h' AND (%(is_recoded)s OR 0 = ANY(p.partattrs) OR EXISTS (
                        SELECT FROM pg_attribute a
                         WHERE a.attrelid = p.partrelid AND a.attnum = ANY(p.partattrs)
                           AND a.atttypid >= %(unpinned)s))),
       array(SELECT path.oid::int8
               FROM pg_partition_ancestors(c.oid) above JOIN pg_class path ON path.oid = above.relid
              WHERE path.relispartition AND NOT {IS_BORN_PARTITION.replace("c.oid", "path.oid")})
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class root ON root.oid = pg_partition_root(c.oid)
  JOIN pg_namespace rn ON rn.oid = root.relnamespace
 WHERE c.relispartition AND c.relkind = 'r'
   AND (%(oids)s::int8[] IS NULL OR c.oid = ANY(%(oids)s::int8[]::oid[]))
"""
# What is not ours to follow, of what a publication FOR ALL TABLES has.
_OTHERS = f"""
SELECT c.oid::int8 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.oid >= 16384
   AND NOT ({USER_SCHEMA} AND {USER_TABLE})
   AND (%(oids)s::int8[] IS NULL OR c.oid = ANY(%(oids)s::int8[]::oid[]))
"""
_CAPTURES = """
SELECT c.oid::int8 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s
"""
_PUBLISHED = """
SELECT r.prrelid::int8 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
 WHERE p.pubname = ANY(%s)
"""
_CONDITIONS = """
SELECT c.oid::int8, coalesce(pg_get_partition_constraintdef(c.oid), '')
  FROM pg_class c WHERE c.oid = ANY(%s::int8[]::oid[]) AND c.relispartition
"""


@dataclass(frozen=True)
class KnownPartition:
    """A partition, and the name that it goes by."""

    root_schema: str
    root_name: str
    partition: Partition
    # It, and tables above it, that were tables of their own before they were attached.
    attached: frozenset[int] = frozenset()


class Partitions:
    """All that were ever known; outlives a connection.

    `encoding` is PostgreSQL's name of the target's, `followed` the record of the stream.
    """

    def __init__(
        self, encoding: str, followed: FollowedTables | None = None, *, ddl: bool = False
    ) -> None:
        """`ddl`: the target has the partitions that the source has at the same place, so each goes
        by its own name; and captured DDL is followed like a table."""
        self._encoding = encoding
        self._ddl = ddl
        self._followed = followed or FollowedTables()
        self._known: dict[int, KnownPartition] = {}
        # Tables, and partitions, that are published by themselves.
        self._listed: set[int] = set()
        # Tables that are ours, or an extension's.
        self._others: set[int] = set()
        self._conditions: dict[int, str] = {}
        # The table of captured DDL.
        self._captures: set[int] = set()

    def read(
        self,
        catalog: Connection,
        publications: Sequence[str] = (),
        oids: Collection[int] | None = None,
    ) -> None:
        """As they are now; with `oids`, those."""
        asked = None if oids is None else list(oids)
        with translated("reading the source's partitions"):
            listed = {oid for (oid,) in catalog.execute(_PUBLISHED, (list(publications),))}
            found = catalog.execute(
                _PARTITIONS,
                {
                    "oids": asked,
                    "is_recoded": server_encoding(catalog) != self._encoding,
                    "unpinned": FIRST_UNPINNED_OID,
                },
            ).fetchall()
            others = {oid for (oid,) in catalog.execute(_OTHERS, {"oids": asked})}
            captures = {oid for (oid,) in catalog.execute(_CAPTURES, DDL_TABLE)}
        # Of what was not asked about, nobody knows whether it is a partition.
        self._listed = listed if asked is None else listed & (self._listed | set(asked))
        self._captures |= captures
        self._others = others if asked is None else self._others - set(asked) | others
        for oid, schema, name, root_oid, root_schema, root_name, keys, is_rehashed, own in found:
            partition = Partition(
                schema, name, root_oid, tuple(map(frozenset, keys)), is_rehashed=is_rehashed
            )
            self._known[oid] = KnownPartition(root_schema, root_name, partition, frozenset(own))
        self._read_ahead(catalog, [row[0] for row in found if row[0] not in self._conditions])

    def is_listed(self, oid: int) -> bool:
        """Whether a publication names it."""
        return oid in self._listed

    def is_own(self, oid: int) -> bool:
        """Whether it is published as a table of its own."""
        if oid not in self._listed:
            return False
        is_own, known = self._followed.is_own(oid), self._known.get(oid)
        if is_own is None:
            return known is None or oid in known.attached
        return is_own

    def is_foreign(self, oid: int) -> bool:
        """Whether it is a table of ours, or of an extension: nobody's to follow."""
        return oid in self._others and not (self._ddl and oid in self._captures)

    def find(self, oid: int) -> KnownPartition | None:
        """None for a table of its own, or one that nothing is known of."""
        if self._ddl:
            return None
        return None if self.is_own(oid) else self._known.get(oid)

    def read_conditions(self, catalog: Connection, oids: Iterable[int]) -> None:
        """Which rows each of them holds now; for `with_condition`."""
        with translated("reading the bounds of the source's partitions"):
            catalog.execute(f"SET lock_timeout = '{_WAIT}'")
            self._conditions |= dict(catalog.execute(_CONDITIONS, (list(oids),)).fetchall())

    def with_condition(self, relation: RelationVersion) -> RelationVersion:
        """The relation of a partition, with the rows it holds as far as they are known."""
        if relation.partition is None:
            return relation
        condition = self._conditions.get(relation.oid)
        return replace(relation, partition=replace(relation.partition, condition=condition))

    def _read_ahead(self, catalog: Connection, oids: list[int]) -> None:
        """The rows of partitions that may be gone when it matters."""
        with translated("reading the bounds of the source's partitions"):
            catalog.execute(f"SET lock_timeout = '{_NO_WAIT}'")
            for first in range(0, len(oids), _CONDITIONS_AT_ONCE):
                some = oids[first : first + _CONDITIONS_AT_ONCE]
                try:
                    found = catalog.execute(_CONDITIONS, (some,)).fetchall()
                except psycopg.errors.LockNotAvailable:
                    continue  # asked for again when needed
                self._conditions |= dict(found)
            catalog.execute("SET lock_timeout = 0")


def as_partition(relation: RelationVersion, known: KnownPartition) -> RelationVersion:
    """The partition's own description under the name of its root."""
    return replace(
        relation,
        schema=known.root_schema,
        name=known.root_name,
        partition=replace(known.partition, schema=relation.schema, name=relation.name),
    )
