"""
What a maintenance run decides and reports; pure.

A table's files are organized like the levels of a log-structured merge tree: when a level has `FAN_IN` files
without deleted rows, they are merged into one file of a higher level, so that every byte is rewritten only a
few times and a table has a few files per level. Files with deleted rows cannot be merged; they are rewritten
when a share of their rows is deleted, or when there are as many of them as a merge takes.
`lake.upkeep.table_upkeep` executes the decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["ExpiryReport", "MaintenanceReport", "Merge", "Rewrite", "TableFile", "TableUpkeep", "next_step"]

KIB, MIB = 1 << 10, 1 << 20
LEVELS = (0, 512 * KIB, 4 * MIB, 32 * MIB)
"""The sizes at which levels begin; files above the last one are left alone."""
FAN_IN = 8
STEP_BYTES = 64 * MIB
"""The most that one step reads, except when a few files are larger: commits wait for a step."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A current data file of the table."""

    bytes: int
    rows: int
    removed: int = 0
    """Rows that a delete file removes from it."""

    @property
    def share(self) -> float:
        return self.removed / max(1, self.rows)


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge the files of a level, from `at_least` to below `below` bytes, into one."""

    at_least: int
    below: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Rewrite files without their deleted rows, if these are at least `share` of all."""

    share: float


UpkeepStep = Merge | Rewrite


def next_step(
    files: Sequence[TableFile], *, delete_share: float, done: Collection[UpkeepStep] = ()
) -> UpkeepStep | None:
    """The next step for a table's files; steps in `done` had no effect and are not tried again."""
    steps: list[UpkeepStep] = [*_merges(files), *_rewrites(files, delete_share)]
    for step in steps:
        if step not in done:
            return step
    return None


def _merges(files: Sequence[TableFile]) -> list[Merge]:
    clean = sorted(file.bytes for file in files if not file.removed)
    merges = []
    for low, high in itertools.pairwise(LEVELS):
        level = [size for size in clean if low <= size < high]
        if len(level) >= FAN_IN:
            count = max(FAN_IN, _within(level))
            merges.append(Merge(low, high if count >= len(level) else level[count - 1] + 1))
    return merges


def _rewrites(files: Sequence[TableFile], delete_share: float) -> list[Rewrite]:
    removed = sorted((file for file in files if file.removed), key=lambda file: -file.share)
    small = [file for file in removed if file.bytes < LEVELS[-1]]
    if len(small) < FAN_IN:
        removed = [file for file in removed if file.share >= delete_share]
    count = max(1, _within([file.bytes for file in removed]))
    return [Rewrite(removed[count - 1].share)] if removed else []


def _within(sizes: Sequence[int]) -> int:
    """How many of the files one step may read."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > STEP_BYTES:
            return count
    return len(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUpkeep:
    """What a run did to the files of one table."""

    table: str
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    delete_files_before: int = 0
    delete_files_after: int = 0
    rows_flushed: int = 0
    files_merged: int = 0
    files_rewritten: int = 0

    @property
    def changed(self) -> bool:
        return bool(self.rows_flushed or self.files_merged or self.files_rewritten)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryReport:
    """What a run removed from a lake's history."""

    snapshots_before: int = 0
    snapshots_after: int = 0
    kept_for: str | None = None
    """Readers that still need lake snapshots older than the retention, or why that is unknown."""
    files_removed: int = 0
    orphans_removed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceReport:
    """One maintenance run of one lake."""

    lake: str
    seconds: float = 0.0
    longest_hold_seconds: float = 0.0
    """The longest wait of commits."""
    complete: bool = True
    """False if the time was up; the next run continues where this one stopped."""
    error: str | None = None
    tables: tuple[TableUpkeep, ...] = ()
    expiry: ExpiryReport = field(default_factory=ExpiryReport)

    @property
    def totals(self) -> TableUpkeep:
        """The sum over all tables."""
        total = TableUpkeep(table="")
        names = [name for name in TableUpkeep.__slots__ if name != "table"]
        for table in self.tables:
            sums: dict[str, Any] = {name: getattr(total, name) + getattr(table, name) for name in names}
            total = replace(total, **sums)
        return total
