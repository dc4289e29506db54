"""
The events query without Spark: the same planner and the same parts, one after another in this process.

For `aqueduck tail`, which prints within a second of its start, and for cases that do not justify a JVM.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable

from aqueduck import faults
from aqueduck.model.errors import AqueduckError, own_error
from aqueduck.model.event_parts import EventPart
from aqueduck.postgres.capture.events_capture import EventsSettings
from aqueduck.spark.query.events_query import Deliver
from aqueduck.spark.query.events_source import EventsReader
from aqueduck.spark.query.part_writer import PartWriter

__all__ = ["LocalEventsQuery"]


class LocalEventsQuery:
    """Does the work of `EventsQuery` in a thread of this process."""

    def __init__(self, run_dir: Path, writer: PartWriter, deliver: Deliver) -> None:
        self._run_dir = run_dir
        self._writer = writer
        self._deliver = deliver
        self._stopping = threading.Event()
        self._failure: AqueduckError | None = None
        self._thread: threading.Thread | None = None

    def start(self, settings: EventsSettings, *, once: bool = False) -> None:
        shutil.rmtree(self._writer.directory, ignore_errors=True)
        settings.save(self._run_dir / "capture-settings.json")
        reader = EventsReader(str(self._run_dir / "capture-settings.json"), self._writer.to_json())
        self._failure = None
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, args=(reader, once), daemon=True)
        self._thread.start()

    def _run(self, reader: EventsReader, once: bool) -> None:
        try:
            if once:
                reader.prepareForTriggerAvailableNow()
            start = reader.initialOffset()
            while not self._stopping.is_set():
                end = reader.latestOffset(start, ReadAllAvailable())
                if end != start:
                    self._batch(reader, start, end)
                    start = end
                elif once:
                    return
        except BaseException as exc:  # noqa: BLE001 - `check` raises it
            self._failure = own_error(exc)
        finally:
            reader.stop()

    def _batch(self, reader: EventsReader, start: dict[str, Any], end: dict[str, Any]) -> None:
        rows = [row for piece in reader.partitions(start, end) for row in reader.read(piece)]
        faults.point("events.parts_written")
        if rows:
            parts = [EventPart(*row[2:]) for row in rows]
            self._deliver(parts, rows[0][0], rows[0][1])
            for part in parts:
                Path(part.path).unlink(missing_ok=True)
        faults.point("batch.committed")
        reader.commit(end)

    @property
    def active(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the query's error, if it failed."""
        if self._failure is not None and not self.active:
            raise self._failure

    def wait(self, seconds: int) -> bool:
        """Wait up to `seconds`; returns whether the query ended."""
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Let a running batch finish, then stop."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(20)
        (self._run_dir / "capture-settings.json").unlink(missing_ok=True)
