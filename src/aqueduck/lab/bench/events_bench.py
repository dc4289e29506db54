"""
The bench of change events: 1 M inserts from a slot into a JSON lines file, on Spark.

The limit is the same as for `drain`: `pg_recvlogical` draining the same backlog to /dev/null.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import psycopg
from rich.console import Console

from aqueduck.config.events import parse_events
from aqueduck.config.events_sections import PostgresCdcConfig
from aqueduck.events.service import EventsService
from aqueduck.lab.bench.workbench import SETTINGS, TABLE, Meter, bench_server, seconds_to_send
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.engine import load_extension
from aqueduck.lake.session.sql import literal
from aqueduck.model.errors import VerifyDifferenceError
from aqueduck.model.schema import lsn_text, parse_lsn

__all__ = ["bench_events"]

DEFAULT = str(PostgresCdcConfig.model_fields["capture"].default)
SLOT, PUBLICATION = "bench_events", "bench_events"
WARM_UP_ROWS = 240_000


@dataclass
class _Bench:
    """A running server, a running events service, and the file between them."""

    server: EmbeddedPostgres
    service: EventsService
    conn: psycopg.Connection[Any]
    file: Path

    def position(self) -> int:
        row = self.conn.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def fill(self, first: int, rows: int) -> int:
        """Insert rows in transactions of 1 000; returns a position that the flow has passed when it has them."""
        self.conn.execute(f"call fill({first}, {rows}, 1000)")
        with self.conn.transaction():
            self.conn.execute(f"insert into sbtest values ({-first}, 0, 'last', 'row')")
            row = self.conn.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0]) + 1

    def wait_for(self, position: int, *, seconds: float = 900.0) -> None:
        deadline = time.monotonic() + seconds
        while self.service.position < position:
            self.service.check()
            if time.monotonic() > deadline:
                raise TimeoutError("the file did not catch up")
            time.sleep(0.005)

    def hold(self, on: bool) -> None:
        path = self.service.directory / "hold"
        if not on:
            path.unlink(missing_ok=True)
            return
        path.touch()
        while not self.service.report().get("held"):
            self.service.check()
            time.sleep(0.05)

    def settle(self, seconds: float = 30.0) -> None:
        """Wait until the service's slot starts from here, as the limit's new slot does."""
        here = lsn_text(self.position())
        moved = "select restart_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
        deadline = time.monotonic() + seconds
        while self.conn.execute(moved, (here, SLOT)).fetchone() != (True,) and time.monotonic() < deadline:
            self.conn.execute("select pg_log_standby_snapshot()")
            self.conn.execute("update sbtest set k = k + 1 where id = 0")
            time.sleep(0.3)

    def limit_seconds(self) -> float:
        """Seconds that PostgreSQL itself needs to send the backlog."""
        return seconds_to_send(self.server, self.conn, PUBLICATION, lsn_text(self.position()))


def bench_events(console: Console, rows: int | None, *, capture: str = DEFAULT) -> dict[str, Any]:
    """1 M inserts in transactions of 1 000."""
    n = rows or 1_000_000
    with _bench(capture) as bench:
        console.print("warming up …")
        bench.conn.execute("insert into sbtest values (0, 0, 'first', 'row')")
        for first in (100_000_000, 200_000_000):
            bench.hold(True)
            target = bench.fill(first, WARM_UP_ROWS)
            bench.hold(False)
            bench.wait_for(target)
        bench.settle()
        bench.hold(True)
        before = bench.file.stat().st_size
        bench.conn.execute("select pg_create_logical_replication_slot('bench_limit', 'pgoutput')")
        console.print(f"making a backlog of {n:,} inserts …")
        target = bench.fill(1_000_000, n)
        bench.conn.execute("checkpoint")
        console.print("measuring the limit: pg_recvlogical to /dev/null …")
        limit = bench.limit_seconds()
        console.print("draining it into the file …")
        with Meter() as meter:
            bench.hold(False)
            bench.wait_for(target)
        console.print("comparing table and file …")
        _verify(bench, before, n)
        return {
            "bench": "events",
            "capture": capture,
            "rows": n,
            "limit_rows_per_s": round(n / limit),
            "rows_per_s": round(n / meter.seconds),
            "ratio": round(limit / meter.seconds, 3),
            "cpu_s_per_million": round(meter.cpu_seconds * 1e6 / n, 2),
            "peak_rss_mb": round(meter.peak_python_bytes / 1e6),
            "peak_jvm_rss_mb": round(meter.peak_jvm_bytes / 1e6),
            "bytes_per_event": round((bench.file.stat().st_size - before) / (n + 1)),
            "seconds": round(meter.seconds, 2),
            "limit_seconds": round(limit, 2),
        }


def _verify(bench: _Bench, before: int, rows: int) -> None:
    """Every row of the backlog is in the file, once, in order, value for value."""
    new = bench.file.with_suffix(".new")
    with open(bench.file, "rb") as source, open(new, "wb") as out:
        source.seek(before)
        while piece := source.read(1 << 24):
            out.write(piece)
    con = duckdb.connect()
    found = con.execute(
        "select count(*), count(distinct after.id), sum(hash(after.id, after.k, rtrim(after.c), rtrim(after.pad))::hugeint)"
        " from read_json(?, format = 'newline_delimited', columns = {'op': 'varchar',"
        " 'after': 'struct(id int, k int, c varchar, pad varchar)'}) where op = 'insert' and after.id between ? and ?",
        [str(new), 1_000_000, 1_000_000 + rows - 1],
    ).fetchone()
    load_extension(con, "postgres_scanner")
    con.execute(f"attach {literal(bench.server.dsn)} as source (type postgres, read_only)")
    wanted = con.execute(
        "select count(*), count(distinct id), sum(hash(id, k, rtrim(c), rtrim(pad))::hugeint)"
        " from source.public.sbtest where id between ? and ?",
        [1_000_000, 1_000_000 + rows - 1],
    ).fetchone()
    con.close()
    new.unlink()
    if found != wanted:
        raise VerifyDifferenceError("the file does not hold the table's rows", table="public.sbtest")


@contextlib.contextmanager
def _bench(capture: str) -> Iterator[_Bench]:
    with bench_server(SETTINGS) as (directory, server), psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(TABLE.encode())
        conn.execute(f"create publication {PUBLICATION} for table sbtest".encode())
        config = {
            "source": {
                "type": "postgres-cdc",
                "config": {
                    "connection_url": server.dsn,
                    "slot_name": SLOT,
                    "publication_name": PUBLICATION,
                    "capture": capture,
                },
            },
            "sink": {"type": "jsonl", "config": {"path": "changes.jsonl"}},
            "state": {"type": "file", "config": {"path": "state"}},
        }
        service = EventsService(parse_events(json.dumps(config), base_dir=directory, env={}))
        try:
            service.prepare()
            service.start()
            yield _Bench(server, service, conn, directory / "changes.jsonl")
        finally:
            service.stop()
