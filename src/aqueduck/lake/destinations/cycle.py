"""A cycle of a fan-out as its workers see it: the destinations that they get, and what became of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from aqueduck.config.lake_place import LakePlace
from aqueduck.model.schema import TableName

__all__ = ["Applied", "Destination"]


@dataclass(frozen=True, slots=True)
class Destination:
    """One destination as workers see it."""

    id: str
    value: str
    """Its routing value, as text."""
    place: LakePlace
    target: TableName
    cursor: int | None
    """The source lake snapshot up to which it is complete; None before it is seeded."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one destination in one cycle."""

    id: str
    cursor: int | None
    """What the destination's lake says now; None if it has no cursor yet."""
    error: str | None = None
    seeded: bool = False
    stamp: int | None = None
    """The stamp of the cursor's lake snapshot."""
    miscounted: bool = False
    """It did not have as many rows as the source: it is to be seeded again."""
    reason: str | None = None
    """The error for which it is to be seeded again."""
    rows: dict[str, int] = field(default_factory=dict)
    """Counts: written, deleted, upserted, matched, conflicts, orphans."""
    seconds: float = 0.0
