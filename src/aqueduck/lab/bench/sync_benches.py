"""The benches of `sync`: backlogs of inserts, of single rows, of mixed changes and transactions, and one very large transaction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from aqueduck.lab.bench.workbench import CAPTURE, Meter, Workbench, workbench
from aqueduck.lab.waiting import hold
from aqueduck.model.errors import VerifyDifferenceError
from aqueduck.model.schema import lsn_text
from aqueduck.sync.verify import verify_tables

__all__ = ["bench_big", "bench_drain", "bench_mixed", "bench_small", "bench_varied", "warm_up"]

WARM_UP_ROWS = 60_000

MIXED = """
create procedure mix(changes int, per_tx int, top int) language plpgsql as $$
declare updates int := per_tx * 7 / 10; inserts int := per_tx * 2 / 10; deletes int := per_tx / 10; fresh int;
begin
  select max(id) into fresh from sbtest where id < 1000000000;
  for i in 1 .. changes / per_tx loop
    update sbtest set k = k + 1, c = left(md5(id::text || i) || md5(i::text) || md5(k::text), 119)
      where id = any (array(select (random() * (top - 1))::int + 1 from generate_series(1, updates)));
    insert into sbtest select fresh + g, g, md5(g::text), md5(i::text) from generate_series(1, inserts) g;
    fresh := fresh + inserts;
    delete from sbtest where id = any (array(select (random() * (top - 1))::int + 1 from generate_series(1, deletes)));
    commit;
  end loop;
end $$;
"""


def bench_drain(
    console: Console, rows: int | None, *, capture: str = CAPTURE, partitions: int | None = None
) -> dict[str, Any]:
    """1 M inserts in transactions of 1 000."""
    n = rows or 1_000_000
    with workbench(capture=capture, partitions=partitions) as bench:
        warm_up(bench, console)
        result = _measure(
            bench, console, "drain", n, lambda: bench.conn.execute(f"call fill(1000000, {n}, 1000)")
        )
        return {**result, "partitions": partitions or 1, **bench.files()}


def bench_mixed(console: Console, rows: int | None, *, capture: str = CAPTURE) -> dict[str, Any]:
    """300 000 changes on a table of 1 M rows: 70 % updates, 20 % inserts, 10 % deletes, transactions of 100."""
    n = rows or 300_000
    with workbench(capture=capture) as bench:
        bench.conn.execute(MIXED)
        warm_up(bench, console)
        console.print("filling the table …")
        bench.conn.execute("call fill(1, 1000000, 10000)")
        bench.wait_for(bench.committed_position())
        bench.conn.execute("call mix(5000, 100, 1000000)")
        bench.conn.execute("vacuum analyze sbtest")
        bench.wait_for(bench.committed_position())
        return _measure(
            bench, console, "mixed", n, lambda: bench.conn.execute(f"call mix({n}, 100, 1000000)")
        )


def bench_small(console: Console, rows: int | None, *, capture: str = CAPTURE) -> dict[str, Any]:
    """100 000 transactions of a single row."""
    n = rows or 100_000
    with workbench(capture=capture) as bench:
        warm_up(bench, console)
        return _measure(bench, console, "small", n, lambda: bench.conn.execute(f"call fill(1000000, {n}, 1)"))


def bench_varied(console: Console, rows: int | None, *, capture: str = CAPTURE) -> dict[str, Any]:
    """2 M inserts: a third in transactions of 1 000, a third in one transaction, a tenth in single rows, and 1 000 again."""
    n = rows or 2_000_000
    parts = [(n // 3, 1000), (n // 3, n // 3), (n // 10, 1), (n - n // 3 * 2 - n // 10, 1000)]

    def load() -> None:
        first = 1_000_000
        for count, per_tx in parts:
            bench.conn.execute(f"call fill({first}, {count}, {per_tx})")
            first += count

    with workbench(capture=capture) as bench:
        warm_up(bench, console)
        return _measure(bench, console, "varied", n, load)


def bench_big(console: Console, rows: int | None, *, capture: str = CAPTURE) -> dict[str, Any]:
    """One transaction of 5 M inserts: once as a backlog, once while the service reads."""
    n = rows or 5_000_000
    with workbench(capture=capture) as bench:
        warm_up(bench, console)
        result = _measure(
            bench, console, "big", n, lambda: bench.conn.execute(f"call fill(1000000, {n}, {n})")
        )
        console.print("the same while the service reads …")
        with Meter() as meter:
            bench.conn.execute(f"call fill({1_000_000 + n}, {n}, {n})")
            committed = time.monotonic()
            bench.wait_for(bench.committed_position())
        return {
            **result,
            "live_commit_to_lake_s": round(time.monotonic() - committed, 2),
            "live_peak_rss_mb": round(meter.peak_python_bytes / 1e6),
        }


def warm_up(bench: Workbench, console: Console) -> None:
    """Compile everything and start a worker for each core before the clock runs."""
    console.print("warming up …")
    for rows in (WARM_UP_ROWS, 8 * WARM_UP_ROWS):  # the second is a batch of more than one fold task
        hold(bench.service, "bench", True)
        bench.conn.execute(f"call fill(-1000000, {rows}, 1000)")
        target = bench.committed_position()
        hold(bench.service, "bench", False)
        bench.wait_for(target)
        bench.conn.execute("delete from sbtest where id < 0")
        bench.wait_for(bench.committed_position())
    bench.conn.execute("insert into sbtest values (0, 0, 'first', 'row')")
    bench.wait_for(bench.committed_position())


def _measure(
    bench: Workbench, console: Console, name: str, rows: int, load: Callable[[], object]
) -> dict[str, Any]:
    console.print(f"making a backlog of {rows:,} changes …")
    with bench.backlog():
        load()
        target = bench.committed_position()
    console.print("measuring the limit: pg_recvlogical to /dev/null …")
    limit = bench.limit_seconds(lsn_text(bench.position()))
    console.print("draining it into the lake …")
    with Meter() as meter:
        hold(bench.service, "bench", False)
        bench.wait_for(target)
    console.print("comparing source and lake …")
    results = verify_tables(bench.service.config, session=bench.service.lake, spark=bench.service.spark)
    if not all(r.same for r in results):
        raise VerifyDifferenceError("source and lake differ after the bench", table="public.sbtest")
    return {
        "bench": name,
        "capture": bench.service.config.groups[0].capture,
        "rows": rows,
        "limit_rows_per_s": round(rows / limit),
        "rows_per_s": round(rows / meter.seconds),
        "ratio": round(limit / meter.seconds, 3),
        "cpu_s_per_million": round(meter.cpu_seconds * 1e6 / rows, 2),
        "peak_rss_mb": round(meter.peak_python_bytes / 1e6),
        "peak_jvm_rss_mb": round(meter.peak_jvm_bytes / 1e6),
        "seconds": round(meter.seconds, 2),
        "limit_seconds": round(limit, 2),
    }
