"""Random changes of structure for one source, with rows before, in and after them.

Invariant: whatever is chosen, its statements succeed on the source, and a second attempt of them
does: clients and campaigns try again what a restart has cut off.
"""

from __future__ import annotations

import random

from tests.torture.ingredients import Incident

_FILL = "INSERT INTO {t} SELECT i, 'v' || i FROM generate_series(1, 20) i ON CONFLICT DO NOTHING"
_MAKE = "CREATE TABLE {t} (id int PRIMARY KEY, v text)"

# What is counted, and the transactions; {t} is a name that nobody has had, {n} its number.
CHANGES: tuple[tuple[Incident, tuple[str, ...]], ...] = (
    (Incident.DDL_CREATE_TABLE, (f"{_MAKE}; {_FILL}", "UPDATE {t} SET v = 'u' WHERE id < 9")),
    (
        Incident.DDL_CREATE_TABLE,
        ("DO $$ BEGIN EXECUTE 'CREATE TABLE {t} (id serial PRIMARY KEY, v text)'; "
         "INSERT INTO {t} (v) SELECT 'x' FROM generate_series(1, 9); END $$",),
    ),
    (Incident.DDL_CREATE_TABLE_AS, ("CREATE TABLE {t} AS SELECT * FROM generate_series(1, 50) i",)),
    (
        Incident.DDL_ADD_COLUMN,
        (f"{_MAKE}; {_FILL}", "BEGIN; DELETE FROM {t} WHERE id = 3; ALTER TABLE {t} ADD COLUMN "
         "c int DEFAULT 5; UPDATE {t} SET c = 6 WHERE id = 4; COMMIT"),
    ),
    (
        Incident.DDL_VOLATILE,
        (f"{_MAKE}; {_FILL}", "ALTER TABLE {t} ADD COLUMN at timestamptz DEFAULT clock_timestamp()",
         "UPDATE {t} SET v = 'later' WHERE id < 5", "INSERT INTO {t} VALUES (100, 'new')"),
    ),
    (
        Incident.DDL_ALTER_TYPE,
        (f"{_MAKE}; {_FILL}", "ALTER TABLE {t} ALTER COLUMN id TYPE bigint, ADD CONSTRAINT {t}_c "
         "CHECK (id > 0)", "UPDATE {t} SET id = id + 5000000000 WHERE id = 7"),
    ),
    (
        Incident.DDL_RENAME,
        (f"{_MAKE}; {_FILL}", "ALTER TABLE {t} RENAME TO {t}_new; ALTER TABLE {t}_new RENAME v TO w"
         "; UPDATE {t}_new SET w = 'n'"),
    ),
    (
        Incident.DDL_DROP_TABLE,
        (f"{_MAKE}; {_FILL}", "DELETE FROM {t} WHERE id = 1; DROP TABLE {t}"),
    ),
    (
        Incident.DDL_PARTITION,
        ("CREATE TABLE {t} (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id); CREATE "
         "TABLE {t}_a PARTITION OF {t} FOR VALUES FROM (1) TO (11); CREATE TABLE {t}_b "
         f"PARTITION OF {{t}} FOR VALUES FROM (11) TO (100); {_FILL}",
         "ALTER TABLE {t} DETACH PARTITION {t}_a; INSERT INTO {t}_a VALUES (500, 'free')"),
    ),
    (
        Incident.DDL_INDEX,
        (f"{_MAKE}; {_FILL}", "CREATE UNIQUE INDEX CONCURRENTLY {t}_i ON {t} (v, id)"),
    ),
    (Incident.DDL_VIEW, (f"{_MAKE}; {_FILL}; CREATE VIEW {{t}}_v AS SELECT id FROM {{t}}",)),
    (
        Incident.DDL_ENUM,
        ("CREATE TYPE {t}_e AS ENUM ('a'); CREATE TABLE {t} (id int PRIMARY KEY, e {t}_e)",
         "ALTER TYPE {t}_e ADD VALUE 'b'", "INSERT INTO {t} VALUES (1, 'b')"),
    ),
    (
        Incident.DDL_SCHEMA,
        ("CREATE SCHEMA {t}_s; CREATE TABLE {t}_s.one (id int PRIMARY KEY); INSERT INTO {t}_s.one "
         "VALUES (1)", "ALTER SCHEMA {t}_s RENAME TO {t}_r; INSERT INTO {t}_r.one VALUES (2)"),
    ),
)  # fmt: skip


def choose(dice: random.Random, number: int) -> tuple[Incident, list[str]]:
    """One of them for a source, whose `number` is used once."""
    incident, texts = dice.choice(CHANGES)
    table = f"ddl_{number}"
    return incident, [text.replace("{{t}}", table).replace("{t}", table) for text in texts]
