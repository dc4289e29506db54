"""
The stage: decoded changes waiting on disk for Spark, cut at commits.

The capture thread adds runs; Spark's planner asks for what is ready.  Rows collect in
memory per table and are written as *segments* (Arrow IPC files, one table and one schema
version each) when they reach `segment_bytes`, or when a batch wants them.  A *cut* is a
position at which every segment before it belongs to whole transactions: the only places
where a batch may end.  The stage is scratch: after a crash the slot sends it all again.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from aqueduck.changes import SegmentRef
from aqueduck.errors import StageFullError
from aqueduck.postgres.decoder import Commit, Layout, Rows, Run, Truncate


@dataclass(frozen=True, slots=True)
class Cut:
    """Whole transactions up to `position`."""

    position: int
    time_us: int
    segments: tuple[SegmentRef, ...]
    bytes: int


@dataclass(slots=True)
class _Draft:
    """A segment that is still in memory."""

    layout: Layout
    batches: list[pa.RecordBatch] = field(default_factory=list)
    bytes: int = 0
    rows: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    key_changes: int = 0
    unchanged: int = 0
    first_ord: int = -1
    last_ord: int = -1

    def add(self, rows: Rows) -> int:
        size = rows.batch.get_total_buffer_size()
        if self.first_ord < 0:
            self.first_ord = rows.first_ord
        self.last_ord = rows.batch.column("_ord")[-1].as_py()
        self.batches.append(rows.batch)
        self.bytes += size
        self.rows += rows.batch.num_rows
        self.inserts += rows.inserts
        self.updates += rows.updates
        self.deletes += rows.deletes
        self.key_changes += rows.key_changes
        self.unchanged += rows.unchanged
        return int(size)


@dataclass(slots=True)
class _Bucket:
    """Segments (written) and drafts (in memory) of one side of the last commit."""

    written: list[SegmentRef] = field(default_factory=list)
    closed: list[_Draft] = field(default_factory=list)
    drafts: dict[int, _Draft] = field(default_factory=dict)
    memory_bytes: int = 0

    def draft(self, layout: Layout) -> _Draft:
        draft = self.drafts.get(layout.table.oid)
        if draft is not None and draft.layout is not layout:
            self.close(layout.table.oid)
            draft = None
        if draft is None:
            draft = self.drafts[layout.table.oid] = _Draft(layout)
        return draft

    def close(self, oid: int) -> None:
        draft = self.drafts.pop(oid, None)
        if draft is not None:
            self.closed.append(draft)

    def absorb(self, other: _Bucket) -> None:
        """Take over what `other` holds; its rows come after ours."""
        self.written += other.written
        for draft in other.closed:
            self._append(draft)
            self.close(draft.layout.table.oid)
        for draft in other.drafts.values():
            self._append(draft)
        self.memory_bytes += other.memory_bytes

    def _append(self, draft: _Draft) -> None:
        mine = self.drafts.get(draft.layout.table.oid)
        if mine is None or mine.layout is not draft.layout:
            self.close(draft.layout.table.oid)
            self.drafts[draft.layout.table.oid] = draft
            return
        mine.batches += draft.batches
        mine.last_ord = draft.last_ord
        for name in ("bytes", "rows", "inserts", "updates", "deletes", "key_changes", "unchanged"):
            setattr(mine, name, getattr(mine, name) + getattr(draft, name))

    @property
    def bytes(self) -> int:
        """What it holds, on disk and in memory."""
        return self.memory_bytes + sum(ref.bytes for ref in self.written)

    def has_rows(self) -> bool:
        return bool(self.written or self.closed or self.drafts)


class Stage:
    """Thread-safe: one capture thread adds, the planner takes."""

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
        directory.mkdir(parents=True)
        self.changed = threading.Condition()
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._bytes_max = bytes_max
        self._rows_max = rows_max
        self._cuts: deque[Cut] = deque()
        self._ready = _Bucket()  # committed, not cut yet
        self._open = _Bucket()  # of the transaction that is still coming in
        self._ready_position = position
        self._ready_time_us = 0
        self._files = 0
        self.staged_bytes = 0
        self.staged_rows = 0
        self.durable = position
        self.rows = 0
        self.transactions = 0
        self.bytes = 0

    # -- the capture thread's side

    def add(self, run: Run) -> None:
        with self.changed:
            if isinstance(run, Rows):
                self._add_rows(run)
            elif isinstance(run, Truncate):
                self._add_truncate(run)
            else:
                self._add_commit(run)

    def _add_rows(self, run: Rows) -> None:
        size = self._open.draft(run.layout).add(run)
        self._open.memory_bytes += size
        self.rows += run.batch.num_rows
        self.bytes += size
        if self._open.memory_bytes >= self._segment_bytes:
            self._write(self._open)

    def _add_truncate(self, run: Truncate) -> None:
        self._open.close(run.layout.table.oid)
        self._write(self._open)
        draft = _Draft(run.layout, first_ord=run.ord, last_ord=run.ord)
        ref = _ref(run.layout, kind="truncate", path="", draft=draft)
        where = replace(ref, commit_lsn=run.lsn, commit_ts=run.time_us, xid=run.xid, seq=run.seq)
        self._open.written.append(where)

    def _add_commit(self, run: Commit) -> None:
        self.transactions += run.transactions
        if self._open.written:  # keep file order: what is in memory before them goes first
            self._write(self._ready)
        self._ready.absorb(self._open)
        self._open = _Bucket()
        self._ready_position = run.position
        self._ready_time_us = run.time_us
        if self._ready.bytes >= self._segment_bytes:
            self.cut()
        self.changed.notify_all()

    def abandon_open(self) -> None:
        """Forget a transaction whose end did not come; the server sends it again."""
        with self.changed:
            for segment in self._open.written:
                if segment.path:
                    Path(segment.path).unlink(missing_ok=True)
            self._open = _Bucket()

    @property
    def pending(self) -> bool:
        """Whether changes are on their way to the lake or in an open transaction."""
        return bool(self._cuts) or self._ready.has_rows() or self._open.has_rows()

    @property
    def full(self) -> bool:
        """Whether reading must pause: committed changes beyond the limit wait for Spark."""
        return bool(self._cuts) and (self.staged_bytes > self._bytes_max or self.staged_rows > self._rows_max)

    @property
    def oldest_us(self) -> int | None:
        """Commit time of the oldest batch that waits for the lake, as far as it is known."""
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
            drafts = [*self._ready.closed, *self._ready.drafts.values()]
            waiting += [(d.layout.table.oid, d.rows, d.bytes) for d in drafts]
        for oid, rows, size in waiting:
            before = found.get(oid, (0, 0))
            found[oid] = (before[0] + rows, before[1] + size)
        return found

    # -- the planner's side; callers hold `changed` where they combine calls

    def cut(self) -> None:
        """Make everything committed available, as a place where a batch may end."""
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
            self._ready = _Bucket()

    def ready_bytes(self, after: int) -> int:
        """Bytes that a batch starting after `after` could have, without cutting."""
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
        """Everything up to here is durable in the lake: forget it."""
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

    def _write(self, bucket: _Bucket) -> None:
        """Write the drafts of a bucket, in the order in which they began."""
        drafts = sorted([*bucket.closed, *bucket.drafts.values()], key=lambda d: d.first_ord)
        for draft in drafts:
            bucket.written.append(self._write_draft(draft))
        bucket.closed, bucket.drafts, bucket.memory_bytes = [], {}, 0

    def _write_draft(self, draft: _Draft) -> SegmentRef:
        self._files += 1
        path = self._directory / f"{self._files:08d}-{draft.layout.table.oid}.arrow"
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, draft.layout.arrow) as writer:
                for batch in draft.batches:
                    writer.write_batch(batch)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
            raise StageFullError(
                "no space is left for changes that wait for the lake",
                hint=f"free space below state_dir, or lower stage_bytes_max; needed now: {draft.bytes} bytes",
            ) from exc
        return _ref(draft.layout, kind="rows", path=str(path), draft=draft)


def _ref(layout: Layout, *, kind: str, path: str, draft: _Draft) -> SegmentRef:
    return SegmentRef(
        table_oid=layout.table.oid,
        version=layout.version,
        kind=kind,  # type: ignore[arg-type]
        path=path,
        rows=draft.rows,
        bytes=draft.bytes,
        inserts=draft.inserts,
        updates=draft.updates,
        deletes=draft.deletes,
        key_changes=draft.key_changes,
        unchanged=draft.unchanged,
        first_ord=draft.first_ord,
        last_lsn=0,
        last_ts=0,
        schema_json=layout.table.to_json(),
        last_ord=draft.last_ord,
    )
