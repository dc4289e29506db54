"""
When `capture: auto` reads in bulk, and when it streams: decisions, nothing else.

`BulkRead` watches the steps of one bulk reader and says when the stream should take over.  `Catchup` lives as long as its
capture: it says when a backlog is worth a bulk reader, from what the last one brought.  Both know only numbers; the
readers are in `polling` and `wire`, and `readers` asks here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LOOK_SECONDS", "NEAR_BYTES", "Backlog", "BulkRead", "Catchup", "End", "Step"]

End = Literal["caught_up", "large", "empty", "far", "stalled", "stopped"]
"""Why a bulk reader ended; `far` means that each step decodes too much again."""

NEAR_BYTES = 1 << 20
OPEN_SHARE = 4  # a quarter of a step belongs to transactions that had not ended
EMPTY_STEPS = 2
STEP_FACTOR = 4  # a bulk step may be this many times `poll_step_bytes`, if much is decoded again
FAR_FACTOR = 16
AGAIN_SHARE = 3  # a switch costs about as much as streaming a third of what is decoded again
LOOK_SECONDS = 1.0
BUSY_BYTES = 4 << 20  # a stream that receives less in that time is not what delays the changes
USEFUL_BYTES = 64 << 20
PAUSE_FACTOR = 10
REST_FACTOR = 4
FAILED_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a bulk reader brought."""

    full: bool
    """Whether WAL that was written before the step is left."""
    left_bytes: int
    """How much of it; the last step reads to its end, as the stream would first decode again what was read."""
    frame_bytes: int
    open_bytes: int
    """The frames of transactions that had not ended with the step; it is sent again."""
    again_bytes: int
    """WAL that the next step decodes again, before it reaches what is new."""


class BulkRead:
    """One bulk reader: the size of its steps, and when it ends."""

    def __init__(self, *, step_bytes: int) -> None:
        self._step_bytes = step_bytes
        self._empty = 0
        self.kept_bytes = 0
        """The frames that need not be sent again."""
        self.end: End = "stopped"

    def step_bytes(self, usual: int, again_bytes: int) -> int:
        """Larger than `usual` if each step decodes much again, within limits."""
        return max(usual, min(again_bytes // 2, STEP_FACTOR * self._step_bytes))

    def has_ended(self, step: Step) -> bool:
        """Whether the stream should continue after this step."""
        self.kept_bytes += step.frame_bytes - step.open_bytes
        self._empty = self._empty + 1 if step.full and not step.frame_bytes else 0
        if step.open_bytes and step.open_bytes * OPEN_SHARE >= step.frame_bytes:
            self.end = "large"
        elif step.left_bytes < NEAR_BYTES:
            self.end = "caught_up"
        elif self._empty >= EMPTY_STEPS:
            self.end = "empty"
        elif step.again_bytes > FAR_FACTOR * self._step_bytes:
            self.end = "far"
        else:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits at the server, in bytes of WAL."""

    waiting_bytes: int
    again_bytes: int
    """Between where a reader of the slot begins to decode, and what was read."""


class Catchup:
    """Decides for one capture when to read in bulk."""

    def __init__(self, *, catchup_bytes: int) -> None:
        self._catchup_bytes = catchup_bytes
        self._not_before = 0.0
        self._looked_at = 0.0
        self._received: int | None = None
        self._committed = 0
        self._paused = False
        self.trouble: str | None = None
        """Why the last bulk reader could not read."""

    def may_read(self, now: float) -> bool:
        """Whether a bulk reader may be tried at all."""
        return now >= self._not_before

    def is_due(self, backlog: Backlog) -> bool:
        """Whether a bulk reader is faster, including both switches."""
        return backlog.waiting_bytes > max(
            self._catchup_bytes, NEAR_BYTES, backlog.again_bytes // AGAIN_SHARE
        )

    def began_stream(self) -> None:
        self._received = None

    def is_busy(self, now: float, *, received: int, committed: int, paused: bool, unfinished: bool) -> bool:
        """
        Whether the stream may be what delays the changes; called all the time, and true at most once a second.

        It is false while the stage is full, and within a large transaction, which the stream would have to send again.
        """
        self._paused = self._paused or paused
        before = self._received
        if before is not None and now - self._looked_at < LOOK_SECONDS:
            return False
        busy = before is not None and received - before >= min(BUSY_BYTES, self._catchup_bytes)
        moved = committed > self._committed
        found = busy and moved and not self._paused and not unfinished and self.may_read(now)
        self._looked_at, self._received, self._committed, self._paused = now, received, committed, False
        return found

    def is_not_due(self, now: float) -> None:
        """The stream keeps up, so the server is not asked again at the next look."""
        self._not_before = max(self._not_before, now + REST_FACTOR * LOOK_SECONDS)

    def bulk_ended(self, now: float, began: float, read: BulkRead) -> None:
        """After a bulk read of little use, stream for ten times as long as it took before the next one."""
        self.trouble = None
        if read.end not in ("caught_up", "stalled") and read.kept_bytes < USEFUL_BYTES:
            self._not_before = now + PAUSE_FACTOR * (now - began)

    def bulk_failed(self, now: float, why: str) -> None:
        self.trouble = why
        self._not_before = now + FAILED_SECONDS
