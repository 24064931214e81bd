"""Work in the background of a stream: what repeats it, what stops it, who is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.errors import ConnectionLost, ServerError
from millrace.follow.background import in_background


def raising(errors: list[Exception], calls: list[str]) -> Callable[[], None]:
    """Work that fails with one error after the other, then succeeds."""

    def work() -> None:
        calls.append(threading.current_thread().name)
        if errors:
            raise errors.pop(0)

    return work


def test_an_error_that_may_go_away_is_logged_and_the_work_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []
    caplog.set_level(logging.DEBUG, logger="millrace")
    work = raising([ConnectionLost("the source is away")], calls)
    with in_background("errand", work, 0.001):
        wait_for(lambda: len(calls) > 2)
    assert "errand: the source is away" in caplog.text
    assert set(calls) == {"errand"}
    assert "errand" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("error", [ServerError("no such table"), ValueError("unforeseen")])
def test_any_other_error_stops_the_stream_and_is_raised_at_its_end(error: Exception) -> None:
    calls: list[str] = []
    stopped = threading.Event()
    running = in_background("errand", raising([error], calls), 0.001, stopped.set, at_once=True)
    with pytest.raises(type(error), match=str(error)), running:
        assert stopped.wait(DEADLINE_SECONDS)
    assert calls == ["errand"]


def test_an_error_of_the_stream_itself_counts_for_more() -> None:
    stopped = threading.Event()

    def stream() -> None:
        assert stopped.wait(DEADLINE_SECONDS)
        raise ServerError("of the stream")

    running = in_background("errand", raising([ValueError("b")], []), 0.001, stopped.set)
    with pytest.raises(ServerError, match="of the stream"), running:
        stream()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("at_once", [True, False])
def test_work_that_has_come_to_its_end_is_not_repeated(times: int, at_once: bool) -> None:
    calls: list[str] = []

    def work() -> bool:
        calls.append("")
        return len(calls) == times

    with in_background("errand", work, 0.001, at_once=at_once):
        wait_for(lambda: "errand" not in {thread.name for thread in threading.enumerate()})
    assert len(calls) == times


def test_the_first_time_comes_after_a_pause_unless_it_is_wanted_at_once() -> None:
    calls: list[str] = []
    with in_background("errand", raising([], calls), 3600):
        pass
    assert calls == []
    with in_background("errand", raising([], calls), 3600, at_once=True):
        wait_for(lambda: calls)
