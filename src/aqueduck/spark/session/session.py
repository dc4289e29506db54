"""
Start the Spark session that all flows use, and define its settings.

`java` selects the Java runtime; `spark.query` has the queries and jobs that run in the session.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aqueduck.config.secret_text import keep_secrets
from aqueduck.model.errors import SparkStartError
from aqueduck.spark.session.authentication import SECRET_FILE, authentication, open_to_strangers, unsecret
from aqueduck.spark.session.java import find_java, make_shim
from aqueduck.state_files.private_files import private_directory
from aqueduck.state_files.scratch import scratch_directory

__all__ = ["build_session", "prepare_environment", "session_settings"]

log = structlog.get_logger()

_LOOPBACK = "127.0.0.1"
_LOCAL = re.compile(r"local(\[.*\])?|local-cluster\[.*\]")
_NO_COMMAND = "no-such-python"
_LOGGING = Path(__file__).with_name("log4j2.properties")
_SOCKETS = "spark.python.unix.domain.socket.dir"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_JAVA_CAUSE = re.compile(r"^(?:: |Caused by: )?[\w.$]+(?:Exception|Error): (.+)$", re.MULTILINE)

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Limits for finished work, which Spark keeps in memory for its page even if the page is off.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.shuffle.partitions": "4",
    # Adaptive execution merges tasks with small input, but ours are references to much larger segments.
    "spark.sql.adaptive.enabled": "false",
    # Copies and streams share the cores, so that a stream's few tasks do not wait for all chunks of a copy.
    "spark.scheduler.mode": "FAIR",
    # Workers are forked with our modules already imported.
    "spark.python.daemon.module": "aqueduck.spark.session.worker_daemon",
    # Over TCP each task waits 40 ms for a delayed acknowledgement: eight empty tasks take 0.26 s instead of 0.09 s.
    "spark.python.unix.domain.socket.enabled": "true",
    # A worker that starts on a busy machine may need longer than the default of 15 s to connect back.
    "spark.python.authenticate.socketTimeout": "120s",
    # Environment variables of executors are redacted in event logs too, under any name.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|dsn|executorenv",
    # The lake defines the progress, so a few batches of Spark's own log are enough.
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # The default starts processes to set file modes and takes 110 ms per batch; this one takes 25 ms.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

_JVM_OPTIONS = (
    f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
    # Stopping a query matches a recursive regular expression against a Python traceback.
    "-Xss8m",
)

_LOCAL_JVM_OPTIONS = (
    # Rows do not pass through the JVM.  Compiling less saves a quarter of its CPU time, and more at the start;
    # one thread is enough to collect its garbage.
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
)


def build_session(
    master: str,
    conf: Mapping[str, str],
    app_name: str,
    driver_memory: str = "2g",
    state_dir: str | None = None,
) -> SparkSession:
    """
    Start Spark, or return the session that already runs in this process.

    Tasks of a cluster find connection strings in `state_dir`, tasks of this host in a directory of this process.
    `conf` overrides all other settings.  Raises `SparkStartError` if Spark does not start, or if executors do not see
    `state_dir`.
    """
    prepare_environment(os.environ, master)
    settings = session_settings(master, conf, driver_memory)
    if todo := open_to_strangers(master, conf):
        log.warning("spark does not authenticate", hint=todo)
    keep_secrets(scratch_directory(None if _LOCAL.fullmatch(master) else state_dir))
    with _start_failures(master), _same_interrupt():
        _start_java({**settings, "spark.master": master, "spark.app.name": app_name})
        builder = SparkSession.builder.master(master).appName(app_name)
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
    if state_dir is not None and not _LOCAL.fullmatch(master):
        _refuse_unshared(session, Path(state_dir))
    return session


def _refuse_unshared(session: SparkSession, state_dir: Path) -> None:
    """Raise if an executor does not see the files that the driver writes into `state_dir`."""
    with tempfile.NamedTemporaryFile(dir=private_directory(state_dir), prefix="shared-") as file:
        tasks = 2 * session.sparkContext.defaultParallelism
        name = file.name
        hosts = session.sparkContext.parallelize(range(tasks), tasks).flatMap(lambda _: _blind(name))
        blind = sorted(set(hosts.collect()))
    if blind:
        raise SparkStartError(
            f"executors on {', '.join(blind)} do not see the files in state_dir",
            hint=f"put state_dir ({state_dir}) on storage that driver and executors share, at the same path",
        )


def _blind(name: str) -> list[str]:
    """In a task: this host, if the file is not there."""
    return [] if os.access(name, os.R_OK) else [socket.gethostname()]


def session_settings(master: str, conf: Mapping[str, str], driver_memory: str) -> dict[str, str]:
    """The settings of a session on `master`, including those in `conf`."""
    settings = {**_SETTINGS, "spark.driver.memory": driver_memory}
    # The JVM's own temporary directory is /tmp, where the shuffled rows of a killed one would stay.
    options = [*_JVM_OPTIONS, f"-Djava.io.tmpdir={scratch_directory()}"]
    if _LOCAL.fullmatch(master):
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
        settings[_SOCKETS] = str(scratch_directory())
        options += _LOCAL_JVM_OPTIONS
    settings |= {**authentication(master, conf), **conf}
    if master.startswith("spark:"):
        settings.pop(SECRET_FILE, None)  # Spark itself reads a file on Kubernetes only
    # Java takes the last of two conflicting options, so those in `conf` win.
    settings[_JAVA_OPTIONS] = " ".join([*options, conf.get(_JAVA_OPTIONS, "")]).strip()
    return settings


def prepare_environment(env: MutableMapping[str, str], master: str) -> None:
    """Set the environment variables for Spark's launcher and its Python workers."""
    # Python workers allocate large buffers for a short time: return most memory, but reuse buffers of usual size.
    env.setdefault("MALLOC_ARENA_MAX", "2")
    env.setdefault("MALLOC_TRIM_THRESHOLD_", str(64 << 20))
    env.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    env.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if _LOCAL.fullmatch(master):
        env["PYSPARK_PYTHON"] = sys.executable
    else:  # executors may have another place for it
        env.setdefault("PYSPARK_PYTHON", sys.executable)
    # With a command that does not exist, Spark does not search packages for data sources, which would start a process
    # and print a traceback when it ends.
    env["PYSPARK_DRIVER_PYTHON"] = _NO_COMMAND
    env["JAVA_HOME"] = str(make_shim(find_java(env)))
    if _LOCAL.fullmatch(master):
        env["SPARK_LOCAL_IP"] = _LOOPBACK


def _start_java(settings: Mapping[str, str]) -> None:
    """Start the JVM with only the settings that it needs, because Spark's own start puts all on its command line."""
    SparkContext._ensure_initialized(
        conf=SparkConf(loadDefaults=False).setAll(list(unsecret(settings).items()))
    )


@contextmanager
def _same_interrupt() -> Iterator[None]:
    """Restore the handler of ctrl-C, because a Spark context sets its own, which raises at any point of the program."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _start_failures(master: str) -> Iterator[None]:
    try:
        yield
    except (PySparkException, Py4JError, OSError) as exc:
        hint = "check spark.master and spark.conf; spark.conf with spark.log.level: INFO shows more"
        raise SparkStartError(f"Spark did not start on {master}: {_reason(exc)}", hint=hint) from exc


def _reason(exc: BaseException) -> str:
    """The line that explains a failed start: the innermost Java cause, if there is one."""
    text = str(exc)
    if "stopped SparkContext" in text:
        return "the cluster does not answer, or has no resources for this application"
    causes = _JAVA_CAUSE.findall(text)
    return str(causes[-1]) if causes else text.strip().split("\n")[0]
