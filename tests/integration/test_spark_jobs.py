"""A user's own Spark job, `examples/mirror_table.py`: by spark-submit, and killed with SIGKILL over and over."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from aqueduck.spark.session.session import prepare_environment
from tests.fix_postgres import Database, wait_until
from tests.integration.test_cluster import master

__all__ = ["master"]  # a fixture

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mirror_table.py"


class Job:
    """The example as a process of its own."""

    def __init__(self, db: Database, directory: Path, *flags: str) -> None:
        self._directory = directory
        self._arguments = [
            "--dsn-env", "PG_DSN", "--table", "public.t", "--keys", "id", "--catalog", f"sqlite:{directory}/lake.sqlite",
            "--data-path", f"{directory}/lake/", "--checkpoint", f"{directory}/checkpoint", *flags,
        ]  # fmt: skip
        self._env = {
            **os.environ,
            "PG_DSN": db.dsn,
            "PYTHONPATH": f"{ROOT}/src",
            "PYSPARK_SUBMIT_ARGS": _SUBMIT,
        }
        prepare_environment(self._env, "local[2]")
        # For the service's own process only: spark-submit runs the job with it.
        self._env.pop("PYSPARK_DRIVER_PYTHON")
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "job.log"

    def submit(self, master: str = "local[2]") -> int:
        """By spark-submit, to its end."""
        conf = ("spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1")
        options = [word for setting in conf for word in ("--conf", setting)]
        command = [str(Path(sys.executable).with_name("spark-submit")), "--master", master, *options]
        with self.log.open("ab") as log:
            done = subprocess.run(
                [*command, str(EXAMPLE), *self._arguments], env=self._env, stdout=log, stderr=log, timeout=280
            )
        return done.returncode

    def start(self, **env: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), *self._arguments], env={**self._env, **env}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def wait_for_fault(self, point: str) -> None:
        """One of Spark's processes dies at the point; the query fails, or Spark retries automatically."""
        wait_until(lambda: f"fault point {point}" in self.log.read_text(), f"{point} is passed", seconds=120)

    def kill(self) -> None:
        """Everything at once, as a machine that loses its power."""
        assert self.process is not None
        family = [self.process.pid]
        if self.process.poll() is None:
            family += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        for pid in family:
            wait_until(lambda pid=pid: not psutil.pid_exists(pid) or _is_dead(pid), "the job is dead")  # type: ignore[misc]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        pool = LakePool(max_open=1)
        place = LakePlace(catalog=f"sqlite:{self._directory}/lake.sqlite", data_path="")
        try:
            with pool.use(place, read_only=True) as lake:
                return lake.execute(query.replace("lake.", f"{lake.alias}."))
        finally:
            pool.close()


_SUBMIT = (
    "--master local[2] --conf spark.ui.enabled=false --conf spark.driver.bindAddress=127.0.0.1"
    " --conf spark.driver.host=127.0.0.1 pyspark-shell"
)


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def source(db: Database) -> Database:
    db.execute("create table t (id int primary key, v int)")
    return db


def test_spark_submit_mirrors_a_table(source: Database, tmp_path: Path) -> None:
    """The example runs as docs/spark.md says, and continues from its checkpoint."""
    job = Job(source, tmp_path, "--once")
    assert job.submit() == 0, job.log.read_text()[-3000:]
    source.execute("insert into t select g, g from generate_series(1, 5000) g")
    source.execute("update t set v = 0 where id <= 10; delete from t where id > 4000")
    assert job.submit() == 0, job.log.read_text()[-3000:]
    assert job.rows("select count(*), sum(v) from lake.t") == source.query("select count(*), sum(v) from t")
    assert sorted(job.rows("from lake.t")) == sorted(source.query("select * from t"))


def test_the_job_runs_on_a_cluster(source: Database, master: str, tmp_path: Path) -> None:
    """DESIGN 9: the tasks that read segments and write files are in executors that are separate processes."""
    job = Job(source, tmp_path, "--once")
    assert job.submit(master) == 0, job.log.read_text()[-3000:]
    source.execute("insert into t select g, g from generate_series(1, 5000) g")
    assert job.submit(master) == 0, job.log.read_text()[-3000:]
    assert sorted(job.rows("from lake.t")) == sorted(source.query("select * from t"))
    assert list((tmp_path / "work").glob("app-*/*")), "executors ran in the worker's directory"


def test_a_killed_job_loses_and_doubles_nothing(source: Database, tmp_path: Path) -> None:
    """Guarantee 10: SIGKILL at any moment, and at each durable step; every change is in the lake once."""
    job = Job(source, tmp_path, "--history")
    job.start()
    wait_until(
        lambda: source.query("select 1 from pg_replication_slots where slot_name = 'mirror_table'"),
        "the slot is there", seconds=120, log=lambda: job.log.read_text()[-3000:],
    )  # fmt: skip
    source.execute(
        "create table journal (n bigint generated always as identity, id int, v int, op text);"
        "create function note() returns trigger language plpgsql as $$ begin"
        " insert into journal (id, v, op) values (coalesce(new.id, old.id), new.v, lower(tg_op)); return null; end $$;"
        "create trigger note after insert or update or delete on t for each row execute function note()"
    )
    stop = threading.Event()
    writer = threading.Thread(target=_write, args=(source, stop))
    writer.start()
    faults = [
        "",
        "write.after_commit:2",
        "write.before_commit:2",
    ]  # the others: tests/spark/formats/test_exactly_once.py
    try:
        for number, fault in enumerate(faults):
            if number:
                job.start(AQUEDUCK_FAULT=fault)
            if fault:
                job.wait_for_fault(fault.partition(":")[0])
            time.sleep(random.uniform(0.5, 6.0))
            job.kill()
    finally:
        stop.set()
        writer.join()
    last = Job(source, tmp_path, "--history", "--once")
    assert last.submit() == 0, last.log.read_text()[-3000:]
    expected = source.query("select id, v, op from journal order by n")
    assert len(expected) > 200
    rows = last.rows("select id, v, _op from lake.t_history order by _commit_lsn, _seq")
    assert [(i, None if op == "delete" else v, op) for i, v, op in rows] == expected
    assert _strays(last, tmp_path) == set()


def _write(db: Database, stop: threading.Event) -> None:
    """Transactions of one writer, so that the journal has the order of the stream."""
    with db.connect() as conn:
        number = 0
        while not stop.is_set():
            with conn.transaction():
                for _ in range(random.randint(1, 30)):
                    number += 1
                    conn.execute("insert into t values (%s, %s)", (number, number))
                conn.execute("update t set v = v + 1 where id = %s", (random.randint(1, number),))
                conn.execute("delete from t where id = %s", (random.randint(1, number),))
            time.sleep(0.02)


def _strays(job: Job, directory: Path) -> set[str]:
    """Files that no catalog row knows."""
    files = {path.name for path in (directory / "lake").rglob("*.parquet")}
    pool = LakePool(max_open=1)
    place = LakePlace(catalog=f"sqlite:{directory}/lake.sqlite", data_path="")
    with pool.use(place, read_only=True) as lake:
        known = {
            path.rsplit("/", 1)[-1]
            for (path,) in lake.execute(f"select path from {lake.metadata}.ducklake_data_file")
        }
    pool.close()
    return files - known
