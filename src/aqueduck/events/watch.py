"""
Watch the source of an events flow for events that its stream does not report.

If a publication is missing, PostgreSQL 18 only logs a warning and continues; no version reports tables that
were temporarily out of a publication. `EventsWatch.look` compares the catalog with the state file
`publication` at each start and every few seconds; it also records the slot's position
(`postgres.session.history`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psycopg
import structlog

from aqueduck.config.events import PostgresCdcConfig
from aqueduck.events.prepare import FROM_THE_SLOT
from aqueduck.model.errors import PublicationError, UnpublishedError
from aqueduck.postgres.publications.published import publication_marks, refuse_unpublished
from aqueduck.postgres.publications.slots import look_at_slot
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.history import KnownPast, SlotWatch
from aqueduck.service.probe import Probe
from aqueduck.state_files.files import read_report, replace_file

__all__ = ["EventsWatch"]

log = structlog.get_logger()


class EventsWatch:
    """Watches one publication and one slot; its state files are in the flow's directory."""

    def __init__(self, source: PostgresCdcConfig, dsn: str, directory: Path) -> None:
        self._source = source
        self._dsn = dsn
        self._publication_path = directory / "publication"
        self._slot_path = directory / "slot"
        self._slot = SlotWatch(self._slot_path)
        self.probe: Probe | None = None
        """What the last look saw of the slot and the server."""

    def begin_anew(self) -> None:
        """Forget earlier publications: without a bookmark they do not matter."""
        for path in (self._publication_path, self._slot_path):
            path.unlink(missing_ok=True)
        self._slot = SlotWatch(self._slot_path)

    def refuse_gap(self, conn: psycopg.Connection[Any]) -> None:
        """Raise what the next look will raise, and change nothing: for a check before a start."""
        name, before = self._source.publication_name, read_report(self._publication_path)
        if self._source.on_unpublished == "stop":
            refuse_unpublished(conn, name, before, publication_marks(conn, name), self._way_out)

    def look(self, timeline: int, position: int) -> None:
        """
        Raises `SlotLostError` if the server was restored from a backup, and `UnpublishedError` for changes that
        were not sent, unless the flow is configured to continue without them.

        The bookmark is at `position`.
        """
        name, before = self._source.publication_name, read_report(self._publication_path)
        with connect(self._dsn) as conn:
            known = KnownPast(position, whose="the bookmark", way_out=FROM_THE_SLOT)
            self._slot.look(conn, self._source.slot_name, timeline, known)
            active, flushed = look_at_slot(conn, self._source.slot_name)
            self.probe = Probe(time.monotonic(), active, flushed)
            try:
                now = publication_marks(conn, name)
                refuse_unpublished(conn, name, before, now, self._way_out)
            except (UnpublishedError, PublicationError) as exc:
                if self._source.on_unpublished == "stop":
                    raise
                log.warning("changes were not sent", error=str(exc))
                if isinstance(exc, PublicationError):
                    return
        if now.items() - before.items():
            replace_file(self._publication_path, json.dumps({**before, **now}), sync=True)

    @property
    def _way_out(self) -> str:
        return (
            f"bring the consumers of the events up to date, then remove the file {self._publication_path} and start again;"
            " or set on_unpublished: continue"
        )
