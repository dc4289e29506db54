"""
The streaming query of an events flow: capture → JSON parts → sink.

    aqueduck_events (planner: capture, tasks: JSON) ──parts──▶ foreachBatch (driver: sink, then bookmark)

`EventsQuery` wires the two together and watches over the query.  Spark's checkpoint is scratch: each start begins a
new one at the bookmark, which is the only truth about progress.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from aqueduck import faults
from aqueduck.errors import AqueduckError, own_error
from aqueduck.event_parts import EventPart
from aqueduck.postgres.events_capture import EventsSettings
from aqueduck.spark.events_source import FORMAT, EventsSource
from aqueduck.spark.part_writer import PartWriter

__all__ = ["Deliver", "EventsQuery"]

#: hands the parts of a batch, in order, to the sink: parts, end position, commit time
Deliver = Callable[[Sequence[EventPart], int, int], None]


class EventsQuery:
    """The query of one slot; `start` it again after a failure."""

    def __init__(self, spark: SparkSession, run_dir: Path, writer: PartWriter, deliver: Deliver) -> None:
        self._spark = spark
        self._run_dir = run_dir
        self._writer = writer
        self._deliver = deliver
        self._query: StreamingQuery | None = None
        self._delivering = threading.Lock()
        self._stopping = False
        self._failure: AqueduckError | None = None

    def start(self, settings: EventsSettings, *, once: bool = False) -> None:
        """Start at the settings' position; with `once`, end when everything committed by now is delivered."""
        self._spark.dataSource.register(EventsSource)
        checkpoint = self._run_dir / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(self._writer.directory, ignore_errors=True)
        settings.save(self._settings_file)
        self._failure, self._stopping = None, False
        source = self._spark.readStream.format(FORMAT).option("settings_file", str(self._settings_file))
        parts = source.option("writer", self._writer.to_json()).load()
        stream = parts.writeStream.foreachBatch(self._on_batch).option("checkpointLocation", str(checkpoint))
        stream = stream.trigger(availableNow=True) if once else stream.trigger(processingTime="0 seconds")
        self._query = stream.start()

    @property
    def _settings_file(self) -> Path:
        return self._run_dir / "capture-settings.json"

    def _on_batch(self, batch: DataFrame, _batch_id: int) -> None:
        """Runs the batch's one Spark job, then delivers what its tasks made."""
        with self._delivering:
            if self._stopping:
                # Returning would tell Spark, and through it the slot, that this batch is durable.
                raise AqueduckError("stopped before this batch was delivered")
            rows = sorted(batch.collect(), key=lambda row: int(row.number))
            faults.point("events.parts_written")
            if not rows:
                return
            parts = [EventPart(r.number, r.path, r.events, r.bytes) for r in rows]
            try:
                self._deliver(parts, rows[0].position, rows[0].time_us)
            except BaseException as exc:
                self._failure = own_error(exc)
                raise
            for part in parts:
                Path(part.path).unlink(missing_ok=True)
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
            raise (
                self._failure
                or AqueduckError.from_text(str(failure))
                or AqueduckError(f"the streaming query failed: {_first_line(str(failure))}")
            )

    def wait(self, seconds: int) -> bool:
        """Whether the query ended within `seconds`."""
        assert self._query is not None
        try:
            return bool(self._query.awaitTermination(seconds))
        except StreamingQueryException:
            return True

    def stop(self, *, patience_seconds: float = 20.0) -> None:
        """Let a delivery that is under way finish, then end the query."""
        if self._query is None:
            return
        took = self._delivering.acquire(timeout=patience_seconds)
        self._stopping = True
        if took:
            self._delivering.release()
        with contextlib.suppress(PySparkException):
            self._query.stop()
        deadline = time.monotonic() + 5
        while self._query.isActive and time.monotonic() < deadline:
            time.sleep(0.02)
        self._settings_file.unlink(missing_ok=True)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:300]
