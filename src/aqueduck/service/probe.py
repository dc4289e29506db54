"""
Whether a group that reports streaming really streams: the proof behind the state STREAMING.

The watch of a flow takes a `Probe` of the source's catalog every few seconds. `Proof` compares it with the
capture: the slot is being read, and the position passes an earlier position of the server. A condition that
fails for `STILL_SECONDS` is an error, and the tables of a sync are not shown as STREAMING; the next successful
probe clears it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from aqueduck.model.errors import AqueduckError, ConnectionLostError

__all__ = ["STILL_SECONDS", "Probe", "Proof", "Reading"]

STILL_SECONDS = 30.0
OLD_SECONDS = 60.0
"""A probe proves nothing after this time: the watch hangs, or does not reach the server."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The catalog's view of a group at one moment."""

    at: float
    """By the monotonic clock."""
    slot_active: bool
    flushed: int
    """The server's position."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The group's own view at that moment."""

    slot: str
    seen: int
    """Every change before this position is decoded."""
    received: int
    """Bytes received, including those of a transaction that has not ended."""
    waits: bool
    """Whether it is intentionally not reading: held, paused, or restarting after a failure."""
    polls: bool
    """Whether it reads by SQL: its slot is active only now and then."""


@dataclass(slots=True)
class Proof:
    """The results of a group's probes; `error` is why it cannot be shown as streaming."""

    last: Probe | None = None
    error: AqueduckError | None = None
    _read_at: float = 0.0
    """When its slot was last being read."""
    _moved_at: float = 0.0
    _seen: tuple[int, int] = (0, 0)
    _goal: int = 0
    """The server's position when the group's position last moved; passing it counts as progress."""

    def is_old(self) -> bool:
        """Whether the last probe is too old to show anything as streaming."""
        return self.last is not None and time.monotonic() - self.last.at >= OLD_SECONDS

    def take(self, probe: Probe, group: Reading) -> None:
        """Add one probe."""
        seen = group.seen, group.received
        well = self.last is None or group.waits
        moved, self._seen = seen != self._seen, seen
        if well or moved or probe.slot_active or group.polls:
            self._read_at = probe.at
        if well or moved or group.seen >= self._goal:
            self._moved_at, self._goal = probe.at, probe.flushed
        self.last = probe
        self.error = self._judge(probe.at, group.slot)

    def _judge(self, now: float, slot: str) -> AqueduckError | None:
        if now - self._read_at >= STILL_SECONDS:
            return ConnectionLostError(
                f"the slot {slot} has had no reader for {now - self._read_at:.0f} s",
                hint="see the service's log; if it does not retry, restart the service",
            )
        if now - self._moved_at >= STILL_SECONDS:
            return ConnectionLostError(
                f"the position of the slot {slot} has not moved for {now - self._moved_at:.0f} s, and the server is ahead of it",
                hint="see the service's log; if it does not retry, restart the service",
            )
        return None
