"""
The bookmark of an events flow: how far its sink has everything, and where the sink stood then.

Plain values.  The stores are `sinks.bookmark_file`, `sinks.bookmark_table` and `sinks.bookmark_lake`;
all of them replace a bookmark in one step or not at all.
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
    """Everything up to `position`, the end of a commit, is in the sink."""

    position: int
    system_identifier: str
    """Which PostgreSQL cluster the position belongs to."""
    time_us: int | None = None
    """Time of that commit; None before the first batch."""
    place: dict[str, Any] = field(default_factory=dict)
    """What the sink wants to know at the next start."""
    events: int = 0
    """How many the sink was given, since there is a bookmark."""
    timeline: int | None = None
    """On which timeline of the cluster; None where an older version did not keep it."""

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
                hint="restore the state from a backup, or remove it: everything the slot has is then delivered again",
            ) from exc


class BookmarkStore(Protocol):
    """Keeps one bookmark, durably."""

    def load(self) -> Bookmark | None:
        """The bookmark; None if there is none."""
        ...

    def save(self, bookmark: Bookmark) -> None:
        """Replace the bookmark; when this returns it survives a crash."""
        ...

    def close(self) -> None: ...
