"""
What the fan-out decides, as plain values: source tables over time, destinations, ranges, evolution.

Nothing here touches a lake. `lake.source.lake_changes` reads the source, `lake.destinations.destination`
writes a destination, `spark.query.fanout_query` runs a cycle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aqueduck.model.errors import ReservedColumnError
from aqueduck.model.retries import doubled
from aqueduck.model.schema import TableName

__all__ = [
    "SnapshotRange",
    "SourceColumn",
    "SourceTable",
    "backoff_seconds",
    "evolution",
    "had_upkeep",
    "may_touch",
    "readable_ranges",
]

RESERVED = ("snapshot_id", "rowid", "change_type")
"""Names that DuckLake's change functions use; a user column of that name would hide theirs."""

PLACES = ("filename", "file_row_number")
"""Names under which DuckLake exposes a row's location; a user column of that name hides it, without other harm."""

TRIES = 3
"""Attempts in quick succession before a destination is retried less often."""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of the source table; its id survives renames."""

    id: int
    name: str
    type: str
    default: str | None = None
    """The value, as text, of rows that are older than the column."""
    fields: tuple[SourceColumn, ...] = ()
    """For a struct its fields, for a list its element, for a map key and value; types are DuckLake's names."""

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> SourceColumn:
        """The reverse of `asdict`."""
        return cls(**{**values, "fields": tuple(map(cls.from_plain, values.get("fields", ())))})


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The source table as of one lake snapshot."""

    uuid: str
    """Distinguishes a re-created table from the dropped one of the same name."""
    columns: tuple[SourceColumn, ...]

    @property
    def types(self) -> dict[str, str]:
        return {column.name: column.type for column in self.columns}

    def refuse_reserved_names(self) -> None:
        """Raise if a column has a name that DuckLake's change feed uses."""
        for column in self.columns:
            if column.name.lower() in RESERVED:
                raise ReservedColumnError(
                    f"the source table has a column {column.name}, a name that DuckLake's change feed needs",
                    hint="rename the column; the change feed would show its values in place of its own",
                )

    @classmethod
    def from_json(cls, text: str) -> SourceTable:
        """The reverse of `asdict`; ignores other keys."""
        values = json.loads(text)
        return cls(values["uuid"], tuple(map(SourceColumn.from_plain, values["columns"])))


@dataclass(frozen=True, slots=True)
class SnapshotRange:
    """Consecutive lake snapshots that can be read at once, both bounds included."""

    first: int
    last: int
    removing: tuple[int, ...] = ()
    """Lake snapshots that deleted rows."""

    @property
    def removes(self) -> bool:
        return bool(self.removing)

    def within(self, first: int, last: int) -> SnapshotRange:
        """The part of the range between two lake snapshots."""
        return SnapshotRange(first, last, tuple(s for s in self.removing if first <= s <= last))

    def one_by_one(self) -> Iterator[SnapshotRange]:
        """The range in pieces: each lake snapshot that deleted rows is a piece of its own."""
        start = self.first
        for snapshot in self.removing:
            if start < snapshot:
                yield SnapshotRange(start, snapshot - 1)
            yield SnapshotRange(snapshot, snapshot, (snapshot,))
            start = snapshot + 1
        if start <= self.last:
            yield SnapshotRange(start, self.last)


def readable_ranges(
    changes: Iterable[tuple[int, str]],
    table_id: int,
    deletes: Sequence[tuple[int, int]] = (),
    altered: Container[int] = (),
) -> list[SnapshotRange]:
    """
    The parts of a range that contain changes of the table.

    `changes` has DuckLake's description of each lake snapshot, in order; `deletes` has the snapshot ranges of
    files with deleted rows, because a transaction that deleted rows it had just written does not report that.
    Snapshots that rewrite or merge files are left out and end a range: the change functions report the moved
    rows as changed, and a range across them shows wrong values of deleted rows. `altered` are the snapshots
    that rename the table or change its columns: a range is read with the names at its end.
    """
    spans: list[SnapshotRange] = []
    open_span = False
    for snapshot, text in changes:
        done = {verb for verb, target in _ENTRY.findall(text) if target == str(table_id)}
        open_span = open_span and snapshot not in altered
        if done & _COMPACTIONS:
            open_span = False
        elif done & (_INSERTS | _DELETES):
            removes = bool(done & _DELETES) or any(first <= snapshot <= last for first, last in deletes)
            before = spans.pop() if open_span else SnapshotRange(snapshot, snapshot)
            spans.append(
                SnapshotRange(before.first, snapshot, (*before.removing, *([snapshot] if removes else ())))
            )
            open_span = True
    return spans


def may_touch(text: str, table_id: int, table: TableName) -> bool:
    """Whether a lake snapshot with this description may have changed the table, its name or its columns."""
    entries = _ENTRY.findall(text)
    name = f'"{table.schema}"."{table.name}"'.lower()
    return not entries or any(
        target == str(table_id) or (verb == "created_table" and target.lower() == name)
        for verb, target in entries
    )


def had_upkeep(changes: Iterable[tuple[int, str]], table_id: int) -> bool:
    """Whether one of the lake snapshots rewrote or merged the table's files, or flushed inlined rows."""
    return any(
        verb in _UPKEEP and target == str(table_id)
        for _, text in changes
        for verb, target in _ENTRY.findall(text)
    )


_ENTRY = re.compile(r'(\w+):((?:"(?:[^"]|"")*"|[^,"])+)')
_INSERTS = frozenset({"inserted_into_table", "inlined_insert"})
_DELETES = frozenset({"deleted_from_table", "inlined_delete"})
_COMPACTIONS = frozenset({"rewrite_delete", "merge_adjacent", "compacted_table"})
_UPKEEP = _COMPACTIONS | {"inline_flush"}


@dataclass(frozen=True, slots=True)
class Evolve:
    """One step that aligns a destination's table with the source's columns."""

    kind: str
    """add, drop, rename or type."""
    name: str
    to: str = ""
    """The new name or type."""
    default: str | None = None


def evolution(old: Sequence[SourceColumn], new: Sequence[SourceColumn]) -> list[Evolve] | None:
    """The steps from old to new columns; None if the table must be re-created."""
    before = {column.id: column for column in old}
    after = {column.id: column for column in new}
    steps = [Evolve("drop", c.name) for c in old if c.id not in after]
    renames = [(before[c.id], c) for c in new if c.id in before and before[c.id].name != c.name]
    taken = {c.name.lower() for c in old if c.id in after}
    if any(c.name.lower() in taken for _, c in renames) or not set(before) & set(after):
        return None  # swapped names: rare enough to re-create the table
    steps += [Evolve("rename", was.name, c.name) for was, c in renames]
    for column in new:
        known = before.get(column.id)
        if known is None:
            steps.append(Evolve("add", column.name, column.type, column.default))
        elif known.fields and known.fields != column.fields:
            return None
        elif known.type != column.type:
            if _nested(known.type) or _nested(column.type):
                return None
            steps.append(Evolve("type", column.name, column.type))
    return steps


def _nested(kind: str) -> bool:
    return ("(" in kind and not kind.startswith("DECIMAL")) or kind.endswith("]")


def backoff_seconds(failures: int) -> float:
    """How long a destination waits after this many consecutive failures."""
    if failures < TRIES:
        return doubled(1.0, failures - 1, 30.0)
    return doubled(30.0, failures - TRIES, 1800.0)
