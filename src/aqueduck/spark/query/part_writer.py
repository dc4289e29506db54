"""
Write a piece of a batch of the events flow as one part, a file for the sink, in a task.

A part is scratch: a retry of the piece rewrites it, and the sink reads it only when the whole batch is complete.
`envelopes.json_events` builds the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from aqueduck.envelopes.envelope import Envelope
from aqueduck.envelopes.json_events import Lines, stretch_lines
from aqueduck.envelopes.json_kernels import Rendered
from aqueduck.lake.fold.change_rows import EVENT_SCHEMA, change_rows
from aqueduck.model.errors import SinkWriteError, system_reason
from aqueduck.model.event_parts import EventPart, PartFormat, piece_stretches
from aqueduck.sinks.rows import SCHEMA

__all__ = ["PartWriter"]


@dataclass(frozen=True, slots=True)
class PartWriter:
    """Format and directory of parts; serialized to the tasks."""

    directory: str
    envelope: Envelope
    database: str
    part_format: PartFormat

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PartWriter:
        return cls(**json.loads(text))

    def write(self, piece: str, position: int, number: int) -> EventPart:
        """Write the part; the caller keeps the segments in the stage until then."""
        path = Path(self.directory) / f"{position:016X}-{number:05d}.part"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.part_format == "table":
                events = _write_table(path, self._batches(piece))
            elif self.part_format == "rows":
                events = _write_rows(path, self._lines(piece))
            else:
                events = _write_text(path, self._lines(piece))
            return EventPart(number, str(path), events, path.stat().st_size)
        except OSError as exc:
            path.unlink(missing_ok=True)
            hint = "free space on the disk of state_dir; the whole batch is then written again"
            raise SinkWriteError(
                f"a part of a batch cannot be written: {system_reason(exc)}", hint=hint
            ) from exc

    def _lines(self, piece: str) -> Iterator[Lines]:
        with_keys = self.part_format == "rows"
        for stretch in piece_stretches(piece):
            yield from stretch_lines(stretch, self.envelope, database=self.database, with_keys=with_keys)

    def _batches(self, piece: str) -> Iterator[pa.RecordBatch]:
        for stretch in piece_stretches(piece):
            yield from change_rows(stretch, None, self.envelope, self.database)


def _write_table(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    events = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, EVENT_SCHEMA) as out:
        for batch in batches:
            out.write_batch(batch)
            events += batch.num_rows
    return events


def _write_text(path: Path, stretched: Iterable[Lines]) -> int:
    events = 0
    with open(path, "wb", buffering=0) as out:
        for lines in stretched:
            view = memoryview(lines.text)
            while view:
                view = view[out.write(view) :]
            events += lines.rows
    return events


def _write_rows(path: Path, stretched: Iterable[Lines]) -> int:
    events = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as out:
        for lines in stretched:
            assert lines.keys is not None
            arrays = [
                _binary(lines.text, lines.ends),
                _keys(lines.keys),
                pa.array(lines.lsn, pa.int64()),
                pa.array(lines.seq, pa.int64()),
            ]
            out.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
            events += lines.rows
    return events


def _binary(text: pa.Buffer, ends: np.ndarray) -> pa.Array:
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    return pa.Array.from_buffers(pa.large_binary(), ends.size, [None, pa.py_buffer(offsets), text])


def _keys(keys: Rendered) -> pa.Array:
    return _binary(pa.py_buffer(keys.text), keys.ends)
