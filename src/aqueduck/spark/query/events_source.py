"""
The streaming data source of `events`: presents a slot as parts of JSON lines, which tasks write as they read them.

`EventsReader` is a `SlotReader`.  A row of the stream names the part that a task wrote for a piece.  The events
themselves never pass through the JVM.
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
from aqueduck.spark.query.slot_reader import Busy, SlotReader

if TYPE_CHECKING:
    from aqueduck.postgres.capture.capture import Capture
    from aqueduck.postgres.capture.capture_settings import CaptureSettings
    from aqueduck.postgres.capture.events_capture import EventsSettings, EventsStage

__all__ = ["FORMAT", "EventsSource"]

FORMAT = "aqueduck_events"
SCHEMA = "position bigint, time_us bigint, number int, path string, events bigint, bytes bigint"
BUSY = Busy(4 << 20, 1.0)


class EventsSource(DataSource):
    """`spark.readStream.format("aqueduck_events")`; its options name what the service wrote for the query."""

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


class EventsReader(SlotReader["EventsStage"]):
    """In the planner: capture and pieces.  In a task: `read`."""

    def __init__(self, settings_file: str, writer: str) -> None:
        super().__init__(BUSY)
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
    def capture_settings(self) -> CaptureSettings:
        return self._settings.capture

    def start_capture(self) -> tuple[EventsStage, Capture]:
        from aqueduck.postgres.capture.events_capture import EventsStage, events_capture

        s, c = self._settings, self._settings.capture
        stage = EventsStage(
            c.stage_dir,
            segment_bytes=c.segment_bytes,
            bytes_max=c.stage_bytes_max,
            position=c.position,
            max_messages=s.max_messages,
            max_staged_records=s.max_staged_records,
        )
        capture = events_capture(s, stage)
        capture.start()
        return stage, capture

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
        """In a task: write the piece's part."""
        from aqueduck.spark.query.part_writer import PartWriter

        assert isinstance(partition, PiecePartition)
        p = partition
        part = PartWriter.from_json(self._writer).write(p.piece, p.position, p.number)
        yield (p.position, p.time_us, part.number, part.path, part.events, part.bytes)
