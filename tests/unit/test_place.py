"""Where a command works that is not told a directory, and which places it refuses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.errors import ServerError, WorkDirError
from millrace.spool import place as spool_place
from millrace.spool.place import SpoolPlace
from millrace.workdir import place
from millrace.workdir.lock import open_lock
from millrace.workdir.sentinel import Sentinel

NOWHERE = "postgresql://ann@127.0.0.1:1/shop"
SNAPSHOT = (sys.executable, "-m", "millrace", "snapshot")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    (home / "tmp").mkdir(exist_ok=True)
    return kept | {"HOME": str(home), "TMPDIR": str(home / "tmp"), **more}


def run(home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command that looks at its work directory, and then finds no server."""
    return subprocess.run(
        [*SNAPSHOT, "--source", NOWHERE, *arguments],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        check=False,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("variable", ["HOME", "XDG_STATE_HOME"])
def test_default_is_one_directory_of_the_users_that_nobody_else_can_read(
    home: Path, source_db: str, variable: str
) -> None:
    state = home / ".local" / "state" if variable == "HOME" else home / "a" / "b"
    settings = environment(home, **({} if variable == "HOME" else {variable: str(state)}))
    with subprocess.Popen(
        [*SNAPSHOT, "--source", source_db], env=settings, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip()
        directory = state / "millrace"
        assert [mode(one) for one in (directory, state, state.parent)] == [0o700] * 3
        assert (directory / "snapshot.json").exists()
        # Another command finds it there.
        subprocess.run([*SNAPSHOT, "--stop"], env=settings, check=True)


def test_default_that_others_can_read_is_closed_to_them(home: Path) -> None:
    directory = home / ".local" / "state" / "millrace"
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    assert run(home).returncode == ServerError.exit_code
    assert mode(directory) == 0o700


def test_default_that_is_a_link_or_holds_one_is_refused(home: Path) -> None:
    directory = home / ".local" / "state" / "millrace"
    (home / "elsewhere").mkdir()
    directory.parent.mkdir(parents=True)
    directory.symlink_to(home / "elsewhere")
    ended = run(home)
    assert ended.returncode == WorkDirError.exit_code
    assert f"{directory} is a symbolic link" in ended.stderr
    assert list((home / "elsewhere").iterdir()) == []

    directory.unlink()
    directory.mkdir(0o700)
    (directory / "snapshot.json").symlink_to(home / "elsewhere" / "written")
    ended = run(home)
    assert ended.returncode == WorkDirError.exit_code
    assert "snapshot.json is a symbolic link" in ended.stderr
    assert list((home / "elsewhere").iterdir()) == []


def test_run_in_the_former_default_is_told_and_not_begun_anew(home: Path) -> None:
    former = home / "tmp" / "millrace"
    with Sentinel(former):
        pass
    ended = run(home)
    assert ended.returncode == WorkDirError.exit_code
    assert f"there is a run in {former}" in ended.stderr
    assert f"--dir {former}" in ended.stderr
    assert not (home / ".local" / "state" / "millrace").exists()
    assert run(home, "--dir", str(former)).returncode == ServerError.exit_code


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "state" / "millrace"
    with open_lock(directory):
        place.require_own(directory)
    owner = os.geteuid()
    monkeypatch.setattr(place.os, "geteuid", lambda: owner + 1)
    with pytest.raises(WorkDirError, match="belongs to") as raised:
        place.require_own(directory)
    assert "--dir" in raised.value.hint


def test_directory_below_one_where_others_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(WorkDirError, match="others may write"):
        place.require_own(tmp_path / "open" / "millrace")
    # As /tmp is: what is in it can be moved by its owner only.
    (tmp_path / "open").chmod(0o1777)
    place.require_own(tmp_path / "open" / "millrace")


def test_link_of_another_user_in_a_named_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spool").symlink_to("/elsewhere")
    place.require_no_foreign_link(tmp_path)
    owner = os.geteuid()
    if owner == 0:
        os.chown(tmp_path / "spool", 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(place.os, "geteuid", lambda: owner + 1)
    with pytest.raises(WorkDirError, match="spool belongs to"):
        place.require_no_foreign_link(tmp_path)


def test_memory_is_told_from_a_disk(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not Path("/proc/self/mountinfo").exists() or not shared.is_dir():
        pytest.skip("no /proc, or no /dev/shm")
    assert place.is_in_memory(shared)
    assert not place.is_in_memory(Path("/proc"))
    assert not place.is_in_memory(tmp_path / "missing")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_spool_in_memory_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_memory: bool,
) -> None:
    monkeypatch.setattr(spool_place, "is_in_memory", lambda path: in_memory)
    with SpoolPlace(tmp_path, "utf-8", "s").open_writer():
        pass
    assert ("is in memory (tmpfs)" in caplog.text) == in_memory
