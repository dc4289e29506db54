"""A group's status, as plain values for the terminal, JSON and the page."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime

from aqueduck.model.changes import SegmentRef

__all__ = ["GroupStatus", "Parked", "RequestsDone", "TableCounts"]


@dataclass(slots=True)
class TableCounts:
    """Changes of one table since the service started."""

    changes: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    copied: int = 0
    """Rows that copies wrote."""
    applied: tuple[int, datetime] | None = None
    """Position and time of the last batch with changes of it, or of its copy."""

    def add(self, segment: SegmentRef) -> None:
        """The changes of one more segment."""
        self.changes += segment.rows
        self.inserts += segment.inserts
        self.updates += segment.updates
        self.deletes += segment.deletes


@dataclass(frozen=True, slots=True)
class Parked:
    """Changes of one table that wait in the lake until it is ready."""

    rows: int
    bytes: int
    since: datetime

    def plus(self, rows: int, size: int) -> Parked:
        return replace(self, rows=self.rows + rows, bytes=self.bytes + size)


@dataclass(slots=True)
class RequestsDone:
    """The last requests about a table that were begun; requests are counted."""

    resync: int = 0
    retry: int = 0


@dataclass(slots=True)
class GroupStatus:
    """One group since the service started."""

    group: str
    state: str = "starting"
    position: int = 0
    """The position that the lake has reached."""
    seen: int = 0
    """The position that the capture has decoded."""
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    """Age of the oldest commit that is not in the lake yet."""
    freshness_seconds: float | None = None
    """Time from source commit to lake commit, of the last transaction of the last batch."""
    last_commit_at: datetime | None = None
    batches: int = 0
    transactions: int = 0
    staged_bytes: int = 0
    unfinished_bytes: int = 0
    """Staged bytes of source transactions that have not ended."""
    streams_in_progress: bool = True
    """Whether the capture reads large transactions before they end; false if the server does not support it."""
    reader: str = "stream"
    """`stream`, `poll`, or `bulk` while `auto` reads a backlog."""
    bulk_trouble: str | None = None
    """Why `auto` cannot read backlogs in bulk."""
    queued: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Changes and bytes that wait on disk, by table."""
    moved_at: float = field(default_factory=time.monotonic)
    """When the lake's position last moved, or nothing waited for it; by the monotonic clock."""
    reading: bool = False
    """Whether the capture has reported since the query's last start."""
    paused: bool = False
    held: bool = False
    restarts: int = 0
    last_error: str | None = None
    tables: dict[int, TableCounts] = field(default_factory=dict)
    """By oid: names may be swapped."""
