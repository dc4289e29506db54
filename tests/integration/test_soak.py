"""
Hours of running, or as long as `AQUEDUCK_SOAK_SECONDS` says: files, memory and retained WAL stay bounded.

`make soak` runs it for half an hour and prints what it sees.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.fix_postgres import Database

SECONDS = float(os.environ.get("AQUEDUCK_SOAK_SECONDS", "180"))

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(SECONDS + 900)]


@dataclass(frozen=True)
class Seen:
    """The service at one moment."""

    second: float
    files: int
    delete_files: int
    on_disk: int
    snapshots: int
    memory: int
    retained: int

    def __str__(self) -> str:
        return (
            f"{self.second:6.0f} s  files {self.files:4}  delete files {self.delete_files:4}  on disk {self.on_disk:5}"
            f"  lake snapshots {self.snapshots:5}  memory {self.memory >> 20:5} MiB  retained WAL {self.retained >> 10:7} KiB"
        )


def look(sync: Any, process: Any, began: float) -> Seen:
    meta = "__ducklake_metadata_lake"
    [[files, delete_files, snapshots]] = sync.lake(
        f"select (select count(*) from {meta}.ducklake_data_file where end_snapshot is null),"
        f" (select count(*) from {meta}.ducklake_delete_file where end_snapshot is null),"
        f" (select count(*) from {meta}.ducklake_snapshot)"
    )
    parent = psutil.Process(process.pid)
    memory = 0
    for member in (parent, *parent.children(recursive=True)):
        try:
            memory += member.memory_info().rss
        except psutil.Error:
            continue
    return Seen(
        time.monotonic() - began,
        files,
        delete_files,
        sum(path.is_file() for path in (sync.directory / "data").rglob("*")),
        snapshots,
        memory,
        int(
            sync.db.value(
                "select pg_current_wal_lsn() - restart_lsn from pg_replication_slots where slot_name = 'aqueduck_test'"
            )
        ),
    )


def test_files_memory_and_wal_stay_bounded(db: Database, sync_of: Any) -> None:
    """P-S32: inserts, updates and deletes all the time, a flush every second, maintenance every ten."""
    db.execute("create table a (id bigint generated always as identity primary key, v text, n int)")
    db.execute("create table b (id int primary key, v text)")
    sync = sync_of("public.a", "public.b", flush_interval_ms=1000)
    sync.options = {
        "maintenance": {"interval_seconds": 10, "retention_hours": 60 / 3600, "grace_hours": 30 / 3600}
    }
    process = sync.started()
    began, seen, round_number = time.monotonic(), [], 0
    looked = began
    while time.monotonic() - began < SECONDS:
        round_number += 1
        db.execute("insert into a (v, n) select md5(n::text), n from generate_series(1, 300) n")
        db.execute("update a set n = n + 1 where id %% 50 = %s", (round_number % 50,))
        db.execute("delete from a where id < (select max(id) from a) - 20000")
        db.execute(
            "insert into b select n, %s from generate_series(1, 200) n on conflict (id) do update set v = excluded.v",
            (str(round_number),),
        )
        if time.monotonic() - looked >= 15:
            looked = time.monotonic()
            seen.append(look(sync, process, began))
            print(seen[-1], flush=True)
            assert process.poll() is None, sync.log()
        time.sleep(0.4)
    sync.wait_same()
    assert process.poll() is None
    sync.stop(process)
    late = seen[len(seen) // 3 :]
    assert max(s.files for s in late) <= 60
    assert max(s.delete_files for s in late) <= 30
    assert max(s.snapshots for s in late) <= 400
    assert max(s.retained for s in late) <= 256 << 20
    half = len(late) // 2
    first, last = max(s.memory for s in late[:half]), max(s.memory for s in late[half:])
    assert last <= first * 1.25 + (200 << 20), f"memory grew from {first >> 20} to {last >> 20} MiB"
