"""Base images: folders and tar files, as made by pg_basebackup or by `decode prepare`.

Invariant: a file of the image is found by the name it has in a data directory, however it is
packed.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from millrace.errors import ConfigError
from millrace.wal.catalog.base_image import BaseFiles

_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")


class FolderFiles:
    """A base backup as a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> bytes | None:
        path = self._find(name)
        return path.read_bytes() if path is not None else None

    def names(self, prefix: str) -> list[str]:
        folder = self._root / prefix
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def _find(self, name: str) -> Path | None:
        if "*" in name:
            return next(iter(sorted(self._root.glob(name))), None)
        path = self._root / name
        return path if path.is_file() else None


class TarFiles:
    """A base backup as a tar file, with one more for each tablespace beside it."""

    def __init__(self, path: Path) -> None:
        self._archives = [("", tarfile.open(path))]  # noqa: SIM115 (read until the end)
        for other in sorted(path.parent.glob("*.tar*")):
            oid = other.name.split(".")[0]
            if oid.isdigit():
                self._archives.append((f"pg_tblspc/{oid}/", tarfile.open(other)))  # noqa: SIM115
        self._members = {
            prefix + member.name.removeprefix("./"): (archive, member)
            for prefix, archive in self._archives
            for member in archive.getmembers()
            if member.isfile()
        }

    def read(self, name: str) -> bytes | None:
        found = self._members.get(name) or self._by_pattern(name)
        if found is None:
            return None
        archive, member = found
        opened = archive.extractfile(member)
        return opened.read() if opened is not None else None

    def names(self, prefix: str) -> list[str]:
        head = prefix.rstrip("/") + "/"
        return sorted(n.removeprefix(head) for n in self._members if n.startswith(head))

    def _by_pattern(self, name: str) -> tuple[tarfile.TarFile, tarfile.TarInfo] | None:
        if "*" not in name:
            return None
        head, _, tail = name.partition("*")
        for candidate, found in self._members.items():
            if candidate.startswith(head) and candidate.endswith(tail):
                return found
        return None


def open_base(path: Path) -> BaseFiles:
    """The files of a base image."""
    if (path / "base.tar").is_file():
        return TarFiles(path / "base.tar")
    for suffix in _TAR_SUFFIXES:
        if (path / f"base{suffix}").is_file():
            return TarFiles(path / f"base{suffix}")
    if path.is_dir():
        return FolderFiles(path)
    if path.is_file():
        try:
            return TarFiles(path)
        except tarfile.TarError as error:
            raise ConfigError(f"{path} is no tar file: {error}") from error
    raise ConfigError(
        f"there is no base image {path}",
        hint="make one with pg_basebackup or with `millrace decode prepare`",
    )
