"""The bench of many tables: how soon changes are visible if they are spread over hundreds of small tables."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from rich.console import Console

from aqueduck.lab.bench.workbench import Meter, Workbench, workbench
from aqueduck.model.errors import ConfigError, VerifyDifferenceError
from aqueduck.sync.verify import verify_tables

__all__ = ["bench_tables"]

TABLES = 100
PER_SECOND = 300
SECONDS = 30
TIMES = 3
FIRST_ROWS = 10


def bench_tables(
    console: Console,
    rows: int | None,
    *,
    tables: int = TABLES,
    catalog: str = "postgres",
    one_transaction: bool = False,
) -> dict[str, Any]:
    """300 single-row transactions a second over many tables, or transactions that change each of them once."""
    if catalog not in ("postgres", "sqlite"):
        raise ConfigError(f"the bench tables has no catalog {catalog}", hint="choose postgres or sqlite")
    names = [f"busy{n}" for n in range(tables)]
    setup = "".join(
        f"create table {t} (id bigint primary key, v text, at timestamptz default now());" for t in names
    )
    console.print(f"starting with {tables} tables …")
    with workbench(setup=setup, tables=names, catalog=catalog) as bench:
        for name in names:
            bench.conn.execute(
                f"insert into {name} select g, 'first' from generate_series(1, {FIRST_ROWS}) g".encode()
            )
        bench.wait_quiet()
        _load(bench, names, 5)  # warm
        bench.wait_quiet()
        measure = _transactions if one_transaction else _steady
        result = measure(bench, console, names, rows)
        _verify(bench)
    return {"bench": "tables", "tables": tables, "catalog": catalog, **result}


def _steady(bench: Workbench, console: Console, names: list[str], rows: int | None) -> dict[str, Any]:
    seconds = SECONDS if rows is None else max(1, rows // PER_SECOND)
    ages: list[Any] = []
    bench.service.runner("bench").on_commit = lambda paths: ages.append(_ages(paths))
    console.print(f"{PER_SECOND} transactions a second for {seconds} s …")
    with Meter() as meter:
        sent = _load(bench, names, seconds)
        bench.wait_quiet()
    every = np.concatenate(ages)
    return {
        "rows": sent,
        "seconds": seconds,
        "p50_s": round(float(np.percentile(every, 50)), 3),
        "p95_s": round(float(np.percentile(every, 95)), 3),
        "max_s": round(float(every.max()), 3),
        "batches": len(ages),
        "cpu_cores": round(meter.cpu_seconds / meter.seconds, 2),
        "peak_rss_mb": round(meter.peak_python_bytes / 1e6),
    }


def _transactions(bench: Workbench, console: Console, names: list[str], _rows: int | None) -> dict[str, Any]:
    """Seconds from the commit of a transaction that changes all tables until all of them show it."""
    seconds = []
    for number in range(TIMES):
        console.print(f"one transaction over {len(names)} tables, {number + 1} of {TIMES} …")
        with bench.conn.transaction():
            for name in names:
                bench.conn.execute(f"insert into {name} values ({-1 - number}, 'all at once')".encode())
                bench.conn.execute(f"update {name} set v = 'all {number}' where id = 1".encode())
        committed = time.monotonic()
        bench.wait_quiet()
        seconds.append(round(time.monotonic() - committed, 2))
    return {"seconds": seconds, "p50_s": sorted(seconds)[TIMES // 2]}


def _ages(paths: list[str]) -> Any:
    """Seconds since the source commit of the changes in these segments, measured now: the lake just committed."""
    times = [pa.ipc.open_file(path).read_all()["_ts"].to_numpy() for path in paths]
    return time.time() - np.concatenate(times) / 1e6


def _load(bench: Workbench, names: list[str], seconds: float) -> int:
    """Single-row transactions at a steady rate, table by table: inserts and updates in turn."""
    done = threading.Event()
    with psycopg.connect(bench.server.dsn, autocommit=True) as conn:
        row = conn.execute(f"select max(id) from {names[0]}".encode()).fetchone()
        first = row[0] + 1 if row else 1
        began, sent = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            name, turn = names[sent % len(names)], sent // len(names)
            if turn % 2:
                conn.execute(
                    f"update {name} set v = 'row {sent}', at = now() where id = {turn % FIRST_ROWS + 1}".encode()
                )
            else:
                conn.execute(f"insert into {name} values ({first + turn}, 'a row')".encode())
            sent += 1
            ahead = began + sent / PER_SECOND - time.monotonic()
            if ahead > 0:
                done.wait(ahead)
    return sent


def _verify(bench: Workbench) -> None:
    results = verify_tables(bench.service.config, session=bench.service.lake, spark=bench.service.spark)
    if not all(result.same for result in results):
        raise VerifyDifferenceError("source and lake differ after the bench", table="public.busy0")
