"""Reading the source under the snapshot: catalog, locks, samples.

Invariant: every table that will be copied is locked against DROP, TRUNCATE and
rewriting before it is trusted; a table rewritten between snapshot and lock is reported.
"""

from __future__ import annotations

from typing import Any

import psycopg

from millrace.clone import large_object
from millrace.clone.settings import CloneSettings
from millrace.filter.apply import filter_catalog
from millrace.filter.decide import PG_CLASS_OID, Decision
from millrace.filter.rules import FilterRules
from millrace.name import IDENTITY, Naming
from millrace.postgres.catalog import relations as catalog
from millrace.postgres.wire.connect import server_encoding, translated
from millrace.relation import SourceCatalog

Connection = psycopg.Connection[tuple[Any, ...]]


def read_source(
    connection: Connection,
    settings: CloneSettings,
    decision: Decision,
    *,
    target_encoding: str,
) -> SourceCatalog:
    """All that the plan is made from, less what the filters leave out; locks the tables until
    the transaction ends."""
    return read_catalog(
        connection,
        decision,
        settings.filters,
        settings.naming,
        same_encoding=server_encoding(connection) == target_encoding,
        with_extensions=not settings.schema.skip_extensions,
        with_large_objects=not settings.skip_large_objects,
        with_locks=True,
    )


def read_catalog(
    connection: Connection,
    decision: Decision,
    rules: FilterRules,
    naming: Naming = IDENTITY,
    *,
    same_encoding: bool = True,
    with_extensions: bool = True,
    with_large_objects: bool = True,
    with_locks: bool = False,
) -> SourceCatalog:
    """The catalog less what the filters leave out."""
    # Under another name, the server that adds a key has to find the referenced table on its own.
    foreign_keys = (
        catalog.read_foreign_keys if naming.is_identity else catalog.read_relative_foreign_keys
    )
    with translated("reading the source's catalog"):
        tables = catalog.read_tables(connection, same_encoding=same_encoding)
        tables = [
            table
            for table in tables
            if (PG_CLASS_OID, table.oid) not in decision.excluded
            and (with_extensions or table.extension_condition is None)
        ]
        if with_locks:
            catalog.lock_tables(connection, tables)
        copied = {table.oid for table in tables}
        ranges, large_object_bytes = (
            catalog.read_large_object_ranges(
                connection,
                bytes_per_range=large_object.BYTES_PER_RANGE,
                objects_per_range=large_object.OBJECTS_PER_RANGE,
            )
            if with_large_objects
            else ([], 0)
        )
        found = SourceCatalog(
            tables=tuple(tables),
            # What is not copied by us is indexed by the restored schema.
            indexes=tuple(i for i in catalog.read_indexes(connection) if i.table_oid in copied),
            foreign_keys=tuple(foreign_keys(connection)),
            sequences=tuple(catalog.read_sequences(connection, with_extensions=with_extensions)),
            extensions=tuple(catalog.read_extensions(connection)),
            partitioned_tables=tuple(catalog.read_relations_of_kind(connection, "p")),
            materialized_views=tuple(catalog.read_relations_of_kind(connection, "m")),
            view_indexes=catalog.read_view_indexes(connection),
            own_publications=catalog.read_own_publications(connection),
            own_event_triggers=catalog.read_own_event_triggers(connection),
            schemas=catalog.read_schemas(connection),
            schema_owners=catalog.read_schema_owners(connection),
            families=read_families(connection),
            large_object_ranges=tuple(ranges),
            large_object_bytes=large_object_bytes,
            rewritten=tuple(catalog.read_rewritten(connection, tables)),
        )
    return filter_catalog(found, decision, rules)


def read_families(connection: Connection) -> dict[int, int]:
    """Each partition's root: locks on one of them reach the others."""
    return {
        oid: root
        for oid, root in connection.execute(
            "SELECT oid::int8, pg_partition_root(oid)::oid::int8 FROM pg_class"
            " WHERE relispartition AND relkind IN ('r', 'p', 'f')"
        )
    }
