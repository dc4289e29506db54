"""
The streaming data source of `events`: a slot as parts of JSON lines, written by the tasks that read them.

As `capture_source` does for `sync`, `EventsReader` keeps the capture in Spark's planner process and answers Spark: how far
may the next batch go, which pieces does it have, what is durable.  A row of the stream names the part that a task
made of a piece; the events themselves never cross the JVM.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.event_parts import plan_pieces

if TYPE_CHECKING:
    from aqueduck.postgres.events_capture import EventsCapture, EventsSettings, EventsStage

__all__ = ["FORMAT", "EventsSource"]

FORMAT = "aqueduck_events"
SCHEMA = "position bigint, time_us bigint, number int, path string, events bigint, bytes bigint"
IDLE_SECONDS = 0.2  # how long a question for the latest offset may wait for an answer
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


class EventsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Planner half: capture and offsets.  Task half: `read`."""

    def __init__(self, settings_file: str, writer: str) -> None:
        self._settings_file = settings_file
        self._writer = writer
        self._loaded: EventsSettings | None = None
        self._running: tuple[EventsStage, EventsCapture] | None = None
        self._target: int | None = None
        self._flushed_at = 0.0

    @property
    def _settings(self) -> EventsSettings:
        if self._loaded is None:
            from aqueduck.postgres.events_capture import EventsSettings

            self._loaded = EventsSettings.load(Path(self._settings_file))
        return self._loaded

    def _started(self) -> tuple[EventsStage, EventsCapture]:
        """The running capture; Spark makes readers that it never asks anything, so it starts late."""
        if self._running is None:
            from aqueduck.postgres.events_capture import EventsCapture, EventsStage

            s, c = self._settings, self._settings.capture
            stage = EventsStage(
                Path(c.stage_dir),
                segment_bytes=c.segment_bytes,
                bytes_max=c.stage_bytes_max,
                position=c.position,
                max_messages=s.max_messages,
                max_staged_records=s.max_staged_records,
            )
            self._running = stage, EventsCapture(s, stage)
            self._running[1].start()
        return self._running

    def initialOffset(self) -> dict[str, Any]:
        return {"position": self._settings.capture.position}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        from aqueduck.postgres.server import flushed_position

        self._target = flushed_position(self._settings.capture.dsn)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        stage, capture = self._started()
        after = int(start["position"])
        deadline = time.monotonic() + IDLE_SECONDS
        with stage.changed:
            while not self._flush_due(after):
                capture.check()
                if self._is_over(after, deadline):
                    return start
                stage.changed.wait(self._wait_seconds(after))
            stage.cut()
            self._flushed_at = time.monotonic()
            upto = stage.furthest(after, self._settings.capture.batch_bytes_max)
            return {"position": upto if stage.limit is None else min(upto, stage.limit)}

    def _flush_due(self, after: int) -> bool:
        stage, capture = self._started()
        if stage.limit is not None:
            return after < stage.limit
        if not stage.has_ready(after):
            return False
        if stage.ready_bytes(after) >= self._settings.capture.segment_bytes:
            return True
        if self._target is not None:
            return capture.seen >= self._target
        return time.monotonic() >= self._flush_at(after)

    def _flush_at(self, after: int) -> float:
        """When a batch is due: soon where little happens; later where much does, as every batch has its price."""
        stage, _ = self._started()
        busy = stage.ready_bytes(after) > BUSY_BYTES
        seconds = self._settings.capture.flush_interval_seconds
        return self._flushed_at + (max(seconds, BUSY_SECONDS) if busy else seconds)

    def _is_over(self, after: int, deadline: float) -> bool:
        """Whether there is nothing to hand out now; for a single run, nothing before its target."""
        stage, capture = self._started()
        if self._target is None or stage.limit is not None:
            return stage.limit is not None or time.monotonic() >= deadline
        if capture.seen >= self._target and not stage.has_ready(after):
            return True
        capture.ask_position()
        return False

    def _wait_seconds(self, after: int) -> float:
        stage, _ = self._started()
        if self._target is None and stage.has_ready(after):
            return max(0.001, min(self._flush_at(after) - time.monotonic(), IDLE_SECONDS))
        return 0.1

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
        from aqueduck.spark.part_writer import PartWriter

        assert isinstance(partition, PiecePartition)
        p = partition
        part = PartWriter.from_json(self._writer).write(p.piece, p.position, p.number)
        yield (p.position, p.time_us, part.number, part.path, part.events, part.bytes)

    def commit(self, end: dict[str, Any]) -> None:
        faults.point("capture.before_confirm")
        stage, _ = self._started()
        stage.release(int(end["position"]))

    def stop(self) -> None:
        if self._running is not None:
            self._running[1].stop()
