"""
`spark.readStream.format("postgres_cdc")`: the changes of PostgreSQL tables in a user's own query.

`CdcReader` is a `SlotReader` that follows Spark's checkpoint.  An offset names a position.  The changes between two
offsets can be read again until Spark commits the batch, and only then are they confirmed to the server.  Tasks
convert staged segments to Arrow batches (`lake.fold.change_rows`).  docs/spark.md lists the options.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.config.secret_text import SecretText
from aqueduck.model.changes import SegmentRef
from aqueduck.model.errors import (
    ConnectionLostError,
    SchemaChangeError,
    SlotLostError,
    SourceUnreachableError,
)
from aqueduck.model.event_parts import piece_stretches, plan_pieces
from aqueduck.model.schema import TableSchema, lsn_text, parse_lsn
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.spark.formats.cdc_options import CdcOptions
from aqueduck.spark.query.slot_reader import IDLE_SECONDS, SlotReader

if TYPE_CHECKING:
    import pyarrow as pa

    from aqueduck.postgres.capture.capture import Capture
    from aqueduck.postgres.capture.cdc_capture import CdcStage
    from aqueduck.postgres.capture.cdc_prepare import CdcSource
from aqueduck.state_files.private_files import private_directory

__all__ = ["FORMAT", "PostgresCdcSource"]

FORMAT = "postgres_cdc"
WATCH_SECONDS = 5.0
MARKS_MAX = 1000
"""Up to this many tables, offsets have how each of them is published."""


class PostgresCdcSource(DataSource):
    """Changes as a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        from aqueduck.lake.fold.change_rows import CHANGE_SCHEMA, EVENT_SCHEMA
        from aqueduck.spark.formats.spark_types import struct_of

        options = CdcOptions.read(self.options)
        if options.table is not None:
            return _table_struct(options)
        return struct_of(CHANGE_SCHEMA if options.envelope is None else EVENT_SCHEMA)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return CdcReader(CdcOptions.read(self.options), schema)


def _table_struct(options: CdcOptions) -> StructType:
    from aqueduck.lake.fold.change_rows import TABLE_META
    from aqueduck.postgres.catalog.tables import describe_table
    from aqueduck.postgres.session.connection import connect
    from aqueduck.spark.formats.spark_types import struct_of
    from aqueduck.spark.formats.table_source import table_struct

    with connect(options.dsn) as conn:
        table = describe_table(conn, str(options.table), need_key=False)
    fields = table_struct(table).fields
    taken = {field.name.lower() for field in fields} & set(TABLE_META.names)
    if taken:
        raise SchemaChangeError(
            f"the column {min(taken)} has the name of a column that {FORMAT} adds",
            hint="remove the option table and read the rows as JSON",
            table=table.qualified,
        )
    return StructType([*fields, *struct_of(TABLE_META).fields])


@dataclass
class ChangesPartition(InputPartition):
    """The piece that one task reads."""

    piece: str
    first: int
    end: int
    whole: bool
    """Whether all changes of the piece are between `first` and `end`."""
    database: str


class CdcReader(SlotReader["CdcStage"]):
    """In the planner: capture and offsets.  In a task: `read`."""

    def __init__(self, options: CdcOptions, schema: StructType) -> None:
        super().__init__()
        self._options = options
        self._schema = schema
        self._source: CdcSource | None = None
        self._moved_at = self._watched_at = time.monotonic()
        self._dropped: set[str] = set()
        self._directory = ""

    def __getstate__(self) -> dict[str, Any]:
        """The state for tasks, which read files and do not need the connection string."""
        return {**self.__dict__, "_options": replace(self._options, dsn=SecretText(""))}

    # -- offsets

    def _offset(self, position: int) -> dict[str, Any]:
        assert self._source is not None
        source = self._source
        return {
            "lsn": lsn_text(position),
            "system": source.system_identifier,
            "timeline": source.timeline,
            "publication": source.publication_oid,
            "published": source.marks if len(source.marks) <= MARKS_MAX else None,
            "slot": None if source.slot is None else lsn_text(source.slot.restart_lsn),
        }

    def _resume(self, offset: dict[str, Any]) -> int:
        """The position of an offset; the first offset that Spark passes defines where to begin."""
        position = parse_lsn(offset["lsn"])
        if self._source is None:
            from aqueduck.postgres.capture.cdc_prepare import resume_cdc

            o = self._options
            self._source = resume_cdc(
                o.dsn, slot=o.slot, publication=o.publication, tables=o.table_names, position=position,
                system_identifier=offset["system"], timeline=offset.get("timeline"),
                published_by=offset.get("publication"), marks=offset.get("published"), plugin=o.plugin,
                restart_lsn=parse_lsn(offset["slot"]) if offset.get("slot") else None,
            )  # fmt: skip
        return position

    def initialOffset(self) -> dict[str, Any]:
        if self._source is None:
            from aqueduck.postgres.capture.cdc_prepare import prepare_cdc

            o = self._options
            self._source = prepare_cdc(
                o.dsn, slot=o.slot, publication=o.publication, tables=o.table_names, create=o.create, start=o.start,
                plugin=o.plugin,
            )  # fmt: skip
        return self._offset(self._source.position)

    def getDefaultReadLimit(self) -> ReadLimit:
        rows, size = self._options.rows_max, self._options.bytes_max
        return ReadMaxBytes(size) if rows is None else ReadMaxRows(rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        after = self._resume(start)
        self._watch()
        stage, _ = self._started()
        deadline = time.monotonic() + IDLE_SECONDS
        target = self._target
        if target is None and isinstance(limit, ReadAllAvailable):  # the trigger `once`
            from aqueduck.postgres.session.server import flushed_position

            target = flushed_position(self._options.dsn)
        with stage.changed:
            while (end := self._end(after, limit, target)) is None:
                if target is None and time.monotonic() >= deadline:
                    return start
                stage.changed.wait(0.1)
        if end <= after:
            return start
        self._moved_at = time.monotonic()
        return self._offset(end)

    def _watch(self) -> None:
        """Check what the stream does not show: tables that were unpublished for a while, and the slot's position."""
        from aqueduck.postgres.capture.cdc_prepare import look_again

        if self._source is None or time.monotonic() - self._watched_at < WATCH_SECONDS:
            return
        with contextlib.suppress(ConnectionLostError, SourceUnreachableError):  # the stream reports these
            o = self._options
            self._source = look_again(o.dsn, o.slot, o.publication, self._source)
        self._watched_at = time.monotonic()

    def _end(self, after: int, limit: ReadLimit, target: int | None) -> int | None:
        """The end of the next batch; `after` itself if the run is over, None if it is not known yet."""
        stage, capture = self._started()
        capture.check()
        covered = self._covered()  # read before the stage, so that the stage has everything up to it
        best = self._within(after, limit)
        if target is None:
            if best == after and stage.has_ready(after):
                stage.cut()
                best = self._within(after, limit)
            if best > after:
                return best
            idle = time.monotonic() - self._moved_at >= self._options.idle_seconds
            return covered if idle and covered > after and not stage.has_ready(after) else None
        if covered >= target:
            stage.cut()
            # Move the offset even if there are no changes up to the target, so that the server can free its WAL.
            best = self._within(after, limit)
            return max(after, target if best == after else min(best, target))
        if best > after and (stage.full or not isinstance(limit, ReadAllAvailable)):
            return best
        capture.ask_position()
        return None

    def _covered(self) -> int:
        """Every transaction whose commit the server wrote before this position is in the stage."""
        stage, capture = self._started()
        return max(capture.seen, stage.committed)

    def _within(self, after: int, limit: ReadLimit) -> int:
        stage, _ = self._started()
        if isinstance(limit, ReadAllAvailable):
            return stage.within(after, None, None)
        return stage.within(after, self._options.bytes_max, self._options.rows_max)

    # -- the capture

    @property
    def capture_settings(self) -> CaptureSettings:
        o, source = self._options, self._source
        return CaptureSettings(
            dsn=o.dsn,
            slot=o.slot,
            publication=o.publication,
            position=0 if source is None else source.position,
            system_identifier="" if source is None else source.system_identifier,
            timeline=0 if source is None else source.timeline,
            directory=self._directory,
            segment_bytes=min(32 << 20, max(o.bytes_max, 1 << 20)),
            stage_bytes_max=o.stage_bytes_max,
            stream_in_progress=False,
            capture=o.capture,
            plugin=o.plugin,
            poll_interval_seconds=o.poll_interval_seconds,
            poll_step_bytes=o.poll_step_bytes,
            catchup_bytes=o.catchup_bytes,
            silence_timeout_seconds=o.silence_timeout_seconds,
        )

    def start_capture(self) -> tuple[CdcStage, Capture]:
        from aqueduck.postgres.capture.capture import Capture
        from aqueduck.postgres.capture.cdc_capture import CdcStage, CdcUse

        assert self._source is not None
        o, source = self._options, self._source
        home = Path(o.stage_dir or tempfile.gettempdir()) / f"aqueduck-cdc-{_tag(source, o.slot)}"
        self._directory = str(private_directory(home) / uuid.uuid4().hex)
        s = self.capture_settings
        stage = CdcStage(
            s.stage_dir,
            segment_bytes=s.segment_bytes,
            bytes_max=s.stage_bytes_max,
            position=source.position,
            batch_rows=o.rows_max,
            batch_bytes=o.bytes_max,
        )
        small = [n // 8 for n in (o.rows_max, o.bytes_max // 1000 if o.bytes_max < 64 << 20 else None) if n]
        use = CdcUse(
            s,
            tables=source.tables,
            wanted=frozenset(t.qualified for t in o.tables),
            rows_step=max(1, min(small)) if small else None,
        )
        capture = Capture(s, stage, use)
        capture.start()
        return stage, capture

    # -- batches

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, upto = self._resume(start), parse_lsn(end["lsn"])
        if upto < first:
            raise SlotLostError(
                f"the slot begins at {lsn_text(first)}, after a batch that is to be read again",
                hint="restart the query with another checkpointLocation",
            )
        self._await(upto)
        faults.point("capture.staged")
        stage, _ = self._started()
        slices = stage.slices(first, upto)
        segments = [segment for segment, _ in slices]
        self._refuse_new_columns(segments)
        whole = all(whole for _, whole in slices)
        assert self._source is not None
        database = self._source.database
        return [ChangesPartition(piece, first, upto, whole, database) for piece in plan_pieces(segments)]

    def _await(self, upto: int) -> None:
        """Wait until the stage has everything up to a position; it may not when Spark repeats a batch after a restart."""
        stage, capture = self._started()
        with stage.changed:
            stage.needed = max(stage.needed, upto)
            while self._covered() < upto:
                capture.check()
                capture.ask_position()
                stage.changed.wait(0.1)

    def _refuse_new_columns(self, segments: Sequence[SegmentRef]) -> None:
        """Raise if a column was added after the query began: its values would be lost silently, as the schema lacks it."""
        if self._options.table is None or self._source is None:
            return
        known = {c.name for t in self._source.tables for c in t.columns} | self._dropped
        for text in {s.schema_json for s in segments}:
            table = TableSchema.from_json(text)
            new = {c.name for c in table.columns} - known
            if new:
                self._dropped |= new - _columns_now(self._options.dsn, table.oid)
                if new - self._dropped:
                    raise SchemaChangeError(
                        f"the table has a new column {min(new - self._dropped)}",
                        hint="restart the query with the same checkpoint; its schema then has the column",
                        table=table.qualified,
                    )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: read the piece."""
        from aqueduck.lake.fold.change_rows import CommitRange, change_rows, table_rows
        from aqueduck.spark.formats.spark_types import arrow_of, duckdb_types

        assert isinstance(partition, ChangesPartition)
        span = None if partition.whole else CommitRange(partition.first, partition.end)
        stretches = piece_stretches(partition.piece)
        if self._options.table is not None:
            segments = [segment for stretch in stretches for segment in stretch]
            yield from table_rows(segments, span, duckdb_types(self._schema))
            return
        names = arrow_of(self._schema).names
        for stretch in stretches:
            for batch in change_rows(stretch, span, self._options.envelope, partition.database):
                yield batch.select(names)

    def commit(self, end: dict[str, Any]) -> None:
        faults.point("capture.before_confirm")
        position = self._resume(end)
        self._started()[0].release(position)

    def stop(self) -> None:
        super().stop()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _tag(source: CdcSource, slot: str) -> str:
    """A name for the stages of one slot of one server."""
    place = json.dumps([source.system_identifier, source.database, slot])
    return f"{slot}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def _columns_now(dsn: str, oid: int) -> set[str]:
    from aqueduck.postgres.catalog.tables import describe_oid
    from aqueduck.postgres.session.connection import connect

    with connect(dsn) as conn:
        return {column.name for column in describe_oid(conn, oid, need_key=False).columns}
