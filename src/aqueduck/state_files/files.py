"""
The state files of a group, by which driver, planner and tasks exchange state.

Each file has one writer, is replaced atomically, and is in the group's directory.  The module imports little, because
Spark imports it in every process.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aqueduck.model.layout import PLAIN, TableLayout
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableSchema, lsn_text, parse_lsn

__all__ = [
    "NOT_SENT",
    "Confirmation",
    "Sending",
    "SlotMark",
    "file_stamp",
    "read_confirmation",
    "read_durable",
    "read_layout",
    "read_modes",
    "read_report",
    "read_sendings",
    "read_skips",
    "read_slot",
    "read_tables",
    "replace_file",
    "write_confirmation",
    "write_durable",
    "write_sendings",
    "write_skips",
    "write_slot",
    "write_tables",
]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A position beyond the lake's that was confirmed while no changes were in between; it identifies our own slot."""

    position: int
    """The confirmed position."""
    durable: int
    """The position of the lake (or of a bookmark) then; no change of ours is between the two."""
    lake: str = ""
    """The identifier of the lake, see `lake.ledger.progress.lake_mark`."""

    def covers(self, confirmed: int, *, durable: int, lake: str = "") -> bool:
        """Whether a slot at `confirmed` has skipped nothing that a lake at `durable` lacks."""
        return self.lake == lake and self.durable <= durable and confirmed <= self.position

    def is_ahead_of(self, *, durable: int, lake: str = "") -> bool:
        """Whether the same lake had a later position than now, because it was restored from a backup."""
        return self.lake == lake and self.durable > durable


def write_confirmation(path: Path, confirmation: Confirmation) -> None:
    """Write the confirmation to disk, before it is sent to the server."""
    replace_file(path, json.dumps(asdict(confirmation)), sync=True)


def read_confirmation(path: Path) -> Confirmation | None:
    """The last confirmation that `write_confirmation` wrote; None if there is none."""
    try:
        return Confirmation(**json.loads(path.read_text()))
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        TypeError,
    ):  # missing or invalid
        return None


@dataclass(frozen=True, slots=True)
class SlotMark:
    """A slot's `restart_lsn`, which on one timeline only moves forward, also across a crash of the server."""

    timeline: int
    restart_lsn: int
    slot: str = ""
    """The slot's name; marks of older versions lack it."""

    def is_comparable(self, other: SlotMark) -> bool:
        """Whether one of the two must be the earlier one."""
        same = self.slot == other.slot or not (self.slot and other.slot)
        return same and self.timeline == other.timeline

    def is_ahead_of(self, now: SlotMark) -> bool:
        """Whether the slot has moved back since."""
        return self.is_comparable(now) and now.restart_lsn < self.restart_lsn


def write_slot(path: Path, mark: SlotMark) -> None:
    """Write the mark; the server reported it twice, so it is on the server's disk."""
    replace_file(path, json.dumps(asdict(mark)), sync=True)


def read_slot(path: Path) -> SlotMark | None:
    """The last mark that `write_slot` wrote; None if there is none."""
    try:
        return SlotMark(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Sending:
    """How a publication sends a table; two looks at it show whether the table was not sent for a while."""

    entries: tuple[str, ...] = ()
    """
    The publication's entries that include the table: the table itself, its root, its schema, or all tables.  An entry that
    was removed and added again is another one.
    """
    changed_by: int = 0
    """The transaction that last changed the publication itself, for example the kinds of changes that it sends."""
    owner: int = 0

    def continues(self, before: Sending) -> bool:
        """Whether the table was sent all the time since; a change of the owner alone is no gap."""
        same = not set(self.entries).isdisjoint(before.entries)
        return same and (self.changed_by == before.changed_by or self.owner != before.owner)


NOT_SENT = Sending()
"""Nothing continues this."""


def write_sendings(path: Path, found: Mapping[int, Sending]) -> None:
    """Write how each table was sent at the last look, by OID."""
    replace_file(path, json.dumps({oid: asdict(sending) for oid, sending in found.items()}), sync=True)


def read_sendings(path: Path) -> dict[int, Sending]:
    """What `write_sendings` wrote last; empty if there is nothing."""
    try:
        found = json.loads(path.read_text())
        return {int(o): Sending(tuple(s["entries"]), s["changed_by"], s["owner"]) for o, s in found.items()}
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_durable(path: Path, position: int) -> None:
    """Write a position; in the file `durable`, the driver sends the lake's position to the capture: see `Stage.release`."""
    replace_file(path, lsn_text(position))


def read_durable(path: Path) -> int | None:
    """The last position that `write_durable` wrote; None if there is none."""
    try:
        return parse_lsn(path.read_text())
    except FileNotFoundError:
        return None


def read_report(path: Path) -> dict[str, Any]:
    """The last report of a process about its state, for example the capture's; empty if there is none."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return report


def write_tables(
    path: Path,
    tables: Iterable[tuple[TableSchema, str | None]],
    modes: Mapping[int, TableMode] | None = None,
    layouts: Mapping[int, TableLayout] | None = None,
) -> None:
    """Write the group's tables for capture and tasks: the directory of each, modes other than `upsert`, and layouts."""
    modes, layouts = modes or {}, layouts or {}
    found = {
        schema.oid: [
            schema.to_json(),
            place,
            modes.get(schema.oid, UPSERT).to_json(),
            None if layouts.get(schema.oid, PLAIN).is_plain else layouts[schema.oid].to_json(),
        ]
        for schema, place in tables
    }
    replace_file(path, json.dumps(found))


def read_tables(path: Path) -> dict[int, tuple[TableSchema, str | None]]:
    """The tables that `write_tables` wrote last, by OID."""
    tables = json.loads(path.read_text())
    return {int(oid): (_schema_of(schema), place) for oid, (schema, place, *_) in tables.items()}


@functools.lru_cache(4096)
def _schema_of(text: str) -> TableSchema:
    """Parse a schema; cached, because most tables are unchanged when the file is rewritten."""
    return TableSchema.from_json(text)


def file_stamp(path: Path) -> tuple[int, int, int]:
    """A value that changes when the file is replaced, without reading it."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_modes(path: Path) -> dict[int, TableMode]:
    """The modes that `write_tables` wrote last, by OID."""
    tables = json.loads(path.read_text())
    return {int(oid): TableMode.from_json(mode) for oid, (_, _, mode, _) in tables.items()}


def read_layout(path: Path, oid: int) -> TableLayout:
    """The layout of a table that `write_tables` wrote last."""
    found = json.loads(path.read_text()).get(str(oid))
    return PLAIN if found is None or found[3] is None else TableLayout.from_json(found[3])


def write_skips(path: Path, skips: Mapping[int, int | None]) -> None:
    """Write for tasks which tables are not ready (None), and before which position a table's copy has the changes."""
    replace_file(path, json.dumps(skips))


def read_skips(path: Path) -> dict[int, int | None]:
    """The skips that `write_skips` wrote last, by OID."""
    try:
        return {int(oid): skip for oid, skip in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}


def replace_file(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace a file atomically; with `sync`, it is on disk when this returns."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as out:
        out.write(text)
        if sync:
            out.flush()
            os.fsync(out.fileno())
    temporary.replace(path)
