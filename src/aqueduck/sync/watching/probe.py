"""
Whether a group that is said to stream does: the proof behind the state STREAMING.

`SourceWatch` takes a `Probe` of the source's catalog every few seconds.  `Proof` compares it with what the group's capture says: its
tables are in the publication, its slot is being read, and its position passes where the server was a while ago.  What is
not so for `STILL_SECONDS` is an error, and its tables are not shown as STREAMING; the next probe that finds it well takes it back.
"""

from __future__ import annotations

from dataclasses import dataclass

from aqueduck.model.errors import AqueduckError, ConnectionLostError

__all__ = ["STILL_SECONDS", "Probe", "Proof", "Reading"]

STILL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What the source's catalog says of a group at one moment."""

    at: float
    """By the clock that only goes forward."""
    published: frozenset[int]
    """The tables that its publication sends, by OID."""
    slot_active: bool
    flushed: int
    """The server's position."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the group says of itself at that moment."""

    slot: str
    seen: int
    """Every change before this position is decoded."""
    received: int
    """Bytes, also of a transaction that has not ended."""
    waits: bool
    """Whether it does not read on purpose: it is held, paused, or started again after a failure."""
    polls: bool
    """Whether it reads by SQL: its slot is active only now and then."""


@dataclass(slots=True)
class Proof:
    """What the probes of one group have shown; `error` is why it cannot be said to stream."""

    last: Probe | None = None
    error: AqueduckError | None = None
    _read_at: float = 0.0
    """When its slot was last being read."""
    _moved_at: float = 0.0
    _seen: tuple[int, int] = (0, 0)
    _goal: int = 0
    """Where the server was when the position last moved; passing it is moving, too."""

    def take(self, probe: Probe, group: Reading) -> None:
        """Take one more probe."""
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
                f"the slot {slot} is not read by anybody, for {now - self._read_at:.0f} s",
                hint="look at the service's log; if nothing is tried again, restart the service",
            )
        if now - self._moved_at >= STILL_SECONDS:
            return ConnectionLostError(
                f"the position of the slot {slot} has not moved for {now - self._moved_at:.0f} s, and the server is ahead of it",
                hint="look at the service's log; if nothing is tried again, restart the service",
            )
        return None
