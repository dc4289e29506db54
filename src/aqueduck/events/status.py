"""
The status of an events flow: counters, and the row of `aqueduck status`.

`EventsStatus` holds plain values that the service changes and others read. `events_status` works without a service: it
reads the bookmark, the server, and the state file of the last error.  The picture of a running service is in `overview`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from aqueduck.overview.values import (
    GroupState,
)
from aqueduck.postgres.publications.slots import slot_info
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.group_lock import group_runs
from aqueduck.postgres.session.server import read_server
from aqueduck.state_files.files import read_report, replace_file

if TYPE_CHECKING:  # the service starts the server that shows it
    pass

__all__ = ["FLOW", "EventsStatus", "events_status", "flow_dir", "lock_name", "record_error", "sink_text"]

FLOW = "events"
"""The flow's name on the page, in the API and in metrics."""


@dataclass(slots=True)
class EventsStatus:
    """The state of a flow since the service started."""

    state: GroupState = "starting"
    events: int = 0
    bytes: int = 0
    batches: int = 0
    restarts: int = 0
    freshness_seconds: float | None = None
    """Time from source commit to the sink's acknowledgement, of the last transaction of the last batch."""
    last_delivery_at: datetime | None = None
    last_error: str | None = None
    moved_at: float = field(default_factory=time.time)
    """When the service last checked its query."""
    bulk_trouble: str | None = None
    """Why the capture `auto` cannot read backlogs in bulk."""


def flow_dir(config: EventsConfig) -> Path:
    """The directory of a flow's stage, checkpoint and state files."""
    return Path(config.state_dir) / config.source.slot_name


def lock_name(config: EventsConfig) -> str:
    """The lock that a service of the flow holds while it runs."""
    return f"{FLOW} {config.source.slot_name}"


def sink_text(config: EventsConfig) -> str:
    """A description of the sink for people, without secrets."""
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


def record_error(directory: Path, error: AqueduckError) -> None:
    """Write the error to a file, where `aqueduck status` finds it even after the service has ended."""
    if directory.is_dir():
        at = datetime.now(UTC).isoformat(timespec="seconds")
        replace_file(directory / "last-error.json", json.dumps({"at": at, "error": str(error)}))


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
    # While nothing is pending, the slot is confirmed beyond the bookmark.
    reached = max(bookmark.position if bookmark else 0, (slot.confirmed_flush_lsn or 0) if slot else 0)
    last = read_report(flow_dir(config) / "last-error.json")
    time_us = None if bookmark is None else bookmark.time_us
    return {
        "slot_name": slot_name,
        "running": runs,
        "capture": config.source.capture,
        "bulk_trouble": read_report(flow_dir(config) / "capture.json").get("bulk_trouble"),
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
