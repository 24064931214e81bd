"""What is known of the source, and how it is shown."""

from __future__ import annotations

import pytest

from millrace.cli.display import render_follow
from millrace.follow import source_watch
from millrace.follow.progress import FollowProgress, SourceProgress
from millrace.follow.source_watch import SourceHistory, SourceView
from millrace.postgres.wire.slot import SlotState


def _slot(safe: int | None) -> SlotState:
    return SlotState("s", "pgoutput", "d", None, 0, 0, "extended", "", 100, safe_wal_bytes=safe)


def test_a_lag_is_as_old_as_what_is_missing() -> None:
    history = SourceHistory()
    assert history.ahead_since(0) is None
    for at, lsn in ((1.0, 100), (2.0, 100), (3.0, 250), (4.0, 300)):
        history.add(SourceView(at, lsn, None))
    assert history.ahead_since(99) == 1.0
    assert history.ahead_since(100) == 3.0
    assert history.ahead_since(299) == 4.0
    assert history.ahead_since(300) is None


def test_a_long_history_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_watch, "MOST_POSITIONS", 10)
    history = SourceHistory()
    for at in range(1000):
        history.add(SourceView(float(at), at, None))
    since = history.ahead_since(0)
    assert since is not None
    assert since <= 1.0  # never told as younger than it is
    assert history.ahead_since(999) is None


def test_when_a_slot_is_lost_is_told_from_its_rate() -> None:
    history = SourceHistory()
    assert history.seconds_until_lost() is None
    history.add(SourceView(0.0, 1, _slot(1000)))
    assert history.seconds_until_lost() is None
    history.add(SourceView(10.0, 2, _slot(900)))
    assert history.seconds_until_lost() == 90.0
    # What was long ago does not count.
    for at in (60, 71, 80):
        history.add(SourceView(float(at), 3, _slot(900)))
    assert history.seconds_until_lost() is None
    history.add(SourceView(90.0, 3, _slot(-5)))
    assert history.seconds_until_lost() == 0.0
    # The limit was taken away.
    history.add(SourceView(91.0, 4, _slot(None)))
    assert history.seconds_until_lost() is None


@pytest.mark.parametrize(
    ("source", "lag", "said"),
    [
        (SourceProgress(), None, "the source's position is not known yet"),
        (SourceProgress(9, 1.0, 0), 0, "nothing to apply"),
        (SourceProgress(9, 99.0, 0), 0, "the source can't be asked for its position"),
        (SourceProgress(9, 1.0, 5 << 20, 1.0), 5 << 20, "5 MB and 7.0 s behind"),
        (SourceProgress(9, 1.0, 5 << 20, 35.0), 5 << 20, "from the source for 35 s; it is"),
        (SourceProgress(9, 99.0, 5, 35.0), 5, "for 35 s; it can't be reached"),
        (SourceProgress(None, None, None, 35.0), None, "for 35 s; it can't be reached"),
        (
            SourceProgress(9, 1.0, 5, 35.0, "the spool is full"),
            5,
            "holding back: the spool is full",
        ),
    ],
)
def test_nothing_to_apply_is_said_only_if_it_is_known(
    source: SourceProgress, lag: int | None, said: str
) -> None:
    progress = FollowProgress(lag_bytes=lag, lag_seconds=7.0, source=source)
    assert said in render_follow(progress)
    assert ("nothing to apply" in render_follow(progress)) == (said == "nothing to apply")
