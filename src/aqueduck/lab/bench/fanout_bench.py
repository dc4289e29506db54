"""
How fast one lake becomes many: PostgreSQL catalogs, 100 destinations, against one DuckDB process in the same
run.

The limit reads the same changes once, then attaches, appends to and detaches the same number of lakes one
after the other, without deletes, cursors or any guarantee. `ratio` is its seconds divided by ours for the
inserts. `split_s` measures the split alone: 1 M rows routed to 10 000 destinations and separated.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from aqueduck.config.fanout import FanoutConfig, parse_fanout
from aqueduck.config.lake_place import LakePlace
from aqueduck.fanout.run import catch_up
from aqueduck.fanout.service import FanoutService
from aqueduck.fanout.verdicts import raise_difference
from aqueduck.fanout.verify import verify_destinations
from aqueduck.lab.bench.workbench import Meter, bench_server
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.source.lake_changes import Routes, chunks, read_routed
from aqueduck.lake.source.source_lake import SourceLake
from aqueduck.model.schema import TableName

__all__ = ["bench_fanout", "bench_tenants"]

TABLE = TableName("main", "events")
COLUMNS = "event_id bigint, company varchar, amount double, note varchar"
SNAPSHOTS = 10


class FanoutBench:
    """A server with all catalogs, a source that is changed, and the service."""

    def __init__(self, directory: Path, server: EmbeddedPostgres, destinations: int, max_open: int) -> None:
        self.directory = directory
        self.destinations = destinations
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute("create database source")
            # A database for each lake: attaching one reads the catalog of its whole database.
            for number in range(destinations):
                admin.execute(f"create database ours_{number}".encode())
        self.source = LakePlace(
            catalog=f"postgres:{server.dsn_for('source')}", data_path=f"{directory}/source/"
        )
        self._server = server
        self.pool = LakePool(max_open=4)
        self._change(f"create table {{t}} ({COLUMNS})")
        self.service = FanoutService(self._config(max_open))
        self.rows = 0

    def _config(self, max_open: int) -> FanoutConfig:
        document = {
            "source": {"catalog": self.source.catalog, "data_path": self.source.data_path, "table": "events"},
            "routing": {"field": "company", "key_columns": ["event_id"]},
            "destinations": [
                {
                    "id": f"tenant-{i}",
                    "routing_value": f"tenant-{i}",
                    "catalog": f"postgres:{self._server.dsn_for(f'ours_{i}')}",
                    "data_path": f"{self.directory}/ours_{i}/",
                }
                for i in range(self.destinations)
            ],
            "pool": {"max_open": max_open},
            "state_dir": str(self.directory / "state"),
        }
        return parse_fanout(json.dumps(document), base_dir=self.directory, env={})

    def _change(self, *statements: str) -> None:
        with self.pool.use(self.source) as lake:
            for statement in statements:
                lake.execute(statement.format(t=lake.table(TABLE)), doing="changing the bench's source")

    def insert(self, rows: int, snapshots: int) -> None:
        """Insert rows evenly over all destinations, in this many lake snapshots."""
        each = rows // snapshots
        for _ in range(snapshots):
            first = self.rows
            self.rows += each
            self._change(
                f"insert into {{t}} select i, 'tenant-' || (i % {self.destinations}), i * 0.5, md5(i::varchar)"
                f" from range({first}, {first + each}) r(i)"
            )

    def change(self, updates: int, deletes: int) -> None:
        self._change(
            f"update {{t}} set amount = amount + 1 where event_id < {updates}",
            f"delete from {{t}} where event_id >= {updates} and event_id < {updates + deletes}",
        )

    def catch_up(self) -> tuple[float, Meter]:
        """One cycle of the service that reads everything; returns its seconds and resource use."""
        with Meter() as meter:
            began = time.monotonic()
            while not self._done():
                self.service.poll()
                self.service.help_others()
            seconds = time.monotonic() - began
        return seconds, meter

    def _done(self) -> bool:
        with self.pool.use(self.source, read_only=True) as lake:
            latest = SourceLake(lake, TABLE).latest()
        return all(t.well and t.cursor == latest for t in self.service.served)

    def latest(self) -> int:
        with self.pool.use(self.source, read_only=True) as lake:
            return SourceLake(lake, TABLE).latest()

    def verify(self) -> None:
        """Compare the content of every destination with the source."""
        results = verify_destinations(self.service.config, env={})
        raise_difference(results)
        assert all(r.verdict == "identical" and r.cursor == self.latest() for r in results)

    # -- the limit

    def limit_place(self, number: int) -> LakePlace:
        catalog = f"postgres:{self._server.dsn_for(f'limit_{number}')}"
        return LakePlace(catalog=catalog, data_path=f"{self.directory}/limit_{number}/")

    def make_limit_lakes(self) -> None:
        with psycopg.connect(self._server.dsn, autocommit=True) as admin:
            for number in range(self.destinations):
                admin.execute(f"create database limit_{number}".encode())
        for number in range(self.destinations):
            with self.pool.use(self.limit_place(number)) as lake:
                lake.execute(f"create table {lake.table(TABLE)} ({COLUMNS})")

    def limit_seconds(self, start: int, end: int) -> float:
        """
        Seconds of the limit in one DuckDB: read once, then attach, append and detach one lake after the
        other.
        """
        engine = LakePool(max_open=1)
        began = time.monotonic()
        with engine.use(self.source, read_only=True) as lake:
            engine.con.execute(
                "create table changes as select * from"
                f" ducklake_table_insertions('{lake.alias}', 'main', 'events', {start + 1}, {end})"
            )
        for number in range(self.destinations):
            with engine.use(self.limit_place(number)) as lake:
                self._append(lake, number)
        seconds = time.monotonic() - began
        engine.close()
        return seconds

    def _append(self, lake: PooledLake, number: int) -> None:
        lake.execute(
            f"insert into {lake.table(TABLE)} select * from memory.main.changes where company = 'tenant-{number}'"
        )

    def close(self) -> None:
        self.service.stop()
        self.pool.close()


@contextlib.contextmanager
def _bench(destinations: int, max_open: int) -> Iterator[FanoutBench]:
    settings = {"max_connections": "600", "shared_buffers": "256MB", "max_wal_size": "4GB"}
    with bench_server(settings) as (directory, server):
        bench = FanoutBench(directory, server, destinations, max_open)
        try:
            yield bench
        finally:
            bench.close()


def bench_fanout(console: Console, rows: int | None) -> dict[str, Any]:
    """100 destinations, 200 000 rows in 10 lake snapshots, then 20 000 updates and 10 000 deletes."""
    total = rows or 200_000
    destinations = min(100, max(2, total // 2000))
    with _bench(destinations, max_open=2 * destinations) as bench:
        console.print(f"{destinations} destinations are made and seeded")
        seed_seconds = _seed(bench)
        # Afterwards workers, sessions and code are warm, as in a service that has run for a while.
        for _ in range(2):
            bench.insert(destinations * 4, 2)
            bench.catch_up()
        start = bench.latest()
        bench.insert(total, SNAPSHOTS)
        end = bench.latest()
        console.print("inserts")
        insert_seconds, inserted = bench.catch_up()
        bench.change(total // 10, total // 20)
        console.print("updates and deletes")
        change_seconds, changed = bench.catch_up()
        reads = bench.service.status.reads
        bench.verify()
        console.print("the limit: one DuckDB process")
        bench.make_limit_lakes()
        limit_seconds = bench.limit_seconds(start, end)
    return {
        "bench": "fanout",
        "destinations": destinations,
        "rows": total,
        "insert_s": round(insert_seconds, 3),
        "rows_per_s": round(total / insert_seconds),
        "change_s": round(change_seconds, 3),
        "changes_per_s": round((total // 10 + total // 20) / change_seconds),
        "cycle_s": round((insert_seconds + change_seconds) / 2, 3),
        "seed_s": round(seed_seconds, 3),
        "source_reads": reads,
        "limit_s": round(limit_seconds, 3),
        "ratio": round(limit_seconds / insert_seconds, 2),
        "peak_python_mib": max(inserted.peak_python_bytes, changed.peak_python_bytes) >> 20,
        "peak_jvm_mib": max(inserted.peak_jvm_bytes, changed.peak_jvm_bytes) >> 20,
        "split_s": round(split_seconds(1_000_000, 10_000), 3),
    }


def bench_tenants(console: Console, rows: int | None) -> dict[str, Any]:
    """1 000 destinations with at most 50 open sessions; `rows` sets the number of destinations."""
    destinations = rows or 1000
    with _bench(destinations, max_open=50) as bench:
        console.print(f"{destinations} destinations are made and seeded")
        seed_seconds = _seed(bench)
        bench.insert(destinations * 20, SNAPSHOTS)
        seconds, meter = bench.catch_up()
        bench.verify()
        status = bench.service.status
    return {
        "bench": "tenants",
        "destinations": destinations,
        "rows": destinations * 20,
        "seed_s": round(seed_seconds, 3),
        "cycle_s": round(seconds, 3),
        "destinations_per_s": round(destinations / seconds, 1),
        "source_reads": status.reads,
        "pool_open": status.pool_open,
        "pool_evicted": status.pool_evicted,
        "peak_python_mib": meter.peak_python_bytes >> 20,
        "peak_jvm_mib": meter.peak_jvm_bytes >> 20,
    }


def _seed(bench: FanoutBench) -> float:
    began = time.monotonic()
    bench.service.prepare()
    catch_up(bench.service, threading.Event())
    return time.monotonic() - began


def split_seconds(rows: int, destinations: int) -> float:
    """Seconds to read, route and split: until every destination's rows are an Arrow table of their own."""
    with tempfile.TemporaryDirectory(prefix="aqueduck-bench-") as directory:
        place = LakePlace(catalog=f"sqlite:{directory}/source.db", data_path=f"{directory}/data/")
        pool = LakePool()
        with pool.use(place) as lake:
            lake.execute(f"create table {lake.table(TABLE)} ({COLUMNS})")
            start = SourceLake(lake, TABLE).latest()
            lake.execute(
                f"insert into {lake.table(TABLE)} select i, 'tenant-' || (hash(i) % {destinations}), i, md5(i::varchar)"
                f" from range({rows}) r(i)"
            )
        with pool.use(place, read_only=True) as lake:
            source = SourceLake(lake, TABLE)
            plan = source.plan("company", ["event_id"], start, source.latest())
        values = tuple(f"tenant-{i}" for i in range(destinations))
        routes = Routes(values, (start,) * destinations, (0,) * destinations)
        began = time.monotonic()
        name, _ = read_routed(pool, plan, routes)
        pieces = sum(_cut_apart(chunk) for chunk, _ in chunks(pool, name, plan, 0))
        seconds = time.monotonic() - began
        assert pieces >= destinations
        pool.close()
    return seconds


def _cut_apart(chunk: bytes) -> int:
    """Split a chunk's rows by destination, as slices; returns how many there are."""
    table = pa.ipc.open_stream(chunk).read_all()
    ends = pc.run_end_encode(table["d"].combine_chunks()).run_ends.to_pylist()
    slices = [table.slice(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]
    return len(slices)
