"""
What the fan-out knows about itself: counters for metrics, and a state per destination that SQL can read.

`FanoutStatus` is plain values that the service changes and others read.  `StateFile` is a SQLite database in
`state_dir` with one row per destination, written when something changed: also the errors of destinations whose own
lake cannot be written.  The cursor that counts is in each destination's lake (`lake.destination`).
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aqueduck.fanout_config import FanoutConfig

__all__ = ["DestinationStatus", "FanoutStatus", "StateFile", "state_path"]


@dataclass
class DestinationStatus:
    """One destination since the service started."""

    id: str
    state: str = "UNKNOWN"
    """UNKNOWN until its lake was asked, SEEDING, STREAMING, or FAILING with a time of its next try."""
    cursor: int | None = None
    lag_snapshots: int = 0
    lag_seconds: float = 0.0
    rows_written: int = 0
    rows_deleted: int = 0
    rows_upserted: int = 0
    rows_matched: int = 0
    write_seconds: float = 0.0
    writes: int = 0
    seeds: int = 0
    failures: int = 0
    last_error: str | None = None
    last_change_at: float | None = None
    retry_at: float | None = None

    @property
    def rows_replicated(self) -> int:
        return self.rows_written + self.rows_upserted + self.rows_deleted


@dataclass
class FanoutStatus:
    """The whole flow since the service started."""

    instance: str
    source_snapshot: int = 0
    polls: int = 0
    cycles: int = 0
    reads: int = 0
    """Times the source's changes were read; for all destinations at once."""
    read_seconds: float = 0.0
    rows_read: int = 0
    batch_rows: int = 0
    """Rows of the last read."""
    unrouted_rows: int = 0
    null_rows: int = 0
    routing_moves: int = 0
    conflicts: int = 0
    orphaned_preimages: int = 0
    reseeds: int = 0
    pool_open: int = 0
    pool_created: int = 0
    pool_evicted: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By code and destination; the source's own have no destination."""
    destinations: dict[str, DestinationStatus] = field(default_factory=dict)
    source_error: str | None = None
    progress_at: float = field(default_factory=time.time)
    ready: bool = False

    def metrics(self) -> dict[str, Any]:
        """Every metric: a number, or numbers by destination (and code)."""
        each = self.destinations
        return {
            "polls_total": self.polls,
            "cdc_reads_total": self.reads,
            "cdc_read_seconds_total": self.read_seconds,
            "cdc_rows_read_total": self.rows_read,
            "cdc_batch_rows": self.batch_rows,
            "source_snapshot_id": self.source_snapshot,
            "dest_write_seconds_total": {i: d.write_seconds for i, d in each.items()},
            "dest_writes_total": {i: d.writes for i, d in each.items()},
            "dest_rows_written_total": {i: d.rows_written for i, d in each.items()},
            "dest_rows_deleted_total": {i: d.rows_deleted for i, d in each.items()},
            "dest_rows_upserted_total": {i: d.rows_upserted for i, d in each.items()},
            "dest_upsert_matched_total": {i: d.rows_matched for i, d in each.items()},
            "dest_last_snapshot_id": {i: d.cursor or 0 for i, d in each.items()},
            "dest_lag_snapshots": {i: d.lag_snapshots for i, d in each.items()},
            "dest_lag_seconds": {i: d.lag_seconds for i, d in each.items()},
            "unrouted_rows_total": self.unrouted_rows + self.null_rows,
            "unrouted_null_rows_total": self.null_rows,
            "pool_open_connections": self.pool_open,
            "pool_creates_total": self.pool_created,
            "pool_evictions_total": self.pool_evicted,
            "cdc_routing_mutations_total": self.routing_moves,
            "cdc_conflicts_resolved_total": self.conflicts,
            "cdc_orphaned_preimages_total": self.orphaned_preimages,
            "reseeds_total": self.reseeds,
            "errors_total": dict(self.errors),
        }

    def healthy(self, *, patience_seconds: float) -> bool:
        """Whether there was progress of any kind within the last `patience_seconds`."""
        return time.time() - self.progress_at <= patience_seconds


_TABLE = """
create table if not exists destinations (
    destination_id text primary key, instance_id text, state text, last_snapshot_id integer,
    lag_snapshots integer, rows_replicated integer, last_error text, last_change_at text,
    retry_at text, updated_at text
)
"""


class StateFile:
    """The state of every destination as a SQLite table, for `aqueduck status` and anyone's SQL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, tuple[Any, ...]] = {}

    def write(self, status: FanoutStatus) -> None:
        """Write what changed since the last time; nothing if nothing did."""
        rows = {d.id: _row(d, status.instance) for d in status.destinations.values()}
        changed = [row for key, row in rows.items() if self._written.get(key) != row]
        gone = [(key,) for key in self._written if key not in rows]
        if not changed and not gone:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        con = sqlite3.connect(self.path, timeout=10)
        try:
            with con:
                con.execute(_TABLE)
                con.executemany(
                    "insert or replace into destinations values (?, ?, ?, ?, ?, ?, ?, ?, ?,"
                    " strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
                    changed,
                )
                con.executemany("delete from destinations where destination_id = ?", gone)
        finally:
            con.close()
        self._written = rows

    def read(self) -> list[dict[str, Any]]:
        """The rows; none before the service ran."""
        if not self.path.exists():
            return []
        con = sqlite3.connect(self.path, timeout=10)
        con.row_factory = sqlite3.Row
        try:
            return [dict(row) for row in con.execute("select * from destinations order by destination_id")]
        finally:
            con.close()


def _row(d: DestinationStatus, instance: str) -> tuple[Any, ...]:
    times: Iterable[float | None] = (d.last_change_at, d.retry_at)
    changed, retry = (None if t is None else _iso(t) for t in times)
    return (
        d.id, instance, d.state, d.cursor, d.lag_snapshots, d.rows_replicated, d.last_error, changed, retry
    )  # fmt: skip


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def state_path(config: FanoutConfig) -> Path:
    """Where an instance keeps the state of its destinations for readers."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in config.instance.id)
    return Path(config.state_dir) / "fanout" / f"{name}.sqlite"
