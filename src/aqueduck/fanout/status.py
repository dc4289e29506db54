"""
The fan-out's status: counters for metrics, and a state per destination that SQL can read.

`FanoutStatus` holds plain values that the service changes and others read. `destination_rows` are the rows
that `state_files.destinations` stores.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aqueduck.overview.values import DestinationState, FanoutCounts, VerifyOverview
from aqueduck.overview.verification import NEVER, in_words

__all__ = ["FLOW", "DestinationStatus", "FanoutStatus", "destination_rows"]

FLOW = "fanout"
"""The flow's name on the page, in the API and in metrics."""


@dataclass
class DestinationStatus:
    """One destination since the service started."""

    id: str
    state: DestinationState = "pending"
    """Pending until its cursor was read and its seed begins; errored with the time of its next try."""
    cursor: int | None = None
    lag_snapshots: int = 0
    lag_seconds: float = 0.0
    rows_written: int = 0
    rows_deleted: int = 0
    rows_upserted: int = 0
    rows_matched: int = 0
    rows_before: int = 0
    """The counts that its lake had before this start."""
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
        """Rows written since this start."""
        return self.rows_written + self.rows_upserted + self.rows_deleted


@dataclass
class FanoutStatus:
    """The whole flow since the service started."""

    instance: str
    source_snapshot: int = 0
    polls: int = 0
    cycles: int = 0
    reads: int = 0
    """Reads of the source's changes, each for all destinations."""
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
    """Destinations of the table or the pattern that are not served, by id, with the reason."""
    seed: tuple[int, int, float] | None = None
    """The running seed: destinations, rows of the source, start time."""
    moved_at: float = field(default_factory=time.time)
    """When the service last did anything, including polls without changes."""

    def counts(self) -> FanoutCounts:
        """The public counters."""
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


def destination_rows(status: FanoutStatus) -> dict[str, tuple[Any, ...]]:
    """The rows of the destinations file (`state_files.destinations`)."""
    return {d.id: _row(d, status.instance) for d in list(status.destinations.values())}


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
