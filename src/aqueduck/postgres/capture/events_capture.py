"""
The capture of change events: `capture` and `stage`, for all tables of a publication.

`EventsStage` counts events (the limits of a run and of a transaction), and `EventsUse` can read a temporary slot, which
exists as long as its connection.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow.compute as pc

from aqueduck.model.errors import TransactionTooLargeError
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.capture.announced_tables import AnnouncedTables
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings, save_settings
from aqueduck.postgres.capture.readers import Readers
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode.decoder import (
    Commit,
    Decoder,
    Rows,
    StreamItem,
    Truncate,
    commit_after,
    last_commit,
)
from aqueduck.postgres.decode.streamed import Finish
from aqueduck.postgres.publications.published import Newcomer, newcomers
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.quoting import identifier, literal
from aqueduck.postgres.session.wire import ReplicationStream, start_stream

__all__ = ["EventsSettings", "EventsStage", "EventsUse", "StartStream", "events_capture"]

#: opens the stream at a position; the default reads an existing slot
StartStream = Callable[[int], ReplicationStream]


@dataclass(frozen=True, slots=True)
class EventsSettings:
    """The additional settings of a capture of events; passed to the planner process as a file."""

    capture: CaptureSettings
    tables: tuple[str, ...] = ()
    """The tables that are known before the stream announces them: `TableSchema` as JSON."""
    temporary: bool = False
    copy_of: str | None = None
    """The slot whose position and WAL a temporary slot takes over; without it, the temporary slot begins now."""
    max_messages: int | None = None
    max_staged_records: int | None = None
    excluded: tuple[str, ...] = ()
    """Tables, as schema.name, whose changes are not events: Aqueduck's own, including partitions that they get later."""

    def save(self, path: Path) -> None:
        save_settings(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> EventsSettings:
        values = json.loads(path.read_text())
        capture = values.pop("capture")
        for name in ("excluded", "tables"):
            values[name] = tuple(values[name])
        return cls(CaptureSettings(**capture), **values)


class EventsStage(Stage):
    """A stage that counts its events and knows where a limited run of the service has to end."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int,
        bytes_max: int,
        position: int,
        max_messages: int | None = None,
        max_staged_records: int | None = None,
    ) -> None:
        super().__init__(directory, segment_bytes=segment_bytes, bytes_max=bytes_max, position=position)
        self._max_messages = max_messages
        self._max_staged_records = max_staged_records
        self._events = 0
        self._open_events = 0
        self.limit = None  # then the first commit that reaches `max_messages`

    def add(self, item: StreamItem) -> None:
        with self.changed:
            super().add(item)
            if isinstance(item, Finish):
                self._count(self._open.changes, item.changes)
            elif isinstance(item, Truncate) and not item.stream:
                self._count(1, item.seq + 1)
            elif isinstance(item, Rows) and not item.stream:
                self._count(item.batch.num_rows, pc.max(item.batch.column("_seq")).as_py() + 1)
            elif isinstance(item, Commit):
                self._events += self._open_events
                self._open_events = 0
                if self.limit is None and self._is_enough():
                    self.cut()
                    self.limit = item.position

    def _is_enough(self) -> bool:
        return self._max_messages is not None and self._events >= self._max_messages

    def _count(self, events: int, of_transaction: int) -> None:
        """Events that were staged, and the number of changes of their transaction so far."""
        self._open_events += events
        if self._max_staged_records is not None and of_transaction > self._max_staged_records:
            raise TransactionTooLargeError(
                f"a transaction has more than {self._max_staged_records} changes (max_staged_records)",
                hint="raise max_staged_records, or leave it out: larger transactions are spilled to disk",
            )

    def abandon_open(self) -> None:
        with self.changed:
            self._open_events = 0
            super().abandon_open()


class EventsUse:
    """Reads a publication's changes; a temporary slot exists as long as its connection."""

    confirms_idle = True
    reports = True

    def __init__(self, settings: EventsSettings, start: StartStream | None = None) -> None:
        self.readers = Readers(settings.capture)
        self._settings = settings
        self._start = start

    def open(self, position: int, *, in_progress: bool) -> ReplicationStream:
        if self._start is not None:
            return self._start(position)
        s = self._settings.capture
        before = self._making_slot()
        if before is None:
            return self.readers.open(position, in_progress=in_progress)
        return start_stream(s.dsn, s.slot, s.publication, position, in_progress=in_progress, before=before)

    def _making_slot(self) -> str | None:
        """Creates a temporary slot; None if the slot exists."""
        slot = self._settings.capture.slot
        if (other := self._settings.copy_of) is not None:
            return f"select pg_copy_logical_replication_slot({literal(other)}, {literal(slot)}, true)"
        if self._settings.temporary:
            return f"CREATE_REPLICATION_SLOT {identifier(slot)} TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT"
        return None

    def decoder(self, *, first_ord: int, first_version: int, in_progress: bool) -> Decoder:
        s = self._settings
        tables = AnnouncedTables(
            {t.oid: t for t in map(TableSchema.from_json, s.tables)},
            excluded=s.excluded,
            look=self._newcomers,
        )
        commits = last_commit if s.max_messages is None else commit_after(0)
        return Decoder(
            tables, first_ord=first_ord, first_version=first_version, streams=in_progress, commits=commits
        )

    def _newcomers(self, known: Sequence[int]) -> Mapping[int, Newcomer]:
        with connect(self._settings.capture.dsn) as conn:
            return newcomers(conn, self._settings.capture.publication, known)

    def look_at_tables(self, decoder: Decoder) -> None:
        """The stream announces tables that are added and dropped."""


def events_capture(
    settings: EventsSettings, stage: EventsStage, *, start: StartStream | None = None
) -> Capture:
    """The capture of a publication's changes; by default it reads an existing slot."""
    capture = settings.capture
    # A temporary slot is dropped with its connection, so there is no second try.
    in_progress = capture.stream_in_progress and not settings.temporary
    return Capture(replace(capture, stream_in_progress=in_progress), stage, EventsUse(settings, start))
