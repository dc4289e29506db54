"""
The settings of a capture when its query starts.

It imports little, because Spark imports this module in every process that needs to know the source.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["CaptureSettings", "save_settings"]


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """The settings of a capture; passed to the planner process as a file."""

    dsn: str
    slot: str
    publication: str
    position: int
    directory: str
    """The directory of the stage and of the state files through which driver and capture exchange state."""
    first_ord: int = 0
    """The number of the first change, if not the position: larger than those of earlier captures whose changes are still pending."""
    lake: str = ""
    """Which lake the position is of; written into the state file `confirmed`."""
    system_identifier: str = ""
    timeline: int = 0
    """The server's identity as found at the start; 0 if it was not checked."""
    segment_bytes: int = 32 << 20
    stage_bytes_max: int = 1 << 30
    max_queued_changes: int = 10_000_000
    batch_bytes_max: int = 512 << 20
    fold_concurrency: int = 64
    """The number of tasks that fold a batch."""
    flush_interval_seconds: float = 1.0
    slot_retries: int = 10
    silence_timeout_seconds: float = 30.0
    """After this time without any message from the server, the connection is given up."""
    stream_in_progress: bool = True
    """Whether large transactions are read before they end."""
    capture: str = "stream"
    """`stream`, `poll` or `auto`: selects the reader, see `readers`."""
    plugin: str = "pgoutput"
    poll_interval_seconds: float = 0.1
    poll_step_bytes: int = 64 << 20
    """The most WAL that one step of an SQL reader decodes."""
    catchup_bytes: int = 16 << 20
    """With `auto`, a larger backlog is read by SQL first."""

    @property
    def stage_dir(self) -> Path:
        return Path(self.directory) / "stage"

    @property
    def tables_path(self) -> Path:
        """The group's tables; read again whenever the file is replaced."""
        return Path(self.directory) / "tables.json"

    @property
    def report_path(self) -> Path:
        """The capture's report."""
        return Path(self.directory) / "capture.json"

    @property
    def hold_path(self) -> Path:
        """While this file exists, the capture releases the slot."""
        return Path(self.directory) / "hold"

    @property
    def confirmed_path(self) -> Path:
        """The last position that was confirmed while no change was pending."""
        return Path(self.directory) / "confirmed"

    @property
    def durable_path(self) -> Path:
        """The lake's position."""
        return Path(self.directory) / "durable"

    def save(self, path: Path) -> None:
        save_settings(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> CaptureSettings:
        return cls(**json.loads(path.read_text()))


def save_settings(settings: dict[str, Any], path: Path) -> None:
    """Write settings so that only our user can read them: they contain the connection string."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(settings, out)
