"""The base: errors that travel, lines without secrets, places to die."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace import errors, failpoint
from millrace.errors import ConfigError, ConnectionLost, MillraceError
from millrace.log import fields, redact, setup_logging


def _tree(cls: type[MillraceError]) -> Iterator[type[MillraceError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


@pytest.fixture
def log_output(in_this_process: None) -> io.StringIO:
    return io.StringIO()


@pytest.mark.parametrize("cls", list(_tree(MillraceError)), ids=lambda cls: cls.__name__)
def test_error_keeps_type_message_hint_and_facts_through_pickle(cls: type[MillraceError]) -> None:
    error = cls("copy failed", hint="Run it again.", table="public.t", part=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.to_dict() == error.to_dict()
    assert str(again) == "copy failed"


def test_exit_codes_are_stable() -> None:
    codes = {cls.__name__: cls.exit_code for cls in _tree(MillraceError)}
    assert codes == {
        "MillraceError": 1,
        "ConfigError": 2,
        "NoSuchTube": 2,
        "PreflightError": 3,
        "WorkDirError": 4,
        "ServerError": 5,
        "ConnectionLost": 5,
        "EngineLost": 5,
        "TubeLost": 5,
        "SlotLost": 5,
        "Blocked": 5,
        "SourceDiverged": 5,
        "SnapshotLost": 5,
        "FormatError": 6,
        "UnknownVersion": 6,
        "ApplyError": 7,
        "SinkError": 8,
        "MismatchError": 9,
        "InvariantError": 70,
    }


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://ann:s3cret@db.example.com/shop",
        "postgresql://ann:s3cret@[::1]:5432/shop",
        "postgresql://ann:p%40s3cret@host/shop",
        "postgresql:///shop?host=db&password=s3cret&user=ann",
        "host=db password=s3cret user=ann",
        "host=db password = 's3cret word' user=ann",
        r"host=db password='it\'s s3cret' user=ann",
        "PGPASSWORD=s3cret millrace clone",
        "sslpassword=s3cret",
    ],
)
def test_no_password_is_left_by_redact(text: str) -> None:
    assert "s3cret" not in redact(text)
    assert "***" in redact(text)


def test_text_without_a_password_is_not_changed_by_redact() -> None:
    text = "copied public.t from postgresql://ann@db:5432/shop at 12:30"
    assert redact(text) == text


@pytest.mark.parametrize("as_json", [False, True])
def test_log_line_has_fields_and_no_password(log_output: io.StringIO, as_json: bool) -> None:
    setup_logging(as_json=as_json, stream=log_output)
    uri = "postgresql://ann:s3cret@db/shop"
    logging.getLogger("millrace.clone").info("connected to %s", uri, extra=fields(rows=3, to=uri))
    line = log_output.getvalue()
    assert "s3cret" not in line
    assert json.loads(line)["rows"] == 3 if as_json else "rows=3" in line


def test_other_libraries_are_heard_from_warning_up(log_output: io.StringIO) -> None:
    setup_logging(verbose=1, stream=log_output)
    logging.getLogger("py4j").info("chatter")
    logging.getLogger("py4j").warning("trouble")
    assert "chatter" not in log_output.getvalue()
    assert "trouble" in log_output.getvalue()


@pytest.mark.usefixtures("in_this_process")
def test_log_goes_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display, or a test, puts another in its place, and may close it."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    setup_logging()
    logging.getLogger("millrace.clone").info("one")
    monkeypatch.setattr(sys, "stderr", second)
    assert "one" in first.getvalue()
    first.close()
    logging.getLogger("millrace.clone").info("two")
    assert "two" in second.getvalue()


def test_failpoint_does_nothing_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failpoint.VARIABLE, raising=False)
    failpoint.hit("unit.none")
    monkeypatch.setenv(failpoint.VARIABLE, "unit.other=error")
    failpoint.hit("unit.none")


def test_failpoint_fails_the_number_of_times_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, "unit.twice=error*2")
    monkeypatch.setattr(failpoint, "_hits", failpoint.Counter())
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            failpoint.hit("unit.twice")
    failpoint.hit("unit.twice")


def test_failpoint_with_a_file_fires_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    monkeypatch.setenv(failpoint.VARIABLE, f"unit.once=error@{marker}")
    with pytest.raises(ConnectionLost):
        failpoint.hit("unit.once")
    failpoint.hit("unit.once")
    assert not marker.exists()


def test_unknown_action_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoint.VARIABLE, "unit.bad=explode")
    with pytest.raises(ConfigError, match="explode"):
        failpoint.hit("unit.bad")


def test_failpoint_kills_the_process() -> None:
    script = "from millrace import failpoint; failpoint.hit('unit.kill'); print('alive')"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {failpoint.VARIABLE: "unit.kill=kill"},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (-9, "")


def test_every_error_class_says_what_it_means() -> None:
    assert all(cls.__doc__ for cls in _tree(errors.MillraceError))
