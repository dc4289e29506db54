"""
The sinks of change events, one module each.

A sink gets the parts of a batch in order and returns when they are durable; then the bookmark moves.
`files` delivers exactly once, because the bookmark has the length of its file.  `stdout`, `http` and `kafka` deliver at
least once; they name each event by its transaction and index, so that a receiver can recognize duplicates.  Tables
(`sinks.postgres_table`, `sinks.lake_table`) are exactly once, because they store the bookmark themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.event_parts import EventPart, PartFormat

__all__ = ["Sink"]


class Sink(Protocol):
    """The interface of a sink."""

    part_format: PartFormat
    """The format of the parts that tasks write for it."""
    batch_bytes_max: int | None
    """The most that should be delivered between two bookmarks; None for no limit."""

    def recover(self, bookmark: Bookmark | None) -> None:
        """Return to the state in the bookmark."""
        ...

    def place(self) -> dict[str, Any]:
        """The sink's current state, for the bookmark."""
        ...

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        """
        Deliver a batch that ends at `position`; it must survive a crash when this returns.

        A sink that stores the bookmark only accepts the batch here, and delivers it with the next bookmark.
        """
        ...

    def tick(self, position: int, *, final: bool = False) -> bool:
        """Called when there are no events, or at the end of a run; returns whether the bookmark must be saved again."""
        ...

    def settle(self, position: int) -> None:
        """Called after the bookmark was saved, for work that must follow it; must be idempotent."""
        ...

    def close(self) -> None: ...
