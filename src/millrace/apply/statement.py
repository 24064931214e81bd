"""The statements by which net changes of one table reach the target; pure text.

Invariant: each statement touches exactly the rows its stage names, or its row count says so.

Changes arrive in temporary tables, the *stages*: `n` numbers the rows, `k1...` hold what the row
was known by before, `v1...` its values after. What every statement has in common is how a row
`t` of the table is matched with a row `s` of the stage: by its key, or, where there is none, by
what all its values look like, each of several equal rows paired with one stage row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from millrace.apply.target_table import TargetColumn, TargetTable
from millrace.errors import ApplyError
from millrace.postgres.catalog.relations import FIRST_UNPINNED_OID
from millrace.postgres.pgoutput.messages import RelationColumn, RelationVersion
from millrace.postgres.quote import ident, qualified


@dataclass(frozen=True)
class MappedColumn:
    """A column that is sent on."""

    # Its place in the relation message.
    place: int
    target: TargetColumn
    # The type of its values in a stage.
    stage_type: str
    # Whether the table itself reads the values as they come.
    is_direct: bool


_INTEGERS = frozenset((20, 21, 23))

# The smallest and the largest key of a stage.
Span = tuple[int, int]


@dataclass(frozen=True)
class TablePlan:
    """One version of a source's table, and its table on the target."""

    relation: RelationVersion
    table: TargetTable
    # Generated ones are here only if they are part of the key, and are never written.
    columns: tuple[MappedColumn, ...]
    # Of `columns`, those that identify rows; empty if only inserts can come.
    key: tuple[MappedColumn, ...]
    # No key: rows are known by all their values, and may be equal.
    is_multiset: bool
    is_binary: bool
    # Distinguishes the stages of several plans of one session.
    number: int
    # Only rows that meet this condition belong on the target; empty for all.
    where: str = ""

    @cached_property
    def name(self) -> str:
        return qualified(self.table.schema, self.table.name)

    @cached_property
    def source_name(self) -> str:
        return qualified(self.relation.schema, self.relation.name)

    @cached_property
    def label(self) -> str:
        """As the source calls it: so does everything that is reported."""
        return f"{self.relation.schema}.{self.relation.name}"

    @property
    def can_insert_directly(self) -> bool:
        return not self.where and all(
            column.is_direct and not column.target.is_generated for column in self.columns
        )

    @cached_property
    def is_looked_up(self) -> bool:
        """Whether an index of the table certainly finds the row of each stage row."""
        names = {column.target.name for column in self.key if column.is_direct}
        return not self.is_multiset and any(names.issuperset(k) for k in self.table.lookup_keys)

    @cached_property
    def has_integer_key(self) -> bool:
        """Whether between two keys there are at most as many rows as numbers. Not where triggers
        fire: they would run under the settings of the statement."""
        if not self.is_looked_up or self.table.has_triggers or len(self.key) > 1:
            return False
        return self.key[0].target.type_oid in _INTEGERS

    @property
    def can_trade_values(self) -> bool:
        """Whether rows can be in each other's way although the outcome is fine: by an index other
        than that of the key."""
        names = {column.target.name for column in self.key}
        is_key_unique = any(names == set(unique) for unique in self.table.unique_keys)
        return self.table.unique_index_count > is_key_unique

    @property
    def comes_whole(self) -> bool:
        """Whether changes bring the whole row as it was. Such rows are followed by all of it: a
        deferrable key may be there twice until its transaction ends."""
        return self.relation.replica_identity == "f"

    def settable(self, *, with_key: bool, unchanged: frozenset[int]) -> list[MappedColumn]:
        """The columns an UPDATE sets; numbers in `unchanged` are places."""
        key = () if with_key else self.key
        return [
            column
            for column in self.columns
            if column.place not in unchanged
            and not column.target.is_identity_always
            and not column.target.is_generated
            and (self.is_multiset or column not in key)
        ]

    def copy(self, into: str, columns: Iterable[str] = ()) -> str:
        listed = f" ({', '.join(columns)})" if columns else ""
        return f"COPY {into}{listed} FROM STDIN (FORMAT {'binary' if self.is_binary else 'text'})"

    def insert_copy(self) -> str:
        """Rows straight into the table."""
        return self.copy(self.name, [ident(column.target.name) for column in self.columns])

    def stage(self, kind: str) -> str:
        return f"pg_temp.millrace_{self.number}_{kind}"

    def create_stage(self, kind: str) -> str:
        """`kind`: d for rows to delete, i to insert, u, and u with a number, to update."""
        fields = ["n int4"]
        if kind != "i":
            fields += [f"k{i} {c.stage_type}" for i, c in enumerate(self.key, 1)]
        if kind != "d":
            fields += [f"v{i} {c.stage_type}" for i, c in enumerate(self.columns, 1)]
        return (
            f"CREATE TEMP TABLE {self.stage(kind)[8:]} ({', '.join(fields)}) ON COMMIT DELETE ROWS"
        )

    def delete(self, span: Span | None = None) -> str:
        return self._by_key(
            f"DELETE FROM {self._only} AS t USING {self._source('d')} WHERE {self._match}", span
        )

    def update(
        self,
        kind: str,
        columns: Sequence[MappedColumn],
        condition: str = "true",
        span: Span | None = None,
    ) -> str:
        """`condition`: which rows of the stage."""
        sets = ", ".join(f"{ident(c.target.name)} = s.{self._value(c)}" for c in columns)
        return self._by_key(
            f"UPDATE {self._only} AS t SET {sets} FROM {self._source(kind)}"
            f" WHERE {self._match} AND {condition}",
            span,
        )

    def span(self, kind: str) -> str:
        """A query for it; integer keys only."""
        return f"SELECT min(k1), max(k1) FROM {self.stage(kind)}"

    def _by_key(self, statement: str, span: Span | None) -> str:
        """Look rows up in the index where there is one. Planners like to hash a whole table for a
        tenth of its rows, which takes longer, and know little of a table that grows so fast.

        With a span that is full of the stage's keys, the index is read once from end to end of it
        instead of once for each row, which saves a fifth of an update."""
        if not self.is_looked_up:
            return statement
        off = ["enable_hashjoin", "enable_mergejoin"]
        if span is not None:
            off = ["enable_nestloop", "enable_mergejoin", "enable_seqscan"]
            statement += f" AND t.{ident(self.key[0].target.name)} BETWEEN {span[0]} AND {span[1]}"
        return "; ".join(
            (
                *(f"SET LOCAL {name} = off" for name in off),
                statement,
                *(f"SET LOCAL {name} TO DEFAULT" for name in off),
            )
        )

    def count_new_identities(self, kind: str, unchanged: frozenset[int]) -> str | None:
        """How many rows get another value in a column that UPDATE may not set; None if the table
        has no such column."""
        always = [
            column
            for column in self.columns
            if column.target.is_identity_always and column.place not in unchanged
        ]
        if not always:
            return None
        differs = " OR ".join(
            f"t.{ident(column.target.name)} IS DISTINCT FROM s.{self._value(column)}"
            for column in always
        )
        return (
            f"SELECT count(*) FROM {self._only} AS t, {self._source(kind)}"
            f" WHERE {self._match} AND ({differs})"
        )

    def missing(self, kind: str) -> str:
        """Numbers of stage rows that no row of the table answers to; keys only."""
        return (
            f"SELECT s.n FROM {self.stage(kind)} AS s WHERE NOT EXISTS"
            f" (SELECT FROM {self._only} AS t WHERE {self._key_match}) ORDER BY s.n"
        )

    def insert_staged(self, kind: str = "i", condition: str = "", conflict: str = "") -> str:
        written = [column for column in self.columns if not column.target.is_generated]
        names = ", ".join(ident(column.target.name) for column in written)
        values = ", ".join(f"s.{self._value(column)}" for column in written)
        into = f"{self.name} ({names}) OVERRIDING SYSTEM VALUE" if names else self.name
        where = f" WHERE {condition}" if condition else ""
        return (
            f"INSERT INTO {into} SELECT {values} FROM {self.stage(kind)} AS s{where}"
            f" ORDER BY s.n{conflict}"
        )

    def is_kept(self, kind: str) -> str:
        """A condition on stage rows: their values meet the table's condition."""
        values = ", ".join(
            f"w.{self._value(column)} AS {ident(column.target.name)}" for column in self.columns
        )
        return (
            f"s.n IN (SELECT q.millrace_n FROM (SELECT w.n AS millrace_n, {values}"
            f" FROM {self.stage(kind)} AS w) AS q WHERE ({self.where}))"
        )

    def mentions(self, places: frozenset[int]) -> bool:
        """Whether the condition may depend on one of these columns."""
        names = [column.target.name for column in self.columns if column.place in places]
        return any(name.lower() in self.where.lower() for name in names)

    def delete_left(self, kind: str) -> str:
        """Rows of an update stage that no longer meet the condition."""
        matches = [
            self._equal(column.target.name, f"s.{self._value(column)}", "r") for column in self.key
        ]
        # In the innermost query no name of the stage is in the condition's way.
        return (
            f"DELETE FROM {self._only} AS t USING"
            f" (SELECT tableoid AS place_table, ctid AS place FROM {self._only}"
            f" WHERE ({self.where}) IS NOT TRUE) AS l, {self._only} AS r, {self.stage(kind)} AS s"
            f" WHERE t.tableoid = l.place_table AND t.ctid = l.place"
            f" AND r.tableoid = t.tableoid AND r.ctid = t.ctid AND {' AND '.join(matches)}"
        )

    def delete_blocking(self, kind: str) -> list[str]:
        """Rows of the table that hold a unique value of a stage row; one statement for each key."""
        places = {column.target.name: self._value(column) for column in self.columns}
        statements = []
        for unique in self.table.unique_keys:
            if not all(name in places for name in unique):
                continue
            matches = [self._equal(name, f"s.{places[name]}") for name in unique]
            statements.append(
                f"DELETE FROM {self._only} AS t USING {self.stage(kind)} AS s"
                f" WHERE {' AND '.join(matches)}"
            )
        return statements

    def lifted(self, kind: str) -> str:
        """The table that holds rows while they are out of theirs."""
        return f"{self.stage(kind)}_l"

    def lift(self, kind: str) -> tuple[str, str]:
        """(create, move): take the rows of an update stage out of the table, into a table of
        their own, together with their numbers."""
        create = (
            f"CREATE TEMP TABLE {self.lifted(kind)[8:]} ON COMMIT DROP AS"
            f" SELECT 0 AS millrace_n, {self._stored} FROM {self.name} LIMIT 0"
        )
        listed = ", ".join(f"t.{ident(c.name)}" for c in self._stored_columns)
        move = (
            f"WITH gone AS (DELETE FROM {self._only} AS t USING {self._source(kind)}"
            f" WHERE {self._match} RETURNING s.n, {listed})"
            f" INSERT INTO {self.lifted(kind)} SELECT * FROM gone"
        )
        return create, move

    def put_back(self, kind: str, unchanged: frozenset[int]) -> str:
        """Insert the lifted rows again, with their new values."""
        new = {
            column.target.name: f"s.{self._value(column)}"
            for column in self.columns
            if column.place not in unchanged
        }
        values = ", ".join(new.get(c.name, f"l.{ident(c.name)}") for c in self._stored_columns)
        return (
            f"INSERT INTO {self.name} ({self._stored}) OVERRIDING SYSTEM VALUE SELECT {values}"
            f" FROM {self.lifted(kind)} AS l JOIN {self.stage(kind)} AS s ON s.n = l.millrace_n"
            " ORDER BY s.n"
        )

    @property
    def _stored_columns(self) -> list[TargetColumn]:
        return [column for column in self.table.columns if not column.is_generated]

    @property
    def _stored(self) -> str:
        return ", ".join(ident(column.name) for column in self._stored_columns)

    @property
    def _only(self) -> str:
        # The source sends the rows of inheriting tables under their own names.
        return self.name if self.table.is_partitioned else f"ONLY {self.name}"

    def _value(self, column: MappedColumn) -> str:
        return f"v{self.columns.index(column) + 1}"

    def _equal(self, name: str, value: str, row: str = "t") -> str:
        column = self.table.column(name)
        assert column is not None
        if column.equality is None:
            return f"{row}.{ident(name)}::text = {value}::text"
        return f"{row}.{ident(name)} {column.equality} {value}"

    @cached_property
    def _key_match(self) -> str:
        return " AND ".join(
            self._equal(column.target.name, f"s.k{i}") for i, column in enumerate(self.key, 1)
        )

    @property
    def _match(self) -> str:
        if not self.is_multiset:
            return self._key_match
        return "t.tableoid = s.place_table AND t.ctid = s.place"

    def _source(self, kind: str) -> str:
        if not self.is_multiset:
            return f"{self.stage(kind)} AS s"
        # The text of a whole row, with NULLs distinct from empty strings.
        names = [ident(column.target.name) for column in self.key]
        theirs = ", ".join(f"r.{name}" for name in names)
        ours = ", ".join(
            f"w.k{i}::{column.target.definition.split(' COLLATE ')[0]}"
            for i, column in enumerate(self.key, 1)
        )
        stage = self.stage(kind)
        return (
            f"(SELECT found.place_table, found.place, wanted.* FROM"
            f" (SELECT r.tableoid AS place_table, r.ctid AS place, ROW({theirs})::text AS image,"
            f" row_number() OVER (PARTITION BY ROW({theirs})::text) AS copy FROM {self._only} AS r"
            f" WHERE ROW({theirs})::text IN (SELECT ROW({ours})::text FROM {stage} AS w)) AS found"
            f" JOIN (SELECT w.*, ROW({ours})::text AS image,"
            f" row_number() OVER (PARTITION BY ROW({ours})::text) AS copy FROM {stage} AS w)"
            " AS wanted USING (image, copy)) AS s"
        )


def plan_table(
    relation: RelationVersion,
    table: TargetTable,
    *,
    is_binary: bool,
    type_names: Mapping[int, str],
    excluded: frozenset[str] = frozenset(),
    where: str = "",
    number: int = 0,
) -> TablePlan:
    """How changes of this version of a table are applied; `excluded` columns are left out, and
    rows that do not meet `where`."""
    columns = []
    for place, column in enumerate(relation.columns):
        target = table.column(column.name)
        is_told_by = column.is_key and relation.replica_identity != "f"
        if column.name in excluded or (target and target.is_generated and not is_told_by):
            continue
        if target is None:
            raise ApplyError(
                f"{relation.schema}.{relation.name}: the target has no column {column.name}",
                hint="add it there (ALTER TABLE ... ADD COLUMN), then run the same command again",
                table=f"{relation.schema}.{relation.name}",
            )
        columns.append(_map_column(place, column, target, is_binary, type_names))
    key, is_multiset = _choose_key(relation, table, columns)
    return TablePlan(relation, table, tuple(columns), key, is_multiset, is_binary, number, where)


def _map_column(
    place: int,
    column: RelationColumn,
    target: TargetColumn,
    is_binary: bool,
    type_names: Mapping[int, str],
) -> MappedColumn:
    if not is_binary or column.type_oid in (0, target.type_oid):
        return MappedColumn(place, target, target.definition, True)
    if column.type_oid < FIRST_UNPINNED_OID:
        if column.type_oid not in type_names:
            raise ApplyError(
                f"column {column.name} came in binary, and the target has no type with OID"
                f" {column.type_oid}: it is older than the source",
                hint="give the stream's commands --no-binary, or the source's column a type that"
                " both servers have",
            )
        return MappedColumn(place, target, type_names[column.type_oid], False)
    # A type of the users' own, or one that initdb numbers, has another OID there; the receiver
    # lets only those pass in binary whose bytes do not name it.
    return MappedColumn(place, target, target.definition, True)


def _choose_key(
    relation: RelationVersion, table: TargetTable, columns: Sequence[MappedColumn]
) -> tuple[tuple[MappedColumn, ...], bool]:
    """(the columns that identify rows, whether even they may not)."""
    by_name = {column.target.name: column for column in columns}
    if relation.replica_identity == "f":
        for names in table.telling_keys:
            if all(name in by_name for name in names):
                return tuple(by_name[name] for name in names), False
        return tuple(columns), True
    names = tuple(column.name for column in relation.columns if column.is_key)
    if not names and table.telling_keys and not any(c.type_oid for c in relation.columns):
        # The plugin does not say; the target's key is the source's.
        names = table.telling_keys[0]
    if _is_half_key(set(names), table):
        return (), False
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ApplyError(
            f"{relation.schema}.{relation.name}: the key column {missing[0]} is left out",
            hint="a column of the replica identity can't be excluded",
            table=f"{relation.schema}.{relation.name}",
        )
    return tuple(by_name[name] for name in names), False


def _is_half_key(names: set[str], table: TargetTable) -> bool:
    """Whether the rest of the key are generated columns, which the source did not send: up to
    version 17 it never does."""
    generated = {column.name for column in table.columns if column.is_generated}
    keys = [set(key) for key in table.telling_keys]
    return not any(key <= names for key in keys) and any(
        names < key and key - names <= generated for key in keys
    )
