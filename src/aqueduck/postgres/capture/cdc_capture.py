"""
The capture behind `postgres_cdc`: what `events_capture` does, for a query whose checkpoint is the truth.

`CdcDecoder` keeps the tables that are wanted and each change's own LSN, `CdcStage` cuts so that batches keep to the
limits of a query and can begin and end anywhere, and `CdcCapture` confirms what Spark has committed and nothing else.
Large transactions are read when they have ended: only then is it known which batch they belong to.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from aqueduck.model.changes import SegmentRef
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.events_capture import EventsDecoder
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode import pgoutput as wireformat
from aqueduck.postgres.decode import pgoutput_messages as messages
from aqueduck.postgres.decode.decoder import Commit, Decoder, Layout, Rows, Run, Truncate
from aqueduck.postgres.session.wire import ReplicationStream

__all__ = ["CdcCapture", "CdcDecoder", "CdcStage"]

OWN_LSN = pa.field("_at", pa.int64(), nullable=False)
_HEADER = 29  # from where a row's cells begin back to the LSN of its message


class CdcDecoder(EventsDecoder):
    """Decodes the wanted tables, all if none are named, and lets a stage cut after `rows_step` rows."""

    def __init__(
        self,
        tables: Mapping[int, TableSchema],
        *,
        wanted: frozenset[str],
        rows_step: int | None,
        resolve: Callable[[Column], Column],
        first_ord: int = 0,
        first_version: int = 0,
    ) -> None:
        super().__init__(tables, first_ord=first_ord, first_version=first_version, rows_step=rows_step)
        self._resolve = resolve
        self._wanted = wanted

    def _learn(self, relation: messages.WireRelation) -> None:
        if self._wanted and f"{relation.schema}.{relation.name}" not in self._wanted:
            self._here[relation.oid] = None
            return
        super()._learn(relation)
        layout = self._here[relation.oid]
        if layout is not None:
            self._here[relation.oid] = dataclasses.replace(layout, arrow=layout.arrow.append(OWN_LSN))

    def _table_rows(
        self, buf: wireformat.Bytes, layout: Layout, rows: wireformat.Ints, ords: wireformat.Ints
    ) -> Rows:
        plain = dataclasses.replace(layout, arrow=layout.arrow.remove(len(layout.arrow) - 1))
        found = super()._table_rows(buf, plain, rows, ords)
        at = self._index.row_at[rows] - _HEADER
        lsn = buf[at[:, None] + np.arange(8)].view(">i8").ravel().astype(np.int64)
        arrays = [*found.batch.columns, pa.array(lsn)]
        return dataclasses.replace(
            found, layout=layout, batch=pa.RecordBatch.from_arrays(arrays, schema=layout.arrow)
        )


class CdcStage(Stage):
    """A stage whose cuts keep to the limits of a query, and from which batches can be cut anew."""

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
        """Up to here everything is read, however full the stage is: a batch that was promised needs it."""

    @property
    def committed(self) -> int:
        """The end of the last transaction that is in."""
        return self._ready_position

    @property
    def full(self) -> bool:
        return super().full and self._ready_position >= self.needed

    def add(self, run: Run) -> None:
        with self.changed:
            if isinstance(run, Commit):
                self._cut_before_too_much()
                super().add(run)
                if self._ready.has_rows():
                    self._ready_rows += self._open_rows
                self._open_rows = 0
                return
            if isinstance(run, Rows | Truncate):
                self._open_rows += run.batch.num_rows if isinstance(run, Rows) else 1
            super().add(run)

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
        """The last cut after `after` with which a batch keeps to the limits; at least one, if there is any."""
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
        """Segments with changes of a batch; whether all of their changes belong to it."""
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


class CdcCapture(Capture):
    """Reads a publication's changes into a `CdcStage`."""

    _stage: CdcStage

    def __init__(
        self,
        settings: CaptureSettings,
        stage: CdcStage,
        *,
        tables: tuple[TableSchema, ...],
        wanted: frozenset[str],
        rows_step: int | None,
    ) -> None:
        super().__init__(settings, stage)
        self._known = {table.oid: table for table in tables}
        self._wanted = wanted
        self._rows_step = rows_step

    @property
    def covered(self) -> int:
        """Every transaction whose commit the server wrote before this position is in the stage."""
        return max(self.seen, self._stage.committed)

    def _open(self, position: int) -> ReplicationStream:
        stream = super()._open(position)
        _remove_old_stages(Path(self._settings.directory))
        return stream

    def _new_decoder(self) -> Decoder:
        return CdcDecoder(
            self._known,
            wanted=self._wanted,
            rows_step=self._rows_step,
            resolve=self._resolve,
            first_ord=self._next_ord,
            first_version=self._next_version,
        )

    def _position_to_confirm(self, decoder: Decoder) -> int:
        """What Spark has committed; while nothing happens, its offsets move instead."""
        return max(self._confirmed, self._stage.durable)

    def _report(self) -> None:
        """Spark's own progress reports show what there is to know."""


def _remove_old_stages(mine: Path) -> None:
    """A slot has one reader, and that is us: the other stages beside ours are of queries that died."""
    for other in mine.parent.iterdir():
        if other != mine:
            shutil.rmtree(other, ignore_errors=True)
