"""
Parts in the format `rows`: events with their names, for sinks that deliver them one by one or in small batches.

A part is an Arrow file with `line` (the event, ending in a line break), `key` (the row's primary key as JSON, or null),
`lsn` and `seq` (the event's transaction and its index in it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from aqueduck.model.schema import lsn_text

__all__ = ["SCHEMA", "EventBatch", "event_batches", "event_id", "read_rows"]

SCHEMA = pa.schema(
    [("line", pa.large_binary()), ("key", pa.large_binary()), ("lsn", pa.int64()), ("seq", pa.int64())]
)


def event_id(lsn: int, seq: int) -> str:
    """The name of an event, the same at each delivery: its transaction's LSN and its index there."""
    return f"{lsn_text(lsn)}/{seq}"


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Consecutive events."""

    lines: bytes
    lsn: Any
    seq: Any

    def ids(self) -> list[str]:
        """The names of all events; consecutive ones of a transaction as `LSN/first-last`."""
        cuts = np.flatnonzero((np.diff(self.lsn) != 0) | (np.diff(self.seq) != 1)) + 1
        runs = zip([0, *cuts.tolist()], [*cuts.tolist(), len(self.lsn)], strict=True)
        return [_run(int(self.lsn[a]), int(self.seq[a]), int(self.seq[b - 1])) for a, b in runs]

    def as_array(self) -> bytes:
        """The events as one JSON array, with line breaks only between events."""
        return b"[" + self.lines[:-1].replace(b"\n", b",") + b"]"


def _run(lsn: int, first: int, last: int) -> str:
    return event_id(lsn, first) if first == last else f"{event_id(lsn, first)}-{last}"


def read_rows(path: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of a part."""
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def event_batches(path: Path, size: int) -> Iterator[EventBatch]:
    """A part's events, at most `size` at a time."""
    for batch in read_rows(path):
        _, offsets, data = batch.column("line").buffers()
        at = np.frombuffer(offsets, np.int64)
        lsn, seq = (batch.column(name).to_numpy() for name in ("lsn", "seq"))
        for first in range(0, batch.num_rows, size):
            stop = min(first + size, batch.num_rows)
            lines = data.slice(int(at[first]), int(at[stop] - at[first])).to_pybytes()
            yield EventBatch(lines, lsn[first:stop], seq[first:stop])
