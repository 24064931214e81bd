"""Finding Java, and making it start faster.

Invariant: without a usable Java nothing else is started; the class archive only
ever changes how fast the JVM starts, never what it does.

An AppCDS archive holds Spark's classes parsed and linked. It is made once for
each Java and each installation of Spark, in the user's cache directory, by a run of
its own (`python -m millrace.spark.java`), and halves the time of every later start.

Facts: JEP 350 (Dynamic CDS Archives, Java 13). A JVM takes an archive only if its class path
holds the same files in the same order, with the sizes and times they had; else it says nothing,
and is slow.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from millrace.errors import ConfigError

log = logging.getLogger(__name__)

LEAST_JAVA = 17
# How long a JVM may take to write the archive when it ends; ten seconds are usual.
DUMP_SECONDS = 300.0
HINT = (
    "install Java 17 or 21 and put it on PATH or in JAVA_HOME, for example:"
    " apt-get install openjdk-17-jre-headless, or brew install openjdk@21"
)


# An archive that does not fit is passed over; its warnings say nothing a user can act on.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


# Without it each JVM has a file below /tmp, wherever its other files are.
NO_PERFORMANCE_DATA = "-XX:-UsePerfData"


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
    return subprocess.run(
        [path, NO_PERFORMANCE_DATA, "-version"], capture_output=True, text=True
    ).stderr


def class_archive() -> Path:
    """Where the archive for this Java and these very files of Spark is, or would be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path, _ = find_java()
    number = re.search(r"build ([\w.+-]+)", _version_output(path))
    spark = _spark_directory()
    name = (
        f"{_archive_prefix(spark)}{_fingerprint(spark / 'jars')}"
        f"-java-{number[1] if number else 'unknown'}.jsa"
    )
    return root / "millrace" / name.replace("/", "_")


def _spark_directory() -> Path:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigError("pyspark is not installed", hint="pip install pyspark")
    return Path(spec.origin).parent


def _archive_prefix(spark: Path) -> str:
    """What the archives of one place have in common, from one installation there to the next."""
    return f"spark-{_short_hash(str(spark))}-"


def _fingerprint(jars: Path) -> str:
    # `jars/*` becomes a class path in the order in which the directory lists its files.
    with os.scandir(jars) as files:
        facts = [(file.name, file.stat().st_size, int(file.stat().st_mtime)) for file in files]
    return _short_hash(repr(facts))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def class_archive_options() -> list[str]:
    """JVM options that use the archive, if it is there."""
    try:
        archive = class_archive()
    except (OSError, RuntimeError):
        return []
    if not archive.exists():
        log.debug("Spark starts without %s: `python -m millrace.spark.java` makes it", archive)
        return []
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", *_QUIET]


def make_class_archive() -> Path:
    """Make the archive by running a small job and letting the JVM dump what it loaded."""
    from millrace.spark.session import Engine, default_master

    archive = class_archive()
    archive.parent.mkdir(parents=True, exist_ok=True)
    draft = archive.with_suffix(f".{os.getpid()}")
    dump = " ".join([f"-XX:ArchiveClassesAtExit={draft}", *_QUIET])
    conf = {"spark.driver.extraJavaOptions": dump}
    # Older ones of this place fit no more; a JVM that began with one keeps it open.
    for older in archive.parent.glob(f"{_archive_prefix(_spark_directory())}*.jsa"):
        older.unlink(missing_ok=True)
    with Engine(default_master(2), conf, end_seconds=DUMP_SECONDS) as engine:
        engine.wait()
    if not draft.exists():
        raise OSError(f"Java has not written {draft}")
    draft.replace(archive)
    return archive


if __name__ == "__main__":
    try:
        if not class_archive().exists() or "--force" in sys.argv:
            make_class_archive()
        sys.stdout.write(f"{class_archive()}\n")
    except OSError as error:
        sys.stdout.write(f"no class archive, Spark will start more slowly: {error}\n")
