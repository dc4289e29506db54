"""`aqueduck verify` as people run it: a process of its own, with Spark, while the source is busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fix_postgres import Database
from tests.small_service import small_service


def verify(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the verdicts by table."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    file = str(directory / "aqueduck.yaml")
    command = [sys.executable, "-m", "aqueduck.cli", "verify", "-c", file, "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    return done.returncode, {result["table"]: result for result in json.loads(done.stdout)}


@pytest.mark.slow
@pytest.mark.spark
def test_spark_reads_both_sides_while_the_source_is_busy(db: Database, tmp_path: Path) -> None:
    """Partitions are tasks, the busy table is identical, and the damaged one is different by its keys."""
    db.execute(
        "create table busy (id int primary key, v int);"
        "create table parts (id int, day int, v text, primary key (id, day)) partition by list (day);"
        "create table parts_0 partition of parts for values in (0);"
        "create table parts_1 partition of parts for values in (1);"
        "create table damaged (id int primary key, v text)"
    )
    with small_service(db, tmp_path, "public.busy", "public.parts", "public.damaged") as service:
        db.execute("insert into parts select g, g % 2, 'x' from generate_series(1, 20000) g")
        db.execute("insert into damaged select g, 'x' from generate_series(1, 20000) g")
        service.apply()
        service.change_lake("delete from lake.main.damaged where id = 12345")
        service.change_lake("update lake.main.damaged set v = null where id = 777")
        stopping = threading.Event()

        def write() -> None:
            with db.connect() as conn:
                n = 0
                while not stopping.wait(0.01):
                    n += 1
                    conn.execute("insert into busy values (%s, 1)", [n])
                    conn.execute("update busy set v = v + 1 where id = %s", [n // 2])

        writer = threading.Thread(target=write)
        writer.start()
        try:
            with service.running():
                code, found = verify(tmp_path)
        finally:
            stopping.set()
            writer.join()
    assert code == 1
    assert (found["public.busy"]["verdict"], found["public.busy"]["differences"]) == ("identical", [])
    assert found["public.busy"]["source_rows"] > 0
    assert (found["public.parts"]["verdict"], found["public.parts"]["lake_rows"]) == ("identical", 20000)
    assert found["public.damaged"]["differences"] == [
        {"kind": "changed", "key": {"id": "777"}},
        {"kind": "missing", "key": {"id": "12345"}},
    ]


@pytest.mark.spark
@pytest.mark.slow
def test_a_catalog_in_a_file_of_duckdb_is_read_by_the_driver(db: Database, tmp_path: Path) -> None:
    """Workers cannot open it, and need not."""
    db.execute("create table t (id int primary key)")
    with small_service(db, tmp_path, "public.t", catalog=str(tmp_path / "lake.ducklake")) as service:
        db.execute("insert into t select generate_series(1, 100)")
        service.apply()
    code, found = verify(tmp_path)
    assert (code, found["public.t"]["verdict"], found["public.t"]["lake_rows"]) == (0, "identical", 100)
