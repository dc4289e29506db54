"""
Where change events go: one module a sink.

A sink is handed the parts of a batch, in order, and returns when they are safe; then the bookmark moves.
`files` is exactly once, because the bookmark says how far its file was; `stdout`, `http` and `kafka` are at least
once, and name each event by its transaction and index so that a receiver can tell one that came before.  Tables
(`sinks.postgres_table`, `sinks.lake_table`) are exactly once because they keep the bookmark themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.event_parts import EventPart, PartFormat

__all__ = ["Sink"]


class Sink(Protocol):
    """What the flow asks of a sink."""

    part_format: PartFormat
    """What tasks are to write for it."""
    batch_bytes_max: int | None
    """The most that should be delivered between two bookmarks; None for no opinion."""

    def recover(self, bookmark: Bookmark | None) -> None:
        """Go back to where the bookmark says we were."""
        ...

    def place(self) -> dict[str, Any]:
        """What a bookmark has to say about the sink, as it is now."""
        ...

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        """
        Deliver a batch that ends at `position`; when this returns it survives a crash.

        A sink that keeps the bookmark takes the batch here, and delivers it with the bookmark that is saved next.
        """
        ...

    def tick(self, position: int, *, final: bool = False) -> bool:
        """A moment without events, or the end of a run; whether the bookmark is to be saved again."""
        ...

    def settle(self, position: int) -> None:
        """The bookmark is saved: do what had to wait for it, in a way that can be done again."""
        ...

    def close(self) -> None: ...
