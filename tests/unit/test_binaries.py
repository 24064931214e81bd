"""Which installation is found, and which is chosen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.errors import ConfigError, PreflightError
from millrace.postgres.program import binaries
from millrace.postgres.program.binaries import Installation, find_tools, installations


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No programs anywhere but where a test puts them."""
    monkeypatch.delenv(binaries.VARIABLE, raising=False)
    monkeypatch.setattr(binaries, "_SYSTEM_PATTERNS", ())
    monkeypatch.setattr(binaries, "_wheel_bindirs", list)
    monkeypatch.setattr(binaries.shutil, "which", lambda _: None)
    installations.cache_clear()
    yield
    installations.cache_clear()


def _make(bindir: Path, version: str, *programs: str) -> Path:
    bindir.mkdir(parents=True)
    for program in programs:
        path = bindir / program
        path.write_text(f'#!/bin/sh\necho "{program} (PostgreSQL) {version}"\n')
        path.chmod(0o755)
    return bindir


def _name(monkeypatch: pytest.MonkeyPatch, *bindirs: Path) -> None:
    monkeypatch.setenv(binaries.VARIABLE, os.pathsep.join(map(str, bindirs)))


@pytest.mark.parametrize(
    ("printed", "major"),
    [("16.14", 16), ("15.18 (Debian 15.18-0+deb12u1)", 15), ("19devel", 19), ("18beta2", 18)],
)
def test_version_is_what_the_program_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, major: int
) -> None:
    bindir = _make(tmp_path / "12" / "bin", printed, "pg_dump")
    _name(monkeypatch, bindir)
    assert installations() == (Installation(major, bindir, "environment"),)


def test_lowest_version_not_below_the_server_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = {v: _make(tmp_path / v, v, "pg_dump", "pg_restore") for v in ("18.1", "15.2", "16.3")}
    _name(monkeypatch, *made.values())
    assert find_tools(16, "pg_dump", "pg_restore").bindir == made["16.3"]
    assert find_tools(17, "pg_dump").bindir == made["18.1"]
    assert find_tools(13, "pg_dump").bindir == made["15.2"]


def test_installation_without_a_program_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = _make(tmp_path / "part", "16.1", "pg_dump")
    whole = _make(tmp_path / "whole", "17.1", "pg_dump", "pg_restore")
    _name(monkeypatch, part, whole)
    assert find_tools(16, "pg_dump", "pg_restore").bindir == whole


def test_older_tools_are_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _name(monkeypatch, _make(tmp_path / "old", "15.1", "pg_dump"))
    with pytest.raises(PreflightError, match="found: 15 in") as caught:
        find_tools(16, "pg_dump")
    assert binaries.VARIABLE in caught.value.hint


def test_named_folder_without_programs_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _name(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        installations()


def test_programs_on_the_path_are_found_where_they_really_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = _make(tmp_path / "cellar" / "bin", "17.0", "pg_dump")
    link = tmp_path / "pg_dump"
    link.symlink_to(real / "pg_dump")
    monkeypatch.setattr(binaries.shutil, "which", lambda _: str(link))
    assert installations() == (Installation(17, real.resolve(), "path"),)


@pytest.mark.parametrize("with_system", [True, False])
def test_wrapper_counts_only_when_there_is_nothing_real(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_system: bool
) -> None:
    share = _make(tmp_path / "share", "15.1", "pg_wrapper")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "pg_dump"
    wrapper.symlink_to(share / "pg_wrapper")
    monkeypatch.setattr(binaries.shutil, "which", lambda _: str(wrapper))
    if with_system:
        _make(tmp_path / "lib" / "15" / "bin", "15.1", "pg_dump")
        pattern = str((tmp_path / "lib" / "*" / "bin").relative_to("/"))
        monkeypatch.setattr(binaries, "_SYSTEM_PATTERNS", (pattern,))
    assert [i.origin for i in installations()] == (["system"] if with_system else ["path"])


def test_folder_found_twice_is_listed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bindir = _make(tmp_path / "bin", "16.1", "pg_dump")
    again = tmp_path / "again"
    again.symlink_to(bindir)
    _name(monkeypatch, bindir, again)
    assert len(installations()) == 1


def test_only_whole_servers_are_server_installations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = _make(tmp_path / "client", "16.1", "pg_dump")
    server = _make(tmp_path / "server", "16.1", "initdb", "pg_ctl", "postgres")
    _name(monkeypatch, client, server)
    assert [i.bindir for i in binaries.server_installations()] == [server]
