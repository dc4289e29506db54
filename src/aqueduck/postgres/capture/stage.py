"""
The stage: decoded changes waiting on disk for Spark, cut at commits.

The capture thread adds decoded items; Spark's planner asks for what is ready.  Rows collect in
memory per table and are written as *segments* (Arrow IPC files, one table and one schema
version each) when they reach `segment_bytes`, or when a batch needs them.  A *cut* is a
position at which every segment before it belongs to whole transactions: batches can end
only there.  Transactions that are streamed before they end wait in `spills` until
their commit arrives.  The stage is scratch: after a crash the slot sends everything again.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from aqueduck.model.changes import SegmentRef
from aqueduck.postgres.capture.segment_buffers import SegmentBuffer, SegmentSet, segment_ref, write_segment
from aqueduck.postgres.capture.spills import Spills
from aqueduck.postgres.decode.decoder import Commit, Rows, StreamItem, Truncate
from aqueduck.postgres.decode.streamed import Finish, Forget


@dataclass(frozen=True, slots=True)
class Cut:
    """Whole transactions up to `position`."""

    position: int
    time_us: int
    segments: tuple[SegmentRef, ...]
    bytes: int


class Stage:
    """Thread-safe: one capture thread adds, the planner takes."""

    limit: int | None = None
    """Where a limited run of the service ends (`EventsStage`): nothing after it is handed out."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int,
        bytes_max: int,
        position: int,
        rows_max: int = 10_000_000,
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o700)
        self.changed = threading.Condition()
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._bytes_max = bytes_max
        self._rows_max = rows_max
        self._cuts: deque[Cut] = deque()
        self._ready = SegmentSet()  # committed, not cut yet
        self._open = SegmentSet()  # of the current transaction
        self._spills = Spills(segment_bytes, self._write)  # of streamed transactions
        self._ready_position = position
        self._ready_time_us = 0
        self._files = 0
        self.staged_bytes = 0
        self.staged_rows = 0
        self.durable = position
        self.rows = 0
        self.transactions = 0

    # -- the capture thread's side

    def add(self, item: StreamItem) -> None:
        with self.changed:
            if isinstance(item, Rows):
                self._add_rows(item)
            elif isinstance(item, Truncate):
                self._add_truncate(item)
            elif isinstance(item, Forget):
                self._spills.forget(item)
            elif isinstance(item, Finish):
                self._open = self._spills.finish(item)
            else:
                self._add_commit(item)

    def _add_rows(self, item: Rows) -> None:
        held = self._spills.held(item.stream, item.layout) if item.stream else self._open
        held.memory_bytes += held.buffer(item.layout).add(item)
        self.rows += item.batch.num_rows
        if item.stream:
            self._spills.make_room()
        elif held.memory_bytes >= self._segment_bytes:
            self._write(held)

    def _add_truncate(self, item: Truncate) -> None:
        held = self._spills.held(item.stream, item.layout) if item.stream else self._open
        held.close(item.layout.table.oid)
        self._write(held)
        ref = segment_ref(SegmentBuffer(item.layout, first_ord=item.ord, last_ord=item.ord), path="")
        where = replace(ref, commit_lsn=item.lsn, commit_ts=item.time_us, xid=item.xid, seq=item.seq)
        held.written.append(where)

    def _add_commit(self, item: Commit) -> None:
        self.transactions += item.transactions
        if self._open.written:  # keep file order: rows in memory that came earlier are written first
            self._write(self._ready)
        self._ready.absorb(self._open)
        self._open = SegmentSet()
        self._ready_position = item.position
        self._ready_time_us = item.time_us
        if self._ready.bytes >= self._segment_bytes:
            self.cut()
        self.changed.notify_all()

    def abandon_open(self) -> None:
        """Drop transactions whose ends did not arrive; the server sends them again."""
        with self.changed:
            self._open.remove_files()
            self._open = SegmentSet()
            self._spills.clear()

    @property
    def pending(self) -> bool:
        """
        Whether changes are pending for the lake, or part of the current transaction.

        Streamed transactions do not count: the server sends them again until their commit is confirmed.
        """
        return bool(self._cuts) or self._ready.has_rows() or self._open.has_rows()

    @property
    def full(self) -> bool:
        """
        Whether reading must pause: committed changes beyond the limit wait for Spark.

        Transactions that have not ended never pause it, however large: that would be a deadlock.
        """
        return bool(self._cuts) and (self.staged_bytes > self._bytes_max or self.staged_rows > self._rows_max)

    @property
    def unfinished(self) -> tuple[int, int]:
        """The number of streamed transactions that have not ended, and their size in bytes."""
        with self.changed:
            return self._spills.transactions, self._spills.bytes

    @property
    def oldest_us(self) -> int | None:
        """Commit time of the oldest batch that waits for the lake, if it is known."""
        with self.changed:
            if self._cuts:
                return self._cuts[0].time_us
            return self._ready_time_us if self._ready.has_rows() else None

    def queued(self) -> dict[int, tuple[int, int]]:
        """Changes and bytes that wait for the lake, by table."""
        found: dict[int, tuple[int, int]] = {}
        with self.changed:
            refs = [s for c in self._cuts for s in c.segments] + self._ready.written
            waiting = [(s.table_oid, s.rows, s.bytes) for s in refs]
            buffers = [*self._ready.closed, *self._ready.buffers.values()]
            waiting += [(buffer.layout.table.oid, buffer.rows, buffer.bytes) for buffer in buffers]
        for oid, rows, size in waiting:
            before = found.get(oid, (0, 0))
            found[oid] = (before[0] + rows, before[1] + size)
        return found

    # -- the planner's side; callers hold `changed` where they combine calls

    def cut(self) -> None:
        """Make everything committed available, by a cut."""
        with self.changed:
            if not self._ready.has_rows():
                return
            self._write(self._ready)
            position, time_us = self._ready_position, self._ready_time_us
            segments = tuple(replace(ref, last_lsn=position, last_ts=time_us) for ref in self._ready.written)
            size = sum(s.bytes for s in segments)
            self._cuts.append(Cut(self._ready_position, self._ready_time_us, segments, size))
            self.staged_bytes += size
            self.staged_rows += sum(s.rows for s in segments)
            self._ready = SegmentSet()

    def ready_bytes(self, after: int) -> int:
        """The size of a batch that starts after `after`, without a new cut."""
        with self.changed:
            return sum(c.bytes for c in self._cuts if c.position > after) + self._ready.bytes

    def has_ready(self, after: int) -> bool:
        with self.changed:
            return self._ready.has_rows() or any(c.position > after for c in self._cuts)

    def furthest(self, after: int, bytes_max: int) -> int:
        """The last cut after `after` that keeps a batch within `bytes_max` (at least one cut)."""
        with self.changed:
            best, size = after, 0
            for c in self._cuts:
                if c.position <= after:
                    continue
                size += c.bytes
                if best > after and size > bytes_max:
                    break
                best = c.position
            return best

    def between(self, after: int, upto: int) -> tuple[Cut, ...]:
        with self.changed:
            return tuple(c for c in self._cuts if after < c.position <= upto)

    def release(self, upto: int) -> None:
        """
        Everything up to here is durable: remove it, and let the slot be confirmed up to it.

        Two routes lead here.  They report the same positions, in either order, and the later one changes nothing:

        * the state file `durable`, which the driver of `sync` and `events` writes right after its commit
          (`Capture._take_durable`): Spark's `commit` comes only with the next batch, and until then the server would
          keep WAL that is no longer needed;
        * `commit` of the source (`SlotReader.commit`), the only route without such a driver: in
          `postgres_cdc`, for which Spark's checkpoint is authoritative, and in `aqueduck tail`.
        """
        with self.changed:
            self.durable = max(self.durable, upto)
            while self._cuts and self._cuts[0].position <= upto:
                done = self._cuts.popleft()
                self.staged_bytes -= done.bytes
                self.staged_rows -= sum(s.rows for s in done.segments)
                for segment in done.segments:
                    if segment.path:
                        Path(segment.path).unlink(missing_ok=True)
            self.changed.notify_all()

    # -- files

    def _write(self, held: SegmentSet) -> None:
        """Write the buffers of a segment set, in the order in which they began."""
        for buffer in held.in_order():
            self._files += 1
            path = self._directory / f"{self._files:08d}-{buffer.layout.table.oid}.arrow"
            held.written.append(write_segment(buffer, path))
        held.closed, held.buffers, held.memory_bytes = [], {}, 0
