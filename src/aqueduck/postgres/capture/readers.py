"""
Which reader a capture uses: the replication stream, SQL steps, or one after the other.

`stream` uses the walsender, with the least delay.  `poll` needs no replication connection.  `auto` reads a large backlog by
SQL, which is faster than the walsender, on a temporary copy of the slot, and then streams.  Each reader continues at the
position at which the one before it stopped, so a switch leaves no gap and repeats nothing.
"""

from __future__ import annotations

import numpy as np

from aqueduck.model.errors import SlotLimitError
from aqueduck.model.schema import lsn_text
from aqueduck.postgres.capture import polling
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.polling import TEXT_STEP, PolledStream, pgoutput_step
from aqueduck.postgres.decode import text_kernels
from aqueduck.postgres.decode.step_rows import StepRows
from aqueduck.postgres.decode.text_rows import TextRows
from aqueduck.postgres.publications.publications import PublishedTables
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.wire import ReplicationStream, start_stream

__all__ = ["open_reader", "warm_up"]


def open_reader(settings: CaptureSettings, position: int, *, in_progress: bool = False) -> ReplicationStream:
    """Continue after `position`; a stream also sends transactions that are `in_progress`, SQL only those that have ended."""
    s = settings
    if s.capture == "poll":
        return _polled(s, position)
    enough = max(s.catchup_bytes, polling.NEAR_BYTES)
    if s.capture == "auto" and _backlog_bytes(s.dsn, position) > enough:
        try:
            return _polled(s, position, bulk=True)
        except SlotLimitError:  # no slot is free for the copy: reading only takes longer
            pass
    return start_stream(s.dsn, s.slot, s.publication, position, in_progress=in_progress)


def warm_up() -> None:
    """Have numba compile the kernels for steps, or load them from its cache."""
    nothing = np.zeros(1, np.uint8)
    StepRows(0).convert(nothing, 0, 0)
    text_kernels.walk(nothing, 0, 0)
    step = np.frombuffer(b"d\0\0\0\6\xff\xff", np.uint8)
    state = np.zeros(text_kernels.STATE_SLOTS, np.int64)
    text_kernels.frames(step, text_kernels.commits(step), text_kernels.TextTables(), nothing, state)


def _polled(s: CaptureSettings, position: int, *, bulk: bool = False) -> PolledStream:
    plan, rows = pgoutput_step(s.publication), None
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


def _backlog_bytes(dsn: str, position: int) -> int:
    with connect(dsn) as conn, translate_errors("read the server's position", conn=conn):
        row = conn.execute(
            "select pg_wal_lsn_diff(pg_current_wal_flush_lsn(), %s::pg_lsn)::int8", (lsn_text(position),)
        ).fetchone()
    assert row is not None
    return int(row[0])
