"""
What a capture is told when its query starts.

Light on purpose: Spark imports this in every process that only has to know of the source.
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
    """Everything a capture needs; travels to the planner process as a file."""

    dsn: str
    slot: str
    publication: str
    position: int
    directory: str
    """Where the stage is, and the files by which driver and capture speak: see `state_files`."""
    first_ord: int = 0
    """The number of the first change, if not the position: larger than those of earlier captures whose changes still wait."""
    lake: str = ""
    """Which lake the position is of; written into the state file `confirmed`."""
    system_identifier: str = ""
    timeline: int = 0
    """What whoever starts us found the server to be; 0 where nobody looked."""
    segment_bytes: int = 32 << 20
    stage_bytes_max: int = 1 << 30
    max_queued_changes: int = 10_000_000
    batch_bytes_max: int = 512 << 20
    fold_concurrency: int = 64
    """How many tasks fold a batch."""
    flush_interval_seconds: float = 1.0
    slot_retries: int = 10
    silence_timeout_seconds: float = 30.0
    """A server of which nothing was heard for so long is given up, although the connection stands."""
    stream_in_progress: bool = True
    """Whether large transactions are read while they are still going on."""
    capture: str = "stream"
    """`stream`, `poll` or `auto`: which reader, see `readers`."""
    plugin: str = "pgoutput"
    poll_interval_seconds: float = 0.1
    poll_step_bytes: int = 64 << 20
    """How much WAL one step of an SQL reader decodes at most."""
    catchup_bytes: int = 64 << 20
    """With `auto`, a backlog above this is read by SQL first."""

    @property
    def stage_dir(self) -> Path:
        return Path(self.directory) / "stage"

    @property
    def tables_path(self) -> Path:
        """The group's tables; read again when it is another."""
        return Path(self.directory) / "tables.json"

    @property
    def report_path(self) -> Path:
        """How the capture fares."""
        return Path(self.directory) / "capture.json"

    @property
    def hold_path(self) -> Path:
        """While it is there, the capture lets go of the slot."""
        return Path(self.directory) / "hold"

    @property
    def confirmed_path(self) -> Path:
        """What the server was told while nothing was on its way."""
        return Path(self.directory) / "confirmed"

    @property
    def durable_path(self) -> Path:
        """What the lake has."""
        return Path(self.directory) / "durable"

    def save(self, path: Path) -> None:
        save_settings(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> CaptureSettings:
        return cls(**json.loads(path.read_text()))


def save_settings(settings: dict[str, Any], path: Path) -> None:
    """Write settings where only we can read them: they hold the connection string."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(settings, out)
