"""
Start a streaming query, watch it, stop it between two batches, and report its error.

`sync_query` and `events_query` define the source and what to do with a batch.  Spark's checkpoint is scratch: each start
begins a new one at the position in its settings.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.streaming.query import StreamingQuery

from aqueduck import faults
from aqueduck.model.errors import AqueduckError, SparkQueryError, own_error

__all__ = ["WatchedQuery"]


class WatchedQuery:
    """
    One query on one slot; it can be restarted after a failure.

    `collect` runs the job of a batch of `source` and returns the output of its tasks; `finish` makes it durable.
    """

    def __init__(
        self,
        spark: SparkSession,
        run_dir: Path,
        source: type[DataSource],
        *,
        collect: Callable[[DataFrame], list[Any]],
        finish: Callable[[list[Any]], None],
    ) -> None:
        self._spark = spark
        self._run_dir = run_dir
        self._source = source
        self._collect = collect
        self._finish = finish
        self._query: StreamingQuery | None = None
        self._committing = threading.Lock()
        self._stopping = False
        self._failure: AqueduckError | None = None

    @property
    def _settings_file(self) -> Path:
        return self._run_dir / "capture-settings.json"

    def _start(self, writer: str, *, once: bool) -> None:
        """Start with the settings in their file."""
        self._spark.dataSource.register(self._source)
        checkpoint = self._run_dir / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        self._failure, self._stopping = None, False
        reader = self._spark.readStream.format(self._source.name())
        rows = reader.option("settings_file", str(self._settings_file)).option("writer", writer).load()
        stream = rows.writeStream.foreachBatch(self._on_batch)
        # On the driver's disk, whatever file system the cluster has by default.
        stream = stream.option("checkpointLocation", f"file://{checkpoint}")
        stream = stream.trigger(availableNow=True) if once else stream.trigger(processingTime="0 seconds")
        self._query = stream.start()

    def _on_batch(self, batch: DataFrame, _batch_id: int) -> None:
        """Run the batch's Spark job, then commit the output of its tasks."""
        with self._committing:
            if self._stopping:
                # Returning would make Spark, and then the slot, treat this batch as durable.
                raise AqueduckError("stopped before this batch was committed")
            rows = self._collect(batch)
            if not rows:
                return
            try:
                self._finish(rows)
            except BaseException as exc:
                self._failure = own_error(exc)
                raise
            faults.point("batch.committed")

    @property
    def active(self) -> bool:
        return self._query is not None and self._query.isActive

    def check(self) -> None:
        """Raise the query's error, if it failed."""
        if self._query is None or self._query.isActive:
            return
        failure = self._query.exception()
        if failure is not None:
            raise self._failure or _failure(failure)

    def wait(self, seconds: int) -> bool:
        """Wait up to `seconds`; returns whether the query ended."""
        assert self._query is not None
        try:
            return bool(self._query.awaitTermination(seconds))
        except StreamingQueryException:
            return True

    def stop(self) -> None:
        """Let a running commit finish, then stop the query."""
        if self._query is None:
            return
        took = self._committing.acquire(timeout=20)
        self._stopping = True
        if took:
            self._committing.release()
        with contextlib.suppress(PySparkException):
            self._query.stop()
        deadline = time.monotonic() + 5
        while self._query.isActive and time.monotonic() < deadline:
            time.sleep(0.02)
        self._settings_file.unlink(missing_ok=True)


def _failure(exc: BaseException) -> AqueduckError:
    """Recover our error from Spark's text, in which it starts with its code."""
    return AqueduckError.from_text(str(exc)) or SparkQueryError(
        f"the streaming query failed: {_first_line(str(exc))}"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:300]
