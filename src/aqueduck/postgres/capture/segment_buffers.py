"""
Segment buffers: rows of one table in memory, before they become a segment.

A `SegmentSet` has the rows of one side of a commit: buffers, and references to the segments that were written.
`stage` decides when buffers are written, and what becomes visible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import StageFullError
from aqueduck.postgres.decode.decoder import Rows
from aqueduck.postgres.decode.layouts import Layout

__all__ = ["SegmentBuffer", "SegmentSet", "numbers", "segment_ref", "write_segment"]

_COUNTS = ("inserts", "updates", "deletes", "key_changes", "unchanged")


@dataclass(slots=True)
class SegmentBuffer:
    """The rows of one table that are still in memory."""

    layout: Layout
    pieces: list[Rows] = field(default_factory=list)
    bytes: int = 0
    rows: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    key_changes: int = 0
    unchanged: int = 0
    first_ord: int = -1
    last_ord: int = -1

    @classmethod
    def of(cls, layout: Layout, batches: Iterable[pa.RecordBatch]) -> SegmentBuffer:
        """A buffer of batches in order, with their counts."""
        buffer = cls(layout)
        for batch in batches:
            if batch.num_rows:
                buffer.add(counted(layout, batch))
        return buffer

    def add(self, rows: Rows) -> int:
        """Add rows that come after ours; returns their bytes."""
        if self.first_ord < 0:
            self.first_ord = rows.first_ord
        self.last_ord = rows.batch.column("_ord")[-1].as_py()
        self.pieces.append(rows)
        self._count(rows, 1)
        return int(rows.batch.nbytes)

    def extend(self, other: SegmentBuffer) -> None:
        """Add the rows of a buffer that comes after this one."""
        self.pieces += other.pieces
        self.last_ord = other.last_ord
        for name in ("bytes", "rows", *_COUNTS):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def cut_back(self, first: int) -> int:
        """Drop the rows from `first` on; returns the bytes that were freed."""
        before = self.bytes
        while self.pieces and self.last_ord >= first:
            piece = self.pieces.pop()
            self._count(piece, -1)
            kept = int(np.searchsorted(numbers(piece.batch, "_ord"), first))
            self.last_ord = -1
            if kept:  # copied: a slice would keep the whole piece in memory
                self.add(counted(piece.layout, piece.batch.take(pa.array(np.arange(kept)))))
            elif self.pieces:
                self.last_ord = self.pieces[-1].batch.column("_ord")[-1].as_py()
        return before - self.bytes

    def _count(self, rows: Rows, sign: int) -> None:
        self.bytes += sign * int(rows.batch.nbytes)
        self.rows += sign * rows.batch.num_rows
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + sign * getattr(rows, name))


def numbers(batch: pa.RecordBatch, name: str) -> npt.NDArray[Any]:
    """A column without NULLs, without copying it."""
    found: npt.NDArray[Any] = batch.column(name).to_numpy()
    return found


def counted(layout: Layout, batch: pa.RecordBatch) -> Rows:
    """A batch with its counts."""
    ops = np.bincount(numbers(batch, "_op"), minlength=4)
    return Rows(
        layout,
        batch,
        inserts=int(ops[1]),
        updates=int(ops[2]),
        deletes=int(ops[3]),
        key_changes=pc.sum(batch.column("_kc")).as_py() or 0,
        unchanged=batch.num_rows - batch.column("_unchanged").null_count,
        first_ord=batch.column("_ord")[0].as_py(),
    )


@dataclass(slots=True)
class SegmentSet:
    """Segments (written) and buffers (in memory) of one side of a commit."""

    written: list[SegmentRef] = field(default_factory=list)
    closed: list[SegmentBuffer] = field(default_factory=list)
    buffers: dict[int, SegmentBuffer] = field(default_factory=dict)
    memory_bytes: int = 0

    def buffer(self, layout: Layout) -> SegmentBuffer:
        buffer = self.buffers.get(layout.table.oid)
        if buffer is not None and buffer.layout is not layout:
            self.close(layout.table.oid)
            buffer = None
        if buffer is None:
            buffer = self.buffers[layout.table.oid] = SegmentBuffer(layout)
        return buffer

    def close(self, oid: int) -> None:
        buffer = self.buffers.pop(oid, None)
        if buffer is not None:
            self.closed.append(buffer)

    def absorb(self, other: SegmentSet) -> None:
        """Add the contents of `other`; its rows come after ours."""
        self.written += other.written
        for buffer in other.closed:
            self._append(buffer)
            self.close(buffer.layout.table.oid)
        for buffer in other.buffers.values():
            self._append(buffer)
        self.memory_bytes += other.memory_bytes

    def _append(self, buffer: SegmentBuffer) -> None:
        mine = self.buffers.get(buffer.layout.table.oid)
        if mine is None or mine.layout is not buffer.layout:
            self.close(buffer.layout.table.oid)
            self.buffers[buffer.layout.table.oid] = buffer
            return
        mine.extend(buffer)

    def in_order(self) -> list[SegmentBuffer]:
        """All buffers, in the order in which they began."""
        return sorted([*self.closed, *self.buffers.values()], key=lambda buffer: buffer.first_ord)

    @property
    def bytes(self) -> int:
        """The size on disk and in memory."""
        return self.memory_bytes + sum(ref.bytes for ref in self.written)

    @property
    def changes(self) -> int:
        """The number of changes on disk and in memory; a truncate is one."""
        on_disk = sum(ref.rows if ref.kind == "rows" else 1 for ref in self.written)
        return on_disk + sum(buffer.rows for buffer in self.in_order())

    def has_rows(self) -> bool:
        return bool(self.written or self.closed or self.buffers)

    def remove_files(self) -> None:
        for segment in self.written:
            if segment.path:
                Path(segment.path).unlink(missing_ok=True)


def write_segment(buffer: SegmentBuffer, path: Path) -> SegmentRef:
    """Write a buffer as a segment."""
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, buffer.layout.arrow) as writer:
            for piece in buffer.pieces:
                writer.write_batch(piece.batch)
    except OSError as exc:
        # Arrow's own message names the file.
        reason = os.strerror(exc.errno).lower() if exc.errno else "unknown reason"
        raise StageFullError(
            f"changes that wait for the lake cannot be written: {reason}",
            hint=f"free space below state_dir, or lower stage_bytes_max; needed now: {buffer.bytes} bytes",
        ) from exc
    return segment_ref(buffer, path=str(path))


def segment_ref(buffer: SegmentBuffer, *, path: str) -> SegmentRef:
    """A reference to a segment; without a path, to a truncate."""
    layout = buffer.layout
    return SegmentRef(
        table_oid=layout.table.oid,
        version=layout.version,
        kind="rows" if path else "truncate",
        path=path,
        rows=buffer.rows,
        bytes=buffer.bytes,
        inserts=buffer.inserts,
        updates=buffer.updates,
        deletes=buffer.deletes,
        key_changes=buffer.key_changes,
        unchanged=buffer.unchanged,
        first_ord=buffer.first_ord,
        last_lsn=0,
        last_ts=0,
        schema_json=layout.table.to_json(),
        last_ord=buffer.last_ord,
    )
