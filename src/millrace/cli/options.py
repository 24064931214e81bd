"""Options that several commands share.

Facts: names and meanings are pgcopydb's where it has them; each is declared once, so that an option
is the same in every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.apply.conflict import OnConflict
from millrace.cli import work_directory
from millrace.config.dsn import Dsn
from millrace.config.size import parse_size
from millrace.errors import ConfigError
from millrace.filter.rules import FilterRules, read_filters
from millrace.split.plan import SplitSettings
from millrace.spool.kind import SpoolKind

# Titles of groups of options in --help.
COPY = "Copy"
WHAT = "What is copied"
STREAM = "Changes"

Source = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_SOURCE",
        metavar="URI",
        help="The database to copy from: a libpq URI or keyword string.",
        show_default=False,
    ),
]
Target = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_TARGET",
        metavar="URI",
        help="The other database: a libpq URI or keyword string.",
        show_default=False,
    ),
]
Directory = Annotated[
    Path,
    typer.Option(
        "--dir",
        envvar="MILLRACE_DIR",
        help="Work directory of one run: its plan, its summary, Spark's log.",
        resolve_path=True,  # Spark's executors have a working directory of their own
        callback=work_directory.choose,
        show_default=work_directory.DEFAULT_SHOWN,
    ),
]
Filters = Annotated[
    Path | None,
    typer.Option(
        "--filters",
        "--filter",
        envvar="MILLRACE_FILTERS",
        metavar="FILE",
        help="Leave out schemas, tables, rows, columns, indexes, extensions: pgcopydb's INI "
        "file, with the sections table-where and exclude-column besides.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
RenameSchema = Annotated[
    list[str],
    typer.Option(
        "--rename-schema",
        metavar="OLD=NEW",
        help="Rename schema OLD of the source to NEW on the target; may be repeated.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
Requirements = Annotated[
    Path | None,
    typer.Option(
        envvar="MILLRACE_REQUIREMENTS",
        metavar="FILE",
        help="Create extensions in the versions that this JSON file says; `millrace list "
        "extensions --requirements` prints one.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]
DEFAULT_DIRECTORY = work_directory.DEFAULT
Master = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_MASTER",
        help="Spark master; by default local, with one slot per job.",
        show_default=False,
    ),
]
Conf = Annotated[
    list[str],
    typer.Option("--conf", metavar="K=V", help="A Spark setting; may be repeated."),
]
SlotName = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_SLOT_NAME",
        help="Name of the replication slot; by default the work directory's, or millrace.",
        show_default=False,
        rich_help_panel=STREAM,
    ),
]
IdentityFull = Annotated[
    bool,
    typer.Option(
        "--replica-identity-full",
        envvar="MILLRACE_REPLICA_IDENTITY_FULL",
        help="Set REPLICA IDENTITY FULL on tables of the source that have no replica identity, so "
        "that their updates and deletes can be followed; `stream cleanup` restores it.",
        rich_help_panel=STREAM,
    ),
]
Ddl = Annotated[
    bool,
    typer.Option(
        "--ddl",
        envvar="MILLRACE_DDL",
        help="Capture DDL on the source, by event triggers, and replay it on the target at its "
        "place in the stream. Needs a superuser of the source, or what a provider has instead. "
        "A stream keeps it: commands that continue one need not repeat it.",
        rich_help_panel=STREAM,
    ),
]
SlotTimeout = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_SLOT_TIMEOUT",
        metavar="SECONDS",
        min=0,
        help="Give up if the slot cannot be created within N seconds because transactions are "
        "open on the source; 0: wait as long as it takes.",
        rich_help_panel=STREAM,
    ),
]
Plugin = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_PLUGIN",
        help="Output plugin of the slot: pgoutput, test_decoding or wal2json; by default the work "
        "directory's, or pgoutput.",
        show_default=False,
        rich_help_panel=STREAM,
    ),
]
ApplyJobs = Annotated[
    int | None,
    typer.Option(
        envvar="MILLRACE_APPLY_JOBS",
        min=1,
        max=64,
        help="Connections that apply, each with tables of its own. With 1 no source transaction "
        "is ever seen in part; with more, tables may be at different transactions meanwhile. "
        "A stream keeps the number it started with, which is the default; 1 for a new stream.",
        rich_help_panel=STREAM,
    ),
]
Conflict = Annotated[
    OnConflict,
    typer.Option(
        "--on-conflict",
        envvar="MILLRACE_ON_CONFLICT",
        help="What to do when the row to change does not exist on the target, or the row to "
        "insert already does.",
        rich_help_panel=STREAM,
    ),
]
MaxSpool = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_MAX_SPOOL",
        metavar="SIZE",
        help="Stop reading from the source while the spool holds more than this; 0: no limit.",
        rich_help_panel=STREAM,
    ),
]
MaxSlotLag = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_MAX_SLOT_LAG",
        metavar="SIZE",
        help="Warn, or stop if the spool is full, when the slot makes the source keep more WAL "
        "than this; 0: no limit.",
        rich_help_panel=STREAM,
    ),
]
BatchesFrom = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_BATCHES_FROM",
        metavar="SIZE",
        help="Ask the source for batches of changes while it is this much WAL ahead, which is "
        "faster than the replication protocol; 0: never.",
        rich_help_panel=STREAM,
    ),
]
EndPos = Annotated[
    str,
    typer.Option(
        "--endpos",
        envvar="MILLRACE_ENDPOS",
        metavar="LSN",
        help="End when everything up to here is applied, and nothing after it.",
        show_default=False,
        rich_help_panel=STREAM,
    ),
]
Spool = Annotated[
    SpoolKind,
    typer.Option(
        envvar="MILLRACE_SPOOL",
        metavar="[files|table]",
        help="Where received changes are stored until they are applied: in files of --dir, or in "
        "tables of the target, for "
        "Spark executors that can't read --dir. Chosen when the stream begins.",
        rich_help_panel=STREAM,
    ),
]
KeepSpool = Annotated[
    bool,
    typer.Option(
        "--keep-spool",
        help="Keep applied changes in the spool.",
        rich_help_panel=STREAM,
    ),
]
SequenceInterval = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_SEQUENCE_INTERVAL",
        min=0.0,
        metavar="SECONDS",
        help="How often, in seconds, the target's sequences are advanced while following; 0: only "
        "at the end position, where they are set to the source's values.",
        rich_help_panel=STREAM,
    ),
]
AcceptUnfollowed = Annotated[
    list[str],
    typer.Option(
        "--accept-unfollowed",
        metavar="TABLE",
        help="A table, as schema.name, that may differ at the end because not all its changes "
        "are followed; may be repeated.",
        rich_help_panel=STREAM,
    ),
]
NoBinary = Annotated[
    bool,
    typer.Option(
        "--no-binary",
        envvar="MILLRACE_NO_BINARY",
        help="Receive values as text, even where all types could come in binary.",
        rich_help_panel=STREAM,
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        envvar="MILLRACE_METRICS_PORT",
        min=1,
        max=65535,
        help="Serve Prometheus metrics on this port.",
        show_default=False,
        rich_help_panel=STREAM,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_METRICS_HOST",
        metavar="ADDRESS",
        help="The address that metrics are served on; 0.0.0.0 or :: for all of this machine's.",
        rich_help_panel=STREAM,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[
    int,
    typer.Option("--verbose", "-v", "--notice", "--debug", "--trace", count=True, help="Log more."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log only warnings and errors.")]
LogJson = Annotated[
    bool, typer.Option("--log-json", envvar="MILLRACE_LOG_JSON", help="Log as JSON lines.")
]
SplitLarger = Annotated[
    str,
    typer.Option(
        "--split-tables-larger-than",
        "--split-at",
        envvar="MILLRACE_SPLIT_TABLES_LARGER_THAN",
        metavar="SIZE",
        help="Copy a table with more bytes than this in several parts at once: '250 MB', '2 GB', "
        "or plain bytes; 0 never splits.",
    ),
]
SplitMaxParts = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_SPLIT_MAX_PARTS",
        min=0,
        help="Maximum number of parts per table; 0: no limit.",
    ),
]
SkipSplitByCtid = Annotated[
    bool,
    typer.Option(
        "--skip-split-by-ctid",
        envvar="MILLRACE_SKIP_CTID_SPLIT",
        help="Never split a table that has no integer key.",
    ),
]


def parse_dsn(text: str, option: str) -> Dsn:
    """The connection string given for an option."""
    if not text:
        raise ConfigError(
            f"--{option} is missing",
            hint=f"give --{option} or set MILLRACE_{option.upper()} to a connection string such as "
            "postgresql://user@host:5432/database",
        )
    return Dsn.parse(text, what=f"--{option}")


def read_rules(path: Path | None) -> FilterRules:
    """The rules of the file given for --filters; none without one."""
    return read_filters(path) if path else FilterRules()


def split_settings(larger_than: str, max_parts: int, skip_by_ctid: bool) -> SplitSettings:
    """How tables are cut, from the three options that say it."""
    return SplitSettings(parse_size(larger_than), max_parts, not skip_by_ctid)
