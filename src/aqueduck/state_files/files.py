"""
Notes: the small files by which driver, planner and tasks of a group speak to each other.

Each has one writer, is replaced as a whole, and lies in the group's directory.  Light on purpose: Spark
imports this in every process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableSchema, lsn_text, parse_lsn

__all__ = [
    "Confirmation",
    "SlotMark",
    "note_confirmation",
    "note_mark",
    "note_position",
    "note_slot",
    "read_confirmation",
    "read_modes",
    "read_note",
    "read_report",
    "read_skips",
    "read_slot",
    "read_tables",
    "write_note",
    "write_skips",
    "write_tables",
]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What we told the server while nothing was on its way: it tells our own slot from one that somebody made again."""

    position: int
    """Confirmed, although the lake stands elsewhere."""
    durable: int
    """Where the lake (or a bookmark) stood: nothing of ours lies between the two."""
    lake: str = ""
    """Which lake it was, see `lake.ledger.progress.lake_mark`."""

    def covers(self, confirmed: int, *, durable: int, lake: str = "") -> bool:
        """Whether a slot that stands at `confirmed` has left nothing out for a lake that stands at `durable`."""
        return self.lake == lake and self.durable <= durable and confirmed <= self.position

    def is_ahead_of(self, *, durable: int, lake: str = "") -> bool:
        """Whether this very lake had more than it has now: then it is an older one, put back in its place."""
        return self.lake == lake and self.durable > durable


def note_confirmation(path: Path, confirmation: Confirmation) -> None:
    """On disk before the server is told."""
    write_note(path, json.dumps(asdict(confirmation)), sync=True)


def read_confirmation(path: Path) -> Confirmation | None:
    """What `note_confirmation` left there last."""
    try:
        return Confirmation(**json.loads(path.read_text()))
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        TypeError,
    ):  # none, or not one that we could rely on
        return None


@dataclass(frozen=True, slots=True)
class SlotMark:
    """How far a slot was: on one timeline, its `restart_lsn` only moves forward, also over a crash."""

    timeline: int
    restart_lsn: int

    def is_ahead_of(self, restart_lsn: int | None, timeline: int) -> bool:
        """Whether a slot that stands there has gone back."""
        return restart_lsn is not None and timeline == self.timeline and restart_lsn < self.restart_lsn


def note_slot(path: Path, mark: SlotMark) -> None:
    """The server has shown it twice, so it is on the server's disk."""
    write_note(path, json.dumps(asdict(mark)), sync=True)


def read_slot(path: Path) -> SlotMark | None:
    """What `note_slot` left there last."""
    try:
        return SlotMark(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def note_position(path: Path, position: int) -> None:
    """Leave a position: `durable` is the driver's word to the capture that the lake has it."""
    write_note(path, lsn_text(position))


def read_note(path: Path) -> int | None:
    """What `note_position` left there last."""
    try:
        return parse_lsn(path.read_text())
    except FileNotFoundError:
        return None


def read_report(path: Path) -> dict[str, Any]:
    """What somebody wrote there last about how it fares, such as the capture; nothing if it has not yet."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return report


def write_tables(
    path: Path,
    tables: Iterable[tuple[TableSchema, str | None]],
    modes: Mapping[int, TableMode] | None = None,
) -> None:
    """Tell capture and tasks which tables the group has, where the files of each go, and modes other than `upsert`."""
    modes = modes or {}
    notes = {
        schema.oid: [schema.to_json(), place, modes.get(schema.oid, UPSERT).to_json()]
        for schema, place in tables
    }
    write_note(path, json.dumps(notes))


def read_tables(path: Path) -> dict[int, tuple[TableSchema, str | None]]:
    """What `write_tables` wrote last, by oid."""
    tables = json.loads(path.read_text())
    return {int(oid): (_schema_of(schema), place) for oid, (schema, place, _) in tables.items()}


@functools.lru_cache(4096)
def _schema_of(text: str) -> TableSchema:
    """Kept: of a note that is written anew, most tables are as they were."""
    return TableSchema.from_json(text)


def note_mark(path: Path) -> tuple[int, int, int]:
    """Tells a note from the one before it, without reading it."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_modes(path: Path) -> dict[int, TableMode]:
    """The modes of the tables that `write_tables` wrote last, by oid."""
    tables = json.loads(path.read_text())
    return {int(oid): TableMode.from_json(mode) for oid, (_, _, mode) in tables.items()}


def write_skips(path: Path, skips: Mapping[int, int | None]) -> None:
    """Tell tasks which tables are not ready (None), and up to which position their copy has the changes."""
    write_note(path, json.dumps(skips))


def read_skips(path: Path) -> dict[int, int | None]:
    """What `write_skips` wrote last, by oid."""
    try:
        return {int(oid): skip for oid, skip in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}


def write_note(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace a file as a whole; with `sync` it is on disk afterwards."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as out:
        out.write(text)
        if sync:
            out.flush()
            os.fsync(out.fileno())
    temporary.replace(path)
