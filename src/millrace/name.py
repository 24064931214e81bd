"""Names of the source and what they are called on the target.

Invariant: a naming is one to one as far as it goes: no two names of the source become one name
of the target, and every name that it gives fits into PostgreSQL's 63 bytes. Nothing here opens a
connection, and no SQL is rewritten by it: statements of the source reach the target through
`millrace.postgres.schema_rename`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from millrace.errors import ConfigError

# NAMEDATALEN less the closing zero.
NAME_BYTES: Final = 63
# Names that a server keeps for itself.
_RESERVED: Final = re.compile(r"pg_.*|information_schema", re.DOTALL)
_NAME: Final = r'("(?:[^"]|"")+"|[^="]+)'
_RENAME: Final = re.compile(f"{_NAME}={_NAME}", re.DOTALL)
_PATH_ELEMENT: Final = re.compile(r'"(?:[^"]|"")*"|[^,\s"]+')
_HINT: Final = 'write old=new; quote a name with = in it as in SQL: "a=b"=c'


class QualifiedName(NamedTuple):
    """Schema and name of a relation."""

    schema: str
    name: str

    @property
    def label(self) -> str:
        """The name as people write it."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class Naming:
    """What names of the source are called on the target; those not in it stay as they are.

    A table's own entry decides before that of its schema. With a prefix, a schema that has no entry
    gets that before its name: so schemas that come later never meet those of somebody else.
    """

    schemas: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[QualifiedName, QualifiedName] = field(default_factory=dict)
    prefix: str = ""

    def __post_init__(self) -> None:
        _refuse_shared(self.schemas)
        _refuse_shared({old.label: new.label for old, new in self.tables.items()})
        for name in self.schemas.values():
            if _RESERVED.fullmatch(name):
                raise ConfigError(
                    f"schema name {name} is reserved by PostgreSQL", hint="choose another name"
                )
        for name in {
            *self.schemas.values(),
            *(part for new in self.tables.values() for part in new),
        }:
            if len(name.encode()) > NAME_BYTES:
                raise ConfigError(
                    f"name {name} has {len(name.encode())} bytes, PostgreSQL allows {NAME_BYTES}",
                    hint="choose a shorter name",
                )

    @property
    def is_identity(self) -> bool:
        is_changed = self.prefix or self.renamed_schemas
        return not is_changed and all(old == new for old, new in self.tables.items())

    @property
    def renamed_schemas(self) -> dict[str, str]:
        """The schemas whose names differ."""
        return {old: new for old, new in self.schemas.items() if old != new}

    def schema(self, name: str) -> str:
        """A schema of the source on the target."""
        return self.schemas.get(name, f"{self.prefix}{name}")

    def target(self, schema: str, name: str) -> QualifiedName:
        """A relation of the source on the target."""
        own = self.tables.get(QualifiedName(schema, name))
        return own or QualifiedName(self.schema(schema), name)

    def source(self, schema: str, name: str) -> QualifiedName | None:
        """A relation of the target on the source; None for one that no name of the source becomes,
        because its schema is called something else here."""
        own = self._sources.get(QualifiedName(schema, name))
        if own is not None:
            return own
        found = self._source_schemas.get(schema)
        if found is None and schema.startswith(self.prefix):
            found = schema.removeprefix(self.prefix)
            if found in self.schemas:
                return None
        return None if found is None else QualifiedName(found, name)

    def search_path(self, text: str) -> str:
        """A search path of the source, as a setting has it, with the target's names."""

        def become(found: re.Match[str]) -> str:
            new = self.renamed_schemas.get(_unquoted(found[0]))
            return found[0] if new is None else '"' + new.replace('"', '""') + '"'

        return _PATH_ELEMENT.sub(become, text)

    def setting(self, text: str) -> str:
        """A `name=value` of the source: only a search path names schemas."""
        name, _, value = text.partition("=")
        return f"{name}={self.search_path(value)}" if name.lower() == "search_path" else text

    @cached_property
    def _source_schemas(self) -> dict[str, str]:
        return {new: old for old, new in self.schemas.items()}

    @cached_property
    def _sources(self) -> dict[QualifiedName, QualifiedName]:
        return {new: old for old, new in self.tables.items()}

    def as_json(self) -> str:
        """The same text for equal namings; empty for one that changes nothing."""
        if self.is_identity:
            return ""
        # With a prefix, a schema that keeps its name is an exception to it.
        schemas = self.schemas if self.prefix else self.renamed_schemas
        value: dict[str, object] = {"schemas": dict(sorted(schemas.items()))}
        if self.prefix:
            value["prefix"] = self.prefix
        if self.tables:
            value["tables"] = sorted([list(old), list(new)] for old, new in self.tables.items())
        return json.dumps(value, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Naming:
        """What `as_json` wrote."""
        value = json.loads(text) if text else {}
        tables = {QualifiedName(*old): QualifiedName(*new) for old, new in value.get("tables", ())}
        return cls(value.get("schemas", {}), tables, value.get("prefix", ""))


def parse_renames(texts: Iterable[str]) -> Naming:
    """The naming of `--rename-schema old=new`, given once or more."""
    schemas: dict[str, str] = {}
    for text in texts:
        found = _RENAME.fullmatch(text)
        if found is None:
            raise ConfigError(f"--rename-schema {text} is not old=new", hint=_HINT)
        old, new = (_unquoted(name) for name in found.groups())
        if schemas.setdefault(old, new) != new:
            raise ConfigError(
                f"--rename-schema gives schema {old} two names, {schemas[old]} and {new}",
                hint="name each schema once",
            )
    return Naming(schemas)


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _refuse_shared(names: Mapping[str, str]) -> None:
    taken: dict[str, str] = {}
    for old, new in names.items():
        other = taken.setdefault(new, old)
        if other != old:
            raise ConfigError(
                f"{other} and {old} would both be called {new} on the target",
                hint="give each a name of its own",
            )


IDENTITY: Final = Naming()
