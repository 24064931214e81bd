"""The schema's way to the target: which entry of the dump is restored when.

Invariant: each entry of the archive is restored exactly once: before the data,
by our own index and foreign key builders, or after the data. Of a schema that the
target has already, the owner is restored.

Before: pre-data, and extended statistics so that ANALYZE fills them. Built by us:
indexes and key constraints of tables with rows, and foreign keys. Between indexes
and foreign keys ("attach"): what makes indexes of partitioned tables whole, since
foreign keys may rest on them. After: all the rest. At the very end ("refresh"): the
rows of materialized views, which are made of everything else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from millrace.postgres.program.dump import Entry
from millrace.relation import SourceCatalog

PG_CLASS_OID = 1259
PG_CONSTRAINT_OID = 2606
PG_NAMESPACE_OID = 2615

# Entries restored in one transaction. Each may lock some relations, and the locks must fit
# into a server with default settings (6,400 slots).
ENTRIES_IN_ONE_TRANSACTION = 500
# pg_restore itself goes over a list three times: for these only after everything else.
_PASSES = {"ACL": 1, "DEFAULT ACL": 1, "EVENT TRIGGER": 2}


@dataclass(frozen=True)
class RestoreLists:
    """The archive's entries, sorted into steps."""

    before: list[Entry]
    attach: list[Entry]
    after: list[Entry]
    refresh: list[Entry]
    built_by_us: list[Entry]
    # Schemas that are there.
    existing: list[Entry]


@dataclass(frozen=True)
class SchemaSettings:
    """What of the schema is left out."""

    no_owner: bool = False
    no_acl: bool = False
    no_comments: bool = False
    no_tablespaces: bool = False
    skip_extensions: bool = False
    skip_extension_comments: bool = False
    skip_collations: bool = False

    def options(self) -> list[str]:
        """The flags that were given: they decide what the restored lists hold."""
        return [
            "--" + name.replace("_", "-").replace("extension-comments", "ext-comments")
            for name, given in vars(self).items()
            if given
        ]

    def restore_options(self) -> list[str]:
        """The pg_restore options that say the same."""
        flags = {
            "--no-owner": self.no_owner,
            "--no-acl": self.no_acl,
            "--no-comments": self.no_comments,
            "--no-tablespaces": self.no_tablespaces,
        }
        return [flag for flag, wanted in flags.items() if wanted]


def plan_restore(
    pre_data: list[Entry],
    post_data: list[Entry],
    catalog: SourceCatalog,
    settings: SchemaSettings,
    *,
    existing_schema_oids: Collection[int] = (),
) -> RestoreLists:
    """Sort the archive's entries into the steps they are restored in."""
    ours = {(PG_CLASS_OID, index.oid) for index in catalog.indexes}
    ours |= {(PG_CONSTRAINT_OID, i.constraint_oid) for i in catalog.indexes if i.constraint_oid}
    ours |= {(PG_CONSTRAINT_OID, key.oid) for key in catalog.foreign_keys}
    lists = RestoreLists([], [], [], [], [], [])
    for entry in pre_data:
        if _left_out(entry, settings):
            continue
        if entry.catalog_oid == PG_NAMESPACE_OID and entry.object_oid in existing_schema_oids:
            lists.existing.append(entry)
        else:
            lists.before.append(entry)
    own = _own(catalog, post_data)
    for entry in post_data:
        if _left_out(entry, settings) or entry.line in own:
            continue
        if entry.description in ("INDEX", "CONSTRAINT", "FK CONSTRAINT") and (
            (entry.catalog_oid, entry.object_oid) in ours
        ):
            lists.built_by_us.append(entry)
        elif entry.description == "STATISTICS":
            lists.before.append(entry)
        elif entry.description in ("INDEX", "CONSTRAINT", "INDEX ATTACH") and (
            # A materialized view that rests on a key is itself among the rest.
            entry.object_oid not in catalog.view_indexes
        ):
            lists.attach.append(entry)
        elif entry.description == "MATERIALIZED VIEW DATA":
            lists.refresh.append(entry)
        else:
            lists.after.append(entry)
    return lists


def chunks(entries: list[Entry]) -> list[list[Entry]]:
    """The entries in the order of restoring, cut into transactions."""
    ordered = sorted(entries, key=_pass)
    size = ENTRIES_IN_ONE_TRANSACTION
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def _pass(entry: Entry) -> int:
    if entry.description == "COMMENT" and entry.rest.startswith("- EVENT TRIGGER "):
        return _PASSES["EVENT TRIGGER"]
    return _PASSES.get(entry.description, 0)


def _own(catalog: SourceCatalog, entries: list[Entry]) -> set[str]:
    """The lines of entries that belong to a stream. A comment has no OID; the names of ours have
    no spaces."""
    found = catalog.own_publications | catalog.own_event_triggers
    own = {(class_oid, oid) for class_oid, oid, _ in found}
    comments = {f"- PUBLICATION {name}" for _, _, name in catalog.own_publications}
    return {
        entry.line
        for entry in entries
        if (entry.catalog_oid, entry.object_oid) in own
        or (entry.description == "COMMENT" and " ".join(entry.rest.split(" ")[:3]) in comments)
    }


def _left_out(entry: Entry, settings: SchemaSettings) -> bool:
    is_extension_comment = entry.description == "COMMENT" and entry.rest.startswith("- EXTENSION ")
    if entry.description == "EXTENSION" or is_extension_comment:
        return settings.skip_extensions or (
            is_extension_comment and settings.skip_extension_comments
        )
    return entry.description == "COLLATION" and settings.skip_collations
