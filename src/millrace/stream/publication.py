"""What the source publishes: two publications, made so that they can't break its own statements.

Invariant: a table whose rows the source could not name (no replica identity) is in a publication of
inserts and truncates only. In one that publishes updates as well, the source's own UPDATE and
DELETE on it would fail.

Partitions are published under their own names: by way of their root, the server would not tell of a
TRUNCATE of one of them. `stream.partition` gives their changes the name of the root.

Facts: PostgreSQL documentation, "CREATE PUBLICATION"; relcache.c, RelationGetIndexList() (which
index is the identity); execReplication.c, CheckCmdReplicaIdentity() (of a partition, its own
identity counts, whichever table is published).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.errors import PreflightError
from millrace.postgres.connect import translated
from millrace.postgres.quote import ident, literal, qualified
from millrace.postgres.schemas import PUBLICATION_COMMENT as COMMENT
from millrace.postgres.schemas import USER_SCHEMA, USER_TABLE

Connection = psycopg.Connection[tuple[Any, ...]]

# PostgreSQL's names end after 63 bytes.
_NAME_BYTES = 63
_SUFFIX = "_insert_only"
# A table that has no parent stands for all below, also for what is attached later.
# `has_identity` is that of the table and of everything below it.
_TABLES = f"""
WITH identity AS (
    SELECT c.oid, c.relreplident = 'f' OR EXISTS (
             SELECT FROM pg_index i
              WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate AND
                    CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                        WHEN 'i' THEN i.indisreplident END) AS has_identity,
           EXISTS (SELECT FROM pg_index i
                    WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate) AS has_key
      FROM pg_class c WHERE c.relkind IN ('r', 'p')
)
SELECT c.oid::int8, n.nspname, c.relname, c.relkind,
       identity.has_identity AND NOT EXISTS (
         SELECT FROM pg_partition_tree(c.oid) tree JOIN identity leaf ON leaf.oid = tree.relid
          WHERE NOT leaf.has_identity), identity.has_key,
       array(SELECT tree.relid::oid::int8 FROM pg_partition_tree(c.oid) tree)
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN identity ON identity.oid = c.oid
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
    has_identity: bool
    has_key: bool

    @property
    def label(self) -> str:
        return qualified(self.schema, self.name)

    def warning(self) -> str | None:
        """What a person should know before following this table."""
        full = f"ALTER TABLE {self.label} REPLICA IDENTITY FULL"
        if not self.has_identity and self.is_partitioned:
            return (
                f"{self.label} or a partition of it has no primary key and no other replica "
                "identity: its updates and deletes can't be followed, only inserts and TRUNCATE; "
                f"add a primary key, or for it and each partition: {full}"
            )
        if not self.has_identity:
            return (
                f"{self.label} has no primary key and no other replica identity: its updates and "
                f"deletes can't be followed, only inserts and TRUNCATE; to follow them: {full}"
            )
        if self.is_partitioned and not self.has_key:
            return (
                f"{self.label} has no primary key: a partition that is added later must get "
                "REPLICA IDENTITY FULL at once, or updates and deletes in it fail on the source"
            )
        return None


def publication_names(slot: str) -> tuple[str, str]:
    """(of tables with an identity, of tables without) for a slot."""
    raw = slot.encode()
    short = raw[: _NAME_BYTES - len(_SUFFIX)].decode(errors="ignore")
    return raw[:_NAME_BYTES].decode(errors="ignore"), short + _SUFFIX


def read_published_tables(
    connection: Connection, oids: Collection[int] | None = None
) -> list[PublishedTable]:
    """The tables that can be followed; with `oids`, those among them, or with a partition
    among them."""
    with translated("reading the source's tables"):
        rows = connection.execute(_TABLES).fetchall()
    wanted = None if oids is None else set(oids)
    return [
        PublishedTable(oid, schema, name, kind == "p", identity, key)
        for oid, schema, name, kind, identity, key, tree in rows
        if wanted is None or oid in wanted or wanted.intersection(tree)
    ]


def create_publications(
    connection: Connection, slot: str, oids: Collection[int] | None = None
) -> list[str]:
    """Make both publications; warnings about tables that can't be followed fully.

    Must come before the slot: a slot can't use a publication that is younger. Those that are
    there already are left alone when the slot is there too, and made again otherwise.
    """
    tables = read_published_tables(connection, oids)
    with_identity, insert_only = publication_names(slot)
    with translated(f"creating the publications of slot {slot}"), connection.transaction():
        taken = _read_publications(connection, (with_identity, insert_only))
        row = connection.execute(
            "SELECT FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        ).fetchone()
        if not (row is not None and len(taken) == 2):
            for name, comment in taken.items():
                _drop(connection, name, comment, slot)
            _create(connection, slot, with_identity, [t for t in tables if t.has_identity], "all")
            _create(
                connection, slot, insert_only, [t for t in tables if not t.has_identity], "insert"
            )
    return [text for table in tables if (text := table.warning())]


def drop_publications(connection: Connection, slot: str) -> list[str]:
    """Drop those of a slot; their names."""
    with translated(f"dropping the publications of slot {slot}"):
        taken = _read_publications(connection, publication_names(slot))
        for name in (ours := [n for n, comment in taken.items() if comment.startswith(COMMENT)]):
            connection.execute(f"DROP PUBLICATION {ident(name)}")
    return ours


def read_own_publications(connection: Connection) -> list[tuple[str, str]]:
    """(publication, its slot) of all that we made in this database."""
    with translated("reading publications"):
        return connection.execute(
            "SELECT p.pubname, substr(d.description, length(%(comment)s) + 1)"
            "  FROM pg_publication p JOIN pg_description d ON d.objoid = p.oid"
            "   AND d.classoid = 'pg_publication'::regclass"
            " WHERE starts_with(d.description, %(comment)s) ORDER BY 1",
            {"comment": COMMENT},
        ).fetchall()


def _read_publications(connection: Connection, names: Collection[str]) -> dict[str, str]:
    rows = connection.execute(
        "SELECT pubname, coalesce(obj_description(oid, 'pg_publication'), '')"
        " FROM pg_publication WHERE pubname = ANY(%s)",
        (list(names),),
    )
    return {name: comment for name, comment in rows}


def _drop(connection: Connection, name: str, comment: str, slot: str) -> None:
    if not comment.startswith(COMMENT):
        raise PreflightError(
            f"the source has a publication {name} that millrace did not make",
            hint="choose another --slot-name, or drop it: DROP PUBLICATION " + ident(name),
            slot=slot,
        )
    connection.execute(f"DROP PUBLICATION {ident(name)}")


def _create(
    connection: Connection, slot: str, name: str, tables: list[PublishedTable], what: str
) -> None:
    publish = "insert, update, delete, truncate" if what == "all" else "insert, truncate"
    listed = ", ".join(f"ONLY {table.label}" for table in tables)
    for_tables = f" FOR TABLE {listed}" if listed else ""
    connection.execute(
        f"CREATE PUBLICATION {ident(name)}{for_tables}"
        f" WITH (publish = '{publish}', publish_via_partition_root = false)"
    )
    connection.execute(f"COMMENT ON PUBLICATION {ident(name)} IS {literal(COMMENT + slot)}")
