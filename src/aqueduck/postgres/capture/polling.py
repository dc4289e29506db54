"""
Read a slot by SQL: a second reader behind the interface of `wire.ReplicationStream`.

`PolledStream` has a thread with an ordinary connection.  It asks for the server's WAL position, and while that is ahead of
what it has read, decodes the next piece with a slot function: a *step*, limited in bytes of WAL.  Rows become
frames of the stream (`step_rows`, `text_rows`), so capture, decoder and stage see no difference.

Through a pooler, each step peeks from the slot's own position, and what was read before is skipped.  On a session of
its own, it consumes a temporary copy of the slot instead, which reads nothing twice.  The slot itself moves only
when the capture reports a position as durable, with `pg_replication_slot_advance`.

A *bulk* reader reads a backlog for `capture: auto` and then ends, also when it fails: the stream continues
after what it read (`catchup` decides).  Its copy of the slot ends with its connection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from aqueduck import faults
from aqueduck.model.errors import (
    AqueduckError,
    ConfigError,
    ConnectionLostError,
    SlotActiveError,
    SlotLimitError,
    own_error,
)
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.postgres.capture.catchup import BulkRead, Step
from aqueduck.postgres.decode.pgoutput import Bytes
from aqueduck.postgres.decode.step_rows import StepRows, keepalive_frame
from aqueduck.postgres.session.quoting import identifier, literal
from aqueduck.postgres.session.sqlwire import SqlConnection, Stopped
from aqueduck.postgres.session.wire import SET_LOCAL_OUTPUT, error_of

__all__ = ["TEXT_STEP", "PolledStream", "Rows", "StepPlan", "pgoutput_step"]

QUEUE_BYTES_MAX = 32 << 20
FIRST_STEP_BYTES = 16 << 20
IDLE_SECONDS_MAX = 1.0
ADVANCE_SECONDS = 1.0
BULK_ADVANCE_SECONDS = 10.0  # the server spends the same time on decoding
FAR_SECONDS = 0.5
STALL_SECONDS = 10.0  # a bulk step holds back vacuum at the source, as a stream does not


# What the stream does not report when a relation changes: how many columns it ever had, and, with a full
# identity, which columns can be a key.
_MARK = """relnatts || case when relreplident = 'f' then '/' || array(
    select indexrelid from pg_index where indrelid = c.oid and indisunique and indisvalid order by 1)::text || array(
    select attnum from pg_attribute where attrelid = c.oid and attnum > 0 and attnotnull order by 1)::text else '' end"""


# Identity and timeline of the server.
_SOURCE = (
    "(pg_control_system()).system_identifier || '/' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
)


class Rows(Protocol):
    """Makes frames of the rows of steps: `StepRows`, or `TextRows` for another plugin."""

    @property
    def position(self) -> int:
        """Every change that was committed before this position was read."""
        ...

    @property
    def relations(self) -> tuple[int, ...]: ...

    step_bytes: int
    open_bytes: int

    def begin(self, marks: dict[int, str], now: int) -> None: ...

    def convert(self, raw: Bytes, start: int, end: int) -> tuple[int, list[Bytes], bool]: ...

    def end(self, position: int) -> Iterable[Bytes]: ...


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How to call a step: the function without its verb, its result columns, and the plugin's options."""

    function: str
    columns: str
    options: tuple[tuple[str, str], ...]

    def sql(self, slot: str, upto: int, *, consume: bool) -> str:
        verb = "get" if consume else "peek"
        options = "".join(f", {literal(name)}, {literal(value)}" for name, value in self.options)
        call = f"pg_logical_slot_{verb}_{self.function}({literal(slot)}, {literal(lsn_text(upto))}, null{options})"
        return (
            f"begin; {SET_LOCAL_OUTPUT}; set local client_encoding = 'UTF8'; set local statement_timeout = 0;"
            f" copy (select {self.columns} from {call}) to stdout (format binary); commit"
        )


def pgoutput_step(publication: str, *, in_progress: bool = False) -> StepPlan:
    """The step of a slot that streams could read, too; `in_progress` sends large transactions before they end."""
    protocol: tuple[tuple[str, str], ...] = (("proto_version", "1"),)
    if in_progress:
        protocol = (("proto_version", "2"), ("streaming", "on"))
    options = (*protocol, ("publication_names", identifier(publication)))
    return StepPlan("binary_changes", "lsn, data", options)


#: the step of a slot of test_decoding
TEXT_STEP = StepPlan(
    "changes",
    "lsn, data",
    (("include-xids", "1"), ("include-timestamp", "1"), ("skip-empty-xacts", "1")),
)


class _StalledError(Exception):
    """Nothing consumes what a bulk reader has read; waiting costs the server less with the stream."""


class PolledStream:
    """Reads a slot by SQL behind the interface of a replication stream."""

    answers = False

    def __init__(
        self,
        dsn: str,
        slot: str,
        plan: StepPlan,
        position: int,
        *,
        rows: Rows | None = None,
        interval_seconds: float = 0.1,
        step_bytes: int = 64 << 20,
        bulk: BulkRead | None = None,
        silence_seconds: float = 30.0,
    ) -> None:
        """With `bulk`, it reads a backlog on a copy of the slot, then ends; it fails if no copy can be made."""
        self._slot = slot
        self._plan = plan
        self._rows: Rows = rows or StepRows(position)
        self._interval = interval_seconds
        self._step_bytes_max = step_bytes
        self._step_bytes = min(FIRST_STEP_BYTES, step_bytes)
        self._bulk = bulk
        self._again_bytes = 0
        self.failure: AqueduckError | None = None
        """Why a bulk reader ended before it had read the backlog."""
        self._silence_seconds = silence_seconds
        self._copy: str | None = None
        self._source: str | None = None
        self._changed = threading.Condition()
        self._queue: deque[Bytes] = deque()
        self._queued_bytes = 0
        self._taken = 0
        self._failure: AqueduckError | None = None
        self._finished = False
        self._ending = self._stopping = False
        self._nudged = False
        self._wanted = 0
        self._advanced_at = time.monotonic() if bulk is not None else 0.0
        self.ended = False
        self._conn = SqlConnection(dsn, lambda: self._stopping)
        try:
            self._confirmed = self._begin(self._conn)
        except BaseException:
            self._conn.close()
            raise
        self._thread = threading.Thread(target=self._work, name=f"poll-{slot}", daemon=True)
        self._thread.start()

    # -- the capture's side

    def read_into(self, buf: Bytes, at: int, timeout: float) -> int:
        """The available frames, or those that arrive within `timeout`."""
        with self._changed:
            if not self._queue and not self._finished and self._failure is None:
                self._changed.wait(timeout)
            if not self._queue:
                if self._failure is not None and self._bulk is None:
                    raise self._failure
                self.failure = self._failure
                self.ended = self._finished or self._failure is not None
                return 0
            start = at
            while self._queue and at < buf.size:
                piece = self._queue[0]
                n = min(piece.size - self._taken, buf.size - at)
                buf[at : at + n] = piece[self._taken : self._taken + n]
                at, self._taken = at + n, self._taken + n
                if self._taken == piece.size:
                    self._queue.popleft()
                    self._queued_bytes -= piece.size
                    self._taken = 0
            self._changed.notify_all()
            return at - start

    def send_status(self, *, received: int, confirmed: int, ask_reply: bool = False) -> None:
        """Move the slot to `confirmed` soon; with `ask_reply`, look for changes now."""
        with self._changed:
            self._wanted = max(self._wanted, confirmed)
            self._nudged = self._nudged or ask_reply
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(timeout=2)
        self._stopping = True  # also during a statement
        self._thread.join(timeout=5)

    # -- the thread

    def _begin(self, conn: SqlConnection) -> int:
        """Copy the slot if the session is ours alone; returns the position of the slot itself."""
        if self._bulk is not None and conn.is_pooled:  # the copy would stay with a connection of the pool
            raise ConfigError("the connection goes through a pooler")
        if not conn.is_pooled:
            copy = f"{self._slot[:48]}_{time.monotonic_ns() % (1 << 40):x}"
            try:
                conn.query(
                    f"select pg_copy_logical_replication_slot({literal(self._slot)}, {literal(copy)}, true)"
                )
                self._copy = copy
            except SlotLimitError:
                if self._bulk is not None:
                    raise
        [[confirmed]] = conn.query(
            "select coalesce(max(confirmed_flush_lsn), '0/0') from pg_replication_slots"
            f" where slot_name = {literal(self._slot)}"
        )
        return parse_lsn(confirmed or "0/0")

    def _skip_read(self) -> None:
        """Move the copy to what was read before, which takes a fraction of the time that decoding takes."""
        if self._copy is not None and self._rows.position > self._confirmed:
            to = literal(lsn_text(self._rows.position))
            self._conn.query(f"select pg_replication_slot_advance({literal(self._copy)}, {to})")

    def _work(self) -> None:
        idle = self._interval
        try:
            self._skip_read()
            while not self._ending:
                self._advance()
                began = time.monotonic()
                server = self._lsn("pg_current_wal_flush_lsn()")
                if server > self._rows.position:
                    self._step(server)
                    idle = self._interval
                    pause = self._rest_after(time.monotonic() - began, behind=server > self._rows.position)
                else:
                    pause, idle = idle, min(idle * 1.5, max(self._interval, IDLE_SECONDS_MAX))
                if self._bulk is not None and self._has_ended(self._bulk, server):
                    self._finish(None)
                    break
                self._pause(pause)
            if self._bulk is None:  # the reader after a bulk reader takes the slot, and confirms
                self._advance(at_once=True)
        except Stopped:
            pass
        except _StalledError:
            self._finish(None)
        except BaseException as exc:  # noqa: BLE001 - raised where the capture reads
            self._finish(own_error(exc))
        finally:
            self._conn.close()

    def _finish(self, failure: AqueduckError | None) -> None:
        with self._changed:
            self._failure, self._finished = failure, failure is None
            self._changed.notify_all()

    def _has_ended(self, bulk: BulkRead, server: int) -> bool:
        left = server - self._rows.position
        step = Step(
            full=left > 0,
            left_bytes=left,
            frame_bytes=self._rows.step_bytes,
            open_bytes=self._rows.open_bytes,
            again_bytes=self._again_bytes,
        )
        return bulk.has_ended(step)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if seconds > 0:
                self._changed.wait_for(lambda: self._nudged or self._ending, seconds)
            self._nudged = False

    def _lsn(self, function: str) -> int:
        [[text]] = self._conn.query(f"select {function}", self._silence_seconds)
        assert text is not None
        return parse_lsn(text)

    def _rest_after(self, seconds: float, *, behind: bool) -> float:
        """
        How long to pause after a step of this duration.

        Decoding begins at the slot's position, not at ours, so half of the time is left to others.  Peeking reads everything again
        that is not durable: if that is much, wait until it is less.
        """
        if self._copy is None and self._rows.position - self._confirmed > 2 * self._step_bytes_max:
            return max(FAR_SECONDS, 2 * seconds)
        return 0.0 if behind else max(self._interval, seconds)

    def _step(self, server: int) -> None:
        """Decode one piece of WAL, and pass on what is new."""
        rows = self._rows
        rows.begin(*self._look())
        begin, size = max(rows.position, self._confirmed), self._step_bytes
        if self._bulk is not None:
            size = self._bulk.step_bytes(size, self._again_bytes)
        upto = min(server, begin + size)
        for piece in self._messages(self._plan.sql(self._copy or self._slot, upto, consume=bool(self._copy))):
            self._put(piece)
        for piece in rows.end(upto):
            self._put(piece)
        self._put(keepalive_frame(upto))
        full = upto < server
        self._step_bytes = min(2 * self._step_bytes if full else FIRST_STEP_BYTES, self._step_bytes_max)

    def _look(self) -> tuple[dict[int, str], int]:
        """The marks of the relations, and a position that was read after them."""
        oids = ", ".join(map(str, self._rows.relations))
        known = f"(select string_agg(oid || ':' || {_MARK}, ' ') from pg_class c where oid in ({oids or 0}))"
        again = (
            f"(select pg_wal_lsn_diff({literal(lsn_text(self._rows.position))}, restart_lsn)::int8"
            f" from pg_replication_slots where slot_name = {literal(self._copy or self._slot)})"
        )
        look = f"select {known}, pg_current_wal_insert_lsn(), {_SOURCE}, {again}"
        [[marks, now, source, again_bytes]] = self._conn.query(look, self._silence_seconds)
        assert now is not None
        self._again_bytes = int(again_bytes or 0)
        if self._source not in (None, source):  # another server behind the same pooler or name
            raise ConnectionLostError("another server has taken over")
        self._source = source
        pairs = (pair.split(":") for pair in (marks or "").split())
        return {int(oid): mark for oid, mark in pairs}, parse_lsn(now)

    def _messages(self, sql: str) -> Iterable[Bytes]:
        """The frames of a step; raises an error that the server sends."""
        pieces: list[Bytes] = []
        size = need = 0
        for piece in self._conn.copy(sql, self._silence_seconds):
            pieces.append(piece)
            size += piece.size
            if size < need:  # within a large row
                continue
            raw = np.concatenate(pieces) if len(pieces) > 1 else piece
            at = 0
            while True:
                at, frames, other = self._rows.convert(raw, at, raw.size)
                yield from frames
                need = 1 + int.from_bytes(bytes(raw[at + 1 : at + 5]), "big") if raw.size - at >= 5 else 5
                if not other or at + need > raw.size:
                    break
                kind = chr(raw[at])
                if kind == "E":
                    raise error_of(bytes(raw[at + 5 : at + need]))
                if kind == "Z":
                    return
                at += need
            pieces, size = [raw[at:]], raw.size - at

    def _put(self, piece: Bytes) -> None:
        with self._changed:
            seconds = None if self._bulk is None else STALL_SECONDS
            has_room = self._changed.wait_for(
                lambda: self._queued_bytes <= QUEUE_BYTES_MAX or self._ending, seconds
            )
            if self._ending:
                raise Stopped
            if not has_room and self._bulk is not None:
                self._bulk.end = "stalled"
                raise _StalledError
            self._queue.append(piece)
            self._queued_bytes += piece.size
            self._changed.notify_all()

    def _advance(self, *, at_once: bool = False) -> None:
        """Move the slot to the durable position; the server may stop before it, and returns the position."""
        now = time.monotonic()
        often = BULK_ADVANCE_SECONDS if self._bulk is not None else ADVANCE_SECONDS
        soon = not at_once and now - self._advanced_at < often
        if self._wanted <= self._confirmed or soon:
            return
        self._advanced_at = now
        faults.point("poll.before_advance")
        wanted = literal(lsn_text(self._wanted))
        try:
            [[reached]] = self._conn.query(
                f"select end_lsn from pg_replication_slot_advance({literal(self._slot)}, {wanted})"
            )
        except SlotActiveError:  # a statement of a broken connection may still run: try later
            return
        self._confirmed = max(self._confirmed, parse_lsn(reached or "0/0"))
        faults.point("poll.advanced")
