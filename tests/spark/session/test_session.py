"""A session has our settings, lets a person's win, and reports in one line that it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from aqueduck.model.errors import AqueduckError, SparkStartError
from aqueduck.spark.session.quiet_worker import quiet_planning, quiet_worker
from aqueduck.spark.session.session import prepare_environment, session_settings

JAVA_OPTIONS = "spark.driver.extraJavaOptions"

STARTS = """
import os, signal, sys
from pyspark.sql.functions import udf
from aqueduck.spark.session.session import build_session

signal.signal(signal.SIGINT, signal.SIG_IGN)
spark = build_session("local[1]", {"spark.sql.shuffle.partitions": "1"}, "test", driver_memory="512m")
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "P-E07: ctrl-C means what it did before"
python = spark.range(1).select(udf(lambda _: __import__("sys").executable)("id")).first()[0]
assert python == sys.executable, python
assert spark.conf.get("spark.sql.shuffle.partitions") == "1"
assert spark.sparkContext.getConf().get("spark.driver.host") == "127.0.0.1"
assert spark.sparkContext.uiWebUrl is None
try:
    spark.range(1).select(udf(lambda _: 1 / 0)("id")).collect()
except Exception as failure:
    assert "division by zero" in str(failure)
"""

PLANS = """
import contextlib, psutil
from pyspark.sql.datasource import DataSource, DataSourceReader
from aqueduck.spark.session.quiet_worker import quiet_planning
from aqueduck.spark.session.session import build_session

class Reader(DataSourceReader):
    def read(self, partition):
        yield (1,)

class Source(DataSource):
    def schema(self):
        quiet_planning()
        return "n int"

    def reader(self, schema):
        quiet_planning()
        return Reader()

spark = build_session("local[1]", {}, "test", driver_memory="512m")
spark.dataSource.register(Source)
assert spark.read.format("Source").load().collect() == [(1,)]
planning = set()
for process in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.Error):
        planning |= {part for part in process.cmdline() if part.startswith("pyspark.sql.worker.")}
print(*sorted(planning))
"""

DIES = """
import os, signal, sys
import psutil
from aqueduck.spark.session.session import build_session

spark = build_session("local[1]", {"spark.shuffle.compress": "false"}, "test", driver_memory="512m")
rows = spark.range(100).selectExpr(f"concat('{sys.argv[1]}', id) as v")
assert rows.repartition(2, "v").rdd.mapPartitions(lambda rows: [len(list(rows))]).sum() == 100
for process in psutil.Process().children(recursive=True):
    process.kill()
os.kill(os.getpid(), signal.SIGKILL)
"""

DOES_NOT_START = """
from aqueduck.model.errors import SparkStartError
from aqueduck.spark.session.session import build_session

try:
    build_session("local[1]", {"spark.memory.fraction": "x"}, "test", driver_memory="512m")
except SparkStartError as error:
    print(error)
"""


def run_python(code: str, directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: a JVM lives as long as the process that started it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **env}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=directory, env=env, capture_output=True, text=True
    )


def test_a_persons_settings_win() -> None:
    """What the file sets under spark.conf is what Spark gets."""
    settings = session_settings("local[2]", {"spark.ui.enabled": "true", "spark.driver.memory": "4g"}, "2g")
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.driver.memory"] == "4g"


def test_a_persons_java_options_come_last() -> None:
    """Java takes the last of two options, so a person's are added after ours."""
    options = session_settings("local[2]", {JAVA_OPTIONS: "-XX:TieredStopAtLevel=4"}, "2g")[JAVA_OPTIONS]
    assert options.startswith("-Dlog4j2.configurationFile=file:")
    assert options.endswith("-XX:TieredStopAtLevel=4")


@pytest.mark.parametrize("master", ["local", "local[*]", "local[4]", "local-cluster[2,1,1024]"])
def test_a_local_driver_listens_on_loopback_only(master: str) -> None:
    """Nobody else can reach a Spark that runs on one machine."""
    settings = session_settings(master, {}, "2g")
    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host"])
def test_a_clusters_driver_can_be_reached(master: str) -> None:
    """Executors on other machines find the driver."""
    assert "spark.driver.bindAddress" not in session_settings(master, {}, "2g")


def test_workers_run_the_same_python() -> None:
    """An interpreter that the environment sets for other programs is not used."""
    env = {**os.environ, "PYSPARK_PYTHON": "/usr/bin/python2"}
    prepare_environment(env, "local[1]")
    assert env["PYSPARK_PYTHON"] == sys.executable


def test_workers_of_a_cluster_run_the_python_of_the_environment() -> None:
    """Executors may have it elsewhere; without the variable it is ours."""
    env = {**os.environ, "PYSPARK_PYTHON": "/opt/python"}
    prepare_environment(env, "spark://host:7077")
    assert env["PYSPARK_PYTHON"] == "/opt/python"
    del env["PYSPARK_PYTHON"]
    prepare_environment(env, "spark://host:7077")
    assert env["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.spark
def test_a_session_starts_quietly_with_our_settings(tmp_path: Path) -> None:
    """Spark starts, works and fails a job without a word on the terminal or a file left behind."""
    result = run_python(STARTS, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def holding(directory: Path, pattern: str, text: str) -> list[Path]:
    files = (path for top in directory.glob(pattern) for path in top.rglob("*") if path.is_file())
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.spark
def test_rows_that_a_killed_spark_shuffled_go_with_the_next_start(tmp_path: Path) -> None:
    """The attack: kill -9 of Python and Java, then a look into /tmp."""
    cell = f"cell-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="a", dir="/tmp") as directory:
        assert run_python(DIES, tmp_path, cell, TMPDIR=directory).returncode == -signal.SIGKILL
        left = holding(Path(directory), "aqueduck-*", cell)
        assert left, "the rows were shuffled through files"
        assert not any(path.stat().st_mode & 0o077 for path in Path(directory).glob("aqueduck-*"))
        assert holding(Path("/tmp"), "blockmgr-*", cell) == []
        next_start = "from aqueduck.state_files.scratch import scratch_directory as made; made()"
        assert run_python(next_start, tmp_path, TMPDIR=directory).returncode == 0
        assert list(Path(directory).iterdir()) == []


@pytest.mark.spark
def test_spark_does_not_look_for_data_sources(tmp_path: Path) -> None:
    """All of ours are registered; looking for others takes a process that stays.  Those that plan end without a word."""
    result = run_python(PLANS, tmp_path)
    planning = ("pyspark.sql.worker.create_data_source", "pyspark.sql.worker.plan_data_source_read")
    assert (result.stdout.split(), result.stderr) == ([*planning], "")


@pytest.mark.spark
def test_a_session_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    """The innermost reason is in the message, and no stack trace is on the terminal."""
    result = run_python(DOES_NOT_START, tmp_path)
    assert result.stderr == ""
    assert isinstance(AqueduckError.from_text(result.stdout), SparkStartError)
    assert 'For input string: "x"' in result.stdout


def test_a_worker_whose_spark_is_gone_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a stop: the daemon's output would look like a failure, but is none."""
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "secret")
    ours, sparks = socket.socketpair()
    with ours:
        with sparks:
            sparks.sendall(struct.pack("!i", 6) + b"secret")
        assert quiet_worker(ours, authenticated=False) == 1


@pytest.mark.parametrize(("name", "quiet"), [("pyspark.daemon", True), ("aqueduck.cli.__main__", False)])
def test_a_worker_that_plans_is_quiet_as_well(
    monkeypatch: pytest.MonkeyPatch, name: str, quiet: bool
) -> None:
    """Its daemon is Spark's own, and calls our `worker`; the `worker` of others is not touched."""
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, None)
    main.worker = other = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    quiet_planning()
    assert main.worker is (quiet_worker if quiet else other)
