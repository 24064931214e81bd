"""What a run read from its source under the snapshot, kept for when that is gone.

Invariant: what comes back is equal to what was kept. So a process that continues when every row is
copied builds the same indexes and constraints, and restores the same lists, as one that still had
the snapshot, whatever happened to the source's schema since.
"""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from millrace.clone.directory import catalog_path
from millrace.filter.decide import Decision
from millrace.relation import SourceCatalog
from millrace.workdir.store import Store

T = TypeVar("T")

# When the run's own snapshot process was told that every row is copied.
GIVEN_BACK_AT: Final = "snapshot given back at"
_SKIPPED = "skip large objects"


def keep(store: Store, catalog: SourceCatalog, decision: Decision) -> None:
    """Before the run is pinned to its snapshot."""
    store.write_kept("catalog", encode_plain(catalog))
    store.write_kept("decision", encode_plain(decision))


def read_kept(store: Store) -> tuple[SourceCatalog, Decision] | None:
    """None for a run of a release that kept nothing."""
    catalog, decision = store.read_kept("catalog"), store.read_kept("decision")
    if catalog is None or decision is None:
        return None
    return decode_plain(SourceCatalog, catalog), decode_plain(Decision, decision)


def keep_skipped_large_objects(store: Store, *, is_skipped: bool) -> None:
    """Whether the run leaves out large objects, for who asks when it is over."""
    store.write_kept(_SKIPPED, str(int(is_skipped)))


def are_large_objects_skipped(directory: Path) -> bool:
    """Whether the run in a directory has left them out; False without a run."""
    path = catalog_path(directory)
    if not path.exists():
        return False
    store = Store(path)
    try:
        return store.read_kept(_SKIPPED) == "1"
    finally:
        store.close()


def encode_plain(value: Any) -> str:
    """A dataclass of plain values as JSON."""
    return json.dumps(_plain(value), separators=(",", ":"))


def decode_plain(kind: type[T], text: str) -> T:
    """The dataclass again, by the types of its fields; a field that is not there has its
    default, one that is unknown is passed over."""
    decoded: T = _typed(kind, json.loads(text))
    return decoded


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):  # keys may be tuples
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, Collection) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _typed(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _typed(hints[name], value[name]) for name in hints if name in value})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        present = [one for one in arguments if one is not types.NoneType]
        return None if value is None else _typed(present[0], value)
    if origin is tuple and arguments[-1:] == (...,):
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is tuple:
        return tuple(_typed(one, item) for one, item in zip(arguments, value, strict=True))
    if origin is frozenset:
        return frozenset(_typed(arguments[0], item) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_typed(arguments[0], key): _typed(arguments[1], item) for key, item in value}
    return value
