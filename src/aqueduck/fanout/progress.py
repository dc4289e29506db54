"""
The progress of a lane's job: tasks append to a file, the driver reads it.

Tasks write a line for each chunk and each destination (`spark.query.fanout_query`), and touch the file during
long work. On a cluster without a shared `state_dir` no progress is shown; everything else works.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

__all__ = ["LaneProgress"]


class LaneProgress:
    """The rows and destinations that the running job has finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.destinations = 0
        self._read = 0

    def restart(self) -> None:
        """Reset at the start of a job."""
        self.rows = self.destinations = self._read = 0
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")

    def idle_seconds(self) -> float:
        """
        Seconds since its tasks last showed progress; 0 before their first progress, and if they do not share
        the file.
        """
        try:
            found = self.path.stat()
        except OSError:
            return 0.0
        return max(0.0, time.time() - found.st_mtime) if found.st_size else 0.0

    def look(self) -> float:
        """Read new lines; returns the time of the last one in seconds since the Unix epoch, or 0."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
            moved_at = self.path.stat().st_mtime
        except OSError:
            return 0.0
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            rows, _, destinations = line.partition(b" ")
            self.rows += int(rows)
            self.destinations += int(destinations)
        return moved_at
