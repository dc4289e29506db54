"""
The streaming data source of `sync`: presents a slot as fold tasks, which Spark tasks fold into files as they read them.

`CaptureReader` is a `SlotReader`.  A row of the stream is a fold task with its outcome: its files, or the reason why
it is left to the driver.  The changes themselves never pass through the JVM.

The module imports only what every process needs at the top; the capture and the lake are imported where they run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from aqueduck import faults
from aqueduck.model.batches import FoldTask, LeftToDriver, plan_fold_tasks, share_tasks
from aqueduck.model.changes import SegmentRef
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.spark.query.slot_reader import SlotReader
from aqueduck.state_files.files import read_modes

if TYPE_CHECKING:
    from aqueduck.postgres.capture.capture import Capture
    from aqueduck.postgres.capture.stage import Stage

FORMAT = "aqueduck_capture"
SCHEMA = "position bigint, time_us bigint, task string, outcome string"


class CaptureSource(DataSource):
    """`spark.readStream.format("aqueduck_capture")`; its options name what the service wrote for the query."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return CaptureReader(self.options["settings_file"], self.options["writer"])


@dataclass
class FoldPartition(InputPartition):
    """The fold tasks that one Spark task handles."""

    position: int
    time_us: int
    tasks: tuple[str, ...]


class CaptureReader(SlotReader["Stage"]):
    """In the planner: capture and fold tasks.  In a Spark task: `read`."""

    def __init__(self, settings_file: str, writer: str) -> None:
        super().__init__()
        self._settings_file = settings_file
        self._writer = writer

    @functools.cached_property
    def _settings(self) -> CaptureSettings:
        return CaptureSettings.load(Path(self._settings_file))

    @property
    def capture_settings(self) -> CaptureSettings:
        return self._settings

    def __reduce__(self) -> tuple[Any, ...]:
        """Tasks do not get the settings, because these contain the connection string."""
        return CaptureReader, (self._settings_file, self._writer)

    def start_capture(self) -> tuple[Stage, Capture]:
        from aqueduck.postgres.capture.capture import Capture
        from aqueduck.postgres.capture.stage import Stage

        s = self._settings
        stage = Stage(
            s.stage_dir,
            segment_bytes=s.segment_bytes,
            bytes_max=s.stage_bytes_max,
            rows_max=s.max_queued_changes,
            position=s.position,
        )
        capture = Capture(s, stage)
        capture.start()
        return stage, capture

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stage, _ = self._started()
        faults.point("capture.staged")
        cuts = stage.between(int(start["position"]), int(end["position"]))
        if not cuts:
            return []
        segments = [segment for cut in cuts for segment in cut.segments]
        tasks = plan_fold_tasks(segments, keep_truncated=self._keep_truncated(segments))
        position, time_us = cuts[-1].position, cuts[-1].time_us
        return [
            FoldPartition(position, time_us, tuple(task.to_json() for task in shared))
            for shared in share_tasks(tasks, self._settings.fold_concurrency)
        ]

    def _keep_truncated(self, segments: Sequence[SegmentRef]) -> set[int]:
        """Tables whose changes are kept even if a truncate follows."""
        if not any(segment.kind == "truncate" for segment in segments):
            return set()
        return {oid for oid, mode in read_modes(Path(self._settings.tables_path)).items() if mode.keeps}

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """In a Spark task: fold large fold tasks into files below the lake's data path; leave small ones to the driver."""
        assert isinstance(partition, FoldPartition)
        for text in partition.tasks:
            yield (partition.position, partition.time_us, text, self._outcome(FoldTask.from_json(text)))

    def _outcome(self, task: FoldTask) -> str:
        if task.direct:
            return json.dumps(LeftToDriver.SMALL)
        from aqueduck.lake.fold.fold_tasks import FoldTaskWriter, outcome_json

        return outcome_json(FoldTaskWriter.from_json(self._writer).write(task))
