"""The input and output of a fan-out's workers: the destinations of a cycle, and the result for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from aqueduck.config.lake_place import LakePlace
from aqueduck.model.layout import AS_IT_IS, WantedLayout
from aqueduck.model.schema import TableName

__all__ = ["Applied", "Destination"]


@dataclass(frozen=True, slots=True)
class Destination:
    """One destination, as passed to workers."""

    id: str
    value: str
    """The routing value, as text."""
    place: LakePlace
    target: TableName
    cursor: int | None
    """The source lake snapshot up to which the destination is complete; None before its seed."""
    layout: WantedLayout = AS_IT_IS
    """What the file says of the layout of its table."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of one cycle for one destination."""

    id: str
    cursor: int | None
    """The cursor that the destination's lake has now; None if it has none."""
    error: str | None = None
    seeded: bool = False
    stamp: int | None = None
    """The stamp of the cursor's lake snapshot."""
    miscounted: bool = False
    """Whether its number of rows differed from the source's, so that it must be re-seeded."""
    reason: str | None = None
    """Why it must be re-seeded."""
    rows: dict[str, int] = field(default_factory=dict)
    """Counts: written, deleted, upserted, matched, conflicts, orphans."""
    seconds: float = 0.0
