"""Every failpoint that a clone passes, in the order in which it passes them.

Invariant: the list is the source's: `read_failpoints` finds the places by themselves, and a test
compares both. Who adds a place adds it here, and so it is killed at.
"""

from __future__ import annotations

import ast
from pathlib import Path

import millrace

PACKAGES = ("clone", "postgres", "snapshot", "spark", "workdir")
# Of `postgres`, what the stream uses is proved elsewhere.
OTHERS = ("replication.py", "pgoutput.py")

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
    "copy.checked",
    "attach.begin",
    "attach.done",
    "foreign-key.begin",
    "foreign-key.done",
    "post-data.begin",
    "post-data.done",
    "properties.begin",
    "properties.done",
    "summary.written",
    "run.finished",
    "records.dropped",
)
FAILPOINTS = BEFORE + TASK + BESIDE + AFTER
# Passed again and again: for each part, index, table.
REPEATED = TASK[:-1] + BESIDE[2:]


def read_failpoints() -> set[str]:
    """The names in the source."""
    root = Path(millrace.__file__).parent
    files = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in files if path.name not in OTHERS]
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
