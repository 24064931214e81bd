"""Which kinds of sinks there are.

Invariant: a kind has one meaning. Ours are listed here; other packages add theirs with an entry
point in the group `millrace.sinks`, under a name that is not taken. An entry point is a function
that takes what follows `KIND:` and returns a sink.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from millrace.errors import ConfigError
from millrace.sink.protocol import ChangeSink, DocumentSink, Sink

GROUP: Final = "millrace.sinks"
# pyproject.toml says the same; a source tree that is not installed has no entry points.
OURS: Final = {
    "jsonl": "millrace.sink.jsonl:open_sink",
    "parquet": "millrace.sink.parquet:open_sink",
    "postgresql": "millrace.sink.postgres_table:open_sink",
    "print": "millrace.sink.print:open_sink",
    "tantivy": "millrace.sink.tantivy_index:open_sink",
}


def find_sinks() -> dict[str, EntryPoint]:
    """The kinds that this installation knows, by name."""
    ours = {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    return {point.name: point for point in entry_points(group=GROUP)} | ours


def open_sink(text: str) -> Sink:
    """The sink that `KIND` or `KIND:ADDRESS` names."""
    kind, _, address = text.partition(":")
    known = find_sinks()
    if kind not in known:
        raise ConfigError(
            f"there is no sink {kind!r}", hint=f"known are: {', '.join(sorted(known))}"
        )
    load: Callable[[str], Sink] = known[kind].load()
    return load(address)


def open_document_sink(text: str) -> DocumentSink:
    """The same, if it takes documents."""
    sink = open_sink(text)
    if not isinstance(sink, DocumentSink):
        sink.close()
        raise ConfigError(
            f"the sink {text.partition(':')[0]!r} takes changes, not documents",
            hint="choose another one, such as postgresql://.../database?table=NAME, jsonl:FILE or"
            " tantivy:DIR",
        )
    return sink


def open_change_sink(text: str) -> ChangeSink:
    """The same, if it takes change batches."""
    sink = open_sink(text)
    if not isinstance(sink, ChangeSink):
        sink.close()
        raise ConfigError(
            f"the sink {text.partition(':')[0]!r} takes documents, not changes",
            hint="choose another one, such as print or parquet:DIR",
        )
    return sink
