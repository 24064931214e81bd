"""What is decided for a source before its copy begins, and kept from then on.

Invariant: a plan is made once, under the eyes of the source's catalog, and written down before
anything is copied. So what is followed, compared and copied again goes by the same names and leaves
out the same things, whatever the source has gained since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg

from millrace.consolidate.config import Indexes, SourceConfig, Views
from millrace.errors import ConfigError
from millrace.filter.rules import KINDS, FilterRules, NamePart, Rule
from millrace.name import Naming
from millrace.postgres.catalog.relations import read_schemas
from millrace.postgres.catalog.schemas import USER_SCHEMA
from millrace.postgres.wire.connect import translated

Connection = psycopg.Connection[tuple[Any, ...]]

_VIEWS: Final = f"""
SELECT CASE c.relkind WHEN 'm' THEN 'exclude-table' ELSE 'exclude-view' END, n.nspname, c.relname
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('v', 'm') AND {USER_SCHEMA}
   AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass
                   AND d.objid = c.oid AND d.deptype = 'e')
 ORDER BY 2, 3
"""
# Indexes that make nothing unique, belong to no constraint, and whose first columns are not those
# of a foreign key. A partition's index goes with that of its root.
_PLAIN_INDEXES: Final = f"""
SELECT 'exclude-index', n.nspname, c.relname
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class t ON t.oid = i.indrelid
 WHERE {USER_SCHEMA} AND t.relkind IN ('r', 'p', 'm') AND NOT i.indisunique
   AND NOT i.indisexclusion AND NOT c.relispartition AND NOT i.indisreplident
   AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid)
   AND NOT EXISTS (
       SELECT FROM pg_constraint k
        WHERE k.contype = 'f' AND k.conrelid = i.indrelid AND i.indpred IS NULL
          AND k.conkey @> (i.indkey::int2[])[0:cardinality(k.conkey) - 1]
          AND k.conkey <@ (i.indkey::int2[])[0:cardinality(k.conkey) - 1])
   AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass
                   AND d.objid IN (t.oid, c.oid) AND d.deptype = 'e')
 ORDER BY 2, 3
"""


@dataclass(frozen=True)
class SourcePlan:
    """The names of a source's schemas on the target, what is left out besides its filters, and
    the number of its positions."""

    naming: Naming
    rules: tuple[Rule, ...] = field(default=())
    # How many workers apply its changes: more than one divide its tables among them.
    workers: int = 1

    def filters(self, source: SourceConfig) -> FilterRules:
        """All that is left out of a source."""
        return FilterRules((*source.filters.rules, *self.rules), source.filters.name)

    def as_json(self) -> str:
        return json.dumps(
            {
                "naming": self.naming.as_json(),
                "rules": [[rule.section, *(p.text for p in rule.parts)] for rule in self.rules],
                "workers": self.workers,
            },
            ensure_ascii=False,
        )

    @classmethod
    def of_copy(cls, setup: dict[str, Any], source: SourceConfig, workers: int) -> SourcePlan:
        """The plan that a copy was made by, as its work directory has it."""
        pinned = FilterRules.from_json(setup["filters"])
        # A rule with the name of a key is the file's, without it.
        plain = {replace(rule, predicate="") for rule in source.filters.of("hash-column")}
        own = tuple(
            rule
            for rule in pinned.rules
            if rule not in source.filters.rules and replace(rule, predicate="") not in plain
        )
        return cls(Naming.from_json(setup["rename_schema"]), own, workers)

    @classmethod
    def from_json(cls, text: str) -> SourcePlan:
        value = json.loads(text)
        return cls(
            Naming.from_json(value["naming"]),
            tuple(_rule(section, *parts) for section, *parts in value["rules"]),
            value.get("workers", 1),
        )


def read_plan(connection: Connection, source: SourceConfig, workers: int = 1) -> SourcePlan:
    """Decide, from what the source has now."""
    with translated(f"reading the catalog of source {source.name}"):
        schemas = sorted(read_schemas(connection).values())
        # What acts by itself, or is about the roles and credentials of the source.
        rules = [_rule("exclude-kind", kind) for kind in KINDS]
        rules += _left_out_schemas(source, schemas)
        if source.views is Views.DROP:
            rules += [_rule(*row) for row in connection.execute(_VIEWS)]
        if source.indexes is Indexes.KEYS:
            rules += [_rule(*row) for row in connection.execute(_PLAIN_INDEXES)]
    out = {rule.parts[0].text for rule in rules if rule.section == "exclude-schema"}
    kept = [one for one in rules if len(one.parts) == 1 or one.parts[0].text not in out]
    naming = plan_naming(source, [one for one in schemas if one not in out])
    return SourcePlan(naming, tuple(kept), workers)


def plan_naming(source: SourceConfig, schemas: list[str]) -> Naming:
    """The target's names of schemas; those that the source gets later have the source's name before
    theirs, so that they are never taken for a schema of another source, or of the analysts."""
    names = {schema: source.target_schema(schema) for schema in schemas}
    return Naming(names, prefix=source.target_schema_prefix)


def _left_out_schemas(source: SourceConfig, schemas: list[str]) -> Iterator[Rule]:
    for schema in source.schemas.keys() - set(schemas):
        raise ConfigError(
            f"source {source.name} has no schema {schema}, which `schemas` names",
            hint="names are case-sensitive; `millrace list schemas` shows them",
        )
    out = [schema for schema in schemas if not source.target_schema(schema)]
    if out and source.filters.of("include-only-schema"):
        raise ConfigError(
            f"source {source.name} leaves out schema {out[0]} by `schemas`, and its filters have "
            "[include-only-schema]",
            hint="leave it out of [include-only-schema]",
        )
    yield from (_rule("exclude-schema", schema) for schema in out)


def _rule(section: str, *parts: str) -> Rule:
    return Rule(section, tuple(NamePart(part) for part in parts))
