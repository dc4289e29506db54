"""
The streaming data source of `sync`: a slot as units of work, by reference.

`CaptureReader` lives in Spark's planner process for as long as the query runs.  It starts
the capture and answers Spark: how far may the next batch go, which units does it have,
what is durable.  Offsets are positions at which whole transactions end.  The rows of the
stream name segments; the changes themselves never cross the JVM.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.batches import plan_units
from aqueduck.postgres.capture import Capture, CaptureSettings
from aqueduck.postgres.server import flushed_position
from aqueduck.postgres.stage import Stage

FORMAT = "aqueduck_capture"
SCHEMA = "position bigint, time_us bigint, unit string"
IDLE_SECONDS = 0.2  # how long a question for the latest offset may wait for an answer


class CaptureSource(DataSource):
    """`spark.readStream.format("aqueduck_capture")`; one option, `settings_file`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return CaptureReader(CaptureSettings.load(Path(self.options["settings_file"])))


@dataclass
class UnitPartition(InputPartition):
    """The units that one task handles."""

    position: int
    time_us: int
    units: tuple[str, ...]


class CaptureReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._stage: Stage | None = None
        self._capture: Capture | None = None
        self._target: int | None = None
        self._flushed_at = 0.0

    def _started(self) -> tuple[Stage, Capture]:
        """The running capture; Spark makes readers that it never asks anything, so it starts late."""
        if self._stage is None or self._capture is None:
            s = self._settings
            self._stage = Stage(
                Path(s.stage_dir),
                segment_bytes=s.segment_bytes,
                bytes_max=s.stage_bytes_max,
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
        if self._target is not None:
            return capture.seen >= self._target or stage.ready_bytes(after) >= self._settings.segment_bytes
        waited = time.monotonic() - self._flushed_at
        return (
            waited >= self._settings.flush_interval_seconds
            or stage.ready_bytes(after) >= self._settings.segment_bytes
        )

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
        units = plan_units(segment for cut in cuts for segment in cut.segments)
        position, time_us = cuts[-1].position, cuts[-1].time_us
        direct = tuple(unit.to_json() for unit in units if unit.direct)
        groups = ([direct] if direct else []) + [(unit.to_json(),) for unit in units if not unit.direct]
        return [UnitPartition(position, time_us, group) for group in groups]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, UnitPartition)
        for unit in partition.units:
            yield (partition.position, partition.time_us, unit)

    def commit(self, end: dict[str, Any]) -> None:
        faults.point("capture.before_confirm")
        stage, _ = self._started()
        stage.release(int(end["position"]))

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.stop()
