"""
The streaming query of a group: capture → fold → commit.

    aqueduck_capture (planner: capture, tasks: fold) ──fold tasks──▶ foreachBatch (driver: one lake transaction)

Each start begins at the lake's position, which alone defines the progress.  `watched_query` starts, watches and stops
the query.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aqueduck import faults
from aqueduck.lake.fold.fold_tasks import FoldedTasks, FoldTaskWriter, read_outcome
from aqueduck.model.batches import FoldTask
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.spark.query.capture_source import CaptureSource
from aqueduck.spark.query.watched_query import WatchedQuery

__all__ = ["CommitTasks", "SyncQuery"]

#: commits the fold tasks of a batch, each with its outcome: end position, commit time
CommitTasks = Callable[[FoldedTasks, int, int], None]


class SyncQuery(WatchedQuery):
    """One group's query."""

    def __init__(
        self, spark: SparkSession, run_dir: Path, writer: FoldTaskWriter, commit: CommitTasks
    ) -> None:
        super().__init__(spark, run_dir, CaptureSource, collect=self._folded, finish=self._committed)
        self.writer = writer
        self._commit = commit
        self.fold_seconds = 0.0
        """Duration of the last batch's job."""

    def start(self, settings: CaptureSettings, *, once: bool = False) -> None:
        """Start at `settings.position`; with `once`, end when everything committed by now is in the lake."""
        settings.save(self._settings_file)
        self._start(self.writer.to_json(), once=once)

    def _folded(self, batch: DataFrame) -> list[Any]:
        began = time.monotonic()
        rows = batch.collect()
        self.fold_seconds = time.monotonic() - began
        faults.point("batch.files_written")
        return rows

    def _committed(self, rows: list[Any]) -> None:
        tasks = [(FoldTask.from_json(r.task), read_outcome(r.outcome)) for r in rows]
        self._commit(tasks, rows[0].position, rows[0].time_us)
