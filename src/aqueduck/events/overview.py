"""
The picture of a running events flow: `overview.values.Overviews` from what the service knows.

Quick enough for once a second; what takes longer (the slot, the processes) is looked at less often.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from psycopg.conninfo import conninfo_to_dict

from aqueduck import __version__
from aqueduck.events.status import FLOW, sink_text
from aqueduck.model.errors import AqueduckError
from aqueduck.model.schema import lsn_text
from aqueduck.overview.problems import Problems
from aqueduck.overview.processes import SLOW_SECONDS, processes
from aqueduck.overview.values import (
    DeliveryOverview,
    FlowOverview,
    GroupOverview,
    Overview,
    ProcessUsage,
)
from aqueduck.postgres.publications.slots import slot_info
from aqueduck.postgres.session.connection import connect

if TYPE_CHECKING:  # the service starts the server that shows it
    from aqueduck.events.service import EventsService

__all__ = ["EventsOverviews"]


class EventsOverviews:
    """Overviews of one service; `overview` is for one thread."""

    def __init__(self, service: EventsService) -> None:
        self._service = service
        self._started_at = datetime.now(UTC)
        self._database = str(conninfo_to_dict(service.dsn).get("dbname") or "")
        self._sink = sink_text(service.config)
        self._problems = Problems(FLOW)
        self._slow_at = -SLOW_SECONDS
        self._retained_bytes: int | None = None
        self._processes: tuple[ProcessUsage, ...] = ()

    def overview(self) -> Overview:
        status = self._service.status
        if time.monotonic() - self._slow_at >= SLOW_SECONDS:
            self._slow_at = time.monotonic()
            self._look_slowly()
        group = self._group()
        error = self._service.source_error
        flow = FlowOverview(
            name=FLOW,
            kind="events",
            source=self._database,
            target=self._sink,
            groups=(group,),
            error=self._problems.see(None if error is None else str(error)),
            seen_at=self._service.seen_at,
            moved_at=datetime.fromtimestamp(status.moved_at, UTC),
        )
        return Overview(
            at=datetime.now(UTC),
            version=__version__,
            started_at=self._started_at,
            flows=(flow,),
            errors=self._problems.recent(),
            processes=self._processes,
        )

    def _look_slowly(self) -> None:
        self._processes = tuple(processes())
        if self._service.status.state == "streaming":
            try:
                with connect(self._service.dsn) as conn:
                    slot = slot_info(conn, self._service.config.source.slot_name)
            except AqueduckError:  # the service's watch reports it
                slot = None
            self._retained_bytes = None if slot is None else slot.retained_bytes

    def _group(self) -> GroupOverview:
        service, status, report = self._service, self._service.status, self._service.report()
        source, bookmark = service.config.source, service.bookmark
        position = 0 if bookmark is None else bookmark.position
        seen = max(position, int(report.get("seen", 0)))
        waits, oldest = bool(report.get("pending")), report.get("oldest_us")
        trouble = status.last_error if status.state == "retrying" else report.get("trouble")
        if trouble is None and service.proof.error is not None:
            trouble = str(service.proof.error)
        return GroupOverview(
            name=source.slot_name,
            state=status.state,
            capture=source.capture,
            reader=str(report.get("reader", "stream")),
            bulk_trouble=report.get("bulk_trouble"),
            slot_name=source.slot_name,
            position=lsn_text(position),
            seen=lsn_text(seen),
            lag_bytes=seen - position if waits else 0,
            lag_seconds=max(0.0, time.time() - oldest / 1e6) if waits and oldest else 0.0,
            freshness_seconds=status.freshness_seconds,
            batches=status.batches,
            transactions=int(report.get("transactions", 0)),
            changes=int(report.get("rows", 0)),
            received_bytes=int(report.get("received_bytes", 0)),
            decode_seconds=float(report.get("decode_seconds", 0.0)),
            staged_bytes=int(report.get("staged_bytes", 0)),
            unfinished_bytes=int(report.get("unfinished_bytes", 0)),
            paused=bool(report.get("paused")),
            retained_bytes=self._retained_bytes,
            restarts=status.restarts,
            last_sync_at=status.last_delivery_at,
            error=self._problems.see(trouble, group=source.slot_name),
            delivery=DeliveryOverview(
                sink=self._sink,
                events=status.events,
                bytes=status.bytes,
                events_total=0 if bookmark is None else bookmark.events,
            ),
        )
