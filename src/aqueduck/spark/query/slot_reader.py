"""
What every streaming source on a slot has in common: the capture in Spark's planner process, and offsets.

A `SlotReader` lives in the planner process for as long as its query runs.  It starts the capture and answers Spark: how
far may the next batch go, and what is durable.  What a batch's partitions are, and what its tasks make of them, is
up to `capture_source`, `events_source` and `cdc_source`.

Only what every process needs is imported at the top: the capture comes in where it runs.
"""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from aqueduck import faults
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.spark.session.quiet_worker import quiet_planning

if TYPE_CHECKING:
    from aqueduck.postgres.capture.capture import Capture
    from aqueduck.postgres.capture.stage import Stage

__all__ = ["IDLE_SECONDS", "Busy", "SlotReader"]

IDLE_SECONDS = 0.2  # how long a question for the latest offset may wait for an answer

S = TypeVar("S", bound="Stage")

quiet_planning()  # every worker that plans imports this module


@dataclass(frozen=True, slots=True)
class Busy:
    """From how many waiting bytes on batches are larger, and how long apart they are then."""

    bytes: int
    seconds: float


class SlotReader(DataSourceStreamReader, SupportsTriggerAvailableNow, Generic[S]):
    """
    Offsets are positions at which whole transactions end.

    With `busy`, batches come no more often than that once so many bytes wait: every batch has its price.
    """

    def __init__(self, busy: Busy | None = None) -> None:
        self._busy = busy
        self._running: tuple[S, Capture] | None = None
        self._target: int | None = None
        self._flushed_at = 0.0

    @property
    @abc.abstractmethod
    def capture_settings(self) -> CaptureSettings:
        """Read where it is needed: Spark makes readers that it never asks anything."""

    @abc.abstractmethod
    def start_capture(self) -> tuple[S, Capture]:
        """Make the stage and start the capture."""

    def _started(self) -> tuple[S, Capture]:
        if self._running is None:
            self._running = self.start_capture()
        return self._running

    def initialOffset(self) -> dict[str, Any]:
        return {"position": self.capture_settings.position}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        from aqueduck.postgres.session.server import flushed_position

        self._target = flushed_position(self.capture_settings.dsn)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        stage, capture = self._started()
        after = int(start["position"])
        deadline = time.monotonic() + IDLE_SECONDS
        with stage.changed:
            while not self._flush_due(after):
                capture.check()
                if self._is_over(after, deadline):
                    return start
                stage.changed.wait(self._wait_seconds(after))
            stage.cut()
            self._flushed_at = time.monotonic()
            upto = stage.furthest(after, self.capture_settings.batch_bytes_max)
            return {"position": upto if stage.limit is None else min(upto, stage.limit)}

    def _flush_due(self, after: int) -> bool:
        stage, capture = self._started()
        if stage.limit is not None:
            return after < stage.limit
        if not stage.has_ready(after):
            return False
        if stage.ready_bytes(after) >= self.capture_settings.segment_bytes:
            return True
        if self._target is not None:
            return capture.seen >= self._target
        return time.monotonic() >= self._flush_at(after)

    def _flush_at(self, after: int) -> float:
        """When a batch is due: soon where little happens, later where much does."""
        seconds = self.capture_settings.flush_interval_seconds
        if self._busy is not None and self._started()[0].ready_bytes(after) > self._busy.bytes:
            seconds = max(seconds, self._busy.seconds)
        return self._flushed_at + seconds

    def _is_over(self, after: int, deadline: float) -> bool:
        """Whether there is nothing to hand out now; for a single run, nothing before its target."""
        stage, capture = self._started()
        if stage.limit is not None:
            return True
        if self._target is None:
            return time.monotonic() >= deadline
        if capture.seen >= self._target and not stage.has_ready(after):
            return True
        capture.ask_position()
        return False

    def _wait_seconds(self, after: int) -> float:
        stage, _ = self._started()
        if self._target is None and stage.has_ready(after):
            return max(0.001, min(self._flush_at(after) - time.monotonic(), IDLE_SECONDS))
        return 0.1

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's word that a batch is durable: one of two routes, see `Stage.release`."""
        faults.point("capture.before_confirm")
        stage, _ = self._started()
        stage.release(int(end["position"]))

    def stop(self) -> None:
        if self._running is not None:
            self._running[1].stop()
