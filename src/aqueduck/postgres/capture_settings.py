"""
What a capture is told, and the small files by which driver, planner and tasks speak to each other.

Light on purpose: Spark imports this in every process that only has to know of the source.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from aqueduck.schema import lsn_text, parse_lsn

__all__ = ["CaptureSettings", "note_position", "read_note"]


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """Everything a capture needs; travels to the planner process as a file."""

    dsn: str
    slot: str
    publication: str
    position: int
    tables: tuple[str, ...]  # TableSchema as JSON
    stage_dir: str
    report_path: str
    hold_path: str
    confirmed_path: str
    durable_path: str
    segment_bytes: int = 32 << 20
    stage_bytes_max: int = 1 << 30
    batch_bytes_max: int = 512 << 20
    flush_interval_seconds: float = 1.0
    slot_retries: int = 10

    def save(self, path: Path) -> None:
        """Write the settings where only we can read them: they hold the connection string."""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(asdict(self), out)

    @classmethod
    def load(cls, path: Path) -> CaptureSettings:
        values = json.loads(path.read_text())
        return cls(**{**values, "tables": tuple(values["tables"])})


def note_position(path: Path, position: int, *, sync: bool = False) -> None:
    """
    Leave a position in a file, for another process or another run.

    `durable` is the driver's word to the capture that the lake has it.  `confirmed` is written, and
    synced, before we confirm a position beyond the lake's: at the next start it tells our own slot
    from one that somebody dropped and made again.
    """
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as out:
        out.write(lsn_text(position))
        if sync:
            out.flush()
            os.fsync(out.fileno())
    temporary.replace(path)


def read_note(path: Path) -> int | None:
    """What `note_position` left there last."""
    try:
        return parse_lsn(path.read_text())
    except FileNotFoundError:
        return None
