"""Every failpoint that a clone passes, in the order in which it passes them, a stream, and a tube.

Invariant: the lists are the source's: `read_failpoints` finds the places by themselves, and a test
compares both. Who adds a place adds it here, and so it is killed at.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path

import millrace

STREAM_PACKAGES = ("apply", "follow", "receive", "spool")
PACKAGES = ("clone", "compare", "filter", "postgres", "snapshot", "spark", "split", "workdir")

# Before the data; in the driver.
BEFORE = (
    "run.pinned",
    "snapshot.opened",
    "run.opened",
    "schema.drafted",
    "schema.dumped",
    "plan.written",
    "run.planned",
    "roles.begin",
    "roles.done",
    "pre-data.begin",
    "pre-data.done",
    "shared-tables.begin",
    "shared-tables.done",
)
# In a Spark task.
TASK = (
    "copy.begin",
    "copy.middle",
    "copy.before-commit",
    "copy.after-commit",
    "large-objects.stored",
)
# In the driver, beside the tasks.
BESIDE = (
    "sequences.begin",
    "sequences.done",
    "index.begin",
    "index.done",
    "constraint.begin",
    "constraint.done",
    "vacuum.begin",
    "vacuum.done",
)
# After the data; in the driver.
AFTER = (
    "snapshot.given-back",
    "copy.checked",
    "attach.begin",
    "attach.done",
    "foreign-key.begin",
    "foreign-key.done",
    "post-data.begin",
    "post-data.done",
    "refresh.begin",
    "refresh.done",
    "properties.begin",
    "properties.done",
    "summary.written",
    "run.finished",
    "records.dropped",
)
FAILPOINTS = BEFORE + TASK + BESIDE + AFTER
# Only of a run whose snapshot nobody holds for it; `tests.torture.unprepared` kills there.
OWN_SNAPSHOT = ("snapshot.held",)
# Passed again and again: for each part, index, table.
REPEATED = TASK[:-1] + BESIDE[2:]

# In the process that receives.
RECEIVER = (
    "receive.before_sync",
    "spool.before_index",
    "receive.after_sync",
    "receive.before_feedback",
    "receive.after_feedback",
)
# In the Spark task that applies.
APPLY = (
    "apply.after_begin",
    "apply.after_delete",
    "apply.after_update",
    "apply.before_commit",
    "apply.after_commit",
)
# When a stream begins; tests/postgres/follow/test_slot_making.py kills at it.
BEGIN = ("slot.made",)
STREAM = RECEIVER + APPLY + BEGIN
# While a table is copied again: in the driver, and in the Spark task that copies.
# tests/spark/follow/test_table_sync.py kills at them.
SYNC = (
    "sync.taken_up",
    "sync.copying",
    "sync.published",
    "sync.snapshot",
    "sync.caught_up",
    "sync.before_followed",
    "sync.followed",
)
SYNC_TASK = ("sync.copy_begin", "sync.before_copy_commit", "sync.after_copy_commit")
# Where a tube is delivered, in the task of a worker: for each batch,
TUBE_BATCH = (
    "tube.after_draw",
    "tube.before_write",
    "tube.before_commit",
    "sink.before_commit",
    "tube.after_commit",
    "tube.before_delete",
    "tube.after_delete",
)
# while garbage is collected, while a scheduled backfill runs, and when a table has moved.
TUBE_GARBAGE = ("tube.before_list", "tube.before_forget", "tube.after_forget")
TUBE_BACKFILL = ("tube.before_page", "tube.after_page")
TUBE_MOVED = ("tube.after_forward",)
TUBE = TUBE_BATCH + TUBE_GARBAGE + TUBE_BACKFILL + TUBE_MOVED
TUBE_PACKAGES = ("tube", "sink")
# Of a sink that takes changes; tests/unit/test_sinks.py kills at it.
CHANGE_SINKS = ("sink.after_commit",)


def some_of(names: tuple[str, ...], dice: random.Random, share: int) -> tuple[str, ...]:
    """One in `share`, in their order. A campaign begins with each of them."""
    chosen = set(dice.sample(names, -(-len(names) // share)))
    return tuple(name for name in names if name in chosen)


def read_failpoints(packages: tuple[str, ...] = PACKAGES) -> set[str]:
    """The names in the source."""
    root = Path(millrace.__file__).parent
    files = [path for name in packages for path in sorted((root / name).rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in files]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # `restore(job, archive, entries, "pre-data")` passes f"{name}.begin" and f"{name}.done".
    restored = {_text(call.args[-1]) for call in calls if _name(call) == "restore" and call.args}
    names: set[str] = set()
    for call in calls:
        if _name(call) != "hit":
            continue
        (argument,) = call.args
        if isinstance(argument, ast.JoinedStr):
            suffix = _text(argument.values[-1])
            names |= {f"{name}{suffix}" for name in restored}
        else:
            names.add(_text(argument))
    return names


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant), ast.dump(node)
    return str(node.value)
