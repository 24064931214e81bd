"""`millrace copy ...`, `dump ...`, `restore ...`: the steps of a clone, one by one.

Invariant: each is the clone command with fewer steps; commands with the same --dir work on
the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from millrace.cli import options
from millrace.cli.display import open_display, print_summary
from millrace.clone import step
from millrace.clone.run import clone as run_clone
from millrace.clone.schema import SchemaSettings
from millrace.clone.settings import CloneSettings
from millrace.clone.split import SplitSettings
from millrace.clone.step import Step
from millrace.config.size import parse_size
from millrace.log import setup_logging
from millrace.spark.session import Engine, default_master, parse_conf

copy_app = typer.Typer(help="Do one step of a clone.", no_args_is_help=True)
dump_app = typer.Typer(help="Read from the source into the work directory.", no_args_is_help=True)
restore_app = typer.Typer(help="Write from the work directory to the target.", no_args_is_help=True)


def _command(steps: frozenset[Step], text: str, **fixed: bool) -> Callable[..., None]:
    """A command that does these steps in the work directory's run."""

    def command(
        source: options.Source = "",
        target: options.Target = "",
        directory: options.Directory = options.DEFAULT_DIRECTORY,
        table_jobs: Annotated[int, typer.Option(min=1, help="Parts copied at once.")] = 4,
        index_jobs: Annotated[int, typer.Option(min=1, help="Indexes built at once.")] = 4,
        split_tables_larger_than: options.SplitLarger = "0",
        split_max_parts: options.SplitMaxParts = 0,
        skip_split_by_ctid: options.SkipSplitByCtid = False,
        no_owner: Annotated[bool, typer.Option("--no-owner", help="Leave out owners.")] = False,
        no_acl: Annotated[bool, typer.Option("--no-acl", help="Leave out grants.")] = False,
        snapshot: Annotated[
            str, typer.Option(metavar="ID", help="Use this exported snapshot.")
        ] = "",
        not_consistent: Annotated[
            bool,
            typer.Option("--not-consistent", help="Nobody writes to the source: any snapshot."),
        ] = False,
        master: options.Master = "",
        conf: options.Conf = [],  # noqa: B006 (typer's way)
        verbose: options.Verbose = 0,
        quiet: options.Quiet = False,
    ) -> None:
        setup_logging(verbose=verbose, quiet=quiet)
        settings = CloneSettings(
            source=options.parse_dsn(source, "source"),
            target=options.parse_dsn(target, "target"),
            directory=directory,
            table_jobs=table_jobs,
            index_jobs=index_jobs,
            large_objects_jobs=table_jobs,
            restore_jobs=index_jobs,
            split=SplitSettings(
                parse_size(split_tables_larger_than), split_max_parts, not skip_split_by_ctid
            ),
            schema=SchemaSettings(no_owner=no_owner, no_acl=no_acl),
            steps=steps,
            roles=fixed.get("roles", False),
            snapshot=snapshot or None,
            not_consistent=not_consistent,
        )
        engine = Engine(
            master or default_master(2 * table_jobs), parse_conf(conf), directory / "spark.log"
        )
        with engine, open_display(quiet=quiet) as display:
            result = run_clone(settings, engine, display)
        if result.summary is not None and not quiet:
            print_summary(result.summary)

    command.__doc__ = f"""{text}

    Works in the run of --dir: what is done already is left alone. Commands that share a
    directory must read the same snapshot: hold one with `millrace snapshot`, or say
    --not-consistent if nobody writes to the source.
    """
    return command


for _name, _steps, _text in (
    ("schema", step.SCHEMA, "Dump the schema and restore all of it, without rows."),
    ("data", step.DATA, "Copy all data into a restored schema, and build indexes."),
    ("extensions", frozenset({Step.EXTENSIONS}), "Create the source's extensions."),
    ("table-data", frozenset({Step.TABLE_DATA}), "Copy the rows of all tables."),
    ("large-objects", frozenset({Step.LARGE_OBJECTS}), "Copy large objects."),
    ("sequences", frozenset({Step.SEQUENCES}), "Set sequences as they stand on the source."),
    ("indexes", frozenset({Step.INDEXES}), "Build all indexes."),
    (
        "constraints",
        frozenset({Step.CONSTRAINTS}),
        "Add constraints on built indexes, then foreign keys.",
    ),
):
    copy_app.command(_name)(_command(_steps, _text))
copy_app.command("roles")(
    _command(
        frozenset({Step.ROLES}), "Create the source's roles that the target lacks.", roles=True
    )
)
dump_app.command("schema")(_command(frozenset({Step.DUMP}), "Dump the schema of the source."))
restore_app.command("pre-data")(
    _command(frozenset({Step.PRE_DATA}), "Restore what rows need: tables, types, functions.")
)
restore_app.command("post-data")(
    _command(
        frozenset({Step.INDEXES, Step.CONSTRAINTS, Step.POST_DATA}),
        "Restore indexes, constraints, triggers and all that is left.",
    )
)
