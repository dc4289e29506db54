"""
The capture behind `postgres_cdc`: like `events_capture`, for a query whose checkpoint is authoritative.

`CdcStage` cuts so that batches respect the limits of a query and can begin and end at any cut. `CdcUse` selects the wanted
tables, keeps each change's own LSN, and confirms only what Spark has committed.
Large transactions are read after they have ended: only then is it known which batch they belong to.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from aqueduck.model.changes import SegmentRef
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.capture.announced_tables import AnnouncedTables
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.readers import Readers
from aqueduck.postgres.capture.slot_use import CatalogLookups
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode.decoder import (
    Commit,
    Decoder,
    Rows,
    StreamItem,
    Truncate,
    commit_after,
    last_commit,
)
from aqueduck.postgres.session.wire import ReplicationStream

__all__ = ["CdcStage", "CdcUse"]


class CdcStage(Stage):
    """A stage whose cuts respect the limits of a query, and which can return a batch again."""

    def __init__(
        self,
        directory: Path,
        *,
        position: int,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
        **limits: int,
    ) -> None:
        """The other `limits` are those of every stage."""
        super().__init__(directory, position=position, **limits)
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._ready_rows = 0
        self._open_rows = 0
        self.needed = position
        """Everything up to here is read even if the stage is full, because a planned batch needs it."""

    @property
    def committed(self) -> int:
        """The end of the last staged transaction."""
        return self._ready_position

    @property
    def full(self) -> bool:
        return super().full and self._ready_position >= self.needed

    def add(self, item: StreamItem) -> None:
        with self.changed:
            if isinstance(item, Commit):
                self._cut_before_too_much()
                super().add(item)
                if self._ready.has_rows():
                    self._ready_rows += self._open_rows
                self._open_rows = 0
                return
            if isinstance(item, Rows | Truncate):
                self._open_rows += item.batch.num_rows if isinstance(item, Rows) else 1
            super().add(item)

    def _cut_before_too_much(self) -> None:
        rows, size = self._ready_rows + self._open_rows, self._ready.bytes + self._open.bytes
        if (self._batch_rows is not None and rows > self._batch_rows) or (
            self._batch_bytes is not None and size > self._batch_bytes
        ):
            self.cut()

    def cut(self) -> None:
        with self.changed:
            super().cut()
            self._ready_rows = 0

    def abandon_open(self) -> None:
        with self.changed:
            self._open_rows = 0
            super().abandon_open()

    def within(self, after: int, bytes_max: int | None, rows_max: int | None) -> int:
        """The last cut after `after` with which a batch respects the limits; at least one cut, if there is any."""
        best, size, rows = after, 0, 0
        with self.changed:
            for c in self._cuts:
                if c.position <= after:
                    continue
                size += c.bytes
                rows += sum(s.rows if s.kind == "rows" else 1 for s in c.segments)
                over = (bytes_max is not None and size > bytes_max) or (
                    rows_max is not None and rows > rows_max
                )
                if over and best > after:
                    break
                best = c.position
        return best

    def slices(self, after: int, upto: int) -> list[tuple[SegmentRef, bool]]:
        """Segments with changes of a batch, and whether all of their changes belong to it."""
        found = []
        before = 0
        with self.changed:
            if upto > (self._cuts[-1].position if self._cuts else 0):
                self.cut()
            for c in self._cuts:
                if c.position > after and before < upto:
                    whole = before >= after and c.position <= upto
                    found += [(segment, whole) for segment in c.segments]
                before = c.position
        return [(s, whole) for s, whole in found if s.kind == "rows" or after <= s.commit_lsn < upto]


class CdcUse:
    """Reads the wanted tables, all if none are named, and confirms only what Spark has committed."""

    confirms_idle = False  # while nothing changes, Spark's offsets advance instead
    reports = False  # Spark's own progress reports show the counters

    def __init__(
        self,
        settings: CaptureSettings,
        *,
        tables: tuple[TableSchema, ...],
        wanted: frozenset[str],
        rows_step: int | None,
    ) -> None:
        self.readers = Readers(settings)
        self._settings = settings
        self._known = {table.oid: table for table in tables}
        self._wanted = wanted
        self._rows_step = rows_step

    def open(self, position: int, *, in_progress: bool) -> ReplicationStream:
        stream = self.readers.open(position, in_progress=in_progress)
        _remove_old_stages(Path(self._settings.directory))
        return stream

    def decoder(self, *, first_ord: int, first_version: int, in_progress: bool) -> Decoder:
        """Lets a stage cut after `rows_step` rows, and keeps each change's own LSN."""
        resolve = CatalogLookups(self._settings.dsn).resolve
        return Decoder(
            AnnouncedTables(self._known, wanted=self._wanted, resolve=resolve),
            first_ord=first_ord,
            first_version=first_version,
            commits=last_commit if self._rows_step is None else commit_after(self._rows_step),
            own_lsn=True,
        )

    def look_at_tables(self, decoder: Decoder) -> None:
        """The stream announces tables that are added and dropped."""


def _remove_old_stages(mine: Path) -> None:
    """A slot has one reader, which is this process: other stages in the directory were left by queries that died."""
    for other in mine.parent.iterdir():
        if other != mine:
            shutil.rmtree(other, ignore_errors=True)
