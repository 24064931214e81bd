"""Extensions of sources on the target: one for all, in a schema that is no source's.

Invariant: an extension that the base copy of a source needs is on the target before, in a schema
that `consolidate remove` never drops: others' columns may have its types. One that the target has
stays where it is.

Facts: pg_dump prints CREATE EXTENSION IF NOT EXISTS; while the source's text runs, the extension is
moved to where the source has it (`postgres.schema_rename`).
"""

from __future__ import annotations

import logging

from millrace.filter.apply import read_left_out_extensions
from millrace.postgres.quote import ident
from millrace.postgres.schema_rename import ALONE
from millrace.postgres.wire.connect import connect, translated
from millrace.route import Route

log = logging.getLogger(__name__)

HOME = "public"
# What can't be moved, or is not offered, is refused by the checks of a clone.
_LACKING = """
SELECT a.name FROM pg_available_extensions a
 WHERE a.name = ANY(%s) AND a.installed_version IS NULL
   AND EXISTS (SELECT FROM pg_namespace WHERE nspname = %s) ORDER BY 1
"""
_OF_SOURCE = """
SELECT e.extname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
 WHERE n.nspname = ANY(%s) AND e.extrelocatable
"""


def create_extensions(route: Route) -> list[str]:
    """Create what the target lacks of those in schemas that have other names there."""
    with (
        connect(route.source, "consolidate") as source,
        translated("reading the source's extensions"),
    ):
        rows = source.execute(_OF_SOURCE, (list(route.naming.renamed_schemas),)).fetchall()
        names = {name for (name,) in rows} - read_left_out_extensions(source, route.filters)
    if not names:
        return []
    with (
        connect(route.target, "consolidate") as target,
        translated("creating extensions"),
        target.transaction(),
    ):
        target.execute(ALONE)
        lacking = [name for (name,) in target.execute(_LACKING, (sorted(names), HOME))]
        for name in lacking:
            target.execute(
                f"CREATE EXTENSION IF NOT EXISTS {ident(name)} SCHEMA {HOME} CASCADE".encode()
            )
    for name in lacking:
        log.info("extension %s is created in schema %s of the target", name, HOME)
    return lacking
