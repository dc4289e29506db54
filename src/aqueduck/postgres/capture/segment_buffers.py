"""
Drafts: rows of one table that are still in memory, on their way into a segment.

A `Bucket` holds what came on one side of a commit: drafts, and references to the segments that were
already written of them.  When they are written, and what becomes visible, is the matter of `stage`.
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

__all__ = ["Bucket", "Draft", "numbers", "segment_ref", "write_segment"]

_COUNTS = ("inserts", "updates", "deletes", "key_changes", "unchanged")


@dataclass(slots=True)
class Draft:
    """A segment that is still in memory."""

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
    def of(cls, layout: Layout, batches: Iterable[pa.RecordBatch]) -> Draft:
        """A draft of batches in order, counted again."""
        draft = cls(layout)
        for batch in batches:
            if batch.num_rows:
                draft.add(counted(layout, batch))
        return draft

    def add(self, rows: Rows) -> int:
        """Take rows that come after ours; returns their bytes."""
        if self.first_ord < 0:
            self.first_ord = rows.first_ord
        self.last_ord = rows.batch.column("_ord")[-1].as_py()
        self.pieces.append(rows)
        self._count(rows, 1)
        return int(rows.batch.nbytes)

    def extend(self, other: Draft) -> None:
        """Take over the rows of a draft that comes after this one."""
        self.pieces += other.pieces
        self.last_ord = other.last_ord
        for name in ("bytes", "rows", *_COUNTS):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def cut_back(self, first: int) -> int:
        """Forget the rows from `first` on; returns the bytes that are gone."""
        before = self.bytes
        while self.pieces and self.last_ord >= first:
            piece = self.pieces.pop()
            self._count(piece, -1)
            kept = int(np.searchsorted(numbers(piece.batch, "_ord"), first))
            self.last_ord = -1
            if kept:  # copied: a slice would keep all of the piece in memory
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
    """A column without NULLs, not copied."""
    found: npt.NDArray[Any] = batch.column(name).to_numpy()
    return found


def counted(layout: Layout, batch: pa.RecordBatch) -> Rows:
    """A batch with its counts, which it does not carry itself."""
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
class Bucket:
    """Segments (written) and drafts (in memory) of one side of a commit."""

    written: list[SegmentRef] = field(default_factory=list)
    closed: list[Draft] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)
    memory_bytes: int = 0

    def draft(self, layout: Layout) -> Draft:
        draft = self.drafts.get(layout.table.oid)
        if draft is not None and draft.layout is not layout:
            self.close(layout.table.oid)
            draft = None
        if draft is None:
            draft = self.drafts[layout.table.oid] = Draft(layout)
        return draft

    def close(self, oid: int) -> None:
        draft = self.drafts.pop(oid, None)
        if draft is not None:
            self.closed.append(draft)

    def absorb(self, other: Bucket) -> None:
        """Take over what `other` holds; its rows come after ours."""
        self.written += other.written
        for draft in other.closed:
            self._append(draft)
            self.close(draft.layout.table.oid)
        for draft in other.drafts.values():
            self._append(draft)
        self.memory_bytes += other.memory_bytes

    def _append(self, draft: Draft) -> None:
        mine = self.drafts.get(draft.layout.table.oid)
        if mine is None or mine.layout is not draft.layout:
            self.close(draft.layout.table.oid)
            self.drafts[draft.layout.table.oid] = draft
            return
        mine.extend(draft)

    def in_order(self) -> list[Draft]:
        """All drafts, in the order in which they began."""
        return sorted([*self.closed, *self.drafts.values()], key=lambda d: d.first_ord)

    @property
    def bytes(self) -> int:
        """What it holds, on disk and in memory."""
        return self.memory_bytes + sum(ref.bytes for ref in self.written)

    @property
    def changes(self) -> int:
        """How many changes it holds, on disk and in memory; a truncate is one."""
        on_disk = sum(ref.rows if ref.kind == "rows" else 1 for ref in self.written)
        return on_disk + sum(draft.rows for draft in self.in_order())

    def has_rows(self) -> bool:
        return bool(self.written or self.closed or self.drafts)

    def remove_files(self) -> None:
        for segment in self.written:
            if segment.path:
                Path(segment.path).unlink(missing_ok=True)


def write_segment(draft: Draft, path: Path) -> SegmentRef:
    """Write a draft as a segment."""
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, draft.layout.arrow) as writer:
            for piece in draft.pieces:
                writer.write_batch(piece.batch)
    except OSError as exc:
        # Arrow's own message names the file.
        reason = os.strerror(exc.errno).lower() if exc.errno else "unknown reason"
        raise StageFullError(
            f"changes that wait for the lake cannot be written: {reason}",
            hint=f"free space below state_dir, or lower stage_bytes_max; needed now: {draft.bytes} bytes",
        ) from exc
    return segment_ref(draft, path=str(path))


def segment_ref(draft: Draft, *, path: str) -> SegmentRef:
    """A reference to a segment; without a path to a truncate."""
    layout = draft.layout
    return SegmentRef(
        table_oid=layout.table.oid,
        version=layout.version,
        kind="rows" if path else "truncate",
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
