"""`millrace copy ...`, `dump ...`, `restore ...`: the steps of a clone, one by one.

Invariant: each is the clone command with fewer steps; commands with the same --dir work on
the same run. So all of them take what a run is pinned to, besides what their own step needs.
"""

from __future__ import annotations

import typer

from millrace.cli.clone import clone, run_and_tell
from millrace.cli.command_options import CommandOptions, command
from millrace.clone import step
from millrace.clone.step import Step
from millrace.log import setup_logging

copy_app = typer.Typer(help="Do one step of a clone.", no_args_is_help=True)
dump_app = typer.Typer(help="Read from the source into the work directory.", no_args_is_help=True)
restore_app = typer.Typer(help="Write from the work directory to the target.", no_args_is_help=True)

EVERY_STEP = (
    "source",
    "target",
    "directory",
    "split_tables_larger_than",
    "split_max_parts",
    "skip_split_by_ctid",
    "filters",
    "no_owner",
    "no_acl",
    "no_comments",
    "no_tablespaces",
    "skip_extensions",
    "skip_ext_comments",
    "skip_collations",
    "snapshot",
    "not_consistent",
    "as_json",
    "verbose",
    "quiet",
    "log_json",
)
MOVING = ("fail_fast", "master", "conf")
BUILDING = ("index_jobs", "maintenance_work_mem")
CONSTRAINING = (*BUILDING, "restore_jobs")

HELP = """{text}

Works in the run of --dir: what is done already is left alone. Commands that share a
directory must read rows under the same snapshot: hold one with `millrace snapshot`, or give
--not-consistent if nobody writes to the source. Commands that copy no rows need none, once the
run has begun. Give all of them the same --filters, --no-owner and the like.
"""


def _add(app: typer.Typer, name: str, steps: frozenset[Step], text: str, *takes: str) -> None:
    """A command that does these steps in the work directory's run."""

    def body(asked: CommandOptions) -> None:
        setup_logging(verbose=asked.verbose, quiet=asked.quiet, as_json=asked.log_json)
        run_and_tell(asked, asked.settings(steps))

    body.__doc__ = HELP.format(text=text)
    app.command(name)(command(body, (*EVERY_STEP, *takes)))


copy_app.command("db")(clone)
_add(
    copy_app,
    "schema",
    step.SCHEMA,
    "Dump the schema and restore all of it, without rows.",
    "drop_if_exists",
    "requirements",
    *CONSTRAINING,
)
_add(
    copy_app,
    "data",
    step.DATA,
    "Copy all data into a restored schema, and build indexes.",
    "table_jobs",
    "large_objects_jobs",
    "skip_large_objects",
    "skip_vacuum",
    *CONSTRAINING,
    *MOVING,
)
_add(
    copy_app,
    "roles",
    frozenset({Step.ROLES}),
    "Create the source's roles that the target lacks.",
    "no_role_passwords",
)
_add(
    copy_app,
    "extensions",
    frozenset({Step.EXTENSIONS}),
    "Create the source's extensions.",
    "requirements",
)
_add(
    copy_app,
    "table-data",
    frozenset({Step.TABLE_DATA}),
    "Copy the rows of all tables.",
    "table_jobs",
    *MOVING,
)
for name in ("large-objects", "blobs"):
    _add(
        copy_app,
        name,
        frozenset({Step.LARGE_OBJECTS}),
        "Copy large objects.",
        "large_objects_jobs",
        *MOVING,
    )
_add(
    copy_app,
    "sequences",
    frozenset({Step.SEQUENCES}),
    "Set sequences to the source's values.",
)
_add(
    copy_app,
    "indexes",
    frozenset({Step.INDEXES}),
    "Build all indexes.",
    "fail_fast",
    *BUILDING,
)
_add(
    copy_app,
    "constraints",
    frozenset({Step.CONSTRAINTS}),
    "Add constraints on built indexes, then foreign keys.",
    "fail_fast",
    *CONSTRAINING,
)
_add(dump_app, "schema", frozenset({Step.DUMP}), "Dump the schema of the source.")
_add(
    restore_app,
    "pre-data",
    frozenset({Step.PRE_DATA}),
    "Restore what rows need: tables, types, functions.",
    "drop_if_exists",
    "requirements",
)
_add(
    restore_app,
    "post-data",
    frozenset({Step.INDEXES, Step.CONSTRAINTS, Step.POST_DATA}),
    "Restore indexes, constraints, triggers and all that is left.",
    "fail_fast",
    *CONSTRAINING,
)
