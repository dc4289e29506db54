"""
The common part of the streaming sources on a slot: the capture in Spark's planner process, and offsets.

A `SlotReader` lives in the planner process while its query runs.  It starts the capture, gives Spark the offset at
which the next batch ends, and takes the offset that is durable.  `capture_source`, `events_source` and `cdc_source`
define the partitions of a batch and how tasks read them.

The module imports only what every process needs at the top; the capture is imported where it runs.
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

IDLE_SECONDS = 0.2  # the longest time that `latestOffset` waits for changes

S = TypeVar("S", bound="Stage")

quiet_planning()  # every worker that plans imports this module


@dataclass(frozen=True, slots=True)
class Busy:
    """Under high load, that is with at least `bytes` waiting, batches are `seconds` apart and therefore larger."""

    bytes: int
    seconds: float


class SlotReader(DataSourceStreamReader, SupportsTriggerAvailableNow, Generic[S]):
    """
    Offsets are positions at which whole transactions end.

    With `busy`, batches start less often under high load, because each batch has a fixed cost.
    """

    def __init__(self, busy: Busy | None = None) -> None:
        self._busy = busy
        self._running: tuple[S, Capture] | None = None
        self._target: int | None = None
        self._flushed_at = 0.0

    @property
    @abc.abstractmethod
    def capture_settings(self) -> CaptureSettings:
        """Read on demand, because Spark creates readers that it never uses."""

    @abc.abstractmethod
    def start_capture(self) -> tuple[S, Capture]:
        """Create the stage and start the capture."""

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
        """The time at which a batch is due: soon under low load, later under high load."""
        seconds = self.capture_settings.flush_interval_seconds
        if self._busy is not None and self._started()[0].ready_bytes(after) > self._busy.bytes:
            seconds = max(seconds, self._busy.seconds)
        return self._flushed_at + seconds

    def _is_over(self, after: int, deadline: float) -> bool:
        """Whether to return without a batch now; for a single run, whether nothing is left before its target."""
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
        """Called by Spark when a batch is durable; one of two routes, see `Stage.release`."""
        faults.point("capture.before_confirm")
        stage, _ = self._started()
        stage.release(int(end["position"]))

    def stop(self) -> None:
        if self._running is not None:
            self._running[1].stop()
