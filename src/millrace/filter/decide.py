"""The decision made from filters: what of these objects is left out, and why.

Invariant: the same rules over the same objects give the same decision. A table that is kept
loses nothing it is made of: what it needs stays, or the filters are refused; only rows leave
it, and only those that the file names.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from millrace.errors import ConfigError
from millrace.filter.rules import SECTIONS, FilterRules, NamePart, Rule, rule_error

# An object of a database: OID of its catalog, OID of its row there.
Key = tuple[int, int]

PG_CLASS_OID = 1259
PG_ATTRDEF_OID = 2604
PG_CONSTRAINT_OID = 2606
PG_NAMESPACE_OID = 2615
PG_REWRITE_OID = 2618
PG_EXTENSION_OID = 3079

# Kinds of objects that the sections on tables are about.
TABLE_KINDS = frozenset(["table", "partitioned table", "foreign table", "materialized view"])
INDEX_KINDS = frozenset(["index", "partitioned index"])


@dataclass(frozen=True)
class DbObject:
    """An object of the source that a decision can be about."""

    catalog_oid: int
    oid: int
    kind: str
    schema: str
    name: str
    # The relation an index, a constraint or an owned sequence belongs to.
    owner_oid: int = 0
    # For an index, the constraint that rests on it.
    constraint_oid: int = 0

    @property
    def key(self) -> Key:
        return self.catalog_oid, self.oid

    @property
    def label(self) -> str:
        """The kind and the name as people write it."""
        return (
            f"{self.kind} {self.schema}.{self.name}" if self.schema else f"{self.kind} {self.name}"
        )


@dataclass(frozen=True)
class Depend:
    """`dependent` can't exist without `referenced`."""

    dependent: Key
    referenced: Key
    # pg_depend's n, a, i, P, S and e; "inherits" from child to parent; "whole" from a view, a
    # table or a domain to a rule, a default or a check that is part of its definition.
    kind: str


@dataclass(frozen=True)
class Decision:
    """What is left out of a clone, and why."""

    # Everything that is not made on the target, down to rules and types, with the reason.
    excluded: Mapping[Key, str] = field(default_factory=dict)
    # Tables and materialized views that are made and stay empty.
    data_skipped: Mapping[Key, str] = field(default_factory=dict)
    # What no rule names, but depends on what a rule leaves out; part of `excluded`.
    dependents: Mapping[Key, str] = field(default_factory=dict)
    # What rules leave out and kept objects need: sequences, parents, schemas of extensions.
    kept: Mapping[Key, str] = field(default_factory=dict)
    labels: Mapping[Key, str] = field(default_factory=dict)
    # By the table's OID.
    predicates: Mapping[int, str] = field(default_factory=dict)
    columns: Mapping[int, frozenset[str]] = field(default_factory=dict)
    # Columns that are copied as digests.
    hashed: Mapping[int, frozenset[str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    # Kinds of objects of which all are left out: some have no OID.
    kinds_excluded: frozenset[str] = frozenset()


def decide(
    rules: FilterRules,
    objects: Iterable[DbObject],
    depends: Iterable[Depend],
    matched: Mapping[str, Collection[str]] | None = None,
) -> Decision:
    """What the rules leave out of these objects.

    `matched` has, for each regular expression of the rules, the names that the server found
    to match it.
    """
    return _Decider(rules, objects, depends, matched or {}).decide()


class _Decider:
    def __init__(
        self,
        rules: FilterRules,
        objects: Iterable[DbObject],
        depends: Iterable[Depend],
        matched: Mapping[str, Collection[str]],
    ) -> None:
        self.rules = rules
        self.objects = {o.key: o for o in sorted(objects, key=lambda o: o.key)}
        self.matched = {pattern: frozenset(names) for pattern, names in matched.items()}
        self.dependents: dict[Key, list[Depend]] = defaultdict(list)
        self.references: dict[Key, list[Depend]] = defaultdict(list)
        for depend in sorted(depends, key=lambda d: (d.referenced, d.dependent, d.kind)):
            self.dependents[depend.referenced].append(depend)
            self.references[depend.dependent].append(depend)
        self.members = {
            d.dependent for each in self.references.values() for d in each if d.kind == "e"
        }
        self.excluded: dict[Key, str] = {}
        # Those of them that no rule names, and that are more than a partition of one that is.
        self.inheriting: set[Key] = set()
        self.kept: dict[Key, str] = {}
        self.data_skipped: dict[Key, str] = {}
        self.warnings: list[str] = []
        # Names that must stay, once matched: by their own entry in [include-only-table].
        self.included_by_name: dict[Key, Rule] = {}

    def decide(self) -> Decision:
        if self.rules.of("include-only-table") and self.rules.of("exclude-schema"):
            self.warnings.append(
                f"{self.rules.name} has both [include-only-table] and [exclude-schema]:"
                " an included table in an excluded schema is left out"
            )
        self._exclude_schemas()
        self._exclude_tables()
        self._exclude_indexes()
        self._exclude_views()
        self._skip_data()
        named = set(self.excluded) - self.inheriting
        self._exclude_dependents()
        self._exclude_extensions(named)
        self._keep_schemas_of_extensions()
        dependents = {
            key: self.excluded[key]
            for key in self.excluded
            if key not in named and key in self.objects and not self._belongs_to_excluded(key)
        }
        return Decision(
            excluded=self.excluded,
            data_skipped={k: why for k, why in self.data_skipped.items() if k not in self.excluded},
            dependents=dependents,
            kept={key: why for key, why in self.kept.items() if key not in self.excluded},
            labels={
                key: self.objects[key].label
                for key in (*self.excluded, *self.data_skipped, *self.kept)
                if key in self.objects
            },
            predicates=self._predicates(),
            columns=self._columns("exclude-column"),
            hashed=self._columns("hash-column"),
            warnings=tuple(self.warnings),
        )

    # Which objects the entries name.

    def _exclude_schemas(self) -> None:
        schemas = [o for o in self.objects.values() if o.catalog_oid == PG_NAMESPACE_OID]
        excluding = self._matches("exclude-schema", schemas)
        including = self._matches("include-only-schema", schemas)
        for schema in schemas:
            if rule := excluding.get(schema.key):
                self.excluded[schema.key] = rule.origin
            elif self.rules.of("include-only-schema") and schema.key not in including:
                self.excluded[schema.key] = "not in [include-only-schema]"

    def _exclude_tables(self) -> None:
        tables = self._tables()
        excluding = self._matches("exclude-table", tables)
        including = self._matches("include-only-table", tables)
        self.included_by_name = {k: rule for k, rule in including.items() if rule.is_exact}
        wanted = self._with_family(including)
        out_of_schema = {
            o.name
            for o in self.objects.values()
            if o.catalog_oid == PG_NAMESPACE_OID and o.key in self.excluded
        }
        kinds = {rule.parts[0].text for rule in self.rules.of("exclude-kind")}
        for table in tables:
            if table.kind in kinds:
                self.excluded[table.key] = "[exclude-kind]"
            elif table.schema in out_of_schema:
                self.excluded[table.key] = f"schema {table.schema} is left out"
            elif rule := excluding.get(table.key):
                self.excluded[table.key] = rule.origin
            elif self.rules.of("include-only-table") and table.key not in wanted:
                self.excluded[table.key] = "not in [include-only-table]"
        waiting = deque(table.key for table in tables if table.key in self.excluded)
        while waiting:
            parent = waiting.popleft()
            for child in self._children(parent):
                if child not in self.excluded:
                    is_partition = self._is_partitioned(parent)
                    word = "partition of" if is_partition else "inherits from"
                    self.excluded[child] = f"{word} {self._label(parent)}"
                    if not is_partition:
                        self.inheriting.add(child)
                    waiting.append(child)

    def _with_family(self, including: Mapping[Key, Rule]) -> set[Key]:
        """The included tables, their partitions, and the parents they can't be made without."""
        wanted = set(including)
        waiting = deque(sorted(wanted))
        while waiting:
            parent = waiting.popleft()
            if self._is_partitioned(parent):
                for child in self._children(parent):
                    if child not in wanted:
                        wanted.add(child)
                        waiting.append(child)
        waiting = deque(sorted(wanted))
        while waiting:
            child = waiting.popleft()
            for depend in self.references[child]:
                parent = depend.referenced
                if depend.kind == "inherits" and parent not in wanted:
                    wanted.add(parent)
                    waiting.append(parent)
                    self.kept[parent] = f"parent of {self._label(child)}"
                    if not self._is_partitioned(parent):
                        self.data_skipped[parent] = self.kept[parent]
        return wanted

    def _exclude_indexes(self) -> None:
        indexes = [o for o in self.objects.values() if o.kind in INDEX_KINDS]
        for key, rule in self._matches("exclude-index", indexes).items():
            parent = next(
                (d.referenced for d in self.references[key] if d.kind == "inherits"), None
            )
            if parent is not None and not self._owner_is_excluded(key):
                raise rule_error(
                    self.rules.name,
                    rule.line,
                    f"{self._label(key)} is part of {self._label(parent)}, which needs it",
                    "name the index of the partitioned table instead",
                )
            self.excluded.setdefault(key, rule.origin)
            if constraint := self.objects[key].constraint_oid:
                self.excluded.setdefault((PG_CONSTRAINT_OID, constraint), rule.origin)

    def _exclude_views(self) -> None:
        views = [o for o in self.objects.values() if o.kind == "view"]
        for key, rule in self._matches("exclude-view", views).items():
            self.excluded.setdefault(key, rule.origin)

    def _owner_is_excluded(self, key: Key) -> bool:
        return (PG_CLASS_OID, self.objects[key].owner_oid) in self.excluded

    def _skip_data(self) -> None:
        matches = self._matches("exclude-table-data", self._tables())
        for key, rule in matches.items():
            self.data_skipped[key] = rule.origin
        waiting = deque(key for key in matches if self._is_partitioned(key))
        while waiting:
            parent = waiting.popleft()
            for child in self._children(parent):
                self.data_skipped.setdefault(child, f"partition of {self._label(parent)}")
                if self._is_partitioned(child):
                    waiting.append(child)
        self._skip_readers([key for key in matches if self._is_view(key)])

    def _skip_readers(self, empty: Iterable[Key]) -> None:
        """A materialized view can't be refreshed from one that is not populated."""
        waiting = deque((key, key) for key in empty)
        seen = set(empty)
        while waiting:
            key, cause = waiting.popleft()
            for depend in self.dependents[key]:
                reader = depend.dependent
                if reader in seen or not (depend.kind == "whole" or reader[0] == PG_REWRITE_OID):
                    continue
                seen.add(reader)
                if self._is_view(reader):
                    self.data_skipped.setdefault(reader, f"reads {self._label(cause)}")
                waiting.append((reader, cause))

    def _tables(self) -> list[DbObject]:
        """What the sections on tables are about; an extension's tables go with the extension."""
        return [
            o for o in self.objects.values() if o.kind in TABLE_KINDS and o.key not in self.members
        ]

    def _matches(self, section: str, candidates: list[DbObject]) -> dict[Key, Rule]:
        """The candidates that entries of a section name, each with the first such entry."""
        by_name: dict[tuple[str, ...], DbObject] = {}
        for o in candidates:
            by_name[(o.schema, o.name) if SECTIONS[section] == 2 else (o.name,)] = o
        found: dict[Key, Rule] = {}
        for rule in sorted(self.rules.of(section), key=lambda r: r.line):
            if rule.is_exact:
                match = by_name.get(tuple(part.text for part in rule.parts))
                if match:
                    found.setdefault(match.key, rule)
                else:
                    self._report_unmatched(rule)
                continue
            for names, o in by_name.items():
                if all(self._part_matches(p, n) for p, n in zip(rule.parts, names, strict=True)):
                    found.setdefault(o.key, rule)
        return found

    def _part_matches(self, part: NamePart, name: str) -> bool:
        if part.is_regex:
            return name in self.matched.get(part.text, ())
        return part.text == name

    def _report_unmatched(self, rule: Rule) -> None:
        kind = rule.section.removeprefix("include-only-").removeprefix("exclude-").split("-")[0]
        message = f"the source has no {kind} {rule.label}"
        if rule.section.startswith("include-only-"):
            raise rule_error(
                self.rules.name,
                rule.line,
                message,
                "quote names with capitals; views are not tables",
            )
        self.warnings.append(
            f"{self.rules.name}, line {rule.line}: {message}, so [{rule.section}] has no effect"
        )

    # What goes with them.

    def _exclude_dependents(self) -> None:
        """Drop what can't exist without what is dropped; refuse to drop a table that way."""
        spared = self._sequences_in_use()
        conflicts: list[str] = []
        # The object to name as the cause: rules and row types mean nothing to people.
        causes = {key: key for key in self.excluded}
        waiting = deque(self.excluded)
        while waiting:
            referenced = waiting.popleft()
            cause = causes[referenced]
            for depend in self.dependents[referenced]:
                key = depend.dependent
                o = self.objects.get(key)
                if (
                    key in self.excluded
                    or depend.kind == "e"
                    or key[0] == PG_EXTENSION_OID
                    or key in self.members
                    or (key in spared and depend.kind == "a")
                ):
                    continue
                relation = "in" if referenced[0] == PG_NAMESPACE_OID else "depends on"
                reason = f"{relation} {self._label(cause)}"
                if o and o.kind in TABLE_KINDS and o.kind != "materialized view":
                    conflicts.append(f"{o.label} {reason} ({self.excluded[cause]})")
                    continue
                if rule := self.included_by_name.get(key):
                    conflicts.append(f"{rule.label} {reason} ({self.excluded[cause]})")
                    continue
                self.excluded[key] = reason
                causes[key] = key if o else cause
                waiting.append(key)
        if conflicts:
            raise ConfigError(
                f"the filters of {self.rules.name} keep tables and leave out what they need: "
                + "; ".join(sorted(set(conflicts))[:5]),
                hint="leave out these tables as well, or keep what they need",
                file=self.rules.name,
                conflicts=sorted(set(conflicts)),
            )

    def _sequences_in_use(self) -> set[Key]:
        """Sequences that are owned by tables left out, and used by defaults of kept ones."""
        spared = set()
        for table in self._tables():
            if table.key in self.excluded or table.kind == "materialized view":
                continue
            for part in self.references[table.key]:
                if part.kind != "whole" or part.referenced[0] != PG_ATTRDEF_OID:
                    continue
                for use in self.references[part.referenced]:
                    sequence = self.objects.get(use.referenced)
                    if (
                        sequence
                        and sequence.kind == "sequence"
                        and self._owner_is_excluded(sequence.key)
                    ):
                        spared.add(sequence.key)
                        self.kept[sequence.key] = f"a default of {table.label} uses it"
        return spared

    def _exclude_extensions(self, named: set[Key]) -> None:
        """Extensions and their members, and nothing that uses them: the target may have them."""
        extensions = [o for o in self.objects.values() if o.catalog_oid == PG_EXTENSION_OID]
        excluding = self._matches("exclude-extension", extensions)
        including = self._matches("include-only-extension", extensions)
        for extension in extensions:
            if rule := excluding.get(extension.key):
                self.excluded[extension.key] = rule.origin
            elif self.rules.of("include-only-extension") and extension.key not in including:
                self.excluded[extension.key] = "not in [include-only-extension]"
            else:
                continue
            named.add(extension.key)
            for member in self.dependents[extension.key]:
                if member.kind == "e":
                    self.excluded[member.dependent] = f"belongs to {extension.label}"
                    named.add(member.dependent)

    def _keep_schemas_of_extensions(self) -> None:
        for key, o in self.objects.items():
            if o.catalog_oid != PG_EXTENSION_OID or key in self.excluded:
                continue
            for depend in self.references[key]:
                schema = depend.referenced
                if schema[0] == PG_NAMESPACE_OID and self.excluded.pop(schema, ""):
                    self.kept[schema] = f"{o.label} is in it"

    def _belongs_to_excluded(self, key: Key) -> bool:
        """Whether it goes without saying: a part of something left out, or inside its schema."""
        return any(
            depend.referenced in self.excluded
            and (depend.kind in ("a", "i", "P", "S") or depend.referenced[0] == PG_NAMESPACE_OID)
            for depend in self.references[key]
        )

    # What is changed in tables that stay.

    def _predicates(self) -> dict[int, str]:
        predicates: dict[int, list[str]] = defaultdict(list)
        for rule in self.rules.of("table-where"):
            for oid in self._copied_tables(rule):
                predicates[oid].append(rule.predicate)
        return {
            oid: each[0] if len(each) == 1 else " AND ".join(f"({one})" for one in each)
            for oid, each in predicates.items()
        }

    def _columns(self, section: str) -> dict[int, frozenset[str]]:
        columns: dict[int, set[str]] = defaultdict(set)
        for rule in self.rules.of(section):
            for oid in self._copied_tables(rule):
                columns[oid].add(rule.parts[2].text)
        return {oid: frozenset(names) for oid, names in columns.items()}

    def _copied_tables(self, rule: Rule) -> Iterator[int]:
        """The table of an entry if it is copied; the partitions if it is partitioned."""
        schema, name = rule.parts[0].text, rule.parts[1].text
        tables = [o for o in self._tables() if (o.schema, o.name) == (schema, name)]
        if not tables or tables[0].kind not in ("table", "partitioned table"):
            raise rule_error(
                self.rules.name,
                rule.line,
                f"the source has no table {schema}.{name} with rows to copy",
                "quote names with capitals; the rows of views and foreign tables are not copied",
            )
        if tables[0].key in self.excluded or tables[0].key in self.data_skipped:
            self.warnings.append(
                f"{self.rules.name}, line {rule.line}: no row of {schema}.{name} is copied,"
                f" so [{rule.section}] has no effect"
            )
        waiting = deque([tables[0].key])
        while waiting:
            key = waiting.popleft()
            if self._is_partitioned(key):
                waiting.extend(self._children(key))
            elif self.objects[key].kind == "table":
                yield key[1]

    def _children(self, parent: Key) -> list[Key]:
        return [d.dependent for d in self.dependents[parent] if d.kind == "inherits"]

    def _is_partitioned(self, key: Key) -> bool:
        return self.objects[key].kind == "partitioned table"

    def _is_view(self, key: Key) -> bool:
        return key in self.objects and self.objects[key].kind == "materialized view"

    def _label(self, key: Key) -> str:
        return self.objects[key].label if key in self.objects else "an object"
