"""The benches of copy and freshness: how fast a table is copied, and how soon a change is visible."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
import uuid
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from rich.console import Console

from aqueduck.config.sync import LakeConfig
from aqueduck.lab.bench.sync_benches import warm_up
from aqueduck.lab.bench.workbench import Meter, Workbench, workbench
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.engine import load_extension
from aqueduck.lake.session.sql import literal
from aqueduck.lake.session.storage import sync_file
from aqueduck.model.errors import VerifyDifferenceError
from aqueduck.sync.verify import verify_tables

__all__ = ["bench_copy", "bench_freshness"]

FRESH_TABLES = ("fresh1", "fresh2", "fresh3", "fresh4")
PER_SECOND = 500
SECONDS = 60
ROUNDS = 5


def bench_copy(console: Console, rows: int | None, *, partitions: int | None = None) -> dict[str, Any]:
    """2 M rows copied by a running service."""
    n = rows or 2_000_000
    with workbench(partitions=partitions) as bench:
        warm_up(bench, console)
        console.print(f"filling the table with {n:,} rows …")
        bench.conn.execute(f"call fill(1000000, {n}, 10000)")
        bench.wait_for(bench.committed_position())
        bench.conn.execute("vacuum analyze sbtest")
        for _ in range(2):  # once to warm each worker
            _drop_target(bench)
            _copy(bench)
        limits: list[float] = []
        alternatives: list[tuple[float, float]] = []
        meters: list[Meter] = []
        for number in range(ROUNDS):  # alternating, so that other load on the machine affects all three
            console.print(f"round {number + 1} of {ROUNDS}: limit, alternative, copy …")
            limits.append(_limit_seconds(bench))
            alternatives.append(_alternative_seconds(bench))
            _drop_target(bench)
            os.sync()  # finish earlier writes first
            with Meter() as meter:
                _copy(bench)
            meters.append(meter)
        _verify(bench)
        times = [meter.seconds for meter in meters]
        unsynced, synced = (list(part) for part in zip(*alternatives, strict=True))
        return {
            "bench": "copy",
            "rows": n,
            "rounds": ROUNDS,
            "limit_rows_per_s": round(n / statistics.median(limits)),
            "alternative_rows_per_s": round(n / statistics.median(unsynced)),
            "rows_per_s": round(n / statistics.median(times)),
            "ratio": _ratio(limits, times),
            "ratio_to_alternative": _ratio(unsynced, times),
            "ratio_to_synced_alternative": _ratio(synced, times),
            "cpu_s_per_million": round(statistics.median(m.cpu_seconds for m in meters) * 1e6 / n, 2),
            "peak_rss_mb": round(max(m.peak_python_bytes for m in meters) / 1e6),
            "partitions": partitions or 1,
            **bench.files(),
        }


def _ratio(others: list[float], ours: list[float]) -> float:
    """
    The median of the ratios of single rounds: a machine that is slower for a while slows both parts of a
    round.
    """
    return round(statistics.median(other / our for other, our in zip(others, ours, strict=True)), 3)


def _copy(bench: Workbench) -> None:
    """Make the running service copy the table again, and wait until the copy is in the lake."""
    runner = bench.service.runner("bench")
    [oid] = runner.states
    runner.resync(oid)
    while not runner.states[oid].ready:
        runner.copier.raise_failures()
        time.sleep(0.005)


def _drop_target(bench: Workbench) -> None:
    """Drop the target: a table's first copy finds none, nor does the alternative; both find a cached catalog."""
    runner = bench.service.runner("bench")
    with runner.commit_lock:
        bench.service.lake.execute("drop table lake.main.sbtest")
        bench.service.lake.execute("select count(*) from lake.aqueduck.tables")


def _limit_seconds(bench: Workbench) -> float:
    row = bench.conn.execute("select pg_relation_size('sbtest') / 8192 / 2").fetchone()
    assert row is not None
    halves = (f"ctid < '({row[0]},0)'", f"ctid >= '({row[0]},0)'")
    began = time.monotonic()
    commands = [f"copy (select * from sbtest where {half}) to stdout (format binary)" for half in halves]
    psql = [str(bench.server.bin("psql")), "-d", bench.server.dsn, "-c"]
    with open("/dev/null", "wb") as null:
        processes = [subprocess.Popen([*psql, command], stdout=null) for command in commands]
        for process in processes:
            process.wait()
    return time.monotonic() - began


def _alternative_seconds(bench: Workbench) -> tuple[float, float]:
    """
    Seconds without Aqueduck: DuckDB, its PostgreSQL extension and DuckLake, in one process.

    Includes the time until its files are on disk, because ours are: DuckDB leaves syncing to the system.
    """
    directory = bench.directory / f"alternative-{uuid.uuid4().hex[:8]}"
    config = LakeConfig(catalog=f"sqlite:{directory}/lake.sqlite", data_path=f"{directory}/data")
    with contextlib.closing(open_lake(config)) as lake:
        load_extension(lake.con, "postgres_scanner")
        lake.execute(f"attach {literal(bench.server.dsn)} as source (type postgres, read_only)")
        lake.execute("select count(*) from duckdb_tables()")  # reads the catalog, as `_drop_target` does
        began = time.monotonic()
        lake.execute("create table lake.main.t as from source.public.sbtest")
        seconds = time.monotonic() - began
        for file in (directory / "data").rglob("*.parquet"):
            sync_file(str(file))
        return seconds, time.monotonic() - began


def _verify(bench: Workbench) -> None:
    if not all(
        r.same
        for r in verify_tables(bench.service.config, session=bench.service.lake, spark=bench.service.spark)
    ):
        raise VerifyDifferenceError("source and lake differ after the bench", table="public.sbtest")


def bench_freshness(console: Console, rows: int | None) -> dict[str, Any]:
    """500 single-row transactions a second on 4 tables: from the source's commit to visible in the lake."""
    seconds = SECONDS if rows is None else max(1, rows // PER_SECOND)
    setup = "".join(
        f"create table {t} (id bigint generated always as identity primary key, v text);"
        for t in FRESH_TABLES
    )
    with workbench(setup=setup, tables=FRESH_TABLES) as bench:
        ages: list[Any] = []
        runner = bench.service.runner("bench")
        runner.on_commit = lambda paths: ages.append(_ages(paths))
        _load(bench, 5)  # warm
        bench.wait_quiet()
        ages.clear()
        console.print(f"{PER_SECOND} transactions a second for {seconds} s …")
        with Meter() as meter:
            sent = _load(bench, seconds)
            bench.wait_quiet()
        _verify(bench)
        every = np.concatenate(ages)
        return {
            "bench": "freshness",
            "rows": sent,
            "seconds": seconds,
            "p50_s": round(float(np.percentile(every, 50)), 3),
            "p95_s": round(float(np.percentile(every, 95)), 3),
            "max_s": round(float(every.max()), 3),
            "batches": len(ages),
            "cpu_cores": round(meter.cpu_seconds / meter.seconds, 2),
            "peak_rss_mb": round(meter.peak_python_bytes / 1e6),
        }


def _ages(paths: list[str]) -> Any:
    """Seconds since the source commit of the changes in these segments, measured now: the lake just committed."""
    times = [pa.ipc.open_file(path).read_all()["_ts"].to_numpy() for path in paths]
    return time.time() - np.concatenate(times) / 1e6


def _load(bench: Workbench, seconds: float) -> int:
    """Single-row transactions at a steady rate."""
    sent = 0
    done = threading.Event()
    with psycopg.connect(bench.server.dsn, autocommit=True) as conn:
        began = time.monotonic()
        while not done.is_set() and time.monotonic() - began < seconds:
            conn.execute(f"insert into {FRESH_TABLES[sent % len(FRESH_TABLES)]} (v) values ('a row')")
            sent += 1
            ahead = began + sent / PER_SECOND - time.monotonic()
            if ahead > 0:
                done.wait(ahead)
    return sent
