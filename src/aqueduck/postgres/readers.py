"""
Which reader a capture has: the replication stream, SQL steps, or one after the other.

`stream` is the walsender: the least delay.  `poll` needs no replication connection.  `auto` reads a large backlog by
SQL, which is faster than the walsender, on a temporary copy of the slot; then it streams.  All three go on after a position, which
is where the one before them stopped, so the switch leaves no gap and doubles nothing.
"""

from __future__ import annotations

from pathlib import Path

from aqueduck.errors import SlotLimitError
from aqueduck.postgres.capture_settings import CaptureSettings
from aqueduck.postgres.connection import connect, translate_errors
from aqueduck.postgres.polling import TEXT_STEP, PolledStream, pgoutput_step
from aqueduck.postgres.publications import PublishedTables
from aqueduck.postgres.text_rows import TextRows
from aqueduck.postgres.wire import ReplicationStream, start_stream
from aqueduck.schema import lsn_text

__all__ = ["open_reader"]


def open_reader(settings: CaptureSettings, position: int) -> ReplicationStream:
    """Read on after `position`."""
    s = settings
    if s.capture == "poll":
        return _polled(s, position)
    if s.capture == "auto" and _backlog_bytes(s.dsn, position) > s.catchup_bytes:
        try:
            return _polled(s, position, bulk=True)
        except SlotLimitError:  # no slot is free for the copy: it only takes longer
            pass
    return start_stream(s.dsn, s.slot, s.publication, position)


def _polled(s: CaptureSettings, position: int, *, bulk: bool = False) -> PolledStream:
    plan, rows = pgoutput_step(s.publication), None
    if s.plugin == "test_decoding":
        published = PublishedTables(s.dsn, s.publication)
        plan, rows = TEXT_STEP, TextRows(position, published, Path(s.stage_dir))
    return PolledStream(
        s.dsn,
        s.slot,
        plan,
        position,
        rows=rows,
        interval_seconds=s.poll_interval_seconds,
        step_bytes=s.poll_step_bytes,
        bulk=bulk,
    )


def _backlog_bytes(dsn: str, position: int) -> int:
    with connect(dsn) as conn, translate_errors("read the server's position", conn=conn):
        row = conn.execute(
            "select pg_wal_lsn_diff(pg_current_wal_flush_lsn(), %s::pg_lsn)::int8", (lsn_text(position),)
        ).fetchone()
    assert row is not None
    return int(row[0])
