"""Where the rows of one table go: its enrichment and its sink.

Invariant: an outlet that met an error is closed and opened anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from millrace.errors import ConfigError
from millrace.sink.document import DocumentBatch, DocumentOrigin, Version
from millrace.sink.protocol import DocumentSink
from millrace.sink.registry import open_document_sink
from millrace.tube.delivery.enrich import CallableEnrichment, Enrichment, SqlEnrichment, enrich
from millrace.tube.delivery.fan_out import FanOut
from millrace.tube.delivery.plan import TableDelivery
from millrace.tube.delivery.tube import Connection, Tube, TubeTable

_PYTHON = "python:"


@dataclass(frozen=True)
class Outlet:
    """Open, until it is closed."""

    table: TubeTable
    enrichment: Enrichment
    sink: DocumentSink
    fan_out: FanOut | None

    def enrich(
        self, version: Version, shards: dict[str, int], *, are_documents: bool = False
    ) -> DocumentBatch:
        """Documents of touched keys, or of these documents."""
        if self.fan_out is not None and not are_documents:
            shards = self.fan_out.parents(shards)
        return enrich(self.enrichment, self.table, version, shards)

    def close(self) -> None:
        self.sink.close()


def open_outlet(
    connection: Connection, tube: Tube, table: TubeTable, plan: TableDelivery
) -> Outlet:
    source: Enrichment
    fan_out = FanOut(connection, plan.fan_out, table) if plan.fan_out else None
    if fan_out is not None:
        # What is enriched are parents, by a key of one column.
        table = replace(table, key=("parent",), key_types=(fan_out.parent_type,))
    if plan.enrich.startswith(_PYTHON):
        source = CallableEnrichment(load_function(plan.enrich.removeprefix(_PYTHON)), table)
    else:
        source = SqlEnrichment(connection, plan.enrich, table)
    sink = open_document_sink(plan.sink)
    try:
        sink.begin_documents(DocumentOrigin(tube.name, table.label, source.key), source.schema)
    except BaseException:
        sink.close()
        raise
    return Outlet(table, source, sink, fan_out)


def load_function(text: str) -> Callable[..., Any]:
    """What `module:function` names."""
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the enrichment python:{text} can't be imported: {error}",
            hint="write python:module:function, and put the module on PYTHONPATH",
        ) from error
    if not callable(found):
        raise ConfigError(f"the enrichment python:{text} is no function")
    function: Callable[..., Any] = found
    return function
