"""
Which reader a capture uses: the replication stream, SQL steps, or one after the other.

`stream` uses the walsender, with the least delay.  `poll` needs no replication connection.  `auto` reads a large backlog by
SQL, which is faster than the walsender, on a temporary copy of the slot, and then streams; it leaves large transactions to
the stream, and returns when the stream falls behind.  `catchup` decides that.  Each reader continues at the
position at which the one before it stopped, so a switch leaves no gap and repeats nothing.
"""

from __future__ import annotations

import time

import numpy as np

from aqueduck import faults
from aqueduck.model.errors import AqueduckError, ConfigError, SlotLostError
from aqueduck.model.schema import lsn_text
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.catchup import Backlog, BulkRead, Catchup
from aqueduck.postgres.capture.polling import TEXT_STEP, PolledStream, pgoutput_step
from aqueduck.postgres.decode import text_kernels
from aqueduck.postgres.decode.step_rows import StepRows
from aqueduck.postgres.decode.text_rows import TextRows
from aqueduck.postgres.publications.publications import PublishedTables
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.wire import ReplicationStream, start_stream

__all__ = ["Readers", "warm_up"]


class Readers:
    """Opens one reader after the other for a capture, and remembers what bulk readers brought."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._catchup = Catchup(catchup_bytes=settings.catchup_bytes)
        self._bulk: PolledStream | None = None
        self._read: BulkRead | None = None
        self._began = 0.0

    @property
    def trouble(self) -> str | None:
        """Why backlogs are not read in bulk, though `auto` should."""
        return self._catchup.trouble

    @property
    def kind(self) -> str:
        """The current reader, as people see it."""
        return "bulk" if self._bulk is not None else "poll" if self._settings.capture == "poll" else "stream"

    def open(self, position: int, *, in_progress: bool = False) -> ReplicationStream:
        """Continue after `position`; with `in_progress`, large transactions are read before they end where that is possible."""
        s = self._settings
        if s.capture == "poll":
            return _polled(s, position)
        had_bulk = self._close_bulk()
        if s.capture == "auto" and not had_bulk and self._catchup.may_read(time.monotonic()):
            bulk = self._open_bulk(position, in_progress=in_progress)
            if bulk is not None:
                return bulk
        stream = start_stream(s.dsn, s.slot, s.publication, position, in_progress=in_progress)
        self._catchup.began_stream()
        return stream

    def should_change(self, *, received: int, position: int, paused: bool, unfinished: bool) -> bool:
        """Whether the stream has fallen behind so far that a bulk reader should continue after `position`."""
        if self._settings.capture != "auto" or self._bulk is not None:
            return False
        now = time.monotonic()
        if not self._catchup.is_busy(
            now, received=received, committed=position, paused=paused, unfinished=unfinished
        ):
            return False
        try:
            backlog, _ = self._backlog(position)
        except AqueduckError as exc:
            self._catchup.bulk_failed(now, str(exc))
            return False
        if self._catchup.is_due(backlog):
            faults.point("switch.behind")
            return True
        self._catchup.is_not_due(now)
        return False

    def _open_bulk(self, position: int, *, in_progress: bool) -> PolledStream | None:
        """A bulk reader if it is faster; what keeps it from reading is remembered, and the stream reads instead."""
        s = self._settings
        try:
            backlog, version = self._backlog(position)
            if not self._catchup.is_due(backlog):
                return None
            read = BulkRead(step_bytes=s.poll_step_bytes)
            bulk = _polled(s, position, bulk=read, in_progress=in_progress and version >= 140000)
        except AqueduckError as exc:  # if the stream cannot be opened either, its error is raised
            self._catchup.bulk_failed(time.monotonic(), str(exc))
            return None
        self._bulk, self._read, self._began = bulk, read, time.monotonic()
        faults.point("switch.bulk")
        return bulk

    def _close_bulk(self) -> bool:
        """Whether there was a bulk reader until now; what it brought is taken into account."""
        bulk, read = self._bulk, self._read
        self._bulk = self._read = None
        if bulk is None or read is None:
            return False
        if bulk.failure is not None:
            self._catchup.bulk_failed(time.monotonic(), str(bulk.failure))
        else:
            self._catchup.bulk_ended(time.monotonic(), self._began, read)
        faults.point("switch.stream")
        return True

    def _backlog(self, position: int) -> tuple[Backlog, int]:
        """What waits after `position`, and the version of the server."""
        dsn, read = self._settings.dsn, lsn_text(position)
        with connect(dsn) as conn, translate_errors("read the server's position", conn=conn):
            row = conn.execute(_BACKLOG, {"read": read, "slot": self._settings.slot}).fetchone()
        if row is None:
            raise SlotLostError(f"the slot {self._settings.slot} does not exist")
        if row[1] is None:
            raise SlotLostError(f"the slot {self._settings.slot} was invalidated: its WAL is gone")
        if row[3]:  # the copy would not wait for standby servers, as the slot does
            raise ConfigError(f"the slot {self._settings.slot} has failover, so only the stream can read it")
        return Backlog(int(row[0]), int(row[1])), int(row[2])


_BACKLOG = """
    select case when pg_is_in_recovery() then 0
                else pg_wal_lsn_diff(pg_current_wal_flush_lsn(), %(read)s::pg_lsn) end::int8,
           pg_wal_lsn_diff(%(read)s::pg_lsn, s.restart_lsn)::int8,
           current_setting('server_version_num')::int,
           coalesce((to_jsonb(s) ->> 'failover')::bool, false) -- since PostgreSQL 17
    from pg_replication_slots s where s.slot_name = %(slot)s
"""


def warm_up() -> None:
    """Have numba compile the kernels for steps, or load them from its cache."""
    nothing = np.zeros(1, np.uint8)
    StepRows(0).convert(nothing, 0, 0)
    text_kernels.walk(nothing, 0, 0)
    step = np.frombuffer(b"d\0\0\0\6\xff\xff", np.uint8)
    state = np.zeros(text_kernels.STATE_SLOTS, np.int64)
    text_kernels.frames(step, text_kernels.commits(step), text_kernels.TextTables(), nothing, state)


def _polled(
    s: CaptureSettings, position: int, *, bulk: BulkRead | None = None, in_progress: bool = False
) -> PolledStream:
    plan, rows = pgoutput_step(s.publication, in_progress=in_progress), None
    if s.plugin == "test_decoding":
        published = PublishedTables(s.dsn, s.publication)
        plan, rows = TEXT_STEP, TextRows(position, published, s.stage_dir)
    return PolledStream(
        s.dsn,
        s.slot,
        plan,
        position,
        rows=rows,
        interval_seconds=s.poll_interval_seconds,
        step_bytes=s.poll_step_bytes,
        bulk=bulk,
        silence_seconds=s.silence_timeout_seconds,
    )
