"""
Spills: staged segments of streamed transactions that have not ended; no batch sees them.

Each transaction has a segment set of its own; all of them together use at most `segment_bytes` of memory.  Their rows
are numbered within the transaction.  `forget` removes the rows of a rolled-back subtransaction; `finish` writes the final
order, and the position and time of the commit, into a transaction's rows, also in existing files.
`decode.streamed` explains streamed transactions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from aqueduck.model.changes import SegmentRef
from aqueduck.postgres.capture.segment_buffers import SegmentBuffer, SegmentSet, numbers
from aqueduck.postgres.decode.layouts import Layout
from aqueduck.postgres.decode.pgoutput import Ints
from aqueduck.postgres.decode.streamed import Finish, Forget

__all__ = ["Spills"]


class Spills:
    """Segment sets of streamed transactions, by transaction id.  Not thread-safe: the caller uses it from one thread at a time."""

    def __init__(self, segment_bytes: int, write: Callable[[SegmentSet], None]) -> None:
        self._segment_bytes = segment_bytes
        self._write = write
        self._held: dict[int, SegmentSet] = {}
        self._layouts: dict[int, dict[int, Layout]] = {}

    @property
    def bytes(self) -> int:
        """The size of unfinished transactions, on disk and in memory."""
        return sum(held.bytes for held in self._held.values())

    @property
    def transactions(self) -> int:
        return len(self._held)

    def held(self, stream: int, layout: Layout) -> SegmentSet:
        """The segment set for changes of this layout, which is remembered for rows that are read back from a file."""
        self._layouts.setdefault(stream, {})[layout.version] = layout
        return self._held.setdefault(stream, SegmentSet())

    def make_room(self) -> None:
        """Write the largest set while there is too much in memory."""
        while sum(b.memory_bytes for b in self._held.values()) >= self._segment_bytes:
            self._write(max(self._held.values(), key=lambda b: b.memory_bytes))

    def clear(self) -> None:
        """Drop all of them, because their ends will not arrive."""
        for stream in [*self._held]:
            self.forget(Forget(stream, 0))

    def forget(self, item: Forget) -> None:
        held = self._held.get(item.stream)
        if held is None:
            return
        if item.first == 0:
            held.remove_files()
            del self._held[item.stream]
            self._layouts.pop(item.stream, None)
            return
        self._cut_buffers(held, item.first)
        void = [ref for ref in held.written if ref.last_ord >= item.first]
        held.written = [ref for ref in held.written if ref.last_ord < item.first]
        for ref in void:
            if ref.path and ref.first_ord < item.first:
                self._take_back(held, ref, self._layouts[item.stream][ref.version], item.first)
            if ref.path:
                Path(ref.path).unlink(missing_ok=True)

    @staticmethod
    def _cut_buffers(held: SegmentSet, first: int) -> None:
        for buffer in held.in_order():
            held.memory_bytes -= buffer.cut_back(first)
        held.closed = [buffer for buffer in held.closed if buffer.rows]
        held.buffers = {oid: buffer for oid, buffer in held.buffers.items() if buffer.rows}

    @staticmethod
    def _take_back(held: SegmentSet, ref: SegmentRef, layout: Layout, first: int) -> None:
        """Read the rows of a segment that stay back into memory."""
        with pa.OSFile(ref.path) as file:
            reader = pa.ipc.open_file(file)
            buffer = SegmentBuffer.of(layout, (reader.get_batch(n) for n in range(reader.num_record_batches)))
        buffer.cut_back(first)
        held.close(ref.table_oid)  # there is no such buffer: it would come after this segment
        held.buffers[ref.table_oid] = buffer
        held.memory_bytes += buffer.bytes

    def finish(self, item: Finish) -> SegmentSet:
        """All changes of a transaction, ready to be committed."""
        held = self._held.pop(item.stream, SegmentSet())
        self._layouts.pop(item.stream, None)
        done = SegmentSet(memory_bytes=held.memory_bytes)
        for ref in held.written:
            if ref.path:
                _stamp_file(ref.path, item)
            done.written.append(_stamped_ref(ref, item))
        done.closed = [_stamped(buffer, item) for buffer in held.closed]
        done.buffers = {oid: _stamped(buffer, item) for oid, buffer in held.buffers.items()}
        return done


def _stamped_ref(ref: SegmentRef, item: Finish) -> SegmentRef:
    if (table := item.tables.get(ref.version)) is not None:
        ref = replace(ref, schema_json=table.to_json())
    if ref.kind == "truncate":
        ref = replace(ref, commit_lsn=item.lsn, commit_ts=item.time_us)
    return replace(ref, first_ord=ref.first_ord + item.first_ord, last_ord=ref.last_ord + item.first_ord)


def _stamped(buffer: SegmentBuffer, item: Finish) -> SegmentBuffer:
    layout = buffer.layout
    if (table := item.tables.get(layout.version)) is not None:
        layout = replace(layout, table=table)
    done = SegmentBuffer(layout)
    for piece in buffer.pieces:
        first_ord = piece.first_ord + item.first_ord
        done.add(replace(piece, layout=layout, batch=_stamped_batch(piece.batch, item), first_ord=first_ord))
    return done


def _stamped_batch(batch: pa.RecordBatch, item: Finish) -> pa.RecordBatch:
    stamps = _stamps(batch, item)
    arrays = [
        pa.array(stamps[field.name]) if field.name in stamps else batch.column(n)
        for n, field in enumerate(batch.schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _stamps(batch: pa.RecordBatch, item: Finish) -> dict[str, Ints]:
    return {
        "_ord": numbers(batch, "_ord") + item.first_ord,
        "_lsn": np.full(batch.num_rows, item.lsn),
        "_ts": np.full(batch.num_rows, item.time_us),
    }


def _stamp_file(path: str, item: Finish) -> None:
    """
    Write order, position and time into the existing file: three numbers a row, instead of writing the file again.

    Uncompressed Arrow files store the values of a column consecutively.
    """
    with Path(path).open("r+b") as file:
        memory = np.memmap(file, np.uint8, "r")
        reader = pa.ipc.open_file(pa.py_buffer(memory))
        for n in range(reader.num_record_batches):
            batch = reader.get_batch(n)
            for name, values in _stamps(batch, item).items():
                at = batch.column(name).buffers()[1].address - memory.ctypes.data
                os.pwrite(file.fileno(), values.tobytes(), at)
