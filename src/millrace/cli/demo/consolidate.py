"""`millrace demo consolidate`: three busy databases in one, and a failure of one of them.

Invariant: what it claims it has compared: at the end each source equals its schemas on the target,
that of the source that was halted and mended included.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import psycopg
import typer

from millrace.cli import options
from millrace.cli.demo.shop import app, say
from millrace.clone.run import in_thread
from millrace.consolidate.config import read_config
from millrace.consolidate.status import SourceStatus, read_status
from millrace.demo.library import Authors, create_articles
from millrace.errors import MismatchError, ServerError
from millrace.log import LogSettings, setup_logging
from millrace.postgres.program.embedded import open_cluster
from millrace.spark.session import Engine, default_master

SOURCE_VERSION = 16
TARGET_VERSION = 18
# Replay workers, and tasks of a base copy.
SLOTS = 2 + 4
# How long any step may take on a busy machine.
STEP_SECONDS = 300.0
# Between two transactions of a writer: three of them beside all the other work, on two cores.
WRITER_PAUSE_SECONDS = 0.03
POLL_SECONDS = 0.2
MERGED = """
SELECT 'north', count(*), sum(revision) FROM north_public.article
UNION ALL SELECT 'south', count(*), sum(revision) FROM south_public.article
UNION ALL SELECT 'crm', count(*), sum(revision) FROM crm.article
"""


@app.command()
def consolidate(
    articles: Annotated[int, typer.Option(min=10, help="Articles of each source.")] = 5_000,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Bring three busy databases into one, break one of them, mend it, and prove all equal.

    Starts two throw-away servers with three sources, two of which are databases of one name, and a
    target. All are written to all the while. A column is added to one source, and arrives. A table
    is created there that the target has already: that source halts, the others continue. The
    statement is repaired with `ddl edit`. Needs no PostgreSQL, no Docker and no root.
    """
    setup_logging(verbose=verbose, quiet=quiet or not verbose)
    with ExitStack() as stack:
        folder = TemporaryDirectory(prefix="millrace-demo-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(folder))
        say(f"starting PostgreSQL {SOURCE_VERSION} and {TARGET_VERSION}")
        old = stack.enter_context(open_cluster(SOURCE_VERSION))
        new = stack.enter_context(open_cluster(TARGET_VERSION))
        sources = {
            "north": old.create_database("shop"),
            "south": new.create_database("shop"),
            "crm": old.create_database("crm"),
        }
        for uri in sources.values():
            create_articles(uri, articles)
        target = new.create_database("warehouse")
        path = directory / "sources.toml"
        path.write_text(render_config(target, sources))
        say(f"three sources with {articles:,} articles each; the file:\n\n{path.read_text()}")
        _Story(path, directory / "work", target, sources).tell(stack, articles)


def render_config(target: str, sources: dict[str, str]) -> str:
    """The file of the demo."""
    lines = [f"target = {json.dumps(target)}", "apply_jobs = 2"]
    for name, uri in sources.items():
        lines += ["", f"[source.{name}]", f"uri = {json.dumps(uri)}"]
        if name == "crm":
            lines.append('schemas = { public = "crm" }')
    return "\n".join([*lines, ""])


SHELF = "CREATE TABLE shelf (id int PRIMARY KEY, room text)"


class _Story:
    """The sources, while they are consolidated."""

    def __init__(self, path: Path, directory: Path, target: str, sources: dict[str, str]) -> None:
        self._path = path
        self._directory = directory
        self._target = target
        self._sources = sources
        self._config = read_config(path)
        self._running: Future[None] = Future()

    def tell(self, stack: ExitStack, articles: int) -> None:
        # Numba takes half a second: only those who need it wait for it.
        from millrace.consolidate.run import Consolidator

        engine = stack.enter_context(
            Engine(default_master(SLOTS), log_path=self._directory / "spark.log", streams=True)
        )
        stop = threading.Event()
        log = LogSettings(quiet=True)
        consolidator = Consolidator(self._path, self._directory, engine, log)
        with ExitStack() as writing:
            authors = [
                writing.enter_context(
                    Authors(uri, 2 * articles, pause_seconds=WRITER_PAUSE_SECONDS)
                )
                for uri in self._sources.values()
            ]
            self._running = in_thread(lambda: consolidator.run(stop))
            try:
                self._break_and_mend()
                writing.close()
                committed = sum(one.committed for one in authors)
                say(f"writers stopped after {committed:,} transactions")
                self._wait()
            finally:
                stop.set()
                # Whatever it has to say is said; servers are there until it has let go of them.
                self._running.exception()
        self._compare(engine)

    def _break_and_mend(self) -> None:
        from millrace.consolidate.ddl_control import decide_ddl
        from millrace.ddl.history import Action

        say("writers are at work; copying, one source after the other, and following")
        self._until(self._is_running, "running")
        self._wait()
        say(f"copied and followed: {self._merged()}")
        say("ALTER TABLE article ADD COLUMN topic, on south alone")
        _execute(self._sources["south"], "ALTER TABLE article ADD COLUMN topic text DEFAULT 'new'")
        self._until(self._has_topic, "the column to arrive")
        say("the column is on the target, at its place among the changes")
        say("somebody makes a table shelf in south's schema of the target; then south makes one")
        _execute(self._target, "CREATE TABLE south_public.shelf (id int)")
        _execute(self._sources["south"], f"{SHELF}; INSERT INTO shelf VALUES (1, 'cellar')")
        self._until(lambda: self._state("south") == "halted", "south to halt")
        error = next(one.error for one in self._status() if one.name == "south")
        say(f"south is halted: {error}")
        before = self._changes()
        self._until(
            lambda: all(self._changes()[name] > before[name] + 20 for name in ("north", "crm")),
            "the others to go on",
        )
        text = f"DROP TABLE shelf; {SHELF}"
        say(f'north and crm continue; millrace consolidate ddl edit south --text "{text}"')
        decide_ddl(self._config, self._directory, "south", Action.EDIT, text=text)
        self._until(lambda: self._state("south") == "following", "south to follow")

    def _has_topic(self) -> bool:
        with psycopg.connect(self._target) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_attribute WHERE attname = 'topic'"
                " AND attrelid = 'south_public.article'::regclass"
            ).fetchone()
        return row == (1,)

    def _status(self) -> list[SourceStatus]:
        return read_status(self._directory, self._config)

    def _is_running(self) -> bool:
        return any(one.is_running for one in self._status())

    def _state(self, name: str) -> str:
        return next(str(one.state) for one in self._status() if one.name == name)

    def _changes(self) -> dict[str, int]:
        return {one.name: one.changes or 0 for one in self._status()}

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        waited = threading.Event()
        for _ in range(int(STEP_SECONDS / POLL_SECONDS)):
            if is_so():
                return
            if self._running.done():
                self._running.result()
            waited.wait(POLL_SECONDS)
        raise ServerError(f"waited {STEP_SECONDS:.0f} s for {what}")

    def _wait(self) -> None:
        from millrace.consolidate.control import wait

        wait(self._config, self._directory, timeout_seconds=STEP_SECONDS)

    def _merged(self) -> str:
        with psycopg.connect(self._target) as connection:
            rows = connection.execute(MERGED).fetchall()
        return ", ".join(f"{name} {count:,} articles" for name, count, _ in rows)

    def _compare(self, engine: Engine) -> None:
        from millrace.consolidate.comparison import compare_sources

        rows = 0
        for name, found in compare_sources(self._config, self._directory, (), engine):
            differing = [one.label for one in found if not one.is_equal]
            if differing or not found:
                raise MismatchError(f"source {name} differs: {', '.join(differing)}")
            rows += sum(one.source.rows for one in found if one.source)
        say(f"one query on the target: {self._merged()}")
        say(f"equal: all {len(self._sources)} sources, {rows:,} rows, counts and checksums")


def _execute(uri: str, statement: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(statement.encode())
