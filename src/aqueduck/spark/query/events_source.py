"""
The streaming data source of `events`: a slot as parts of JSON lines, written by the tasks that read them.

`EventsReader` is a `SlotReader`.  A row of the stream names the part that a task made of a piece; the events themselves
never cross the JVM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.model.event_parts import plan_pieces
from aqueduck.spark.query.slot_reader import SlotReader

if TYPE_CHECKING:
    from aqueduck.postgres.capture.capture_settings import CaptureSettings
    from aqueduck.postgres.capture.events_capture import EventsCapture, EventsSettings, EventsStage

__all__ = ["FORMAT", "EventsSource"]

FORMAT = "aqueduck_events"
SCHEMA = "position bigint, time_us bigint, number int, path string, events bigint, bytes bigint"
BUSY_BYTES, BUSY_SECONDS = 4 << 20, 1.0


class EventsSource(DataSource):
    """`spark.readStream.format("aqueduck_events")`; its options are what the service writes."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return EventsReader(self.options["settings_file"], self.options["writer"])


@dataclass
class PiecePartition(InputPartition):
    """The piece that one task writes."""

    position: int
    time_us: int
    number: int
    piece: str


class EventsReader(SlotReader["EventsStage", "EventsCapture"]):
    """Planner half: capture and pieces.  Task half: `read`."""

    def __init__(self, settings_file: str, writer: str) -> None:
        super().__init__()
        self._settings_file = settings_file
        self._writer = writer
        self._loaded: EventsSettings | None = None

    @property
    def _settings(self) -> EventsSettings:
        if self._loaded is None:
            from aqueduck.postgres.capture.events_capture import EventsSettings

            self._loaded = EventsSettings.load(Path(self._settings_file))
        return self._loaded

    @property
    def _capture_settings(self) -> CaptureSettings:
        return self._settings.capture

    def _start(self) -> tuple[EventsStage, EventsCapture]:
        from aqueduck.postgres.capture.events_capture import EventsCapture, EventsStage

        s, c = self._settings, self._settings.capture
        stage = EventsStage(
            c.stage_dir,
            segment_bytes=c.segment_bytes,
            bytes_max=c.stage_bytes_max,
            position=c.position,
            max_messages=s.max_messages,
            max_staged_records=s.max_staged_records,
        )
        capture = EventsCapture(s, stage)
        capture.start()
        return stage, capture

    def _furthest(self, stage: EventsStage, after: int) -> int:
        upto = super()._furthest(stage, after)
        return upto if stage.limit is None else min(upto, stage.limit)

    def _flush_due(self, after: int) -> bool:
        stage, _ = self._started()
        return super()._flush_due(after) if stage.limit is None else after < stage.limit

    def _flush_at(self, after: int) -> float:
        """Soon where little happens; later where much does, as every batch has its price."""
        stage, _ = self._started()
        if stage.ready_bytes(after) > BUSY_BYTES:
            return max(super()._flush_at(after), self._flushed_at + BUSY_SECONDS)
        return super()._flush_at(after)

    def _is_over(self, after: int, deadline: float) -> bool:
        stage, _ = self._started()
        return stage.limit is not None or super()._is_over(after, deadline)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stage, _ = self._started()
        faults.point("capture.staged")
        cuts = stage.between(int(start["position"]), int(end["position"]))
        if not cuts:
            return []
        position, time_us = cuts[-1].position, cuts[-1].time_us
        pieces = plan_pieces(segment for cut in cuts for segment in cut.segments)
        return [PiecePartition(position, time_us, n, piece) for n, piece in enumerate(pieces)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """In a task."""
        from aqueduck.spark.query.part_writer import PartWriter

        assert isinstance(partition, PiecePartition)
        p = partition
        part = PartWriter.from_json(self._writer).write(p.piece, p.position, p.number)
        yield (p.position, p.time_us, part.number, part.path, part.events, part.bytes)
