"""JSON lines on standard output, for pipes and terminals; delivered at least once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import SinkWriteError, system_reason
from aqueduck.model.event_parts import EventPart, PartFormat

__all__ = ["StdoutSink"]


class StdoutSink:
    """Writes and flushes each batch."""

    part_format: PartFormat = "text"
    batch_bytes_max: int | None = 32 << 20

    def __init__(self, out: BinaryIO | None = None) -> None:
        self._out = out or sys.stdout.buffer

    def recover(self, bookmark: Bookmark | None) -> None: ...

    def place(self) -> dict[str, Any]:
        return {}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        try:
            for part in parts:
                with open(part.path, "rb") as source:
                    shutil.copyfileobj(source, self._out, 1 << 20)
            self._out.flush()
        except OSError as exc:
            raise SinkWriteError(f"standard output cannot be written: {system_reason(exc)}") from exc

    def tick(self, position: int, *, final: bool = False) -> bool:
        return False

    def settle(self, position: int) -> None: ...

    def close(self) -> None:
        """Nothing to do: standard output stays open."""
