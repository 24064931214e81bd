"""Finding Java, and making it start faster.

Invariant: without a usable Java nothing else is started; the class archive only
ever changes how fast the JVM starts, never what it does.

An AppCDS archive holds Spark's classes parsed and linked. It is made once for
each Java and Spark version, in the user's cache directory, by a run of its own
(`python -m millrace.spark.java`), and takes 2 to 3 s off every later start.

Facts: JEP 350 (Dynamic CDS Archives, Java 13).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from millrace.errors import ConfigError

LEAST_JAVA = 17
HINT = (
    "install Java 17 or 21 and put it on PATH or in JAVA_HOME, for example:"
    " apt-get install openjdk-17-jre-headless, or brew install openjdk@21"
)


# An archive that does not fit is passed over; its warnings say nothing a user can act on.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


@cache
def find_java() -> tuple[str, int]:
    """(path of java, major version), or an error that says what to install."""
    home = os.environ.get("JAVA_HOME")
    path = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if not path or not Path(path).exists():
        raise ConfigError("no Java found, and Spark needs one", hint=HINT)
    found = re.search(r'version "(\d+)', _version_output(path))
    major = int(found[1]) if found else 0
    if major < LEAST_JAVA:
        raise ConfigError(f"Spark needs Java {LEAST_JAVA} or later, {path} is {major}", hint=HINT)
    return path, major


@cache
def _version_output(path: str) -> str:
    return subprocess.run([path, "-version"], capture_output=True, text=True).stderr


def class_archive() -> Path:
    """Where the archive for this Java and this Spark is, or would be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path, _ = find_java()
    number = re.search(r"build ([\w.+-]+)", _version_output(path))
    # An archive is good for one class path only.
    spec = find_spec("pyspark")
    where = hashlib.sha256(str(spec.origin if spec else "").encode()).hexdigest()[:8]
    name = f"spark-{version('pyspark')}-{where}-java-{number[1] if number else 'unknown'}.jsa"
    return root / "millrace" / name.replace("/", "_")


def class_archive_options() -> list[str]:
    """JVM options that use the archive, if it is there."""
    try:
        archive = class_archive()
    except (OSError, RuntimeError):
        return []
    if not archive.exists():
        return []
    return [
        f"-XX:SharedArchiveFile={archive}",
        "-Xshare:auto",
        "-Xlog:cds=off",
        "-Xlog:cds+dynamic=off",
    ]


def make_class_archive() -> Path:
    """Make the archive by running a small job and letting the JVM dump what it loaded."""
    from millrace.spark.session import Engine, default_master

    archive = class_archive()
    archive.parent.mkdir(parents=True, exist_ok=True)
    draft = archive.with_suffix(f".{os.getpid()}")
    dump = " ".join([f"-XX:ArchiveClassesAtExit={draft}", *_QUIET])
    with Engine(default_master(2), {"spark.driver.extraJavaOptions": dump}) as engine:
        engine.wait()
    if draft.exists():
        draft.replace(archive)
    return archive


if __name__ == "__main__":
    try:
        if not class_archive().exists() or "--force" in sys.argv:
            make_class_archive()
        sys.stdout.write(f"{class_archive()}\n")
    except OSError as error:
        sys.stdout.write(f"no class archive, Spark will start more slowly: {error}\n")
