"""
Plan the work of a batch of events: which segments one task turns into one part, and in which order.

Segments of several tables overlap in the stream order. A *stretch* is a series of segments that overlaps no
other segment, so stretches can be written one after the other. A *piece* is the stretches of one task. Pure
functions over segment references.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from aqueduck.model.changes import SegmentRef

__all__ = ["EventPart", "PartFormat", "piece_stretches", "plan_pieces", "stretches"]

PIECE_BYTES = 24 << 20

PartFormat = Literal["text", "rows", "table"]
"""JSON lines, an Arrow file of lines with their keys and names, or one with all columns of `event_table`."""


@dataclass(frozen=True, slots=True)
class EventPart:
    """The output of one task; the parts of a batch are ordered by `number`."""

    number: int
    path: str
    events: int
    bytes: int


def stretches(segments: Iterable[SegmentRef]) -> list[tuple[SegmentRef, ...]]:
    """The segments in stream order, with overlapping ones grouped together."""
    found: list[list[SegmentRef]] = []
    last = -1
    for segment in sorted(segments, key=lambda s: s.first_ord):
        if not found or segment.first_ord > last:
            found.append([])
        found[-1].append(segment)
        last = max(last, segment.last_ord)
    return [tuple(stretch) for stretch in found]


def plan_pieces(segments: Iterable[SegmentRef], *, piece_bytes: int = PIECE_BYTES) -> list[str]:
    """A batch's pieces in order, each as JSON for `piece_stretches`."""
    pieces: list[list[tuple[SegmentRef, ...]]] = []
    size = 0
    for stretch in stretches(segments):
        more = sum(s.bytes for s in stretch)
        if not pieces or size + more > piece_bytes:
            pieces.append([])
            size = 0
        pieces[-1].append(stretch)
        size += more
    return [json.dumps([[asdict(s) for s in stretch] for stretch in piece]) for piece in pieces]


def piece_stretches(piece: str) -> list[tuple[SegmentRef, ...]]:
    """The stretches of a piece."""
    return [tuple(SegmentRef.from_dict(s) for s in stretch) for stretch in json.loads(piece)]
