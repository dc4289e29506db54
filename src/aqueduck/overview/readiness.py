"""
Whether all pending work is making progress: the decision behind `/readyz`.

`ProgressWatch` receives one overview after the other and remembers when each piece of work last moved. A
piece is a group's stream, a group's copies, or a fan-out. A piece that has work and has not moved for
`stall_seconds` is *stalled*. A single failed table or destination is isolated by design: errors and page show
it, but readiness does not change. The time is part of the overview.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from aqueduck.model.errors import ConfigError
from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import FlowOverview, GroupOverview, Overview

__all__ = ["ProgressWatch", "Stalled"]

_COPYING = (SyncState.PENDING, SyncState.SNAPSHOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """Stalled work: what it is, and since when."""

    flow: str
    group: str | None
    tables: tuple[str, ...]
    reason: str
    seconds: int


@dataclass(frozen=True, slots=True)
class _Work:
    """One piece of work: `mark` changes whenever it moves."""

    flow: str
    group: str | None
    kind: str
    mark: Hashable
    reason: str
    tables: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str | None, str]:
        return self.flow, self.group, self.kind


@dataclass(slots=True)
class ProgressWatch:
    """Remembers when each piece of work last moved."""

    stall_seconds: float
    _moved: dict[tuple[str, str | None, str], tuple[Hashable, datetime]] = field(default_factory=dict)

    def look(self, overview: Overview) -> tuple[Stalled, ...]:
        """What is stalled now; call it for every overview, otherwise a stall goes unnoticed."""
        stalled, moved = [], {}
        for work in _works(overview):
            mark, since = self._moved.get(work.key, (None, overview.at))
            if mark != work.mark:
                since = overview.at
            moved[work.key] = (work.mark, since)
            seconds = (overview.at - since).total_seconds()
            if seconds >= self.stall_seconds:
                stalled.append(
                    Stalled(
                        flow=work.flow,
                        group=work.group,
                        tables=work.tables,
                        reason=work.reason,
                        seconds=int(seconds),
                    )
                )
        self._moved = moved  # a piece without work starts a new interval when work arrives
        return tuple(stalled)


def _works(overview: Overview) -> Iterator[_Work]:
    for flow in overview.flows:
        for group in flow.groups:
            if group.state != "disabled":
                yield from _stream(flow, group)
                yield from _copies(flow, group)
        yield from _fanout(flow)


def _stream(flow: FlowOverview, group: GroupOverview) -> Iterator[_Work]:
    behind = bool(group.lag_bytes or group.staged_bytes)
    # Unreadable registry rows stop nothing: the group continues with its previous configuration.
    held_up = group.error is not None and group.error.code != ConfigError.code
    if group.state == "streaming" and not behind and not held_up:
        return
    # A group that is not streaming cannot know whether there is work: the source may be unreachable.
    mark = (group.position, group.batches, group.transactions, group.received_bytes)
    waiting = tuple(t.source for t in group.tables if t.queued_changes or t.lag_bytes)
    target = "lake" if group.delivery is None else "sink"
    why = f"is {group.state}" if group.state != "streaming" else f"has changes that do not reach the {target}"
    error = f": [{group.error.code}] {group.error.message}" if group.error else ""
    yield _Work(flow.name, group.name, "stream", mark, f"the group {group.name} {why}{error}", waiting)


def _copies(flow: FlowOverview, group: GroupOverview) -> Iterator[_Work]:
    tables = [t for t in group.tables if t.state in _COPYING and t.enabled]
    if not tables:
        return
    mark = tuple((t.source, t.state, t.copy and (t.copy.rows, t.copy.bytes)) for t in tables)
    names = tuple(t.source for t in tables)
    yield _Work(flow.name, group.name, "copies", mark, f"copies of the group {group.name} do not move", names)


def _fanout(flow: FlowOverview) -> Iterator[_Work]:
    if flow.error is not None:
        reason = f"the source cannot be read: [{flow.error.code}] {flow.error.message}"
        yield _Work(flow.name, None, "source", flow.source_snapshot, reason)
    sound = [d for d in flow.destinations if d.state != "errored"]
    behind = [d for d in sound if d.lag_snapshots or d.state in ("pending", "seeding")]
    if behind:
        reason = f"{len(behind)} of {len(flow.destinations)} destinations are behind and none moves"
    elif flow.destinations and not sound:
        reason = f"all {len(flow.destinations)} destinations have failed"
    else:
        return
    mark = (flow.seed and (flow.seed.rows, flow.seed.moved_at), *_positions(flow))
    yield _Work(flow.name, None, "destinations", mark, reason)


def _positions(flow: FlowOverview) -> Iterator[Hashable]:
    for d in flow.destinations:
        yield d.name, d.position, d.state
