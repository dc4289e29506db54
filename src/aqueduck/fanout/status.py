"""
What the fan-out knows about itself: counters for metrics, and a state per destination that SQL can read.

`FanoutStatus` is plain values that the service changes and others read.  `StateFile` is a SQLite database in
`state_dir` with one row per destination, written when something changed: also the errors of destinations whose own
lake cannot be written.  The cursor that counts is in each destination's lake (`lake.destinations.destination`).  A second table
is no copy of anything: for which values the pattern made destinations.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.fanout_roster import Made
from aqueduck.model.verification import NEVER, in_words
from aqueduck.overview.values import DestinationState, FanoutCounts, VerifyOverview

__all__ = ["FLOW", "DestinationStatus", "FanoutStatus", "StateFile", "state_path"]

FLOW = "fanout"
"""The name of the flow on the page, in the API and in metrics."""


@dataclass
class DestinationStatus:
    """One destination since the service started."""

    id: str
    state: DestinationState = "pending"
    """Pending until its lake was asked and its seed begins; errored with a time of its next try."""
    cursor: int | None = None
    lag_snapshots: int = 0
    lag_seconds: float = 0.0
    rows_written: int = 0
    rows_deleted: int = 0
    rows_upserted: int = 0
    rows_matched: int = 0
    rows_before: int = 0
    """What its lake counted before this start."""
    seeds: int = 0
    failures: int = 0
    last_error: str | None = None
    last_change_at: float | None = None
    retry_at: float | None = None
    verified: VerifyOverview = NEVER

    @property
    def rows_replicated(self) -> int:
        return self.rows_before + self.rows_here

    @property
    def rows_here(self) -> int:
        """Of them, since this start."""
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
    rows_read: int = 0
    unrouted_rows: int = 0
    null_rows: int = 0
    routing_moves: int = 0
    conflicts: int = 0
    orphaned_preimages: int = 0
    reseeds: int = 0
    miscounts: int = 0
    pool_open: int = 0
    pool_created: int = 0
    pool_evicted: int = 0
    destinations: dict[str, DestinationStatus] = field(default_factory=dict)
    source_error: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    """Destinations of the table or the pattern that are not served, by id, and why."""
    seed: tuple[int, int, float] | None = None
    """Of the seed that runs: destinations, rows of the source, when it began."""
    moved_at: float = field(default_factory=time.time)
    """When the service last did anything, also looked and found nothing."""

    def counts(self) -> FanoutCounts:
        """The counters as everybody sees them."""
        return FanoutCounts(
            polls=self.polls,
            cycles=self.cycles,
            reads=self.reads,
            rows_read=self.rows_read,
            unrouted_rows=self.unrouted_rows,
            null_rows=self.null_rows,
            routing_moves=self.routing_moves,
            conflicts=self.conflicts,
            orphaned_preimages=self.orphaned_preimages,
            reseeds=self.reseeds,
            miscounts=self.miscounts,
        )


_TABLE = """
create table if not exists destinations (
    destination_id text primary key, instance_id text, state text, last_snapshot_id integer,
    lag_snapshots integer, lag_seconds real, rows_replicated integer, last_error text, last_change_at text,
    retry_at text, verdict text, verified_at text, identical_at text, differences integer, verify_note text, updated_at text
)
"""
_SHAPE = 3
"""The table's; one of another shape is made anew, because everything in it comes from the lakes."""
_DISCOVERED = "create table if not exists discovered (routing_value text, made_at text, primary key (routing_value, made_at))"
"""What the pattern made, and where; never made anew."""


class StateFile:
    """The state of every destination as a SQLite table, for `aqueduck status` and anyone's SQL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, tuple[Any, ...]] = {}
        self._remembered = Made()
        self._writing = threading.Lock()

    def write(self, status: FanoutStatus) -> None:
        """Write what changed since the last time; nothing if nothing did."""
        with self._writing:
            self._write(status)

    def remember(self, made: Made) -> None:
        """Keep what the pattern made; nothing is written if nothing is new."""
        with self._writing:
            new = made - self._remembered
            if not new:
                return
            with self._open() as con:
                con.execute(_DISCOVERED)
                con.executemany("insert or ignore into discovered values (?, ?)", new)
            self._remembered = made

    def recall(self) -> Made:
        """What the pattern ever made."""
        if not self.path.exists():
            return Made()
        with self._open() as con:
            if con.execute("select 1 from sqlite_master where name = 'discovered'").fetchone() is None:
                return Made()
            return Made(con.execute("select routing_value, made_at from discovered").fetchall())

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The file, in a transaction; made if it is not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.path, timeout=10)) as con, con:
            yield con

    def _write(self, status: FanoutStatus) -> None:
        rows = {d.id: _row(d, status.instance) for d in list(status.destinations.values())}
        changed = [row for key, row in rows.items() if self._written.get(key) != row]
        gone = [(key,) for key in self._written if key not in rows]
        if not changed and not gone:
            return
        with self._open() as con:
            if con.execute("pragma user_version").fetchone() != (_SHAPE,):
                con.execute("drop table if exists destinations")
                con.execute(f"pragma user_version = {_SHAPE}")
            con.execute(_TABLE)
            con.executemany(
                f"insert or replace into destinations values ({'?, ' * 15}"
                " strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))",
                changed,
            )
            con.executemany("delete from destinations where destination_id = ?", gone)
        self._written = rows

    def read(self) -> list[dict[str, Any]]:
        """The rows; none before the service ran."""
        if not self.path.exists():
            return []
        with self._open() as con:
            if con.execute("select 1 from sqlite_master where name = 'destinations'").fetchone() is None:
                return []
            con.row_factory = sqlite3.Row
            return [dict(row) for row in con.execute("select * from destinations order by destination_id")]


def _row(d: DestinationStatus, instance: str) -> tuple[Any, ...]:
    times: Iterable[float | None] = (d.last_change_at, d.retry_at)
    changed, retry = (None if t is None else _iso(t) for t in times)
    return (
        d.id, instance, d.state, d.cursor, d.lag_snapshots, round(d.lag_seconds, 1), d.rows_replicated,
        d.last_error, changed, retry, *_verified(d.verified),
    )  # fmt: skip


def _verified(v: VerifyOverview) -> tuple[Any, ...]:
    times = (None if at is None else _iso(at.timestamp()) for at in (v.at, v.identical_at))
    return (v.verdict, *times, v.differences, in_words(v))


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def state_path(config: FanoutConfig) -> Path:
    """Where an instance keeps the state of its destinations for readers."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in config.instance.id)
    return Path(config.state_dir) / "fanout" / f"{name}.sqlite"
