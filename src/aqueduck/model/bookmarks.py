"""
The bookmark of an events flow: the position up to which its sink is complete, and the sink's own state at
that point.

Plain values. The stores are `sinks.bookmark_file`, `sinks.bookmark_table` and `sinks.bookmark_lake`; each
replaces a bookmark atomically.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from aqueduck.model.errors import BookmarkError
from aqueduck.model.schema import lsn_text, parse_lsn

__all__ = ["Bookmark", "BookmarkStore"]


@dataclass(frozen=True, slots=True)
class Bookmark:
    """The sink has everything up to `position`, the end of a commit."""

    position: int
    system_identifier: str
    """The PostgreSQL cluster of the position."""
    time_us: int | None = None
    """Time of that commit; None before the first batch."""
    place: dict[str, Any] = field(default_factory=dict)
    """State that the sink needs at the next start."""
    events: int = 0
    """Events delivered to the sink since the first bookmark."""
    timeline: int | None = None
    """The timeline of the cluster; None if an older version wrote the bookmark."""

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "position": lsn_text(self.position)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Bookmark:
        try:
            values = json.loads(text)
            return cls(**{**values, "position": parse_lsn(values["position"])})
        except (ValueError, TypeError, KeyError) as exc:
            raise BookmarkError(
                "the stored bookmark cannot be read",
                hint="restore the state from a backup, or remove it: everything that the slot retains is then delivered again",
            ) from exc


class BookmarkStore(Protocol):
    """Stores one bookmark durably."""

    def load(self) -> Bookmark | None:
        """The bookmark; None if there is none."""
        ...

    def save(self, bookmark: Bookmark) -> None:
        """Replace the bookmark; once this returns, it survives a crash."""
        ...

    def close(self) -> None: ...
