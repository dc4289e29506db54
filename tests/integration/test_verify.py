"""`aqueduck verify` beside a service that runs under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync


def verify(sync: Sync) -> tuple[int, list[dict[str, Any]]]:
    """Without a second Spark, to be kind to small machines."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "aqueduck.cli", "verify", "-c", str(sync.config_file)]
    done = subprocess.run(
        [*command, "--no-spark", "--json"], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_verify_beside_a_loaded_service_is_clean_and_finds_damage(db: Database, sync_of: Any) -> None:
    """Copied and streamed rows are compared while both continue; a row taken from the lake is named."""
    db.execute("create table t (id int primary key, v int)")
    db.execute("insert into t select g, 0 from generate_series(1, 10000) g")
    sync: Sync = sync_of("public.t", copy=True)
    sync.started()
    sync.wait_same()
    stopping = threading.Event()

    def write() -> None:
        with db.connect() as conn:
            n = 10_000
            while not stopping.wait(0.005):
                n += 1
                conn.execute("insert into t values (%s, 1)", [n])
                conn.execute("update t set v = v + 1 where id = %s", [1 + n % 5000])
                conn.execute("delete from t where id = %s", [n - 7])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        code, [clean] = verify(sync)
        sync.change_lake("delete from lake.main.t where id = 8000")
        damaged_code, [damaged] = verify(sync)
    finally:
        stopping.set()
        writer.join()
    assert (code, clean["verdict"], clean["differences"]) == (0, "identical", []), clean
    assert clean["source_rows"] > 9000
    assert damaged_code == 1
    assert damaged["differences"] == [{"kind": "missing", "key": {"id": "8000"}}]


def verdict(sync: Sync) -> tuple[str, int]:
    """As SQL shows it."""
    [found] = sync.db.query("select verdict, differences from aqueduck.status()")
    return found


def wait_for_the_next_look(sync: Sync) -> None:
    query = "select verified_at from aqueduck.status()"
    before = sync.db.value(query)
    wait_until(lambda: sync.db.value(query) != before, "the service compared once more", 120, log=sync.log)


@pytest.mark.slow
def test_a_service_verifies_itself_under_load_and_after_a_crash(db: Database, sync_of: Any) -> None:
    """P-T01: moving rows are never called different, a row taken from the lake is, even after a kill, until a resync."""
    db.execute("create table t (id int primary key, v int)")
    db.execute("insert into t select g, 0 from generate_series(1, 10000) g")
    sync: Sync = sync_of("public.t", copy=True)
    sync.options = {"verify": {"interval": "1s", "share": 1.0}}
    process = sync.started()
    stopping = threading.Event()

    def write() -> None:
        with db.connect() as conn:
            n = 10_000
            while not stopping.wait(0.005):
                n += 1
                conn.execute("insert into t values (%s, 1)", [n])
                conn.execute("update t set v = v + 1 where id = %s", [1 + n % 5000])
                conn.execute("delete from t where id = %s", [n - 7])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(5):
            wait_for_the_next_look(sync)
            seen.add(verdict(sync))
        assert seen == {("identical", 0)}, sync.log()
        sync.change_lake("delete from lake.main.t where id = 8000")
        wait_until(lambda: verdict(sync) == ("different", 1), "the loss was found", 120, log=sync.log)
        sync.kill(process)
        sync.started()
        assert verdict(sync) == ("different", 1)
        db.execute("select aqueduck.resync_table('public.t')")
        wait_until(lambda: verdict(sync) == ("identical", 0), "the copy repaired it", 420, log=sync.log)
    finally:
        stopping.set()
        writer.join()
