"""The page on reliability holds the figures of a run, and is not torn by them."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.torture import __main__ as torture
from tests.torture.figures import FollowFigures
from tests.torture.ingredients import Ingredient
from tests.torture.report import MARKS, put, render

from millrace.engine import Engine

BEGIN, END = MARKS["clone"]

FIGURES = {
    "seed": 7, "clones": 2, "processes": 9, "interruptions": {"SIGINT": 3, "SIGKILL JVM": 4},
    "total_interruptions": 7, "most_in_one_clone": 5, "tables_compared": 306,
    "rows_compared": 200000, "transactions_meanwhile": 800, "differences": 0, "seconds": 240.0,
    "failure": "", "date": "2026-01-01", "commit": "abc1234", "machine": "2 cores, Linux x86_64",
}  # fmt: skip


def test_figures_stand_between_the_marks_and_replace_the_last_ones() -> None:
    page = Path("docs/reliability.md").read_text(encoding="utf-8")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    text = render(FIGURES)
    once = put(page, text)
    assert once == f"{head}{BEGIN}{text}{END}{tail}"
    assert put(once, text) == once
    assert "| SIGKILL JVM | 4 |" in text
    assert "| **differences** | 0 |" in text
    assert "seed 7" in text


def test_figures_of_streams_have_a_place_of_their_own() -> None:
    page = Path("docs/reliability.md").read_text(encoding="utf-8")
    text = render(
        {
            **FIGURES, "what": "follow", "streams": 3, "rounds": 8, "columns_added": 5,
            "rows_changed": 4000, "transactions_rolled_back": 90, "torn_looks": 600,
        }
    )  # fmt: skip
    put_there = put(page, text, "follow")
    begin, end = MARKS["follow"]
    assert put_there.split(begin)[1].split(end)[0] == text
    assert put_there.split(BEGIN)[1].split(END)[0] == page.split(BEGIN)[1].split(END)[0]
    assert "minutes of streams" in text
    assert "| rows changed by them | 4,000 |" in text


def test_failure_of_a_run_is_told_on_the_page() -> None:
    text = render({**FIGURES, "failure": "CampaignFailed: the target differs:\ntable x"})
    assert "It ended with a failure: CampaignFailed: the target differs:\n" in text


def test_campaign_in_which_something_never_came_up_fails_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torture, "open_follow_stage", lambda seed: nullcontext(SimpleNamespace()))
    options = Namespace(minutes=-1, seed=1, replay=None)
    figures, failure = torture.run_streams(options, cast(Engine, None), Path())
    assert isinstance(figures, FollowFigures)
    assert failure == f"never came up: {'; '.join(Ingredient)}"
    figures.ingredients.update(dict.fromkeys(Ingredient, 1))
    assert figures.missing() == []
