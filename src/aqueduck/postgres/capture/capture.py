"""
Capture: a thread that reads a slot, decodes it and stages the changes.

The thread owns a reader of the slot (`readers`: the replication stream, or SQL).  It answers keepalives,
reports how far the lake is, pauses reading while the stage is full, and releases the slot while it is
held (a disabled group).  It confirms a position only when the lake has it, or when no change
before it is pending.  A failure ends the thread and is raised by `check()`: the service decides whether to start
again, from the lake's position.  Two failures are handled here: a lost connection of an SQL reader is replaced a few
times; and a server that cannot stream a transaction before it ends is asked for whole transactions.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    SlotActiveError,
    SlotLostError,
    SourceQueryError,
    SourceUnreachableError,
)
from aqueduck.model.retries import doubling, retried
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.slot_use import GroupUse, SlotUse
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode.decoder import Commit, Decoder, warm_up
from aqueduck.postgres.publications.slots import SlotInfo, check_slot, slot_info
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.history import KnownPast, check_history
from aqueduck.postgres.session.server import ServerInfo, read_server
from aqueduck.postgres.session.wire import READ_BYTES, ReplicationStream, other_message_error, refuse_garbage
from aqueduck.state_files.files import (
    Confirmation,
    read_confirmation,
    read_durable,
    replace_file,
    write_confirmation,
)

STATUS_SECONDS = 1.0
LINGER_SECONDS = 0.004  # after a short read, so that the next one is worth its cost
POLL_RETRIES, POLL_RETRY_SECONDS = 3, 5.0


class Silence:
    """
    Detects a server that is silent: after half of the time it is asked for a reply, and after the whole time the connection is
    given up.

    The second half begins with that request: a process that was suspended asks before it gives up.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._half = seconds / 2
        self._clock = clock
        self.broken()

    def broken(self) -> None:
        """Something was received, or the silence does not count now."""
        self._since, self._asked = self._clock(), False

    def lasts(self) -> bool:
        """Whether to ask now; raises if the silence has lasted too long."""
        if self._clock() - self._since < self._half:
            return False
        if self._asked:
            raise ConnectionLostError(f"nothing was heard of the server for {2 * self._half:g} s")
        self._since, self._asked = self._clock(), True
        return True


class Capture(threading.Thread):
    """Reads one slot into one stage; the default `use` is that of a group."""

    def __init__(self, settings: CaptureSettings, stage: Stage, use: SlotUse | None = None) -> None:
        super().__init__(name=f"capture-{settings.slot}", daemon=True)
        self._settings = settings
        self._stage = stage
        self._use = use or GroupUse(settings)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._buf = np.empty(2 * READ_BYTES, np.uint8)
        self._fill = 0
        self._frame_bytes = 0
        self._seen = settings.position
        self._confirmed = settings.position
        self._next_ord = settings.first_ord or settings.position
        self._next_version = 0
        self._committed = settings.position
        self._paused = False
        self._held = False
        self._failures = 0
        self._trouble: AqueduckError | None = None
        self._in_progress = settings.stream_in_progress
        self._received_bytes = 0
        self._decode_seconds = 0.0
        self._ask_reply = False
        self._reported_at = 0.0
        self._durable_asked_at = 0.0

    # -- for the planner

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure

    @property
    def seen(self) -> int:
        """Every change that the server wrote before this position is decoded and staged."""
        return self._seen

    @property
    def streams_in_progress(self) -> bool:
        """Whether large transactions are read before they end."""
        return self._in_progress

    def ask_position(self) -> None:
        """Ask the server for its position."""
        self._ask_reply = True

    def stop(self) -> None:
        self._stopping.set()
        with self._stage.changed:
            self._stage.changed.notify_all()
        self.join(timeout=5)

    # -- the thread

    def run(self) -> None:
        try:
            warm_up()
            while not self._stopping.is_set():
                if self._is_held():
                    self._report()
                    self._stopping.wait(0.05)
                else:
                    self._try_session()
        except BaseException as exc:  # noqa: BLE001 - handed to the planner, which raises it
            self._failure = exc
            with self._stage.changed:
                self._stage.changed.notify_all()

    def _is_held(self) -> bool:
        self._held = self._settings.hold_path.exists()
        return self._held

    def _try_session(self) -> None:
        """An SQL reader uses many short connections, so one lost connection does not end the capture."""
        before = self._seen
        try:
            self._session()
            self._failures = 0
        except SourceQueryError:
            # PostgreSQL decodes some transactions (DDL after a rolled-back subtransaction) only after they have ended.
            if not self._in_progress or self._settings.capture == "poll":
                raise
            self._in_progress = False
        except (ConnectionLostError, SourceUnreachableError, SlotActiveError) as exc:
            self._failures = 1 if self._seen > before else self._failures + 1
            if self._settings.capture != "poll" or self._failures > POLL_RETRIES:
                raise
            self._trouble = exc
            self._report()
            self._stopping.wait(POLL_RETRY_SECONDS)
        else:
            self._trouble = None

    def _session(self) -> None:
        """Use one reader until the capture is stopped or held, the reader ends, or it fails."""
        # Move past WAL without changes for us, or a reader that ends there would begin there again.
        stream = self._acquire(max(self._committed, self._confirmed, self._seen))
        decoder = self._use.decoder(
            first_ord=self._next_ord, first_version=self._next_version, in_progress=self._in_progress
        )
        try:
            if self._settings.timeline:
                self._refuse_another()
            self._read(stream, decoder)
        finally:
            self._next_ord, self._next_version = decoder.next_ord, decoder.next_version
            self._stage.abandon_open()
            stream.close()

    def _acquire(self, position: int) -> ReplicationStream:
        """The slot may still belong to a connection that is closing: wait for it, within limits."""
        delays = doubling(0.25, 4.0, times=self._settings.slot_retries)

        def opened() -> ReplicationStream:
            return self._use.open(position, in_progress=self._in_progress)

        return retried(opened, delays, self._stopping.wait, on=SlotActiveError)

    def _refuse_another(self) -> None:
        """
        Raise if the slot or the server is not the same as before.

        While the slot was not in use, it may have been re-created, and another server may have taken over.  It is checked once
        the slot is ours.  Whether a new server fits the lake is decided at the next start.
        """
        s = self._settings
        with connect(s.dsn) as conn:
            server, info = read_server(conn), slot_info(conn, s.slot)
        if s.lake:
            check_history(KnownPast(s.position), server, {})
        same = (server.system_identifier, server.timeline) == (s.system_identifier, s.timeline)
        if not same or server.current_lsn < max(s.position, self._confirmed, self._seen):
            raise ConnectionLostError("another server has taken over, or this one was restored")
        try:
            self._refuse_another_slot(server, info)
        except SlotLostError as exc:
            if s.lake:
                raise
            raise ConnectionLostError("the slot was made again, or moved by another") from exc

    def _refuse_another_slot(self, server: ServerInfo, info: SlotInfo | None) -> None:
        s = self._settings
        check_slot(
            info,
            name=s.slot,
            database=server.database,
            position=max(s.position, self._confirmed),
            lake=s.lake,
            noted=read_confirmation(s.confirmed_path),
            plugin=s.plugin,
        )

    def _read(self, stream: ReplicationStream, decoder: Decoder) -> None:
        self._fill = self._frame_bytes = 0
        sent_at = 0.0
        silence = Silence(self._settings.silence_timeout_seconds)
        while not self._stopping.is_set():
            now = time.monotonic()
            self._take_durable(now)
            confirm = self._position_to_confirm(decoder)
            due = now - sent_at >= STATUS_SECONDS
            idle_step = confirm > self._stage.durable and confirm > self._confirmed
            if idle_step and not due:  # if the lake did not move, once a second is enough
                confirm, idle_step = self._confirmed, False
            if due or decoder.take_reply_request() or self._ask_reply or confirm > self._confirmed:
                ask, self._ask_reply = self._ask_reply, False
                if idle_step:
                    self._record(confirm)
                stream.send_status(received=max(self._seen, confirm), confirmed=confirm, ask_reply=ask)
                self._confirmed, sent_at = confirm, now
                if due and self._is_held():
                    return
            self._report()
            self._paused = self._stage.full
            if self._paused:
                silence.broken()
                with self._stage.changed:
                    self._stage.changed.wait(0.1)
                continue
            received = self._received_bytes
            self._fill_buffer(stream)
            if self._received_bytes > received or not stream.answers:
                silence.broken()
            elif silence.lasts():
                self._ask_reply = True
            if self._fill:
                self._decode(decoder)
            if not decoder.in_transaction and self._fill == 0:
                self._seen = max(self._seen, decoder.wal_end)
            if stream.ended or self._stream_is_slow():
                return
        self._confirm_last(stream)

    def _stream_is_slow(self) -> bool:
        """Whether another reader should continue; it continues after the last commit."""
        return self._use.readers.should_change(
            received=self._received_bytes,
            position=max(self._committed, self._confirmed, self._seen),
            paused=self._paused,
            unfinished=bool(self._stage.unfinished[0]),
        )

    def _record(self, confirm: int) -> None:
        confirmation = Confirmation(confirm, self._stage.durable, self._settings.lake)
        write_confirmation(self._settings.confirmed_path, confirmation)

    def _confirm_last(self, stream: ReplicationStream) -> None:
        """Confirm what is durable by now: a capture that only catches up may end before the next regular status update."""
        self._take_durable(math.inf)
        if self._stage.durable > self._confirmed:
            self._confirmed = self._stage.durable
            with contextlib.suppress(ConnectionLostError):
                stream.send_status(received=max(self._seen, self._confirmed), confirmed=self._confirmed)

    def _take_durable(self, now: float) -> None:
        """Read up to where the driver has committed; one of two routes, see `Stage.release`."""
        if now - self._durable_asked_at < 0.05:
            return
        self._durable_asked_at = now
        durable = read_durable(self._settings.durable_path)
        if durable is not None and durable > self._stage.durable:
            self._stage.release(durable)

    def _fill_buffer(self, stream: ReplicationStream) -> None:
        """Read until there is enough to decode, or nothing more arrives."""
        deadline = 0.0
        while self._fill < max(READ_BYTES, self._frame_bytes):
            if self._fill == self._buf.size:
                self._buf = np.concatenate([self._buf, np.empty(self._buf.size, np.uint8)])
            n = stream.read_into(self._buf, self._fill, 0.1 if deadline == 0.0 else 0.0)
            self._fill += n
            self._received_bytes += n
            now = time.monotonic()
            if deadline == 0.0:
                if n == 0:
                    return
                deadline = now + 0.05
            elif n == 0 or now > deadline:
                return
            if n < READ_BYTES // 16:
                time.sleep(LINGER_SECONDS)

    def _decode(self, decoder: Decoder) -> None:
        began = time.monotonic()
        self._use.look_at_tables(decoder)
        items, used, other = decoder.decode(self._buf, self._fill)
        self._keep_rest(used)
        self._decode_seconds += time.monotonic() - began
        for item in items:
            self._stage.add(item)
            if isinstance(item, Commit):
                self._committed = item.position
        if other:
            self._other_message()

    def _keep_rest(self, used: int) -> None:
        rest = self._fill - used
        if used and rest:
            self._buf[:rest] = self._buf[used : self._fill].copy()
        self._fill = rest
        self._frame_bytes = 0
        refuse_garbage(self._buf, rest)
        size = 2 * READ_BYTES  # also after a large row
        if rest >= 5 and self._buf[0] == ord("d"):
            # A row may be larger than one read, or than the buffer.
            need = self._frame_bytes = 1 + int.from_bytes(bytes(self._buf[1:5]), "big")
            size = max(size, need + READ_BYTES)
        if self._buf.size < self._frame_bytes or rest <= size < self._buf.size:
            self._buf = np.concatenate([self._buf[:rest], np.empty(size - rest, np.uint8)])

    def _other_message(self) -> None:
        error = other_message_error(self._buf, self._fill)
        if error is not None:
            raise error
        length = 1 + int.from_bytes(bytes(self._buf[1:5]), "big")
        if self._fill >= 5 and self._fill >= length:
            self._keep_rest(length)

    def _position_to_confirm(self, decoder: Decoder) -> int:
        """What is durable; or, if the flow permits it, the server's position while no change is pending."""
        with self._stage.changed:
            if not self._use.confirms_idle or self._stage.pending or decoder.in_transaction or self._fill:
                return max(self._confirmed, self._stage.durable)
        return max(self._confirmed, self._seen, self._stage.durable)

    # -- what the service shows

    def _report(self) -> None:
        """Write counters for the driver, at most twice a second."""
        now = time.monotonic()
        if not self._use.reports or now - self._reported_at < 0.5:
            return
        self._reported_at = now
        stage = self._stage
        _, unfinished_bytes = stage.unfinished
        report = {
            "pid": os.getpid(),
            "seen": self._seen,
            "pending": stage.pending,
            "staged_bytes": stage.staged_bytes,
            "reader": self._use.readers.kind,
            "bulk_trouble": self._use.readers.trouble,
            "streams_in_progress": self._in_progress,
            "unfinished_bytes": unfinished_bytes,
            "oldest_us": stage.oldest_us,
            "queued": stage.queued(),
            "rows": stage.rows,
            "transactions": stage.transactions,
            "received_bytes": self._received_bytes,
            "decode_seconds": round(self._decode_seconds, 3),
            "paused": self._paused,
            "held": self._held,
            "trouble": None if self._trouble is None else str(self._trouble),
        }
        replace_file(self._settings.report_path, json.dumps(report))
