"""A comparison under a naming: the target as it is while it has the names of the source.

Invariant: nothing but names is taken as equal: a search path that was mapped with the schemas. What
the target has besides, in schemas that are none of the source's, is not compared, and named.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.compare.filtered import without
from millrace.name import Naming
from millrace.postgres.catalog.describe import DescribedObject, Description, Value
from millrace.postgres.schema_rename import OWN_PREFIX


def map_settings(source: Description, naming: Naming) -> Description:
    """The source, with the settings of its functions as the target has them."""
    if naming.is_identity:
        return source
    return replace(
        source, objects={key: _mapped(one, naming) for key, one in source.objects.items()}
    )


def without_others(source: Description, target: Description) -> tuple[Description, list[str]]:
    """(the target without what others have there, the names of their schemas).

    That is the schemas that are none of the source's. If there are any, what belongs to the whole
    database and is on the target alone may be theirs, too.
    """
    others = {key for key in target.objects if key[0] == "schema" and key not in source.objects}
    if not others:
        return target, []
    wide = {
        key
        for key, one in target.objects.items()
        if one.parent is None and key not in source.objects
    }
    # Where the target's own name was in the way, it was renamed for the comparison.
    names = [name for _, name in sorted(others) if not name.startswith(OWN_PREFIX)]
    return without(target, others | wide), names


def _mapped(one: DescribedObject, naming: Naming) -> DescribedObject:
    settings = one.properties.get("settings")
    if not isinstance(settings, list):
        return one
    mapped: Value = [naming.setting(setting) for setting in settings]
    return replace(one, properties={**one.properties, "settings": mapped})
