"""What is done to a clone or a stream, and when: drawn by Hypothesis, written down as JSON.

Invariant: the same seed gives the same schedules, and a schedule read from its file is the one
that was written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.torture.failpoints import (
    AFTER,
    APPLY,
    BEFORE,
    BESIDE,
    FAILPOINTS,
    RECEIVER,
    REPEATED,
    TASK,
)


class Kind(StrEnum):
    """What happens; the value is how the figures call it."""

    KILL_DRIVER = "SIGKILL driver"
    KILL_JVM = "SIGKILL JVM"
    KILL_WORKER = "SIGKILL worker"
    KILL_DAEMON = "SIGKILL workers' parent"
    TERMINATE = "SIGTERM"
    INTERRUPT = "SIGINT"
    QUIT = "SIGQUIT"
    CUT_SOURCE = "wire cut, source"
    CUT_TARGET = "wire cut, target"
    RESTART_TARGET = "target restarted"
    # Of a stream only: a clone's snapshot ends with the source.
    RESTART_SOURCE = "source restarted, fast"
    CRASH_SOURCE = "source restarted, immediate"
    KILL_RECEIVER = "SIGKILL receiver"
    KILL_EXECUTOR = "SIGKILL executor"
    # Of a tube only.
    FREEZE_WORKER = "worker frozen"


STREAM_KINDS = (
    Kind.RESTART_SOURCE,
    Kind.CRASH_SOURCE,
    Kind.KILL_RECEIVER,
    Kind.KILL_EXECUTOR,
)
CLONE_KINDS = tuple(kind for kind in Kind if kind not in (*STREAM_KINDS, Kind.FREEZE_WORKER))
TUBE_KINDS = (
    Kind.KILL_DRIVER,
    Kind.KILL_JVM,
    Kind.KILL_WORKER,
    Kind.FREEZE_WORKER,
    Kind.TERMINATE,
    Kind.INTERRUPT,
    Kind.CUT_SOURCE,
    Kind.CUT_TARGET,
    Kind.RESTART_TARGET,
    Kind.RESTART_SOURCE,
    Kind.CRASH_SOURCE,
)
# What a running `millrace follow` goes on after, by itself.
SURVIVED = (
    Kind.KILL_WORKER,
    Kind.KILL_DAEMON,
    Kind.KILL_RECEIVER,
    Kind.KILL_EXECUTOR,
    Kind.CUT_SOURCE,
    Kind.CUT_TARGET,
    Kind.RESTART_SOURCE,
    Kind.CRASH_SOURCE,
)
SIDES = {Kind.CUT_SOURCE: "source", Kind.CUT_TARGET: "target"}


class After(StrEnum):
    """What a moment is counted in."""

    FAILPOINT = "failpoint"
    PARTS = "parts committed"
    TRANSACTIONS = "transactions applied"
    SOURCE_BYTES = "bytes to and from the source"
    TARGET_BYTES = "bytes to and from the target"


@dataclass(frozen=True)
class Moment:
    """When: at a failpoint, or after so many parts or bytes from now."""

    after: After
    failpoint: str = ""
    number: int = 0

    def __str__(self) -> str:
        return self.failpoint or f"{self.number} {self.after}"


@dataclass(frozen=True)
class Interruption:
    """What and when; `patient` waits afterwards until nothing of the process is left."""

    kind: Kind
    moment: Moment
    patient: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.moment}"


Schedule = tuple[Interruption, ...]


def at(failpoint: str) -> Moment:
    return Moment(After.FAILPOINT, failpoint)


def parts(number: int) -> Moment:
    return Moment(After.PARTS, number=number)


def _at_one_of(names: tuple[str, ...]) -> st.SearchStrategy[Moment]:
    return st.sampled_from(names).map(at)


# Some bytes are a handshake, some more the schema, many are rows.
_BYTES = st.one_of(st.integers(1, 20_000), st.integers(20_000, 400_000))
_AFTER_SOME = st.one_of(
    st.integers(1, 6).map(parts),
    _BYTES.map(lambda n: Moment(After.SOURCE_BYTES, number=n)),
    _BYTES.map(lambda n: Moment(After.TARGET_BYTES, number=n)),
)
_KINDS = st.sampled_from(CLONE_KINDS)


def _interruptions(moments: st.SearchStrategy[Moment]) -> st.SearchStrategy[Interruption]:
    return st.builds(Interruption, _KINDS, moments, st.booleans()).filter(_can_happen)


def _can_happen(one: Interruption) -> bool:
    if one.kind is Kind.RESTART_TARGET:
        # Then the run is over: a crash empties unlogged tables, as it would any other day.
        return one.moment != at("records.dropped")
    # Spark may not be there yet, or no longer.
    has_victim = one.moment.failpoint not in BEFORE + AFTER
    return has_victim or one.kind not in (Kind.KILL_JVM, Kind.KILL_WORKER, Kind.KILL_DAEMON)


def schedules(*, least: int = 2, most: int = 6) -> st.SearchStrategy[Schedule]:
    """Some interruptions of one clone, anywhere."""
    moments = st.one_of(_AFTER_SOME, _at_one_of(TASK + BESIDE), _at_one_of(FAILPOINTS))
    return st.lists(_interruptions(moments), min_size=least, max_size=most).map(tuple)


def schedules_of_every_kind() -> st.SearchStrategy[Schedule]:
    """Each kind once, in any order, while the rows are copied."""
    during = st.one_of(st.integers(1, 4).map(parts), _at_one_of(TASK[:3]))
    anywhere = st.one_of(during, _BYTES.map(lambda n: Moment(After.TARGET_BYTES, number=n)))
    at_byte = {
        Kind.CUT_SOURCE: _BYTES.map(lambda n: Moment(After.SOURCE_BYTES, number=n)),
        Kind.CUT_TARGET: _BYTES.map(lambda n: Moment(After.TARGET_BYTES, number=n)),
        # Before that there may be none to kill.
        Kind.KILL_JVM: during,
        Kind.KILL_WORKER: during,
        Kind.KILL_DAEMON: during,
    }
    return st.permutations(CLONE_KINDS).flatmap(
        lambda kinds: st.tuples(
            *(
                st.builds(Interruption, st.just(kind), at_byte.get(kind, anywhere), st.booleans())
                for kind in kinds
            )
        )
    )


def long_schedules(count: int) -> st.SearchStrategy[Schedule]:
    """`count` interruptions of the same clone: a few before the data, most in the middle, and one
    at each step after the data. What a process passes only once comes in its order, or the clone
    would run past it to its end."""
    early, late = 4, len(AFTER)
    middle = count - early - late
    before = st.lists(st.sampled_from(BEFORE), min_size=early, max_size=early, unique=True).map(
        lambda names: sorted(names, key=BEFORE.index)
    )
    during = st.one_of(_AFTER_SOME, _at_one_of(REPEATED))
    moments = st.tuples(before, st.lists(during, min_size=middle, max_size=middle)).map(
        lambda stages: [*map(at, stages[0]), *stages[1], *map(at, AFTER)]
    )
    return moments.flatmap(
        lambda found: st.tuples(*(_interruptions(st.just(moment)) for moment in found))
    )


# Of a stream. A big transaction has megabytes, most have a few hundred bytes.
_SOME_BYTES = st.one_of(st.integers(1, 2_000), st.integers(2_000, 3_000_000))
_WHILE_FOLLOWING = st.one_of(
    _at_one_of(RECEIVER + APPLY),
    st.integers(1, 60).map(lambda n: Moment(After.TRANSACTIONS, number=n)),
    _SOME_BYTES.map(lambda n: Moment(After.SOURCE_BYTES, number=n)),
    _SOME_BYTES.map(lambda n: Moment(After.TARGET_BYTES, number=n)),
)
_WHILE_COPYING = _at_one_of(TASK[:3] + BESIDE[2:6] + AFTER[:5])
# Whoever is stopped at a failpoint of the other kind is not there to be killed.
_NOT_THERE = {Kind.KILL_WORKER: RECEIVER, Kind.KILL_RECEIVER: APPLY}


def follow_schedules(
    *, least: int = 8, most: int = 12, copying: bool = True, cluster: bool = False
) -> st.SearchStrategy[Schedule]:
    """Some interruptions of one stream: perhaps of its copy first, then of following."""
    kinds = [*CLONE_KINDS, *STREAM_KINDS]
    if not cluster:
        kinds.remove(Kind.KILL_EXECUTOR)
    if cluster:
        # The point of it; and without its JVM or driver it takes long to come back.
        kinds = [kind for kind in kinds if kind not in (Kind.KILL_JVM, Kind.QUIT)]
        kinds += 3 * [Kind.KILL_EXECUTOR]
    # Those that it survives by itself come twice as often as those that end it.
    often = (*kinds, *(kind for kind in kinds if kind in SURVIVED))
    following = st.builds(
        Interruption, st.sampled_from(often), _WHILE_FOLLOWING, st.booleans()
    ).filter(lambda one: one.moment.failpoint not in _NOT_THERE.get(one.kind, ()))
    main = st.lists(following, min_size=least, max_size=most)
    if not copying:
        return main.map(tuple)
    first = st.lists(_interruptions(_WHILE_COPYING), max_size=2)
    return st.tuples(first, main).map(lambda stages: (*stages[0], *stages[1]))


def every_stream_failpoint() -> Schedule:
    """Whoever comes to a failpoint is killed there; halfway, the driver as well. Those of the
    receiver and of apply in turn, because a task is tried four times only."""
    killed = [(Kind.KILL_RECEIVER, name) for name in RECEIVER]
    for number, name in enumerate(APPLY):
        killed.insert(2 * number, (Kind.KILL_WORKER, name))
    killed.insert(4, (Kind.KILL_DRIVER, RECEIVER[-1]))
    return tuple(Interruption(kind, at(name), patient=True) for kind, name in killed)


def draw(strategy: st.SearchStrategy[Schedule], number: int, count: int) -> list[Schedule]:
    """The first `count` schedules that Hypothesis makes from this seed, but for the simplest."""
    drawn: list[Schedule] = []

    @seed(number)
    @settings(
        max_examples=count + 1,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(schedule: Schedule) -> None:
        drawn.append(schedule)

    collect()
    return drawn[1 : count + 1]


def write_schedule(path: Path, schedule: Schedule) -> None:
    path.write_text(json.dumps([asdict(one) for one in schedule], indent=1) + "\n")


def read_schedule(path: Path) -> Schedule:
    return tuple(
        Interruption(
            Kind(one["kind"]),
            Moment(After(one["moment"].pop("after")), **one["moment"]),
            one["patient"],
        )
        for one in json.loads(path.read_text())
    )
