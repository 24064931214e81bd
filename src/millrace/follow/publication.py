"""What the source publishes: two publications, made so that they can't break its own statements.

Invariant: only tables whose rows the source can name, in values that it sends, are in the
publication of updates and deletes. In it, the source's own UPDATE and DELETE on any other table
would fail, or would name half a key.

    SLOT               inserts, updates, deletes and TRUNCATE, of tables with a usable identity
    SLOT_insert_only   inserts and TRUNCATE: FOR ALL TABLES, so that rows of tables that come later
                       are sent from the first one on; or of the rest, where the role may not make
                       such a publication, or filters leave something out

A table in both gets the union. Partitions are published under their own names: by way of their
root, the server would not send a TRUNCATE of one of them. `receive.partitions` gives their
changes the name of the root.

A partitioned table is in the first one for partitions that come later, which its primary key
gives an identity. One without a primary key is in the second, and the first has its leaves:
statements on a partition that comes later work, whatever identity that has. A new leaf gets into
the first by `follow.new_leaf`.

Facts: PostgreSQL documentation, "CREATE PUBLICATION"; relcache.c, RelationGetIndexList() (which
index is the identity); execReplication.c, CheckCmdReplicaIdentity() (of a partition, its own
identity counts, whichever table is published); publicationcmds.c, pub_contains_invalid_column()
(from 18 on, a generated column in the identity must be published, and a virtual one can't be);
pgoutput.c, check_and_init_gencol() (publications of one slot must agree about generated columns).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from millrace.errors import PreflightError
from millrace.follow.published_table import PublishedTable, read_published_tables
from millrace.postgres.catalog.schemas import PUBLICATION_COMMENT as COMMENT
from millrace.postgres.catalog.schemas import publication_names
from millrace.postgres.quote import ident, literal
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

# ADD TABLE waits for VACUUM, CREATE INDEX and the like; those who follow try again later.
_LOCK_TIMEOUT = "2s"


@dataclass(frozen=True)
class Publications:
    """Both publications of a slot, as the source has them."""

    with_identity: str
    insert_only: str
    # OIDs of the tables that each one lists.
    whole: frozenset[int]
    inserts: frozenset[int]
    # The second one lists none, and has all.
    is_for_all: bool
    # Stored generated columns are sent.
    sends_generated: bool

    def unsent_leaves(self, table: PublishedTable) -> list[int]:
        """Partitions whose updates and deletes are not published."""
        return [oid for oid in sorted(table.leaves) if self.whole.isdisjoint(table.path(oid))]

    def sends_updates(self, table: PublishedTable) -> bool:
        """Whether updates and deletes are published, of a partitioned table those of all leaves."""
        if table.oid in self.whole:
            return True
        # A root with a key and without partitions is there for those that come.
        is_split = table.is_by_leaves or (table.is_partitioned and bool(table.leaves))
        return is_split and not self.unsent_leaves(table)

    def lacks(self, table: PublishedTable) -> bool:
        """Whether less of the table is published than could be."""
        if table.has_identity and not self.sends_updates(table):
            return True
        is_listed = table.oid in self.inserts or (table.has_identity and table.oid in self.whole)
        return not self.is_for_all and not is_listed


def create_publications(
    connection: Connection, slot: str, oids: Collection[int] | None = None
) -> list[str]:
    """Make both publications; warnings about tables that can't be followed fully.

    Must come before the slot: a slot can't use a publication that is younger. Those that are
    there already are left alone when the slot is there too, and made again otherwise. `oids` are
    the tables that filters keep, None for all.
    """
    tables = read_published_tables(connection, oids)
    with_identity, insert_only = publication_names(slot)
    with _creating(connection, slot), connection.transaction():
        taken = _read_comments(connection, (with_identity, insert_only))
        row = connection.execute(
            "SELECT FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        ).fetchone()
        if not (row is not None and len(taken) == 2):
            # What was done to tables for this slot is to be undone some day.
            note = _note(taken.get(insert_only, ""))
            for name, comment in taken.items():
                _drop(connection, name, comment, slot)
            whole = [label for t in tables if t.has_identity for label in _whole_labels(t)]
            _create(connection, slot, with_identity, whole, "all")
            rest = [t.label for t in tables if not t.has_identity or t.is_by_leaves]
            if oids is not None or not _create_for_all(connection, slot, insert_only):
                _create(connection, slot, insert_only, rest, "insert")
            if note:
                _comment(connection, insert_only, COMMENT + slot + note)
    return [text for table in tables if (text := table.warning())]


def read_publications(connection: Connection, slot: str) -> Publications:
    """Those of a slot, as the connection's snapshot sees them."""
    with_identity, insert_only = publication_names(slot)
    generated = "p.pubgencols = 's'" if connection.info.server_version >= 180000 else "false"
    with translated("reading publications"):
        rows = connection.execute(
            f"SELECT p.pubname, p.puballtables, {generated}, array(SELECT r.prrelid::int8"
            " FROM pg_publication_rel r WHERE r.prpubid = p.oid) FROM pg_publication p"
            " WHERE p.pubname = ANY(%s)",
            ([with_identity, insert_only],),
        ).fetchall()
    found = {name: (is_for_all, sends, oids) for name, is_for_all, sends, oids in rows}
    _, sends, whole = found.get(with_identity, (False, False, ()))
    is_for_all, _, inserts = found.get(insert_only, (False, False, ()))
    return Publications(
        with_identity, insert_only, frozenset(whole), frozenset(inserts), is_for_all, sends
    )


def find_unpublished(
    connection: Connection, slot: str, oids: Collection[int] | None = None
) -> list[PublishedTable]:
    """Tables of which less is published than could be: in the slot's own snapshot, those that were
    committed while the slot was made."""
    publications = read_publications(connection, slot)
    sends = publications.sends_generated
    tables = read_published_tables(connection, oids, sends_generated=sends)
    return [table for table in tables if publications.lacks(table)]


def demote(connection: Connection, publications: Publications, table: PublishedTable) -> None:
    """Stop sending updates and deletes of a table that has lost its identity: as long as they
    are published, they fail on the source. Inserts are still sent."""
    with translated("changing publications"), connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        withdraw(connection, publications, table)
        if not publications.is_for_all and table.oid not in publications.inserts:
            connection.execute(alter(publications.insert_only, "ADD", [table.label]))


def withdraw(connection: Connection, publications: Publications, table: PublishedTable) -> None:
    """Take a table, and everything below it, out of the publication of updates."""
    listed = [label for oid, label in table.labels.items() if oid in publications.whole]
    if not listed:
        return
    with translated("changing publications"), connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        connection.execute(alter(publications.with_identity, "DROP", listed))


def alter(publication: str, how: str, labels: Iterable[str]) -> str:
    """The statement that adds or drops tables, each without those below it."""
    return f"ALTER PUBLICATION {ident(publication)} {how} TABLE {_only(labels)}"


def create_note_holder(connection: Connection, slot: str) -> None:
    """A publication of nothing, for the sake of its comment: for plugins that need none."""
    name = publication_names(slot)[1]
    with translated(f"creating a publication for slot {slot}"), connection.transaction():
        if not _read_comments(connection, (name,)):
            _create(connection, slot, name, (), "insert")


def drop_publications(connection: Connection, slot: str) -> list[str]:
    """Drop those of a slot; their names. What was done to tables must be undone before."""
    with translated(f"dropping the publications of slot {slot}"):
        taken = _read_comments(connection, publication_names(slot))
        for name in (ours := [n for n, comment in taken.items() if comment.startswith(COMMENT)]):
            connection.execute(f"DROP PUBLICATION {ident(name)}")
    return ours


def read_own_publications(connection: Connection) -> list[tuple[str, str]]:
    """(publication, its slot) of all that we made in this database."""
    with translated("reading publications"):
        return connection.execute(
            "SELECT p.pubname,"
            " split_part(substr(d.description, length(%(comment)s) + 1), E'\\n', 1)"
            "  FROM pg_publication p JOIN pg_description d ON d.objoid = p.oid"
            "   AND d.classoid = 'pg_publication'::regclass"
            " WHERE starts_with(d.description, %(comment)s) ORDER BY 1",
            {"comment": COMMENT},
        ).fetchall()


def _read_comments(connection: Connection, names: Collection[str]) -> dict[str, str]:
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


@contextmanager
def _creating(connection: Connection, slot: str) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        role = connection.info.user
        raise PreflightError(
            f"{role} may not make the publications of slot {slot}: {error.diag.message_primary}",
            hint="it takes the owner of the tables, with the right to create in the database "
            f"(GRANT CREATE ON DATABASE {ident(connection.info.dbname)} TO {ident(role)}), or a "
            "superuser",
            slot=slot,
        ) from error
    except psycopg.Error:
        with translated(f"creating the publications of slot {slot}"):
            raise


def _create_for_all(connection: Connection, slot: str, name: str) -> bool:
    """False if the role may not."""
    try:
        with connection.transaction():
            _execute_create(connection, slot, name, " FOR ALL TABLES", "insert, truncate")
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def _create(connection: Connection, slot: str, name: str, labels: Iterable[str], what: str) -> None:
    publish = "insert, update, delete, truncate" if what == "all" else "insert, truncate"
    listed = _only(labels)
    _execute_create(connection, slot, name, f" FOR TABLE {listed}" if listed else "", publish)


def _whole_labels(table: PublishedTable) -> list[str]:
    """What is in the publication of updates for a table with an identity."""
    if table.is_by_leaves:
        return [table.labels[oid] for oid in sorted(table.leaves)]
    return [table.label]


def _only(labels: Iterable[str]) -> str:
    return ", ".join(f"ONLY {label}" for label in labels)


def _execute_create(
    connection: Connection, slot: str, name: str, for_tables: str, publish: str
) -> None:
    options = f"publish = '{publish}', publish_via_partition_root = false"
    if connection.info.server_version >= 180000:
        options += ", publish_generated_columns = stored"
    connection.execute(f"CREATE PUBLICATION {ident(name)}{for_tables} WITH ({options})")
    _comment(connection, name, COMMENT + slot)


def _comment(connection: Connection, name: str, comment: str) -> None:
    connection.execute(f"COMMENT ON PUBLICATION {ident(name)} IS {literal(comment)}")


def _note(comment: str) -> str:
    """What is behind the first line of a comment; see millrace.follow.replica_identity."""
    _, line_end, note = comment.partition("\n")
    return line_end + note
