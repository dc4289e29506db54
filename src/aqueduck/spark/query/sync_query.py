"""
The streaming query of a group: capture → fold → commit.

    aqueduck_capture (planner: capture, tasks: fold) ──units and files──▶ foreachBatch (driver: one lake transaction)

Each start begins at the lake's position, which is the only truth about progress.  How the query is watched is
in `watched_query`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aqueduck import faults
from aqueduck.lake.fold.fold_tasks import UnitFiles, UnitWriter
from aqueduck.model.batches import Unit
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.spark.query.capture_source import CaptureSource
from aqueduck.spark.query.watched_query import WatchedQuery

__all__ = ["CommitUnits", "SyncQuery"]

#: commits the units of a batch: (unit, the files a task wrote or None), end position, commit time
CommitUnits = Callable[[list[tuple[Unit, UnitFiles | None]], int, int], None]


class SyncQuery(WatchedQuery):
    """One group's query."""

    source = CaptureSource

    def __init__(self, spark: SparkSession, run_dir: Path, writer: UnitWriter, commit: CommitUnits) -> None:
        super().__init__(spark, run_dir)
        self._writer = writer
        self._commit = commit
        self.fold_seconds = 0.0
        """How long the job of the last batch took."""

    def start(self, settings: CaptureSettings, *, once: bool = False) -> None:
        """Start at `settings.position`; with `once`, end when everything committed by now is in the lake."""
        settings.save(self._settings_file)
        self._start(self._writer.to_json(), once=once)

    def _collect(self, batch: DataFrame) -> list[Any]:
        began = time.monotonic()
        rows = batch.collect()
        self.fold_seconds = time.monotonic() - began
        faults.point("batch.files_written")
        return rows

    def _finish(self, rows: list[Any]) -> None:
        units = [(Unit.from_json(r.unit), UnitFiles.from_json(r.files) if r.files else None) for r in rows]
        self._commit(units, rows[0].position, rows[0].time_us)
