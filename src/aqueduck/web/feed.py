"""
One overview a second for all clients: the newest one, its changes, and a short history.

The page receives *parts*: a head, the lake, the errors, and one part for each table and destination, so that
a thousand tables cost three rows a second if three are busy. `since` returns the changes after a
number; 0 returns everything. `readiness` decides whether all work is making progress.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import structlog

from aqueduck.model.errors import AqueduckError, own_error
from aqueduck.overview.readiness import ProgressWatch, Stalled
from aqueduck.overview.values import (
    DestinationOverview,
    FlowOverview,
    GroupOverview,
    Overview,
    Overviews,
    TableOverview,
    to_plain,
)

__all__ = ["Feed"]

log = structlog.get_logger()

HISTORY = 600
"""Points kept per series: ten minutes."""

RATE_SECONDS = 5.0
"""Rates are averaged over this time: batches come in steps, and a second may have none."""

Row = TableOverview | DestinationOverview
_ROWS = frozenset({"groups", "destinations"})


class Feed:
    """Makes an overview every `interval` seconds; readers never wait for it."""

    def __init__(self, overviews: Overviews, *, stall_seconds: float, interval: float = 1.0) -> None:
        self.interval = interval
        self._overviews = overviews
        self._watch = ProgressWatch(stall_seconds)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overview", daemon=True)
        self._overview: Overview | None = None
        self._failure: AqueduckError | None = None
        self._stalled: tuple[Stalled, ...] = ()
        self._looked_at = datetime.now(UTC)
        self._seq = 0
        self._parts: dict[str, tuple[int, Any]] = {}
        self._gone: dict[str, int] = {}
        self._rows: dict[str, tuple[Row, float]] = {}
        self._delivered: dict[str, int] = {}
        self._lately: dict[str, deque[tuple[datetime, int]]] = {}
        self._series: dict[str, deque[tuple[int, list[float | None]]]] = {}

    def start(self) -> None:
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and end the streams of all listeners."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self) -> None:
        while not self._stopping.wait(self.interval):
            self.look()

    def look(self) -> None:
        """Make one overview; a failure is recorded for readiness and keeps the previous overview."""
        try:
            overview = self._overviews.overview()
        except Exception as exc:  # noqa: BLE001 - a picture that fails must not end the server that shows it
            error = own_error(exc)
            if self._failure is None:
                log.warning("no overview", error=str(error))
            self._failure = error
            return
        self._failure = None
        with self._lock:
            self._take(overview)

    # -- the newest overview

    @property
    def overview(self) -> Overview:
        if self._overview is None:
            raise self._failure or AqueduckError("there is no overview yet", hint="ask again in a second")
        return self._overview

    def stalled(self) -> tuple[Stalled, ...]:
        """Work that makes no progress, including a feed that has had no overview for long."""
        blind = (datetime.now(UTC) - self._looked_at).total_seconds()
        if blind < self._watch.stall_seconds:
            return self._stalled
        why = f": {self._failure}" if self._failure else ""
        reason = f"the service does not report its state{why}"
        return (*self._stalled, Stalled(flow="", group=None, tables=(), reason=reason, seconds=int(blind)))

    def stuck(self) -> tuple[str, ...]:
        """Flows that have stopped polling for work: a restart may help."""
        if self._overview is None:
            return ()
        now = datetime.now(UTC)
        return tuple(
            flow.name
            for flow in self._overview.flows
            if flow.moved_at and (now - flow.moved_at).total_seconds() >= self._watch.stall_seconds
        )

    # -- what changed

    @property
    def seq(self) -> int:
        return self._seq

    def since(self, seq: int) -> dict[str, Any]:
        """Parts that are new, changed or gone after `seq`, and the points of the charts."""
        with self._lock:
            return {
                "seq": self._seq,
                "full": seq == 0,
                "set": {key: part for key, (changed, part) in self._parts.items() if changed > seq},
                "gone": [key for key, changed in self._gone.items() if changed > seq] if seq else [],
                "points": {
                    name: points
                    for name, series in self._series.items()
                    if (points := [point for at, point in series if at > seq])
                },
            }

    def _take(self, overview: Overview) -> None:
        self._seq += 1
        before, self._overview = self._overview, overview
        self._looked_at = datetime.now(UTC)
        self._stalled = self._watch.look(overview)
        self._parts["head"] = (self._seq, self._head(overview))
        for name in ("lake", "errors"):
            value = getattr(overview, name)
            if before is None or value != getattr(before, name):
                self._parts[name] = (self._seq, to_plain(value))
        rates = self._take_rows(overview, before.at if before else overview.at)
        self._take_points(overview, rates)

    def _head(self, overview: Overview) -> dict[str, Any]:
        return {
            "at": overview.at.isoformat(),
            "version": overview.version,
            "started_at": overview.started_at.isoformat(),
            "interval": self.interval,
            "processes": to_plain(overview.processes),
            "stalled": to_plain(self._stalled),
            "flows": [
                {
                    **to_plain(flow, without=_ROWS),
                    "groups": [to_plain(group, without=frozenset({"tables"})) for group in flow.groups],
                }
                for flow in overview.flows
            ],
        }

    def _take_rows(self, overview: Overview, before: datetime) -> dict[str, float]:
        """Stamp changed parts; returns the rate of each row, and of each slot's events, in changes a second."""
        rates: dict[str, float] = {}
        for key, row in _rows(overview):
            old, old_rate = self._rows.get(key, (row, 0.0))
            rate = rates[key] = self._rate(key, (before, _count(old)), (overview.at, _count(row)))
            if key not in self._rows or (old is not row and old != row) or rate != old_rate:
                self._rows[key] = (row, rate)
                self._parts[key] = (self._seq, {**to_plain(row), "rate": round(rate, 1)})
                self._gone.pop(key, None)
        for group in overview.groups:
            if group.delivery is not None:
                key, count = f"events:{group.name}", group.delivery.events
                earlier = self._delivered.get(key, count)
                rates[key] = self._rate(key, (before, earlier), (overview.at, count))
                self._delivered[key] = count
        for key in self._rows.keys() - rates.keys():
            del self._rows[key], self._parts[key]
            self._lately.pop(key, None)
            self._gone[key] = self._seq
        return rates

    def _rate(self, key: str, before: tuple[datetime, int], now: tuple[datetime, int]) -> float:
        """Changes a second over the last seconds; counts are kept only for rows that change."""
        if key not in self._lately and now[1] <= before[1]:
            return 0.0
        counts = self._lately.setdefault(key, deque([before]))
        counts.append(now)
        while len(counts) > 2 and (now[0] - counts[1][0]).total_seconds() >= RATE_SECONDS:
            counts.popleft()
        seconds = (now[0] - counts[0][0]).total_seconds()
        rate = (now[1] - counts[0][1]) / seconds if seconds > 0 else 0.0
        if rate <= 0:  # quiet, or reset by a restart
            del self._lately[key]
        return max(0.0, rate)

    def _take_points(self, overview: Overview, rates: dict[str, float]) -> None:
        """A point is time in ms, bytes behind, their age, and changes a second."""
        points = dict(_points(overview, rates))
        for name, point in points.items():
            series = self._series.setdefault(name, deque(maxlen=HISTORY))
            series.append((self._seq, [round(overview.at.timestamp() * 1000), *point]))
        for name in self._series.keys() - points.keys():
            del self._series[name]


def _rows(overview: Overview) -> Iterator[tuple[str, Row]]:
    for table in overview.tables:
        yield f"table:{table.group}/{table.source}", table
    for destination in overview.destinations:
        yield f"destination:{destination.flow}/{destination.name}", destination


def _count(row: Row) -> int:
    if isinstance(row, TableOverview):
        return row.inserts + row.updates + row.deletes + row.truncates
    return row.rows_replicated


def _points(overview: Overview, rates: dict[str, float]) -> Iterator[tuple[str, list[float | None]]]:
    for flow in overview.flows:
        for group in flow.groups:
            yield f"group:{group.name}", _group_point(group, rates)
        if flow.destinations:
            yield f"flow:{flow.name}", _flow_point(flow, rates)


def _group_point(group: GroupOverview, rates: dict[str, float]) -> list[float | None]:
    rate = sum(rates[f"table:{group.name}/{table.source}"] for table in group.tables)
    rate += rates.get(f"events:{group.name}", 0.0)
    return [group.lag_bytes, group.freshness_seconds, round(rate, 1)]


def _flow_point(flow: FlowOverview, rates: dict[str, float]) -> list[float | None]:
    behind = sum(1 for d in flow.destinations if d.lag_snapshots)
    oldest = max(d.lag_seconds for d in flow.destinations)
    rate = sum(rates[f"destination:{flow.name}/{d.name}"] for d in flow.destinations)
    return [behind, oldest, round(rate, 1)]
