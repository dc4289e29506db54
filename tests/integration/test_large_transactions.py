"""Large transactions through the whole service on Spark: while they are open, killed in the middle, and ten million rows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark


def _little_memory(db: Database) -> None:
    """From its next connection on, the server streams transactions of more than 64 kB."""
    db.execute(f"alter database {db.name} set logical_decoding_work_mem = '64kB'")


def _staged(sync: Sync) -> bool:
    """Whether the capture holds files of a transaction that the lake has nothing of."""
    return any((sync.directory / "state" / sync.group / "stage").glob("*.arrow"))


def test_small_transactions_pass_a_large_one_and_it_arrives_whole(shared: Sync) -> None:
    """P-S29, P-S07: changes that commit beside an unfinished transaction reach the lake before it; then it comes at once."""
    db = shared.db
    _little_memory(db)
    db.execute("create table t (id int primary key, v text); create table u (id int primary key, v text)")
    with shared.held():  # a new connection, with the new setting
        pass
    shared.follow("public.t", "public.u", copy=False)
    with db.connect() as conn:
        conn.execute("begin")
        conn.execute("insert into t select g, repeat('x', 200) from generate_series(1, 15000) g")
        conn.execute("savepoint a")
        conn.execute(
            "insert into u select g, 'void' from generate_series(1, 5000) g; delete from t where id < 9000"
        )
        wait_until(lambda: _staged(shared), "it is staged while it is open")
        db.execute("insert into u values (-1, 'passes')")
        wait_until(lambda: shared.lake("from lake.main.u") == [(-1, "passes")], "the small one is there", 120)
        assert shared.lake("from lake.main.t") == []
        conn.execute("rollback to a")
        conn.execute("insert into u select g, 'kept' from generate_series(1, 10) g")
        conn.execute("commit")
    shared.wait_same()
    assert shared.lake("select count(*) from lake.main.t") == [(15000,)]
    db.execute(f"alter database {db.name} reset logical_decoding_work_mem")


@pytest.mark.slow
def test_a_kill_while_a_large_transaction_is_open(db: Database, sync_of: Callable[..., Sync]) -> None:
    """P-S29, promise 1: kill -9 with half of it staged; after a restart it arrives once if it commits, otherwise not at all."""
    _little_memory(db)
    db.execute("create table t (id int primary key, v text)")
    sync = sync_of("public.t", segment_bytes="256KiB")
    for end in ("commit", "rollback"):
        process = sync.started()
        with db.connect() as conn:
            conn.execute("begin")
            conn.execute("insert into t select g, repeat('x', 100) from generate_series(1, 40000) g")
            wait_until(lambda: _staged(sync), "it is staged while it is open")
            db.execute(f"insert into t values (-{len(sync.processes)}, 'beside')")
            sync.kill(process)
            process = sync.started()
            wait_until(lambda: _staged(sync), "it is staged again")
            conn.execute("update t set v = 'changed' where id % 3 = 0")
            conn.execute(end.encode())
        sync.wait_same()
        sync.stop(process)
        db.execute("delete from t where id > 0")


class Memory:
    """The most memory that each kind of the service's processes had at a time."""

    def __init__(self, sync: Sync) -> None:
        self._root = psutil.Process(sync.processes[-1].pid)
        report = sync.directory / "state" / sync.group / "capture.json"
        wait_until(report.exists, "the capture runs", log=sync.log)
        self._capture = json.loads(report.read_text())["pid"]
        self._stop = threading.Event()
        self.megabytes: dict[str, int] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.3):
            now: dict[str, int] = {}
            for process in [self._root, *self._root.children(recursive=True)]:
                try:
                    kind = self._kind(process)
                    held = process.memory_info().rss if kind == "jvm" else process.memory_full_info().pss
                except psutil.Error:
                    continue
                now[kind] = now.get(kind, 0) + held
            for kind, held in now.items():
                self.megabytes[kind] = max(self.megabytes.get(kind, 0), held >> 20)

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self._root.pid:
            return "driver"
        if process.name().startswith("java"):
            return "jvm"
        return "capture" if process.pid == self._capture else "workers"


@pytest.mark.slow
def test_ten_million_rows_in_one_transaction(
    db: Database, sync_of: Callable[..., Sync], record_property: Callable[[str, Any], None]
) -> None:
    """P-S29, Hazard 9: they arrive at once, and no process needs more memory for them than for one million."""
    db.execute("create table t (id int primary key, v int)")
    sync = sync_of("public.t")
    process = sync.started()
    peaks = []
    for first, rows in ((1, 1_000_000), (10_000_001, 10_000_000)):
        with Memory(sync) as memory, db.connect() as conn:
            began = time.monotonic()
            conn.execute(
                f"insert into t select g, g from generate_series({first}, {first + rows - 1}) g".encode()
            )
            committed = time.monotonic()
            counts: set[int] = set()
            query = f"select count(*) from lake.main.t where id >= {first}"

            def arrived(rows: int = rows, query: str = query, counts: set[int] = counts) -> bool:
                counts.add(sync.lake(query)[0][0])
                return rows in counts

            wait_until(arrived, f"{rows} rows are in the lake", 420, log=sync.log, pause=0.5)
            record_property(f"{rows} rows", {
                "insert_s": round(committed - began, 1), "commit_to_lake_s": round(time.monotonic() - committed, 1),
                **memory.megabytes,
            })  # fmt: skip
        assert counts <= {0, rows}, "all of it or nothing"
        peaks.append(memory.megabytes)
    checks = "select count(*), sum(id::bigint), sum(v::bigint) from"
    assert sync.lake(f"{checks} lake.main.t") == db.query(f"{checks} t")
    one, ten = peaks
    for kind in one:
        assert ten[kind] < one[kind] * 1.3 + 200, peaks
    sync.stop(process)
