"""
The rows of one step of an SQL reader, as frames of the replication stream.

A step is `copy (select lsn, data from pg_logical_slot_…_binary_changes(…)) to stdout (format binary)`.  Its rows contain
the payloads of the stream's XLogData messages, so they get that message's header and go to the same decoder.  Skipped are
transactions that were read before, and repeated descriptions of relations: each step is a decoding
session of its own, in which the server describes every relation again.  For the same reason a streamed transaction that has
not ended with the step is aborted for the decoder: a later step sends it again from its beginning.  One numba kernel; the
connection is in `polling`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from aqueduck.model.byte_copy import copy_bytes
from aqueduck.model.errors import ProtocolError
from aqueduck.postgres.decode.pgoutput import (
    BEGIN,
    COMMIT,
    COPY_DATA,
    RELATION,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_START,
    STREAM_STOP,
    XLOG_DATA,
    Bytes,
    _i64,
    _u32,
)

__all__ = ["StepRows", "frame_of", "keepalive_frame"]

# what stopped the kernel
MORE, FULL, OTHER, RELATION_NEXT, WANTED, BAD, STREAM_NEXT = range(7)
# slots of its state
SKIP_TO, SKIPPING, HOLDING, END, AT, STOP = range(6)
STATE_SLOTS = 6

_HEAD = struct.Struct("!cIcQQQ")


def frame_of(lsn: int, payload: bytes) -> bytes:
    """A payload in the form of the stream."""
    return _HEAD.pack(b"d", len(payload) + 29, b"w", lsn, lsn, 0) + payload


def keepalive_frame(position: int) -> Bytes:
    """The server's statement that everything before `position` was sent."""
    return np.frombuffer(struct.pack("!cIcQQB", b"d", 22, b"k", position, 0, 0), np.uint8)


@njit(cache=True, nogil=True, inline="always")
def _put32(out, at, value):
    out[at] = (value >> 24) & 255
    out[at + 1] = (value >> 16) & 255
    out[at + 2] = (value >> 8) & 255
    out[at + 3] = value & 255


@njit(cache=True, nogil=True)
def _frames(raw, start, end, out, state):
    """Turn complete rows of ``raw[start:end]`` into frames; returns (status, used up to, bytes written)."""
    pos = start
    at = 0
    while pos + 5 <= end:
        if raw[pos] != COPY_DATA:
            return OTHER, pos, at
        stop = pos + 1 + _u32(raw, pos + 1)
        if stop > end:
            return MORE, pos, at
        p = pos + 5
        if stop - p >= 19 and raw[p] == 80:  # PGCOPY…: the header comes with the first row
            p += 19
        if stop - p == 2 and raw[p] == 255:  # the trailer
            pos = stop
            continue
        if stop - p < 19 or raw[p] != 0 or raw[p + 1] != 2 or _u32(raw, p + 2) != 8:
            return BAD, pos, at
        data = p + 18
        n = stop - data
        if _u32(raw, p + 14) != n:
            return BAD, pos, at
        what = raw[data]
        if what == RELATION:
            state[AT], state[STOP] = data, stop
            return RELATION_NEXT, pos, at
        if what == STREAM_START or what == STREAM_STOP or what == STREAM_COMMIT or what == STREAM_ABORT:
            state[AT], state[STOP] = data, stop
            return STREAM_NEXT, pos, at
        if what == BEGIN and n == 21:  # the position of its commit determines whether it was read before
            state[SKIPPING] = 1 if _i64(raw, data + 1) < state[SKIP_TO] else 0
        if what == COMMIT and n == 26:
            state[END] = max(state[END], _i64(raw, data + 10))
        if state[SKIPPING] == 1:
            if what == COMMIT:
                state[SKIPPING] = 0
            pos = stop
            continue
        if at + 30 + n > out.size:
            return FULL, pos, at
        out[at] = COPY_DATA
        _put32(out, at + 1, n + 29)
        out[at + 5] = XLOG_DATA
        for i in range(8):
            out[at + 6 + i] = raw[p + 6 + i]
            out[at + 14 + i] = raw[p + 6 + i]
            out[at + 22 + i] = 0
        at = copy_bytes(raw, data, stop, out, at + 30)
        pos = stop
        if what == BEGIN and state[HOLDING] == 1:
            return WANTED, pos, at
    return MORE, pos, at


@dataclass(slots=True)
class _Streamed:
    """A transaction that a step sends before its end."""

    size: int = 0
    described: dict[int, bytes] = field(default_factory=dict)


class StepRows:
    """Frames of one reader's steps; remembers what was read, and the descriptions of relations."""

    def __init__(self, position: int) -> None:
        self._state = np.zeros(STATE_SLOTS, np.int64)
        self._state[SKIP_TO] = self._state[END] = position
        self._described: dict[int, bytes] = {}
        self._in_step: set[int] = set()
        self._marks: dict[int, str] = {}
        self._altered: dict[int, int] = {}
        self._held: list[bytes] = []
        self._streamed: dict[int, _Streamed] = {}
        self._block: _Streamed | None = None
        self.step_bytes = 0
        """The frames of the last step."""
        self.open_bytes = 0
        """Those of them that belong to transactions that had not ended: they will be sent again."""

    @property
    def relations(self) -> tuple[int, ...]:
        """Relations that were described so far."""
        return tuple(self._described)

    def begin(self, marks: Mapping[int, str], now: int) -> None:
        """
        Another step, which continues after what was read.

        Some changes are not visible in a relation's description: a column that is dropped and added again, the key of
        a table with a full identity.  They change its mark: if a mark changed before `now`, descriptions count as new until
        that position is reached.
        """
        for oid, mark in marks.items():
            if self._marks.get(oid) != mark:
                self._marks[oid], self._altered[oid] = mark, now
        self._in_step.clear()
        self.step_bytes = self.open_bytes = 0

    def end(self, position: int) -> list[Bytes]:
        """The step was read completely: everything that was committed before `position`."""
        self._state[SKIP_TO] = max(int(self._state[SKIP_TO]), position, int(self._state[END]))
        self.open_bytes = sum(streamed.size for streamed in self._streamed.values())
        aborts = [np.frombuffer(frame_of(0, _abort_of(xid)), np.uint8) for xid in self._streamed]
        self._streamed.clear()
        return aborts

    @property
    def position(self) -> int:
        return int(self._state[SKIP_TO])

    def convert(self, raw: Bytes, start: int, end: int) -> tuple[int, list[Bytes], bool]:
        """Returns how much of ``raw`` was used, the frames, and whether a message that is not a row follows."""
        found: list[Bytes] = []
        while True:
            out = np.empty(31 * (end - start) // 24 + 64, np.uint8)
            status, used, size = _frames(raw, start, end, out, self._state)
            if size:
                found.append(out[:size])
                self.step_bytes += size
                if self._block is not None:
                    self._block.size += size
            if status == BAD:
                raise ProtocolError(f"a row of a step is malformed at byte {used}", offset=int(used))
            if status in (MORE, OTHER):
                return int(used), found, status == OTHER
            start = int(used)
            if status == RELATION_NEXT:
                data, start = int(self._state[AT]), int(self._state[STOP])
                self._take_relation(bytes(raw[data:start]), found)
            elif status == STREAM_NEXT:
                data, start = int(self._state[AT]), int(self._state[STOP])
                self._take_stream(bytes(raw[data:start]), found)
            elif status == WANTED:
                found += [np.frombuffer(frame_of(0, payload), np.uint8) for payload in self._held]
                self._held.clear()
                self._state[HOLDING] = 0

    def _take_stream(self, payload: bytes, found: list[Bytes]) -> None:
        """A block of a streamed transaction begins or ends, or such a transaction ends."""
        kind = payload[0]
        if kind == STREAM_STOP:
            self._block = None
        else:
            xid = int.from_bytes(payload[1:5], "big")
            if kind == STREAM_START:
                self._block = self._streamed.setdefault(xid, _Streamed())
            elif kind == STREAM_COMMIT:
                payload = self._end_streamed(xid, payload)
            elif payload[5:9] == payload[1:5]:  # all of it, not a subtransaction
                self._streamed.pop(xid, None)
        found.append(np.frombuffer(frame_of(0, payload), np.uint8))

    def _end_streamed(self, xid: int, commit: bytes) -> bytes:
        """The message that ends the transaction for the decoder; after the commit, the server does not describe its relations again."""
        described = self._streamed.pop(xid, _Streamed()).described
        if int.from_bytes(commit[6:14], "big") < self._state[SKIP_TO]:  # it was read before
            self._described.update(described)
            self._held += described.values()
            self._state[HOLDING] = 1 if self._held else 0
            return _abort_of(xid)
        for oid in described:  # the decoder may know another description now
            self._described.pop(oid, None)
        self._state[END] = max(int(self._state[END]), int.from_bytes(commit[14:22], "big"))
        return commit

    def _take_relation(self, payload: bytes, found: list[Bytes]) -> None:
        if self._block is not None:  # streamed transactions describe relations for themselves
            self._block.described[int.from_bytes(payload[5:9], "big")] = payload[:1] + payload[5:]
            found.append(np.frombuffer(frame_of(0, payload), np.uint8))
            return
        oid = int.from_bytes(payload[1:5], "big")
        first = oid not in self._in_step
        self._in_step.add(oid)
        if first and self._described.get(oid) == payload and self._altered.get(oid, 1 << 63) <= self.position:
            return
        self._described[oid] = payload
        if self._state[SKIPPING]:  # it applies to later rows, too
            self._held.append(payload)
            self._state[HOLDING] = 1
        else:
            found.append(np.frombuffer(frame_of(0, payload), np.uint8))


def _abort_of(xid: int) -> bytes:
    return struct.pack("!cII", b"A", xid, xid)
