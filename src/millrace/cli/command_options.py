"""The options of a clone on the command line, whole or of a single step.

Invariant: an option has one name, one variable, one default and one meaning in all commands
that take it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import typer

from millrace.apply.conflict import OnConflict
from millrace.cli import options
from millrace.cli.options import COPY, STREAM, WHAT
from millrace.clone.directory import catalog_path, read_naming
from millrace.clone.schema.entries import SchemaSettings
from millrace.clone.schema.requirements import read_requirements
from millrace.clone.settings import CloneSettings
from millrace.clone.step import ALL, Step
from millrace.config.duration import parse_duration
from millrace.config.size import parse_size
from millrace.ddl.decide import Choices, why_not_replayed
from millrace.ddl.settings import DdlSettings
from millrace.errors import ConfigError, ConnectionLost
from millrace.follow.pause import PauseKind
from millrace.follow.settings import LOOPBACK, CompareMode, FollowSettings
from millrace.log import LogSettings
from millrace.lsn import parse_lsn
from millrace.name import Naming, parse_renames
from millrace.postgres.wire.connect import resolve
from millrace.route import Route
from millrace.spark.session import Engine, default_master, parse_conf
from millrace.split.plan import SplitSettings
from millrace.spool.kind import SpoolKind
from millrace.workdir.sentinel import Sentinel
from millrace.workdir.stream_binding import has_stream

log = logging.getLogger(__name__)


def _jobs(name: str, text: str, *aliases: str) -> Any:
    return typer.Option(
        f"--{name}",
        *aliases,
        envvar=f"MILLRACE_{name.upper().replace('-', '_')}",
        min=1,
        max=512,
        help=text,
        rich_help_panel=COPY,
    )


def _flag(name: str, text: str, *aliases: str) -> Any:
    return typer.Option(
        f"--{name}",
        *aliases,
        envvar=f"MILLRACE_{name.upper().replace('-', '_')}",
        help=text,
        rich_help_panel=WHAT,
    )


@dataclass(frozen=True)
class CommandOptions:
    """Every option of `millrace clone`; a single step takes some of them."""

    source: options.Source = ""
    target: options.Target = ""
    directory: options.Directory = options.DEFAULT_DIRECTORY
    table_jobs: Annotated[
        int, _jobs("table-jobs", "Parts copied at once, and tables vacuumed.", "--jobs")
    ] = 4
    index_jobs: Annotated[int, _jobs("index-jobs", "Indexes built at once, over all tables.")] = 4
    restore_jobs: Annotated[
        int, _jobs("restore-jobs", "Foreign keys added at once; no two that share a table.")
    ] = 4
    large_objects_jobs: Annotated[
        int, _jobs("large-objects-jobs", "Ranges of large objects copied at once.")
    ] = 4
    split_tables_larger_than: options.SplitLarger = "0"
    split_max_parts: options.SplitMaxParts = 0
    skip_split_by_ctid: options.SkipSplitByCtid = False
    filters: options.Filters = None
    rename_schema: options.RenameSchema = field(default_factory=list)
    drop_if_exists: Annotated[
        bool, _flag("drop-if-exists", "First drop from the target what the source has too.")
    ] = False
    roles: Annotated[bool, _flag("roles", "Copy roles that the target lacks.")] = False
    no_role_passwords: Annotated[
        bool, _flag("no-role-passwords", "Copy roles without passwords (needs no superuser).")
    ] = False
    no_owner: Annotated[bool, _flag("no-owner", "Leave everything to the connecting role.")] = False
    no_acl: Annotated[bool, _flag("no-acl", "Leave out GRANT and REVOKE.")] = False
    no_comments: Annotated[bool, _flag("no-comments", "Leave out comments.")] = False
    no_tablespaces: Annotated[
        bool, _flag("no-tablespaces", "Put everything into the default tablespace.")
    ] = False
    skip_large_objects: Annotated[
        bool, _flag("skip-large-objects", "Leave out large objects.", "--skip-blobs")
    ] = False
    skip_extensions: Annotated[bool, _flag("skip-extensions", "Do not create extensions.")] = False
    requirements: options.Requirements = None
    skip_ext_comments: Annotated[
        bool, _flag("skip-ext-comments", "Leave out comments on extensions.")
    ] = False
    skip_collations: Annotated[bool, _flag("skip-collations", "Do not create collations.")] = False
    skip_vacuum: Annotated[bool, _flag("skip-vacuum", "Do not VACUUM ANALYZE.")] = False
    no_statistics: Annotated[
        bool,
        _flag(
            "no-statistics",
            "ANALYZE every table; otherwise a target from version 18 on gets the source's "
            "statistics.",
        ),
    ] = False
    skip_db_properties: Annotated[
        bool, _flag("skip-db-properties", "Leave out ALTER DATABASE ... SET.")
    ] = False
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            envvar="MILLRACE_FAIL_FAST",
            help="Stop everything at the first error; otherwise other tables are finished first.",
        ),
    ] = False
    maintenance_work_mem: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_MAINTENANCE_WORK_MEM",
            metavar="SIZE",
            help="maintenance_work_mem on the target for each index build.",
            rich_help_panel=COPY,
        ),
    ] = "1GB"
    snapshot: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_SNAPSHOT",
            metavar="ID",
            help="Use a snapshot that another session of the source has exported and holds.",
            show_default=False,
        ),
    ] = ""
    snapshot_keep: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_SNAPSHOT_KEEP",
            metavar="TIME",
            help="How long the process that holds the snapshot waits for --resume when the run "
            "has stopped: 90s, 30min, 12h. It holds back vacuum on the source, and with --follow "
            "the slot's WAL.",
        ),
    ] = "12h"
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in the work directory: what is committed stays. Until every "
            "row is copied it needs its snapshot, which a process of its own holds for "
            "--snapshot-keep.",
        ),
    ] = False
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Empty the target of the run in the work directory, and start over."
        ),
    ] = False
    not_consistent: Annotated[
        bool,
        typer.Option(
            "--not-consistent",
            help="Continue under a new snapshot; correct only if nobody writes to the source.",
        ),
    ] = False
    all_databases: Annotated[
        bool,
        typer.Option(
            "--all-databases",
            help="Copy every database of the source server, one after the other, each under its "
            "own snapshot; databases that the target lacks are created.",
        ),
    ] = False
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Make a replication slot, copy its snapshot, then apply every change since, until "
            "--endpos or `millrace cutover`.",
            rich_help_panel=STREAM,
        ),
    ] = False
    slot_name: options.SlotName = ""
    slot_timeout: options.SlotTimeout = 0
    replica_identity_full: options.IdentityFull = False
    ddl: options.Ddl = False
    plugin: options.Plugin = ""
    spool: options.Spool = SpoolKind.FILES
    endpos: options.EndPos = ""
    apply_jobs: options.ApplyJobs = None
    on_conflict: options.Conflict = OnConflict.STOP
    max_spool: options.MaxSpool = "0"
    max_slot_lag: options.MaxSlotLag = "0"
    batches_from: options.BatchesFrom = "16MB"
    keep_spool: options.KeepSpool = False
    sequence_interval: options.SequenceInterval = 60.0
    accept_unfollowed: options.AcceptUnfollowed = field(default_factory=list)
    no_binary: options.NoBinary = False
    metrics_port: options.MetricsPort = None
    metrics_host: options.MetricsHost = LOOPBACK
    compare_jobs: Annotated[int, _jobs("compare-jobs", "Parts compared at once.")] = 4
    rows: Annotated[bool, typer.Option("--rows", help="List the rows that differ, by key.")] = False
    compare: Annotated[
        CompareMode,
        typer.Option(
            envvar="MILLRACE_COMPARE",
            metavar="[full|none]",
            help="What is compared at the end: every row of every table, or nothing.",
        ),
    ] = CompareMode.FULL
    pause: Annotated[
        PauseKind,
        typer.Option(
            metavar="[none|read-only|revoke-connect|pgbouncer]",
            help="Keep writers off the source: ALTER DATABASE ... SET "
            "default_transaction_read_only, or REVOKE CONNECT, each followed by ending the "
            "sessions; or PAUSE of pgbouncer. If the cut-over fails the source is given back as it "
            "was.",
        ),
    ] = PauseKind.NONE
    pause_command: Annotated[
        str,
        typer.Option(metavar="COMMAND", help="Run by the shell first, to stop the writers."),
    ] = ""
    resume_command: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="Run if the cut-over fails, to let the writers in again."
        ),
    ] = ""
    pgbouncer: Annotated[
        str,
        typer.Option(
            envvar="MILLRACE_PGBOUNCER",
            metavar="URI",
            help="Its admin console, for --pause pgbouncer.",
            show_default=False,
        ),
    ] = ""
    pgbouncer_database: Annotated[
        str,
        typer.Option(metavar="NAME", help="What pgbouncer calls the source; by default the same."),
    ] = ""
    master: options.Master = ""
    conf: options.Conf = field(default_factory=list)
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; change nothing anywhere.")
    ] = False
    as_json: options.AsJson = False
    verbose: options.Verbose = 0
    quiet: options.Quiet = False
    log_json: options.LogJson = False

    def settings(self, steps: frozenset[Step] = ALL) -> CloneSettings:
        """What the engine has to know, checked as far as no server is needed."""
        self._refuse_contradictions()
        rules = options.read_rules(self.filters)
        if self.skip_extensions and rules.of("include-only-extension"):
            raise ConfigError(
                "--skip-extensions and [include-only-extension] cannot be used together"
            )
        if self.skip_extensions and self.requirements:
            raise ConfigError("--skip-extensions and --requirements cannot be used together")
        if self.rename_schema and self.all_databases:
            raise ConfigError("--rename-schema and --all-databases cannot be used together")
        return CloneSettings(
            Route(
                source=options.parse_dsn(self.source, "source"),
                target=options.parse_dsn(self.target, "target"),
                directory=self.directory,
                filters=rules,
                naming=parse_renames(self.rename_schema),
            ),
            table_jobs=self.table_jobs,
            index_jobs=self.index_jobs,
            restore_jobs=self.restore_jobs,
            large_objects_jobs=self.large_objects_jobs,
            split=self._split(),
            schema=self._schema(),
            requirements=read_requirements(self.requirements) if self.requirements else {},
            drop_if_exists=self.drop_if_exists,
            roles=self.roles or steps == {Step.ROLES},
            role_passwords=not self.no_role_passwords,
            skip_large_objects=self.skip_large_objects,
            skip_vacuum=self.skip_vacuum,
            carries_statistics=not self.no_statistics and steps == ALL,
            skip_database_properties=self.skip_db_properties,
            fail_fast=self.fail_fast,
            snapshot=self.snapshot or None,
            snapshot_keep_seconds=parse_duration(self.snapshot_keep) if steps == ALL else None,
            slot_name=self.slot_name,
            plugin=self.plugin,
            maintenance_work_mem=parse_memory(self.maintenance_work_mem),
            steps=steps,
            resume=self._resumes(),
            restart=self.restart,
            not_consistent=self.not_consistent,
        )

    def _refuse_contradictions(self) -> None:
        for one, other in (
            ("resume", "restart"),
            ("resume", "is_dry_run"),
            ("restart", "is_dry_run"),
            ("restart", "not_consistent"),
        ):
            if getattr(self, one, False) and getattr(self, other, False):
                names = [f"--{name.removeprefix('is_').replace('_', '-')}" for name in (one, other)]
                raise ConfigError(f"{names[0]} and {names[1]} cannot be used together")

    def follow_settings(self, *, needs_source: bool = True) -> FollowSettings:
        """What a stream has to know; looks up what the filters leave out of it. Who applies what is
        spooled can do without the source, if there are no filters."""
        # Numba takes half a second: only those who need it wait for it.
        from millrace.follow.setup import read_left

        source = options.parse_dsn(self.source, "source")
        try:
            source = resolve(source)
        except ConnectionLost as error:
            if needs_source or self.filters is not None:
                raise
            log.warning(
                "%s; what was received is applied all the same. Whether the source still has it is "
                "not checked, tables that came later are not looked for, sequences are not "
                "advanced, and an end position can't be reached without it",
                error,
            )
        return FollowSettings(
            Route(
                source=source,
                target=resolve(options.parse_dsn(self.target, "target")),
                directory=self.directory,
                filters=options.read_rules(self.filters),
                naming=self._naming(),
            ),
            endpos=parse_lsn(self.endpos) if self.endpos else None,
            apply_jobs=self.apply_jobs,
            on_conflict=self.on_conflict,
            max_spool_bytes=parse_size(self.max_spool) or None,
            max_slot_lag_bytes=parse_size(self.max_slot_lag) or None,
            batches_from_bytes=parse_size(self.batches_from),
            binary=not self.no_binary,
            keep_spool=self.keep_spool,
            sequence_seconds=self.sequence_interval,
            left=read_left(source, options.read_rules(self.filters)),
            accepted=frozenset(self.accept_unfollowed),
            ddl=self._ddl(),
            log=LogSettings(self.verbose, self.quiet, self.log_json),
        )

    def engine(self, slots: int | None = None, *, streams: bool = False) -> Engine:
        """Spark with a slot for each job; not started yet."""
        if slots is None:
            slots = self.table_jobs + (0 if self.skip_large_objects else self.large_objects_jobs)
            slots = max(slots, self.apply_workers() + 1)
        master = self.master or default_master(slots)
        log_path = self.directory / "spark.log"
        return Engine(master, parse_conf(self.conf), log_path, streams=streams or self.follow)

    def apply_workers(self) -> int:
        """As many as requested, or as the stream began with; that number of tasks runs at once."""
        if self.apply_jobs is not None:
            return self.apply_jobs
        if not has_stream(self.directory):
            return 1
        with Sentinel(self.directory) as sentinel:
            return sentinel.read().apply_jobs or 1

    def _ddl(self) -> DdlSettings | None:
        """Everything is replayed: what is on the source is on the target. A stream that has begun
        with it continues so, whatever command continues it."""
        if not (self.ddl or self._keeps_ddl()):
            return None
        rules = options.read_rules(self.filters)
        if why_not := why_not_replayed(rules):
            raise ConfigError(f"--ddl can't be used with these filters: {why_not}")
        return DdlSettings("", Choices(rules, has_all_kinds=True, shares_extensions=False))

    def _keeps_ddl(self) -> bool:
        if self.restart or not has_stream(self.directory):
            return False
        with Sentinel(self.directory) as sentinel:
            setup = sentinel.read_setup()
        return setup is not None and setup.ddl

    def _resumes(self) -> bool:
        """Scripts give --resume --not-consistent the first time, too: there is nothing to resume
        then, and no snapshot that could be missing."""
        return self.resume and not (
            self.not_consistent and not catalog_path(self.directory).exists()
        )

    def _naming(self) -> Naming:
        """The one given, or that of the copy."""
        return (
            parse_renames(self.rename_schema) if self.rename_schema else read_naming(self.directory)
        )

    def _split(self) -> SplitSettings:
        return options.split_settings(
            self.split_tables_larger_than, self.split_max_parts, self.skip_split_by_ctid
        )

    def _schema(self) -> SchemaSettings:
        return SchemaSettings(
            no_owner=self.no_owner,
            no_acl=self.no_acl,
            no_comments=self.no_comments,
            no_tablespaces=self.no_tablespaces,
            skip_extensions=self.skip_extensions,
            skip_extension_comments=self.skip_ext_comments,
            skip_collations=self.skip_collations,
        )


# What only the end of a stream takes.
_NOT_OF_CLONE = (
    "compare_jobs", "rows", "compare", "pause", "pause_command", "resume_command", "pgbouncer",
    "pgbouncer_database",
)  # fmt: skip
EVERY = tuple(one.name for one in fields(CommandOptions) if one.name not in _NOT_OF_CLONE)


def command(
    body: Callable[[CommandOptions], None], names: tuple[str, ...] = EVERY
) -> Callable[..., None]:
    """A command with these options, for typer; the body gets them as one CommandOptions."""
    hints = get_type_hints(CommandOptions, include_extras=True)
    taken = [one for one in fields(CommandOptions) if one.name in names]

    def run(**given: Any) -> None:
        body(CommandOptions(**given))

    run.__doc__ = body.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(one),
                annotation=hints[one.name],
            )
            for one in taken
        ]
    )
    return run


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def parse_memory(text: str) -> str:
    """A size in PostgreSQL's own notation, in kilobytes."""
    return f"{max(1024, parse_size(text) // 1024)}kB"
