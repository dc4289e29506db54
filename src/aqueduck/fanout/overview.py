"""
The picture of a running fan-out: `overview.values.Overviews`, made from the service's knowledge of its
destinations.

It is made once a second, even for thousands of unchanged destinations: the row of a destination is rebuilt
only when its status changed.
"""

from __future__ import annotations

import time
from dataclasses import fields
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from aqueduck import __version__
from aqueduck.fanout.status import FLOW, DestinationStatus
from aqueduck.fanout.verdicts import FOREIGN
from aqueduck.overview.problems import Problems, difference
from aqueduck.overview.processes import SLOW_SECONDS, processes
from aqueduck.overview.values import (
    DestinationOverview,
    FlowOverview,
    Overview,
    PoolOverview,
    ProcessUsage,
    SeedOverview,
)
from aqueduck.service.verify_schedule import summary

if TYPE_CHECKING:  # the service starts the server that shows it
    from aqueduck.fanout.service import FanoutService

__all__ = ["FanoutOverviews"]

DESTINATION_NEXT = f"wait until the service re-seeds it; for rows of another tenant: {FOREIGN}"

_everything = attrgetter(*(f.name for f in fields(DestinationStatus)))


class FanoutOverviews:
    """The overviews of one service; `overview` is not thread-safe."""

    def __init__(self, service: FanoutService) -> None:
        self._service = service
        self._started_at = datetime.now(UTC)
        self._problems = Problems(FLOW)
        self._rows: dict[str, tuple[Any, DestinationOverview]] = {}
        self._slow_at = -SLOW_SECONDS
        self._processes: tuple[ProcessUsage, ...] = ()

    def overview(self) -> Overview:
        if time.monotonic() - self._slow_at >= SLOW_SECONDS:
            self._slow_at = time.monotonic()
            self._processes = tuple(processes())
        service, status = self._service, self._service.status
        for name, problem in status.left_out.items():
            self._problems.see(problem, destination=name or None)
        seed = status.seed
        jobs = [lane.look() for lane in service.progress.values()]
        flow = FlowOverview(
            name=FLOW,
            kind="fanout",
            source=service.config.source.name or service.config.source.table,
            destinations=tuple(map(self._destination, list(status.destinations.values()))),
            source_snapshot=status.source_snapshot,
            counts=status.counts(),
            seed=None if seed is None else self._seed(*seed),
            pool=PoolOverview(
                open=status.pool_open, created=status.pool_created, evicted=status.pool_evicted
            ),
            error=self._problems.see(status.source_error),
            moved_at=_moment(max(status.moved_at, *jobs)),
            verification=summary(
                service.config.verify,
                [service.verdicts[name] for name in list(status.destinations)],
                service.verifying(),
            ),
        )
        return Overview(
            at=datetime.now(UTC),
            version=__version__,
            started_at=self._started_at,
            flows=(flow,),
            errors=self._problems.recent(),
            processes=self._processes,
        )

    def _seed(self, destinations: int, rows: int, began: float) -> SeedOverview:
        lane = self._service.progress["side"]
        share = lane.rows / (2 * rows) if rows else lane.destinations / max(1, destinations)
        return SeedOverview(
            destinations=destinations,
            destinations_done=lane.destinations,
            rows=lane.rows,
            rows_total=rows,
            share=round(min(1.0, share), 3),
            seconds=round(time.time() - began, 1),
            moved_at=_moment(lane.look()),
        )

    def _destination(self, status: DestinationStatus) -> DestinationOverview:
        verified = self._service.verdicts[status.id]
        now = (*_everything(status), verified)
        before = self._rows.get(status.id)
        if before is not None and before[0] == now:
            return before[1]
        made = DestinationOverview(
            flow=FLOW,
            name=status.id,
            state=status.state,
            position=status.cursor,
            lag_snapshots=status.lag_snapshots,
            lag_seconds=round(status.lag_seconds, 1),
            rows_replicated=status.rows_replicated,
            rows_written=status.rows_written,
            rows_upserted=status.rows_upserted,
            rows_deleted=status.rows_deleted,
            rows_matched=status.rows_matched,
            last_change_at=_moment(status.last_change_at),
            error=self._problems.see(
                status.last_error or difference(verified, DESTINATION_NEXT), destination=status.id
            ),
            verified=verified,
            failures=status.failures,
            retry_at=_moment(status.retry_at),
        )
        self._rows[status.id] = (now, made)
        return made


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None
