"""The target's schemas under the names of the source, for the time of one transaction.

Invariant: inside the transaction the schemas of a naming have the source's names, so that text of
the source means the target's objects; other sessions see the target's names all the time, and so
does everybody after the transaction, whether it was committed or rolled back.

Names inside views, defaults, constraints, policies and index expressions are OIDs once they are
parsed, so the server prints them with the new names from then on. Bodies that are strings are not
parsed: `read_unmapped` names them.

One at a time: a second one would get "tuple concurrently updated", so it waits for an advisory lock
(`ALONE`), and so does a restore without renaming. A statement of the text may wait behind another
session meanwhile; hence a short lock_timeout, and callers that try again.

Facts: namespace.c; ALTER SCHEMA locks no relation; pg_dump prints `public.citext`, so an extension
that the target has elsewhere is moved in and out, if it is relocatable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millrace.name import Naming
from millrace.postgres.quote import literal

# Taken by every transaction that restores a schema or changes what belongs to the whole database:
# two at once would get "tuple concurrently updated". "millrace" in ASCII.
ALONE: Final = "SELECT pg_catalog.pg_advisory_xact_lock(7883675227353771877);\n"
# How long a statement of the source's text waits for a lock before all is rolled back.
LOCK_SECONDS: Final = 2
# Names for a moment: of ours on their way, and of the target's own that are in the way.
_OURS: Final = "_millrace_ours_"
OWN_PREFIX: Final = "_millrace_own_"
# Event triggers of the target are not about this. Who may not silence them has none of his own.
_BLOCK: Final = """DO $millrace$
DECLARE
    olds CONSTANT text[] := {olds};
    news CONSTANT text[] := {news};
    one record;
    role CONSTANT text := pg_catalog.current_setting('session_replication_role');
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_event_trigger) THEN
        BEGIN
            PERFORM pg_catalog.set_config('session_replication_role', 'replica', true);
        EXCEPTION WHEN insufficient_privilege THEN
            NULL;
        END;
    END IF;
{renames}
    IF pg_catalog.current_setting('session_replication_role') <> role THEN
        PERFORM pg_catalog.set_config('session_replication_role', role, true);
    END IF;
END $millrace$;
"""
_LOOP: Final = """
    FOR one IN SELECT n.nspname AS name, {becomes} AS becomes
                 FROM ROWS FROM (pg_catalog.unnest(olds), pg_catalog.unnest(news))
                      WITH ORDINALITY AS m (old, new, number)
                 JOIN pg_catalog.pg_namespace AS n ON n.nspname = {now} LOOP
        EXECUTE pg_catalog.format('ALTER SCHEMA %I RENAME TO %I', one.name, one.becomes);
    END LOOP;"""

# Where an extension is, is asked in the transaction: another one may have created it just now. Its
# schema is remembered by OID, since its name may be about to change.
_MOVE_IN: Final = """DO $millrace$
DECLARE
    one record;
BEGIN
    FOR one IN SELECT e.extname, e.extnamespace, m.home, m.number
                 FROM ROWS FROM (pg_catalog.unnest({names}), pg_catalog.unnest({homes}))
                      WITH ORDINALITY AS m (name, home, number)
                 JOIN pg_catalog.pg_extension AS e ON e.extname = m.name
                 JOIN pg_catalog.pg_namespace AS n ON n.oid = e.extnamespace
                WHERE n.nspname <> m.home LOOP
        PERFORM pg_catalog.set_config('millrace.home_' || one.number, one.extnamespace::text, true);
        EXECUTE pg_catalog.format('ALTER EXTENSION %I SET SCHEMA %I', one.extname, one.home);
    END LOOP;
END $millrace$;
"""
_MOVE_BACK: Final = """DO $millrace$
DECLARE
    one record;
BEGIN
    FOR one IN SELECT m.name, n.nspname
                 FROM pg_catalog.unnest({names}) WITH ORDINALITY AS m (name, number)
                 JOIN pg_catalog.pg_namespace AS n ON n.oid::text =
                      pg_catalog.current_setting('millrace.home_' || m.number, true) LOOP
        EXECUTE pg_catalog.format('ALTER EXTENSION %I SET SCHEMA %I', one.name, one.nspname);
    END LOOP;
END $millrace$;
"""


def rename_in_sql(naming: Naming, extensions: Mapping[str, str] | None = None) -> str:
    """Give the target's schemas the source's names; "" if the naming changes nothing.

    `extensions`: by name, their schemas on the source. One that the target has elsewhere is moved.
    """
    if not naming.renamed_schemas:
        return ""
    loops = (("m.new", f"'{_OURS}'"), ("m.old", f"'{OWN_PREFIX}'"), (f"'{_OURS}' || m.number", ""))
    homes = _moved(naming, extensions)
    move_in = _MOVE_IN.format(**_arrays(homes)) if homes else ""
    return ALONE + _block(naming, loops, "m.old") + move_in


def rename_back_sql(naming: Naming, extensions: Mapping[str, str] | None = None) -> str:
    """Give them their own names again, those too that were created meanwhile."""
    if not naming.renamed_schemas:
        return ""
    back = _block(
        naming,
        (("m.old", f"'{_OURS}'"), (f"'{_OURS}' || m.number", "")),
        "m.new",
    ) + _block(naming, ((f"'{OWN_PREFIX}' || m.number", ""),), "m.old")
    homes = _moved(naming, extensions)
    return back + (_MOVE_BACK.format(**_arrays(homes)) if homes else "")


def _moved(naming: Naming, extensions: Mapping[str, str] | None) -> dict[str, str]:
    """Those whose schema on the source has another name on the target."""
    homes = (extensions or {}).items()
    return {name: home for name, home in homes if home in naming.renamed_schemas}


def _arrays(homes: Mapping[str, str]) -> dict[str, str]:
    return {"names": _array(homes), "homes": _array(homes.values())}


def _block(naming: Naming, loops: tuple[tuple[str, str], ...], last: str) -> str:
    renames = "".join(
        _LOOP.format(now=now, becomes=f"{prefix} || m.number" if prefix else last)
        for now, prefix in loops
    )
    pairs = naming.renamed_schemas.items()
    return _BLOCK.format(
        olds=_array(old for old, _ in pairs), news=_array(new for _, new in pairs), renames=renames
    )


def _array(names: Any) -> str:
    return f"ARRAY[{', '.join(map(literal, names))}]"
