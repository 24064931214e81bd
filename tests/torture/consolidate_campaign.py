"""Ten sources in one target: whatever happens to them, to the process and to the servers.

Invariant: after every round each source equals its schemas, structure and rows. The process ends
only as what was done to it allows, and no source is halted or failed but by what was done to it.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tests.fixtures.wait import wait_for
from tests.torture.consolidate_stage import ConsolidateStage, Source
from tests.torture.figures import ConsolidateFigures
from tests.torture.follow_stage import insist
from tests.torture.ingredients import Incident
from tests.torture.interrupt import CampaignFailed
from tests.torture.pair import Verdict
from tests.torture.program import Program
from tests.torture.random_ddl import choose
from tests.torture.schedule import Kind

from millrace.compare.run import compare_schema
from millrace.compare.schema import POSITION_PROPERTIES
from millrace.consolidate.comparison import compare_sources
from millrace.consolidate.control import settings_of
from millrace.consolidate.registry import SourceState
from millrace.consolidate.status import read_status
from millrace.engine import Engine
from millrace.errors import ServerError
from millrace.workdir.lock import read_holder

# How the process may end; what is not here it survives.
ENDS = {
    Kind.KILL_DRIVER: -signal.SIGKILL,
    Kind.KILL_JVM: ServerError.exit_code,
    Kind.TERMINATE: 143,
}
KINDS = (*ENDS, Kind.KILL_WORKER, Kind.KILL_RECEIVER, Kind.CUT_SOURCE, Kind.CUT_TARGET,
         Kind.RESTART_SOURCE, Kind.CRASH_SOURCE, Kind.RESTART_TARGET)  # fmt: skip
# Between two comparisons.
INCIDENTS_PER_ROUND = 4
VICTIM_SECONDS = 20.0
# How many changes of structure come together.
DDL_PER_INCIDENT = 12


class ConsolidateCampaign:
    """One consolidation, and what became of it."""

    def __init__(
        self,
        stage: ConsolidateStage,
        engine: Engine,
        seed: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.stage = stage
        self.engine = engine
        self.figures = ConsolidateFigures(seed, sources=len(stage.sources))
        self._say = say
        self._dice = random.Random(seed)
        self._program: Program | None = None
        # In the file; the last one comes later.
        self._names = list(stage.sources)[:-1]
        self._kinds: list[Kind] = []
        self._incidents: list[Callable[[], None]] = []

    def run(self, seconds: float) -> None:
        """Round after round, for so long once all are copied; raises CampaignFailed unless all end
        equal."""
        stage = self.stage
        stage.write_config(self._names)
        for source in stage.sources.values():
            source.workload.resume(gentle=True)
        self._kill_while_copying()
        self._get_on()
        ends_at = time.monotonic() + seconds
        self._say(f"{len(self._names)} sources are copied, and followed")
        while time.monotonic() < ends_at:
            self._round(ends_at)
        self._stop()

    def _round(self, ends_at: float) -> None:
        figures, sources = self.figures, self.stage.sources.values()
        began, written = time.monotonic(), sum(one.workload.committed for one in sources)
        changed = sum(one.workload.rows_changed for one in sources)
        for source in sources:
            source.workload.resume(gentle=False)
        for _ in range(INCIDENTS_PER_ROUND):
            self._next_incident()()
            self._interrupt(self._next_kind())
            self._get_on()
            if time.monotonic() > ends_at:
                break
        for source in sources:
            source.workload.pause()
        self._present()
        self.stage.command("wait")
        verdict = self._compare()
        figures.judge(verdict)
        figures.rounds += 1
        figures.processes = len(self.stage.programs)
        figures.transactions_meanwhile += sum(one.workload.committed for one in sources) - written
        figures.rows_changed += sum(one.workload.rows_changed for one in sources) - changed
        figures.seconds += time.monotonic() - began
        self._say(
            f"round {figures.rounds} is equal: {len(self._names)} sources, {verdict.tables} tables,"
            f" {verdict.rows:,} rows; so far {figures.total} interruptions,"
            f" {figures.transactions_meanwhile:,} transactions, 0 differences"
        )

    # What happens to the process and the servers

    def _next_kind(self) -> Kind:
        """Each before any comes again."""
        if not self._kinds:
            self._kinds = self._dice.sample(KINDS, len(KINDS))
        return self._kinds.pop()

    def _interrupt(self, kind: Kind) -> None:
        stage, program = self.stage, self._present()
        server = self._dice.choice(list(stage.servers))
        if kind is Kind.CUT_TARGET:
            stage.proxies["target"].cut()
        elif kind is Kind.CUT_SOURCE:
            stage.proxies[server].cut()
        elif kind is Kind.RESTART_TARGET:
            stage.target.restart("immediate")
        elif kind in (Kind.RESTART_SOURCE, Kind.CRASH_SOURCE):
            stage.servers[server].restart("fast" if kind is Kind.RESTART_SOURCE else "immediate")
        elif not self._hit(program, kind):
            self.figures.not_reached += 1
            return
        self.figures.interruptions[kind] += 1
        self._say(f"  {kind}")

    def _hit(self, program: Program, kind: Kind) -> bool:
        """One of its processes; False if there is none."""
        if kind is Kind.TERMINATE:
            program.process.send_signal(signal.SIGTERM)
        elif kind is Kind.KILL_DRIVER:
            program.process.kill()
        else:
            find = {
                Kind.KILL_JVM: lambda: [one for one in (program.jvm(),) if one],
                Kind.KILL_WORKER: program.workers,
                Kind.KILL_RECEIVER: program.forked,
            }[kind]
            deadline = time.monotonic() + VICTIM_SECONDS
            while not (found := find()) and time.monotonic() < deadline:
                time.sleep(0.05)
            if not found:
                return False
            self._dice.choice(found).kill()
        if kind in ENDS:
            self._end(ENDS[kind])
        return True

    def _present(self) -> Program:
        """The process, started if there is none."""
        if self._program is None:
            program = self._program = self.stage.launch("run")
            wait_for(
                lambda: (
                    read_holder(self.stage.work) == program.process.pid
                    or program.exit_code is not None
                ),
                "it runs",
            )
        if self._program.exit_code is not None:
            raise CampaignFailed(
                f"it ended with {self._program.exit_code}: {self._program.printed()[-2000:]}"
            )
        return self._program

    def _end(self, code: int) -> None:
        """It must, and so."""
        program, self._program = self._program, None
        assert program is not None
        found = program.wait()
        if found != code or "Traceback" in program.printed():
            raise CampaignFailed(f"exit code {found}, not {code}: {program.printed()[-2000:]}")
        wait_for(lambda: not program.left_behind(), "its processes are gone")

    def _stop(self) -> None:
        self._present().process.send_signal(signal.SIGTERM)
        self._end(ENDS[Kind.TERMINATE])

    def _get_on(self, *but: str) -> None:
        """What is committed now on each source comes to the target."""
        self._present()
        for name in self._names:
            if name in but:
                continue
            goal = self.stage.sources[name].written()
            self._wait_for(lambda name=name, goal=goal: self.stage.applied(name) >= goal, name)  # type: ignore[misc]

    def _wait_for(self, what: Callable[[], bool], name: str, why: str = "gets on") -> None:
        def look() -> bool:
            self._present()
            if what():
                return True
            status = self.stage.status(name)
            if why == "gets on" and status.state in (SourceState.HALTED, SourceState.PAUSED):
                raise CampaignFailed(f"{name} is {status.state}: {status.error}")
            time.sleep(0.2)
            return False

        wait_for(look, f"{name} {why}")

    # What happens to a source

    def _next_incident(self) -> Callable[[], None]:
        if not self._incidents:
            every = [self._pause, self._poison, self._reshape, self._create_table, self._add,
                     self._resync, self._resync_whole, self._change_structure,
                     self._change_structure, self._change_structure]  # fmt: skip
            self._incidents = self._dice.sample(every, len(every))
        return self._incidents.pop()

    def _any_source(self) -> Source:
        return self.stage.sources[self._dice.choice(self._names)]

    def _count(self, incident: Incident, source: Source) -> None:
        self.figures.ingredients[incident] += 1
        self._say(f"  {incident}: {source.name}")

    def _kill_while_copying(self) -> None:
        """The first copies, of which some are made, one is under way, and most are to come."""
        for copied in (len(self._names) // 4, len(self._names) // 2):
            self._present()
            wait_for(lambda copied=copied: len(self._followed()) >= copied, "some are copied")  # type: ignore[misc]
            self._present().process.kill()
            self._end(-signal.SIGKILL)
            self.figures.ingredients[Incident.COPY_KILLED] += 1
            self.figures.interruptions[Kind.KILL_DRIVER] += 1

    def _followed(self) -> list[str]:
        found = read_status(self.stage.work, None)
        return [one.name for one in found if one.state == SourceState.FOLLOWING]

    def _pause(self) -> None:
        source = self._any_source()
        self.stage.command("pause", source.name)
        self._wait_for_state(source, SourceState.PAUSED)
        before = self.stage.applied(source.name)
        self._see_others_go_on(source)
        if self.stage.applied(source.name) != before:
            raise CampaignFailed(f"{source.name} is paused, and was applied")
        if self._dice.random() < 0.5:
            self._interrupt(Kind.KILL_DRIVER)
            self._present()
        self.stage.command("resume", source.name)
        self._count(Incident.PAUSED, source)

    def _poison(self) -> None:
        """A row that the target has lost."""
        source, stage = self._any_source(), self.stage
        key = self._dice.randrange(1, 11)
        self._get_on()
        _insist(stage.target_uri, f"DELETE FROM {source.schema}.poisoned WHERE id = {key}")
        _insist(source.uri, f"UPDATE poisoned SET turns = turns + 1 WHERE id = {key}")
        self._halt(source, "poisoned")
        # As it was before.
        source.changes += 1
        _insist(stage.target_uri, f"INSERT INTO {source.schema}.poisoned VALUES ({key}, -1)")
        self._mend(source, Incident.POISONED)

    def _reshape(self) -> None:
        """A column that the target has already."""
        source, stage = self._any_source(), self.stage
        source.changes += 1
        column = f"extra_{source.changes}"
        add = f"reshaped ADD COLUMN IF NOT EXISTS {column} text"
        _insist(stage.target_uri, f"ALTER TABLE {source.schema}.{add}")
        _insist(source.uri, f"ALTER TABLE {add.replace('IF NOT EXISTS ', '')}")
        _insist(source.uri, f"INSERT INTO reshaped ({column}) VALUES ('new')")
        self._halt(source, column)
        self._present()
        self.stage.command("ddl", "skip", source.name)
        self._mend(source, Incident.RESHAPED)

    def _create_table(self) -> None:
        """A table that the target has already, in another form."""
        source, stage = self._any_source(), self.stage
        source.changes += 1
        table = f"late_{source.changes}"
        create = f"CREATE TABLE {table} (id int PRIMARY KEY, v text)"
        _insist(stage.target_uri, f"CREATE TABLE IF NOT EXISTS {source.schema}.{table} (x int)")
        _insist(source.uri, create)
        self._halt(source, table)
        self._present()
        stage.command("ddl", "edit", source.name, "--text", f"DROP TABLE {table}; {create}")
        self._mend(source, Incident.NEW_TABLE)

    def _change_structure(self) -> None:
        """Some changes of structure of some sources, at once with everything else."""
        for _ in range(DDL_PER_INCIDENT):
            source = self._any_source()
            source.changes += 1
            incident, texts = choose(self._dice, source.changes)
            for text in texts:
                insist(source.uri, text)
            self.figures.ingredients[incident] += 1

    def _halt(self, source: Source, why: str) -> None:
        self._wait_for_state(source, SourceState.HALTED)
        status = self.stage.status(source.name)
        if why not in status.error:
            raise CampaignFailed(f"{source.name} is halted by something else: {status.error}")
        self._see_others_go_on(source)
        if self._dice.random() < 0.5:
            self._interrupt(Kind.KILL_DRIVER)
            self._wait_for_state(source, SourceState.HALTED)
            self._count(Incident.HALT_KILLED, source)

    def _mend(self, source: Source, incident: Incident) -> None:
        self._present()
        self.stage.command("resume", source.name)
        goal = source.written()
        self._wait_for(lambda: self.stage.applied(source.name) >= goal, source.name, "is mended")
        self._count(incident, source)

    def _see_others_go_on(self, source: Source) -> None:
        self._get_on(source.name)
        self.figures.ingredients[Incident.OTHERS_WENT_ON] += len(self._names) - 1

    def _wait_for_state(self, source: Source, state: SourceState) -> None:
        self._wait_for(
            lambda: self.stage.status(source.name).state == state, source.name, f"is {state}"
        )

    def _add(self) -> None:
        """The one that is not in the file; killed in its copy; and another goes, to come back."""
        stage = self.stage
        (late,) = stage.sources.keys() - set(self._names)
        self._names.append(late)
        stage.write_config(self._names)
        self._present()
        self._wait_for(lambda: stage.status(late).state != "new", late, "is begun")
        if self._dice.random() < 0.5:
            self._interrupt(Kind.KILL_DRIVER)
            self._count(Incident.COPY_KILLED, stage.sources[late])
        self._get_on()
        self._count(Incident.ADDED, stage.sources[late])
        gone = self._any_source()
        self._names.remove(gone.name)
        stage.command("remove", gone.name)
        stage.write_config(self._names)
        self._count(Incident.REMOVED, gone)

    def _resync(self) -> None:
        source = self._any_source()
        table = self._dice.choice(("keyed", "loose", "toasted", "seat", "poisoned"))
        self._present()
        self.stage.command("resync", f"{source.name}.public.{table}")
        self._count(Incident.RESYNCED, source)

    def _resync_whole(self) -> None:
        source = self._any_source()
        self._present()
        self.stage.command("resync", source.name)
        self._count(Incident.RESYNCED_WHOLE, source)

    def _compare(self) -> Verdict:
        """Each source with its schemas: structure and rows."""
        stage, config = self.stage, self.stage.config
        tables = rows = objects = 0
        differences = []
        for name, compared in compare_sources(config, stage.work, (), self.engine):
            tables += len(compared)
            rows += sum(one.source.rows for one in compared if one.source)
            differences += [
                f"{name}: table {one.label}: {one.problem or one.error or 'rows differ'}"
                for one in compared
                if not one.is_equal
            ]
            route = settings_of(config, stage.work, name).route
            schema = compare_schema(route, POSITION_PROPERTIES)
            objects += sum(schema.objects.values())
            differences += [f"{name}: schema: {one}" for one in schema.differences]
        return Verdict(tables, rows, tuple(differences), objects)


def _insist(uri: str, statements: str) -> None:
    """Clients have locks on everything."""
    insist(uri, f"SET lock_timeout = '5s'; {statements}")
