"""What the service knows about a group, as plain values for the terminal, JSON and the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["GroupStatus", "TableCounts"]


@dataclass(slots=True)
class TableCounts:
    """Changes applied to one table since the service started."""

    changes: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0


@dataclass(slots=True)
class GroupStatus:
    """One group since the service started."""

    group: str
    state: str = "starting"
    position: int = 0
    """What the lake has."""
    seen: int = 0
    """What the capture has decoded."""
    server: int = 0
    lag_bytes: int = 0
    freshness_seconds: float | None = None
    """Source commit to lake commit, of the last batch's last transaction."""
    batches: int = 0
    transactions: int = 0
    staged_bytes: int = 0
    paused: bool = False
    held: bool = False
    restarts: int = 0
    last_error: str | None = None
    tables: dict[str, TableCounts] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
