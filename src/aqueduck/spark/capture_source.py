"""
The streaming data source of `sync`: a slot as units of work, folded by the tasks that read them.

`CaptureReader` lives in Spark's planner process for as long as the query runs.  It starts the
capture and answers Spark: how far may the next batch go, which units does it have, what is durable.
Offsets are positions at which whole transactions end.  A row of the stream is a unit and, where it
was large, the files that its task made of it; the changes themselves never cross the JVM.

Only what every process needs is imported at the top: the capture and the lake come in where they run.
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
from aqueduck.batches import Unit, plan_units
from aqueduck.changes import SegmentRef
from aqueduck.notes import read_modes
from aqueduck.postgres.capture_settings import CaptureSettings

if TYPE_CHECKING:
    from aqueduck.postgres.capture import Capture
    from aqueduck.postgres.stage import Stage

FORMAT = "aqueduck_capture"
SCHEMA = "position bigint, time_us bigint, unit string, files string"
IDLE_SECONDS = 0.2  # how long a question for the latest offset may wait for an answer


class CaptureSource(DataSource):
    """`spark.readStream.format("aqueduck_capture")`; its options are two files that the service writes."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        settings = CaptureSettings.load(Path(self.options["settings_file"]))
        return CaptureReader(settings, self.options["writer"])


@dataclass
class UnitPartition(InputPartition):
    """The units that one task handles."""

    position: int
    time_us: int
    units: tuple[str, ...]


class CaptureReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Planner half: capture and offsets.  Task half: `read`."""

    def __init__(self, settings: CaptureSettings, writer: str) -> None:
        self._settings = settings
        self._writer = writer
        self._stage: Stage | None = None
        self._capture: Capture | None = None
        self._target: int | None = None
        self._flushed_at = 0.0

    def _started(self) -> tuple[Stage, Capture]:
        """The running capture; Spark makes readers that it never asks anything, so it starts late."""
        if self._stage is None or self._capture is None:
            from aqueduck.postgres.capture import Capture
            from aqueduck.postgres.stage import Stage

            s = self._settings
            self._stage = Stage(
                Path(s.stage_dir),
                segment_bytes=s.segment_bytes,
                bytes_max=s.stage_bytes_max,
                rows_max=s.max_queued_changes,
                position=s.position,
            )
            self._capture = Capture(s, self._stage)
            self._capture.start()
        return self._stage, self._capture

    def initialOffset(self) -> dict[str, Any]:
        return {"position": self._settings.position}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        from aqueduck.postgres.server import flushed_position

        self._target = flushed_position(self._settings.dsn)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        stage, capture = self._started()
        after = int(start["position"])
        with stage.changed:
            deadline = time.monotonic() + IDLE_SECONDS
            while not self._flush_due(stage, capture, after):
                capture.check()
                if self._target is None and time.monotonic() >= deadline:
                    return start
                if self._target is not None and self._reached(stage, capture, after):
                    return start
                stage.changed.wait(self._wait_seconds(stage, after))
            stage.cut()
            self._flushed_at = time.monotonic()
            return {"position": stage.furthest(after, self._settings.batch_bytes_max)}

    def _flush_due(self, stage: Stage, capture: Capture, after: int) -> bool:
        if not stage.has_ready(after):
            return False
        if stage.ready_bytes(after) >= self._settings.segment_bytes:
            return True
        if self._target is not None:
            return capture.seen >= self._target
        return time.monotonic() - self._flushed_at >= self._settings.flush_interval_seconds

    def _reached(self, stage: Stage, capture: Capture, after: int) -> bool:
        """Whether everything up to the target of a single run has been handed out."""
        assert self._target is not None
        if capture.seen >= self._target and not stage.has_ready(after):
            return True
        capture.ask_position()
        return False

    def _wait_seconds(self, stage: Stage, after: int) -> float:
        if self._target is None and stage.has_ready(after):
            left = self._flushed_at + self._settings.flush_interval_seconds - time.monotonic()
            return max(0.001, min(left, IDLE_SECONDS))
        return 0.1

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stage, _ = self._started()
        faults.point("capture.staged")
        cuts = stage.between(int(start["position"]), int(end["position"]))
        if not cuts:
            return []
        segments = [segment for cut in cuts for segment in cut.segments]
        units = plan_units(segments, keeping=self._keeping(segments))
        position, time_us = cuts[-1].position, cuts[-1].time_us
        direct = tuple(unit.to_json() for unit in units if unit.direct)
        groups = ([direct] if direct else []) + [(unit.to_json(),) for unit in units if not unit.direct]
        return [UnitPartition(position, time_us, group) for group in groups]

    def _keeping(self, segments: Sequence[SegmentRef]) -> set[int]:
        """Tables whose changes count although a truncate follows."""
        if not any(segment.kind == "truncate" for segment in segments):
            return set()
        return {oid for oid, mode in read_modes(Path(self._settings.tables_path)).items() if mode.keeps}

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """In a task: large units become files in the lake's data path, small ones are left to the driver."""
        assert isinstance(partition, UnitPartition)
        for text in partition.units:
            yield (partition.position, partition.time_us, text, self._files(Unit.from_json(text)))

    def _files(self, unit: Unit) -> str | None:
        if unit.direct:
            return None
        from aqueduck.lake.units import UnitWriter

        files = UnitWriter.from_json(self._writer).write(unit)
        return None if files is None else files.to_json()

    def commit(self, end: dict[str, Any]) -> None:
        faults.point("capture.before_confirm")
        stage, _ = self._started()
        stage.release(int(end["position"]))

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.stop()
