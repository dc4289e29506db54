"""
The streaming query of an events flow: capture → JSON parts → sink.

    aqueduck_events (planner: capture, tasks: JSON) ──parts──▶ foreachBatch (driver: sink, then bookmark)

Each start begins at the bookmark, which alone defines the progress.  `watched_query` starts, watches and stops
the query.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from aqueduck import faults
from aqueduck.model.event_parts import EventPart
from aqueduck.postgres.capture.events_capture import EventsSettings
from aqueduck.spark.query.events_source import EventsSource
from aqueduck.spark.query.part_writer import PartWriter
from aqueduck.spark.query.watched_query import WatchedQuery

__all__ = ["Deliver", "EventsQuery"]

#: hands the parts of a batch, in order, to the sink: parts, end position, commit time
Deliver = Callable[[Sequence[EventPart], int, int], None]


class EventsQuery(WatchedQuery):
    """The query of one slot."""

    def __init__(self, spark: SparkSession, run_dir: Path, writer: PartWriter, deliver: Deliver) -> None:
        super().__init__(spark, run_dir, EventsSource, collect=_parts_written, finish=self._delivered)
        self._writer = writer
        self._deliver = deliver

    def start(self, settings: EventsSettings, *, once: bool = False) -> None:
        """Start at the settings' position; with `once`, end when everything committed by now is delivered."""
        shutil.rmtree(self._writer.directory, ignore_errors=True)
        settings.save(self._settings_file)
        self._start(self._writer.to_json(), once=once)

    def _delivered(self, rows: list[Any]) -> None:
        parts = [EventPart(r.number, r.path, r.events, r.bytes) for r in rows]
        self._deliver(parts, rows[0].position, rows[0].time_us)
        for part in parts:
            Path(part.path).unlink(missing_ok=True)


def _parts_written(batch: DataFrame) -> list[Any]:
    rows = sorted(batch.collect(), key=lambda row: int(row.number))
    faults.point("events.parts_written")
    return rows
