"""
The streaming query of a group: capture → fold → commit.

    aqueduck_capture (planner: capture, tasks: fold) ──units and files──▶ foreachBatch (driver: one lake transaction)

`SyncQuery` wires the two together and watches over the query.  Spark's checkpoint is scratch:
each start begins a new one at the lake's position, which is the only truth about progress.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from aqueduck import faults
from aqueduck.batches import Unit
from aqueduck.errors import AqueduckError, SparkQueryError, own_error
from aqueduck.lake.units import UnitFiles, UnitWriter
from aqueduck.postgres.capture_settings import CaptureSettings
from aqueduck.spark.capture_source import FORMAT, CaptureSource

__all__ = ["CommitUnits", "SyncQuery"]

#: commits the units of a batch: (unit, the files a task wrote or None), end position, commit time
CommitUnits = Callable[[list[tuple[Unit, UnitFiles | None]], int, int], None]


class SyncQuery:
    """One group's query; `start` it again after a failure."""

    def __init__(self, spark: SparkSession, run_dir: Path, writer: UnitWriter, commit: CommitUnits) -> None:
        self._spark = spark
        self._run_dir = run_dir
        self._writer = writer
        self._commit = commit
        self._query: StreamingQuery | None = None
        self._committing = threading.Lock()
        self._stopping = False
        self._failure: AqueduckError | None = None
        self.fold_seconds = 0.0
        """How long the job of the last batch took."""

    def start(self, settings: CaptureSettings, *, once: bool = False) -> None:
        """Start at `settings.position`; with `once`, end when everything committed by now is in the lake."""
        self._spark.dataSource.register(CaptureSource)
        checkpoint = self._run_dir / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        settings_file = self._run_dir / "capture-settings.json"
        settings.save(settings_file)
        self._failure, self._stopping = None, False
        source = self._spark.readStream.format(FORMAT).option("settings_file", str(settings_file))
        units = source.option("writer", self._writer.to_json()).load()
        stream = units.writeStream.foreachBatch(self._on_batch).option("checkpointLocation", str(checkpoint))
        stream = stream.trigger(availableNow=True) if once else stream.trigger(processingTime="0 seconds")
        self._query = stream.start()

    def _on_batch(self, batch: DataFrame, _batch_id: int) -> None:
        """Runs the batch's one Spark job, then commits what its tasks made."""
        with self._committing:
            if self._stopping:
                # Returning would tell Spark, and through it the slot, that this batch is durable.
                raise AqueduckError("stopped before this batch was committed")
            began = time.monotonic()
            rows = batch.collect()
            self.fold_seconds = time.monotonic() - began
            faults.point("batch.files_written")
            if not rows:
                return
            units = [
                (Unit.from_json(r.unit), UnitFiles.from_json(r.files) if r.files else None) for r in rows
            ]
            try:
                self._commit(units, rows[0].position, rows[0].time_us)
            except BaseException as exc:
                self._failure = own_error(exc)
                raise
            faults.point("batch.committed")

    @property
    def active(self) -> bool:
        return self._query is not None and self._query.isActive

    def check(self) -> None:
        """Raise what ended the query, if it failed."""
        if self._query is None or self._query.isActive:
            return
        failure = self._query.exception()
        if failure is not None:
            raise self._failure or _failure(failure)

    def wait(self, seconds: int) -> bool:
        """Whether the query ended within `seconds`."""
        assert self._query is not None
        try:
            return bool(self._query.awaitTermination(seconds))
        except StreamingQueryException:
            return True

    def stop(self, *, patience_seconds: float = 20.0) -> None:
        """Let a commit that is under way finish, then end the query."""
        if self._query is None:
            return
        took = self._committing.acquire(timeout=patience_seconds)
        self._stopping = True
        if took:
            self._committing.release()
        with contextlib.suppress(PySparkException):
            self._query.stop()
        deadline = time.monotonic() + 5
        while self._query.isActive and time.monotonic() < deadline:
            time.sleep(0.02)
        (self._run_dir / "capture-settings.json").unlink(missing_ok=True)


def _failure(exc: BaseException) -> AqueduckError:
    """Errors cross Spark as text; ours start with their code."""
    return AqueduckError.from_text(str(exc)) or SparkQueryError(
        f"the streaming query failed: {_first_line(str(exc))}"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:300]
