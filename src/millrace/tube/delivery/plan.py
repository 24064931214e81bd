"""What a delivery is to do: values that travel to the workers.

Invariant: a plan names tables of the tube, or is for all of them; whatever is not settled here has
a default that is right for a tube of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError


@dataclass(frozen=True)
class TableDelivery:
    """How the rows of a table become documents, and where they go."""

    # A SELECT with the keys as $1, or python:module:function.
    enrich: str
    # As `millrace.sink.registry` reads it.
    sink: str
    # A SELECT that turns keys of the touched table, $1, into keys of the enriched one.
    fan_out: str = ""


@dataclass(frozen=True)
class DeliveryLimits:
    """How much at once, how often, how long."""

    # Ids that are enriched and written together.
    batch_ids: int = 20_000
    # Tries of an id alone until it is a dead letter.
    tries: int = 5
    # A collection of garbage is over when nothing was found for so long.
    settle_seconds: float = 30.0
    # Pauses between looks at an empty partition.
    least_pause_seconds: float = 0.01
    most_pause_seconds: float = 0.25
    # How long a source or sink that is away is waited for, if the delivery ends at an empty tube.
    away_seconds: float = 60.0
    # Rows of a page of a backfill, and the pause after each.
    page_rows: int = 20_000
    page_pause_seconds: float = 0.0


@dataclass(frozen=True)
class Delivery:
    """One tube, into one sink or several."""

    source: Dsn
    schema: str
    tube: str
    # By schema.name; "" is every other table.
    tables: dict[str, TableDelivery]
    until_empty: bool = False
    limits: DeliveryLimits = field(default_factory=DeliveryLimits)

    def require_table(self, label: str) -> TableDelivery:
        found = self.tables.get(label, self.tables.get(""))
        if found is None:
            raise ConfigError(
                f"nothing says how {label} is delivered",
                hint="give its enrichment and sink, or detach it from the tube",
            )
        return found
