"""Options that several commands share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from millrace.clone.filter import FilterRules, read_filters
from millrace.clone.split import SplitSettings
from millrace.config.dsn import Dsn
from millrace.config.size import parse_size
from millrace.errors import ConfigError
from millrace.stream.settings import OnConflict, SpoolKind

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
DEFAULT_DIRECTORY = Path(tempfile.gettempdir()) / "millrace"
Master = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_MASTER",
        help="Spark master; by default local, with a slot for each job asked for.",
        show_default=False,
    ),
]
Conf = Annotated[
    list[str],
    typer.Option("--conf", metavar="K=V", help="A Spark setting; may be given again."),
]
SlotName = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_SLOT_NAME",
        help="Name of the replication slot to make.",
        rich_help_panel=STREAM,
    ),
]
Plugin = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_PLUGIN",
        help="Output plugin of the slot: pgoutput, test_decoding or wal2json.",
        rich_help_panel=STREAM,
    ),
]
ApplyJobs = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_APPLY_JOBS",
        min=1,
        max=64,
        help="Connections that apply, each with tables of its own. With 1 no source transaction "
        "is ever seen in part; with more, tables may be at different transactions meanwhile. A "
        "stream keeps the number it began with.",
        rich_help_panel=STREAM,
    ),
]
Conflict = Annotated[
    OnConflict,
    typer.Option(
        "--on-conflict",
        envvar="MILLRACE_ON_CONFLICT",
        help="What to do about a change whose row is not there, or whose place is taken.",
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
        help="Where received changes wait: in files of --dir, or in a table of the target, for "
        "Spark executors that can't read --dir. Chosen when the stream begins.",
        rich_help_panel=STREAM,
    ),
]
KeepSpool = Annotated[
    bool,
    typer.Option(
        "--keep-spool",
        help="Do not remove what is applied from the spool.",
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more.")]
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
        help="At most so many parts per table; 0: no limit.",
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
