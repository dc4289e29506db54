"""
What a run of maintenance decides, and what it reports; pure.

A table's files are kept like the levels of a log-structured tree: when a level has `FAN_IN` files without
removed rows, they become one file of a higher level, so that every byte is written again a few times only and a
table has a few files a level.  Files with removed rows cannot be merged; they are rewritten when a share of their rows
is gone, or when there are as many of them as would be merged.  `lake.upkeep.table_upkeep` does what is decided here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["ExpiryReport", "MaintenanceReport", "Merge", "Rewrite", "TableFile", "TableUpkeep", "next_step"]

KIB, MIB = 1 << 10, 1 << 20
LEVELS = (0, 512 * KIB, 4 * MIB, 32 * MIB)
"""Sizes at which levels begin; what is larger than the last one is left as it is."""
FAN_IN = 8
STEP_BYTES = 64 * MIB
"""What one step reads at most, unless a few files are larger: commits wait for it."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A data file that the table has now."""

    bytes: int
    rows: int
    removed: int = 0
    """Rows of it that a delete file removes."""

    @property
    def share(self) -> float:
        return self.removed / max(1, self.rows)


@dataclass(frozen=True, slots=True)
class Merge:
    """Make one file of those of a level, `at_least` to below `below` bytes."""

    at_least: int
    below: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Write files anew without their removed rows, where these are at least `share` of all."""

    share: float


Step = Merge | Rewrite


def next_step(files: Sequence[TableFile], *, delete_share: float, done: Collection[Step] = ()) -> Step | None:
    """The next thing to do about a table's files; what is in `done` had no effect and is not tried again."""
    steps: list[Step] = [*_merges(files), *_rewrites(files, delete_share)]
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
    """How many of them one step may read."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > STEP_BYTES:
            return count
    return len(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUpkeep:
    """What a run did about the files of one table."""

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
    """What a run removed of a lake's past."""

    snapshots_before: int = 0
    snapshots_after: int = 0
    kept_for: str | None = None
    """Who still needs lake snapshots that are older than the retention, or why it is not known."""
    files_removed: int = 0
    orphans_removed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceReport:
    """One run over one lake."""

    lake: str
    seconds: float = 0.0
    longest_hold_seconds: float = 0.0
    """The longest time for which commits had to wait."""
    complete: bool = True
    """False: the time was up, and the next run goes on where this one stopped."""
    error: str | None = None
    tables: tuple[TableUpkeep, ...] = ()
    expiry: ExpiryReport = field(default_factory=ExpiryReport)

    @property
    def totals(self) -> TableUpkeep:
        """All tables as one."""
        total = TableUpkeep(table="")
        names = [name for name in TableUpkeep.__slots__ if name != "table"]
        for table in self.tables:
            sums: dict[str, Any] = {name: getattr(total, name) + getattr(table, name) for name in names}
            total = replace(total, **sums)
        return total
