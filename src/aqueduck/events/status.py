"""
What an events flow tells about itself: the picture for page, API and metrics, and the row of `aqueduck status`.

`EventsStatus` is plain values that the service changes and others read.  `EventsOverviews` makes the picture of a running
service of them.  `events_status` works without one: it asks the bookmark, the server, and the note of the last error.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psycopg.conninfo import conninfo_to_dict

from aqueduck import __version__
from aqueduck.config.events import (
    DuckLakeSinkConfig,
    EventsConfig,
    HttpSinkConfig,
    JsonlSinkConfig,
    KafkaSinkConfig,
    PostgresSinkConfig,
)
from aqueduck.events.wiring import load_bookmark, source_dsn
from aqueduck.model.errors import AqueduckError
from aqueduck.model.schema import lsn_text
from aqueduck.overview.problems import Problems
from aqueduck.overview.processes import SLOW_SECONDS, processes
from aqueduck.overview.values import (
    DeliveryOverview,
    FlowOverview,
    GroupOverview,
    GroupState,
    Overview,
    ProcessUsage,
)
from aqueduck.postgres.publications.slots import slot_info
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.group_lock import group_runs
from aqueduck.postgres.session.server import read_server
from aqueduck.state_files.files import read_report, write_note

if TYPE_CHECKING:  # the service starts the server that shows it
    from aqueduck.events.service import EventsService

__all__ = ["FLOW", "EventsOverviews", "EventsStatus", "events_status", "flow_dir", "lock_name", "note_error"]

FLOW = "events"
"""The name of the flow on the page, in the API and in metrics."""


@dataclass(slots=True)
class EventsStatus:
    """A flow since the service started."""

    state: GroupState = "starting"
    events: int = 0
    bytes: int = 0
    batches: int = 0
    restarts: int = 0
    freshness_seconds: float | None = None
    """Source commit to the sink's word, of the last batch's last transaction."""
    last_delivery_at: datetime | None = None
    last_error: str | None = None
    moved_at: float = field(default_factory=time.time)
    """When the service last looked after its query."""


def flow_dir(config: EventsConfig) -> Path:
    """Where a flow has its stage, checkpoint and notes."""
    return Path(config.state_dir) / config.source.slot_name


def lock_name(config: EventsConfig) -> str:
    """What a service of the flow holds for as long as it runs."""
    return f"{FLOW} {config.source.slot_name}"


def sink_text(config: EventsConfig) -> str:
    """The sink for people, without anything that might be a secret."""
    sink = config.sink
    if isinstance(sink, JsonlSinkConfig):
        return f"jsonl {sink.path}"
    if isinstance(sink, HttpSinkConfig):
        return "http"
    if isinstance(sink, KafkaSinkConfig):
        return f"kafka {sink.topic}"
    if isinstance(sink, PostgresSinkConfig):
        return f"postgres {sink.table}"
    return f"ducklake {sink.table}" if isinstance(sink, DuckLakeSinkConfig) else "stdout"


# -- a running service


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
        flow = FlowOverview(
            name=FLOW,
            kind="events",
            source=self._database,
            target=self._sink,
            groups=(group,),
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
        if self._service.status.state == "streaming":  # the source can be reached
            with connect(self._service.dsn) as conn:
                slot = slot_info(conn, self._service.config.source.slot_name)
            self._retained_bytes = None if slot is None else slot.retained_bytes

    def _group(self) -> GroupOverview:
        service, status, report = self._service, self._service.status, self._service.report()
        source, bookmark = service.config.source, service.bookmark
        position = 0 if bookmark is None else bookmark.position
        seen = max(position, int(report.get("seen", 0)))
        waits, oldest = bool(report.get("pending")), report.get("oldest_us")
        trouble = status.last_error if status.state == "retrying" else report.get("trouble")
        return GroupOverview(
            name=source.slot_name,
            state=status.state,
            capture=source.capture,
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


# -- with or without one


def note_error(directory: Path, error: AqueduckError) -> None:
    """Leave the error for `aqueduck status`, which is there when the service is gone, too."""
    if directory.is_dir():
        at = datetime.now(UTC).isoformat(timespec="seconds")
        write_note(directory / "last-error.json", json.dumps({"at": at, "error": str(error)}))


def events_status(config: EventsConfig) -> dict[str, Any]:
    """The flow as `aqueduck status` shows it."""
    dsn, slot_name = source_dsn(config.source), config.source.slot_name
    with connect(dsn) as conn:
        server, slot, runs = (
            read_server(conn),
            slot_info(conn, slot_name),
            group_runs(conn, lock_name(config)),
        )
    bookmark = load_bookmark(config, dsn)
    # While nothing is pending the slot is confirmed beyond the bookmark.
    reached = max(bookmark.position if bookmark else 0, (slot.confirmed_flush_lsn or 0) if slot else 0)
    last = read_report(flow_dir(config) / "last-error.json")
    time_us = None if bookmark is None else bookmark.time_us
    return {
        "slot_name": slot_name,
        "running": runs,
        "capture": config.source.capture,
        "publication": config.source.publication_name,
        "sink": sink_text(config),
        "bookmark": None if bookmark is None else lsn_text(bookmark.position),
        "commit_time": None if time_us is None else datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(),
        "events": None if bookmark is None else bookmark.events,
        "lag_bytes": max(0, server.current_lsn - reached) if reached else None,
        "slot_exists": slot is not None,
        "retained_bytes": None if slot is None else slot.retained_bytes,
        "last_error": last.get("error"),
        "last_error_at": last.get("at"),
    }
