"""On a real Spark standalone cluster: the executors are processes of their own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest

from tests.fix_postgres import Database, wait_until
from tests.stranger import process_texts

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PACKAGE = Path(pyspark.__file__).parent


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The secret of a cluster, as docs/install.md says: in the defaults of master and workers."""
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    settings = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secret.read_text(),
        "spark.network.crypto.enabled": "true",
    }
    (tmp_path / "conf").mkdir()
    defaults = "".join(f"{key} {value}\n" for key, value in settings.items())
    (tmp_path / "conf" / "spark-defaults.conf").write_text(defaults)
    return secret


@pytest.fixture
def master(tmp_path: Path, secret: Path) -> Iterator[str]:
    """A master and one worker on loopback, from the pyspark package."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    env = {
        **os.environ,
        "SPARK_HOME": str(PACKAGE),
        "SPARK_CONF_DIR": str(tmp_path / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    log = tmp_path / "cluster.log"
    commands = (
        ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"],
        ["org.apache.spark.deploy.worker.Worker", url, "--cores", "2", "--memory", "1g", "--webui-port", "0",
         "--work-dir", str(tmp_path / "work")],
    )  # fmt: skip
    processes = []
    with log.open("wb") as out:
        for command in commands:
            program = [str(PACKAGE / "bin" / "spark-class"), *command]
            processes.append(subprocess.Popen(program, env=env, stdout=out, stderr=subprocess.STDOUT))
        try:
            wait_until(
                lambda: "Registering worker" in log.read_text(errors="replace"), "the worker registers", 60
            )
            yield url
        finally:
            for process in processes:
                process.terminate()
                process.wait(timeout=30)


OWN_SESSION = """
import sys
from pyspark.sql import SparkSession
import aqueduck
master, events, dsn_file, catalog_file, directory = sys.argv[1:]
spark = (
    SparkSession.builder.master(master).config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.executor.memory", "512m")
    .config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", events)
    .config("spark.eventLog.compress", "false").config("spark.sql.ui.explainMode", "extended").getOrCreate()
)
aqueduck.register(spark)
lake = {"catalog_file": catalog_file, "data_path": f"{directory}/own/", "table": "copied"}
rows = spark.read.format("postgres_table").options(dsn_file=dsn_file, table="t").load()
rows.write.format("ducklake").options(**lake).mode("append").save()
copied = spark.read.format("ducklake").options(**lake).load()
rows.explain(True)
print("rows:", copied.count(), flush=True)
sys.stdin.readline()
"""


def test_tasks_of_ones_own_session_read_secrets_themselves(
    db: Database, master: str, secret: Path, tmp_path: Path
) -> None:
    """With `dsn_file` and `catalog_file` no password is in a task, a plan, a log, a command line or an environment."""
    db.execute(
        "create table t (id int primary key, v text); insert into t select g, 'v' from generate_series(1, 5000) g"
    )
    (tmp_path / "dsn").write_text(f"{db.dsn} password=password-planted")
    (tmp_path / "catalog").write_text(f"postgres:{db.dsn} password=password-planted")
    (tmp_path / "events").mkdir()
    script = tmp_path / "own.py"
    script.write_text(OWN_SESSION)
    arguments = [master, (tmp_path / "events").as_uri(), *(str(tmp_path / n) for n in ("dsn", "catalog", ""))]
    env = {
        **os.environ, "SPARK_CONF_DIR": str(tmp_path / "conf"), "PYTHONPATH": os.pathsep.join(sys.path),
        "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
    }  # fmt: skip
    with (tmp_path / "own.log").open("wb") as log:
        command = [sys.executable, str(script), *arguments]
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        log_file = tmp_path / "own.log"
        wait_until(
            lambda: b"rows: 5000" in log_file.read_bytes() or process.poll() is not None,
            "it is copied",
            180,
            log=log_file.read_text,
        )
        family = [
            p for root in (process.pid, os.getpid()) for p in psutil.Process(root).children(recursive=True)
        ]
        shown = "".join(text for p in family for text in process_texts(p))
        assert "CoarseGrainedExecutorBackend" in shown
        assert "password-planted" not in shown
    finally:
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0, log_file.read_text()
    holding = {
        path.name
        for path in tmp_path.rglob("*")
        if path.is_file() and b"password-planted" in path.read_bytes()
    }
    assert holding == {"dsn", "catalog"}
    assert any((tmp_path / "events").rglob("*"))


def test_the_same_service_runs_on_a_cluster(
    db: Database, sync_of: Any, master: str, secret: Path, tmp_path: Path
) -> None:
    """DESIGN 9: copy, stream and fold run in executors that are separate processes and know the cluster's secret."""
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select g, md5(g::text) from generate_series(1, 40000) g")
    sync = sync_of("public.t", segment_bytes="2MiB", copy=True)
    sync.spark = {
        "master": master,
        "conf": {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.authenticate.secret.file": str(secret),
        },
    }
    sync.catch_up()
    db.execute("update t set v = v || repeat('y', 100) where id % 2 = 0; delete from t where id % 7 = 0")
    db.execute("insert into t select g, 'new' from generate_series(100000, 130000) g")
    sync.catch_up()
    assert "spark does not authenticate" not in sync.log()
    assert list((tmp_path / "work").glob("app-*/*")), "executors ran in the worker's directory"
    written = [p.name for p in (sync.directory / "data").rglob("aqueduck-test-*.parquet")]
    assert any("-copy-" in name for name in written)
    assert any("-copy-" not in name for name in written)


STARTS = """
import sys
from aqueduck.model.errors import SparkStartError
from aqueduck.spark.session.session import build_session
master, secret, *places = sys.argv[1:]
conf = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m", "spark.authenticate.secret.file": secret}
for place in places:
    try:
        build_session(master, conf, "starts", state_dir=place)
        print("started", flush=True)
    except SparkStartError as exc:
        print(exc, flush=True)
"""


def test_executors_that_do_not_see_the_stage_are_refused(master: str, secret: Path, tmp_path: Path) -> None:
    """A directory that each process has for itself is like a disk that is not shared: no batch would ever be folded."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    places = ["/proc/self/cwd/state", str(tmp_path / "shared")]
    env = {
        **os.environ, "SPARK_CONF_DIR": str(tmp_path / "conf"), "PYTHONPATH": os.pathsep.join(sys.path),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), master, str(secret), *places],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    refused, started = done.stdout.splitlines()
    assert refused.startswith(
        f"[spark.start] executors on {socket.gethostname()} do not see the files in state_dir"
    )
    assert started == "started"
