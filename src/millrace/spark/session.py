"""Starting Spark for work that moves bytes, not rows.

Invariant: workers run our interpreter and can import this package; a failed task
is tried again; no setting of ours holds a password.

The JVM takes seconds to start, so it starts in the background while the driver
reads the catalog and restores the schema; `Engine.call` waits for it.

Facts measured on two cores: unix-domain sockets to the workers cut a job of 100
tasks from 3 s to 1 s; `local[N]` without a second number gives up at a task's
first failure; the serial collector and a small heap save memory and start-up time.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import millrace
from millrace.engine import EngineView
from millrace.errors import ConfigError, EngineLost, MillraceError, ServerError, as_bug
from millrace.room import AGAIN, NO_ROOM, no_room
from millrace.spark.java import NO_PERFORMANCE_DATA, class_archive_options, find_java
from millrace.spark.scratch import Scratch

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

# How often Spark runs a task whose worker died; lost connections are retried inside the task.
TASK_ATTEMPTS = 4
DRIVER_MEMORY = "512m"
# Of tasks that belong to no group.
OWN_GROUP = "millrace"
# How long executors of a cluster may take to come.
EXECUTORS_SECONDS = 60.0
# By which Spark's error of a job that was cancelled is known.
CANCELLED = "SPARK_JOB_CANCELLED"
# What Spark keeps on disk for tasks that return little: copies of the package, and of the tasks.
SCRATCH_BYTES = 64 * 1024 * 1024

DEFAULT_CONF = {
    "spark.app.name": "millrace",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.driver.memory": DRIVER_MEMORY,
    "spark.speculation": "false",
    "spark.task.maxFailures": str(TASK_ATTEMPTS),
    # Workers hold no state worth a shuffle or an event log.
    "spark.eventLog.enabled": "false",
    # What goes to the workers holds passwords: without this, parallelize() writes it to a file.
    "spark.io.encryption.enabled": "true",
}


class Engine:
    """A Spark application that runs plain functions, one task for each call."""

    def __init__(
        self,
        master: str,
        conf: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        *,
        streams: bool = False,
        end_seconds: float = 10.0,
    ) -> None:
        """`streams`: changes will be applied, so the workers load what that needs at once.
        `end_seconds`: how long the JVM may take to end before it is killed."""
        self._streams = streams
        self._end_seconds = end_seconds
        self.master = _with_attempts(master)
        self.is_local = self.master.startswith("local")
        self._has_one_executor = self.master == "local" or self.master.startswith("local[")
        self.conf = dict(conf or {})
        find_java()  # a missing Java is reported before anything else happens
        self.start_seconds = 0.0
        self._starting = threading.Lock()
        self._ready = threading.Event()
        self._context: SparkContext | None = None
        self._gateway: Any = None
        self._failure: BaseException | None = None
        self._closed = False
        self._scratch = Scratch()
        # What the JVM and the workers print.
        self.log_path = log_path or self._scratch.path / "spark.log"
        self._thread = threading.Thread(target=self._start, name="spark-start", daemon=True)

    def start(self) -> None:
        """Begin to start the JVM, if that has not begun; returns at once."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> float:
        """Wait until tasks can run; the seconds this call had to wait."""
        began = time.monotonic()
        self.start()
        self._ready.wait()
        if self._failure is not None:
            if isinstance(self._failure, MillraceError):
                raise self._failure
            if NO_ROOM in str(self._failure):
                raise self._no_room() from self._failure
            raise EngineLost(
                f"Spark did not start with master {self.master}: {_first_line(self._failure)}",
                hint="check --master and --conf; Spark's own messages are in spark.log in --dir",
            ) from self._failure
        return time.monotonic() - began

    def slots(self, wanted: int) -> int:
        """How many tasks can run at once. On a cluster executors come after the start, so those
        that are missing are waited for."""
        self.wait()
        assert self._context is not None
        if self._context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
            return wanted  # executors come when tasks wait for them
        deadline = time.monotonic() + (0 if self._has_one_executor else EXECUTORS_SECONDS)
        while True:
            spark = self._context._jsc.sc()
            profile = spark.resourceProfileManager().defaultResourceProfile()
            found = int(spark.maxNumConcurrentTasks(profile))
            if found >= wanted or time.monotonic() >= deadline:
                return found
            time.sleep(0.2)

    def call(self, body: Callable[[A, int], R], argument: A, description: str) -> R:
        """Run `body(argument, attempt)` in a Spark task and return its result."""
        return self.call_for(OWN_GROUP, body, argument, description)

    def call_for(self, group: str, body: Callable[[A, int], R], argument: A, description: str) -> R:
        """The same for the tasks of a group."""
        self.wait()
        return self._run(group, body, argument, description)

    def _run(self, group: str, body: Callable[[A, int], R], argument: A, description: str) -> R:
        context = self._context
        assert context is not None
        try:
            # Of this thread only: pyspark has a thread of the JVM for each of ours.
            context.setJobGroup(group, description, interruptOnCancel=True)
            results: list[R | MillraceError] = (
                context.parallelize([argument], 1).mapPartitions(_task(body, description)).collect()
            )
        except Exception as error:
            if self._closed:
                raise ServerError(f"{description}: stopped") from None
            if CANCELLED in str(error):
                raise ServerError(f"{description}: cancelled") from None
            if NO_ROOM in str(error):
                raise self._no_room() from error
            if self._jvm_is_gone() or _is_out_of_reach(error):
                raise EngineLost(
                    f"{description}: Spark's JVM ended",
                    hint="it was killed, perhaps by the out-of-memory killer; see the end of "
                    "spark.log in --dir",
                ) from None
            raise _task_error(error, description) from error
        (result,) = results
        if isinstance(result, MillraceError):
            raise result
        return result

    def _no_room(self) -> MillraceError:
        place = self.conf.get("spark.local.dir", str(self._scratch.path))
        then = f"{AGAIN}; TMPDIR or --conf spark.local.dir=... name another disk"
        return no_room(Path(place) / "spark", NO_ROOM, needed_bytes=SCRATCH_BYTES, then=then)

    def cancel(self) -> None:
        """Stop every running task, of all groups; those of a JVM that was killed end by
        themselves."""
        self._cancel(lambda context: context.cancelAllJobs())

    def cancel_group(self, group: str) -> None:
        """Stop the running tasks of a group."""
        self._cancel(lambda context: context.cancelJobGroup(group))

    def _cancel(self, cancel: Callable[[SparkContext], None]) -> None:
        if self._context is not None and not self._jvm_is_gone():
            try:
                cancel(self._context)
            except Exception as error:
                if not _is_out_of_reach(error):
                    raise

    def group(self, name: str) -> EngineGroup:
        """This engine for one owner of tasks."""
        return EngineGroup(self, name)

    def _jvm_is_gone(self) -> bool:
        return self._gateway is None or self._gateway.proc.poll() is not None

    def close(self) -> None:
        """Stop Spark and its processes."""
        self._closed = True
        py4j_log = logging.getLogger("py4j")
        level = py4j_log.level
        py4j_log.setLevel(logging.CRITICAL)  # it complains when cut off
        try:
            self._close()
        finally:
            py4j_log.setLevel(level)
            logging.getLogger().removeFilter(_is_not_of_py4j)

    def _close(self) -> None:
        if self._thread.ident is not None:
            if self._gateway is not None and not self._ready.is_set():
                self._gateway.proc.kill()  # nobody waits for a start that is not wanted
            self._thread.join()
        if self._context is not None and self._failure is None and not self._jvm_is_gone():
            try:
                _stop_context(self._context)
            except Exception as error:
                if not _is_out_of_reach(error):
                    raise
        if self._gateway is not None:
            _stop_jvm(self._gateway, self._end_seconds)
        self._context = self._gateway = None
        self._scratch.close()

    def _start(self) -> None:
        began = time.monotonic()
        try:
            self._context = self._open_context()
            # The first task starts the Python workers' parent, which takes 2 s.
            self._run(OWN_GROUP, _nothing, 0, "warm up")
        except BaseException as error:
            self._failure = error
        finally:
            self.start_seconds = time.monotonic() - began
            self._ready.set()

    def _open_context(self) -> SparkContext:
        local = self._has_one_executor
        options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss1m"]
        log_settings = Path(__file__).with_name("log4j2.properties")
        options.append(f"-Dlog4j2.configurationFile={log_settings}")
        options += [f"-Djava.io.tmpdir={self._scratch.path}", NO_PERFORMANCE_DATA]
        options += class_archive_options()
        conf = DEFAULT_CONF | {"spark.master": self.master}
        conf["spark.local.dir"] = str(self._scratch.path)
        if self.master.startswith("local"):
            conf["spark.driver.host"] = conf["spark.driver.bindAddress"] = "127.0.0.1"
        if local:
            # Only where the workers surely have this package installed.
            name = "stream_daemon" if self._streams else "daemon"
            conf["spark.python.daemon.module"] = f"millrace.spark.{name}"
            conf["spark.python.unix.domain.socket.dir"] = str(self._scratch.path)
            conf["spark.executorEnv.TMPDIR"] = str(self._scratch.path)
        conf |= self.conf
        conf["spark.driver.extraJavaOptions"] = " ".join(
            [*options, self.conf.get("spark.driver.extraJavaOptions", "")]
        ).strip()
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LAUNCHER_OPTS", NO_PERFORMANCE_DATA)
        if self.master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        memory = conf["spark.driver.memory"]
        os.environ["PYSPARK_SUBMIT_ARGS"] = " ".join(
            [
                f"--driver-memory {memory}",
                f'--driver-java-options "{conf["spark.driver.extraJavaOptions"]}"',
                "pyspark-shell",
            ]
        )
        logging.getLogger().addFilter(_is_not_of_py4j)
        from pyspark import SparkConf, SparkContext, java_gateway

        # It makes a directory while the JVM starts, which would stay if we were killed then.
        java_gateway.tempfile = SimpleNamespace(
            mkdtemp=partial(tempfile.mkdtemp, dir=self._scratch.path), mkstemp=tempfile.mkstemp
        )
        spark_conf = SparkConf(loadDefaults=False).setAll(list(conf.items()))
        with self.log_path.open("ab") as log_file:
            self._gateway = java_gateway.launch_gateway(
                popen_kwargs={
                    "stderr": log_file,
                    "stdout": log_file,
                    "pass_fds": self._scratch.descriptors,
                }
            )
        if self._closed:
            raise ServerError("stopped before Spark had started")
        context = SparkContext(conf=spark_conf, gateway=self._gateway)
        # A JVM that was killed would be reported on stderr, with a stack trace; we report it
        # ourselves.
        context._accumulatorServer.handle_error = lambda *_: None
        if not local:
            context.addPyFile(str(_package_zip(self._scratch.path)))
        return context


class EngineGroup(EngineView["Engine"]):
    """The tasks of one owner, as a job group of Spark's."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine)
        self._name = name

    def slots(self, wanted: int) -> int:
        return self._engine.slots(wanted)

    def call(self, body: Callable[[A, int], R], argument: A, description: str) -> R:
        return self._engine.call_for(self._name, body, argument, description)

    def cancel(self) -> None:
        self._engine.cancel_group(self._name)


def default_master(slots: int) -> str:
    """As many task slots as jobs were asked for: they wait for servers, not for our cores."""
    return f"local[{slots},{TASK_ATTEMPTS}]"


def _with_attempts(master: str) -> str:
    """`local[N]` would give up at a task's first failure."""
    match = re.fullmatch(r"local\[(\*|\d+)\]", master)
    return f"local[{match[1]},{TASK_ATTEMPTS}]" if match else master


def parse_conf(pairs: list[str]) -> dict[str, str]:
    """`--conf key=value` given any number of times."""
    conf = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--conf takes key=value, not {pair!r}")
        conf[key.strip()] = value.strip()
    return conf


def _nothing(argument: int, attempt: int) -> int:
    return argument + attempt


def _task(
    body: Callable[[A, int], R], description: str
) -> Callable[[Any], list[R | MillraceError]]:
    """An error of ours is a result, and so is a bug of ours: trying again is not for Spark to
    decide. What the machine may have caused is tried again, perhaps on another one."""

    def run(arguments: Any) -> list[R | MillraceError]:
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = context.attemptNumber() if context else 0
        try:
            with as_bug(description):
                return [body(argument, attempt) for argument in arguments]
        except MillraceError as error:
            return [error]
        except (OSError, MemoryError) as error:
            if attempt + 1 < TASK_ATTEMPTS:
                raise
            return [_machine_error(error, description)]

    return run


def _machine_error(error: OSError | MemoryError, description: str) -> MillraceError:
    where = getattr(error, "filename", None)
    place = f": {where}" if where else ""
    reason = getattr(error, "strerror", None) or type(error).__name__
    return ServerError(
        f"{description}: {reason}{place}",
        hint="look at the disk and the memory of the machine that ran the task; spark.log in --dir"
        " has the traceback",
    )


def _task_error(error: Exception, description: str) -> MillraceError:
    return ServerError(
        f"{description}: the Spark task failed {TASK_ATTEMPTS} times: {_first_line(error)}",
        hint="its Python worker died each time; look for the out-of-memory killer on that machine",
    )


def _is_out_of_reach(error: BaseException) -> bool:
    """Whether the JVM did not answer. One that was killed refuses connections some milliseconds
    before its end can be seen."""
    from py4j.protocol import Py4JError, Py4JJavaError

    if isinstance(error, Py4JError):
        return not isinstance(error, Py4JJavaError)
    return isinstance(error, OSError | EOFError)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """It logs a stack trace, and to the root logger, for what it then raises."""
    return f"{os.sep}py4j{os.sep}" not in record.pathname


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "Exception" in line or "Error" in line:
            return line
    return lines[0] if lines else type(error).__name__


def _package_zip(directory: Path) -> Path:
    """This package as a zip, for executors on other machines."""
    root = Path(millrace.__file__).parent
    path = directory / "millrace.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.write(file, file.relative_to(root.parent))
    return path


def _stop_context(context: SparkContext) -> None:
    """The server for accumulators, which we have none of, would take a second to end."""
    server, context._accumulatorServer = context._accumulatorServer, None
    threading.Thread(target=server.shutdown, name="accumulators", daemon=True).start()
    context.stop()


def _stop_jvm(gateway: Any, end_seconds: float) -> None:
    """Without this the JVM would live on until our process ends."""
    from pyspark import SparkContext

    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(timeout=end_seconds)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
    # The next context of this process starts a JVM of its own.
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
