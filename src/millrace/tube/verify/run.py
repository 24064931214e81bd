"""`millrace tube verify`: both sides of a tube, sink by sink.

Invariant: a report without differences means that every document is what its row says, but for ids
that are still in the tube, which it counts; and that every write to the tables leaves a pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from millrace.engine import Engine
from millrace.postgres.quote import ident
from millrace.postgres.wire.connect import translated
from millrace.tube.delivery.epoch import settle_epoch
from millrace.tube.delivery.plan import Delivery
from millrace.tube.delivery.session import require_session
from millrace.tube.delivery.tube import Tube, find_tube, open_reader
from millrace.tube.verify.attachment import Problem, find_problems
from millrace.tube.verify.task import SinkFindings, VerifyTask, verify_sink


@dataclass(frozen=True)
class VerifyReport:
    """What was found."""

    tube: str
    is_dry_run: bool
    # Of attachments.
    problems: tuple[Problem, ...]
    sinks: tuple[SinkFindings, ...]

    @property
    def is_equal(self) -> bool:
        return not self.problems and not any(one.differences or one.is_ahead for one in self.sinks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tube": self.tube,
            "equal": self.is_equal,
            "dry_run": self.is_dry_run,
            "problems": [asdict(one) for one in self.problems],
            "sinks": [asdict(one) | {"differences": one.differences} for one in self.sinks],
        }


def verify(
    delivery: Delivery, engine: Engine, *, is_dry_run: bool = False, samples: int = 10
) -> VerifyReport:
    """Look at attachments and documents; touch what differs, unless it is a dry run."""
    with open_reader(delivery.source, delivery.tube) as source:
        require_session(source, delivery.source)
        tube = find_tube(source, delivery.tube, delivery.schema or None)
        settle_epoch(source, tube.schema)
        problems = find_problems(source, tube)
        if problems and not is_dry_run:
            # Later partitions get the triggers of the others; nobody waits for that.
            with translated("covering later partitions"):
                source.execute(
                    f"SELECT {ident(tube.schema)}.tube_partitions_refresh(%s)".encode(),
                    (tube.name,),
                )
    delivery = replace(delivery, schema=tube.schema)
    unreadable = {one.table for one in problems if one.is_unreadable}
    engine.start()
    found = [
        engine.call(
            verify_sink,
            VerifyTask(delivery, sink, labels, is_dry_run=is_dry_run, samples=samples),
            f"tube {tube.name} verify",
        )
        for sink, labels in _by_sink(delivery, tube)
        if not unreadable & set(labels)
    ]
    return VerifyReport(tube.name, is_dry_run, tuple(problems), tuple(found))


def _by_sink(delivery: Delivery, tube: Tube) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Tables that share a sink are looked at together: each holds a part of it."""
    sinks: dict[str, list[str]] = {}
    for table in tube.tables:
        plan = delivery.require_table(table.label)
        sinks.setdefault(plan.sink, []).append(table.label)
    yield from ((sink, tuple(labels)) for sink, labels in sinks.items())
