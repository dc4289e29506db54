"""
Decode pgoutput, the wire format of PostgreSQL logical replication, into columns.

`index_frames()` walks one buffer of CopyData frames and lists its row messages,
transactions and control messages (among them the bounds of the blocks in which a
streamed transaction comes); `locate_cells()` finds every cell of the rows of
one relation; `gather()` copies one column's cells into an Arrow-shaped buffer.  All
three are numba kernels that release the GIL; names of numbers are frozen into them when they are compiled.

Nothing here does I/O or remembers anything: the few messages that are not rows are read
in `pgoutput_messages`, the relation cache is in `decoder`, the socket in `wire`.  Malformed
input raises `ProtocolError` with the byte offset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from aqueduck.model.byte_copy import copy_bytes
from aqueduck.model.changes import OLD_FULL, OLD_KEY, OLD_NONE, OP_DELETE, OP_INSERT, OP_UPDATE
from aqueduck.model.errors import ProtocolError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

#: seconds between the epochs of PostgreSQL (2000-01-01) and Unix, in microseconds
PG_EPOCH_US = 946_684_800_000_000

# cell lengths that are not lengths
NULL = -1
UNCHANGED = -2
ABSENT = -3

# what stopped `index_frames`
OK = 0
FULL = 1  # output arrays are full; call again from `consumed`
OTHER = 2  # a protocol message that is not CopyData follows at `consumed`
BAD = 3  # malformed: state[BAD_AT] has the offset, state[BAD_WHY] one of the reasons below

# slots of the state vector that `index_frames` carries from buffer to buffer
IN_TX, TX_LSN, TX_TS, TX_XID, NEXT_SEQ, IN_STREAM, WAL_END, REPLY, BAD_AT, BAD_WHY = range(10)
STATE_SLOTS = 10

_WHY = (
    "",
    "a frame is shorter than its header",
    "an unknown CopyData message",
    "a second BEGIN inside a transaction",
    "a COMMIT without a BEGIN",
    "a row outside a transaction",
    "an unknown pgoutput message",
    "a truncated message",
    "a tuple of the wrong width",
    "an unknown cell kind",
    "bytes left over after a tuple",
    "an unknown tuple kind",
    "a stream message where none was asked for",
    "a stream message out of place",
    "a message of a prepared transaction, which this slot should not send",
)
(
    _,
    SHORT,
    UNKNOWN_COPY,
    SECOND_BEGIN,
    LONE_COMMIT,
    ROW_OUTSIDE,
    UNKNOWN_KIND,
    TRUNCATED,
    WIDTH,
    CELL,
    LEFTOVER,
    TUPLE,
    STREAM,
    STREAM_PLACE,
    PREPARED,
) = range(15)

# messages of the connection, then those of pgoutput within XLogData
COPY_DATA, KEEPALIVE, XLOG_DATA = b"dkw"
INSERT, UPDATE, DELETE, BEGIN, COMMIT, RELATION, TRUNCATE, ORIGIN, TYPE, MESSAGE = b"IUDBCRTOYM"
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = b"SEcA"  # protocol version 2
BEGIN_PREPARE, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED, STREAM_PREPARE = b"bPKrp"

# tuples of a row message, and the cells in them
NEW_TUPLE, OLD_TUPLE, OLD_KEY_TUPLE = b"NOK"
TEXT_CELL, BINARY_CELL, NULL_CELL, UNCHANGED_CELL = b"tbnu"


@dataclass(slots=True)
class FrameIndex:
    """Arrays that `index_frames` fills; allocated once and used for every buffer."""

    row_kind: Bytes
    row_at: Ints  # first byte after the relation id
    row_end: Ints
    row_rel: Ints
    row_tx: Ints
    row_seq: Ints
    """Changes of the transaction before this one; within a block of a streamed transaction, of the block."""
    row_xid: Ints
    """In a block of a streamed transaction: the (sub)transaction that made the change."""
    tx_lsn: Ints
    tx_ts: Ints
    tx_xid: Ints
    tx_end: Ints  # end position, or -1 while the transaction is open
    tx_rows: Ints  # rows indexed before the commit
    control_kind: Bytes
    control_at: Ints
    control_end: Ints
    control_rows: Ints  # rows indexed before this message
    control_tx: Ints
    control_seq: Ints  # changes of its transaction before this message

    @classmethod
    def allocate(cls, rows: int = 65_536, controls: int = 4_096) -> FrameIndex:
        names = {f.name: rows if f.name.startswith(("row", "tx")) else controls for f in fields(cls)}
        kinds = ("row_kind", "control_kind")
        arrays: dict[str, Any] = {
            name: np.empty(n, np.uint8 if name in kinds else np.int64) for name, n in names.items()
        }
        return cls(**arrays)


def protocol_error(why: int, at: int) -> ProtocolError:
    return ProtocolError(f"{_WHY[why]} at byte {at} of the stream buffer", offset=at)


@njit(cache=True, nogil=True, inline="always")
def _u16(b, p):
    return (np.int64(b[p]) << 8) | np.int64(b[p + 1])


@njit(cache=True, nogil=True, inline="always")
def _u32(b, p):
    return (
        (np.int64(b[p]) << 24) | (np.int64(b[p + 1]) << 16) | (np.int64(b[p + 2]) << 8) | np.int64(b[p + 3])
    )


@njit(cache=True, nogil=True, inline="always")
def _i64(b, p):
    return (_u32(b, p) << 32) | _u32(b, p + 4)


@njit(cache=True, nogil=True)
def _index_frames(
    buf, start, end, streams, state,
    row_kind, row_at, row_end, row_rel, row_tx, row_seq, row_xid,
    tx_lsn, tx_ts, tx_xid, tx_end, tx_rows,
    control_kind, control_at, control_end, control_rows, control_tx, control_seq,
):  # fmt: skip
    rows = 0
    txs = 0
    controls = 0
    pos = start
    status = OK
    if state[IN_TX] == 1:  # a transaction that began in an earlier buffer
        tx_lsn[0] = state[TX_LSN]
        tx_ts[0] = state[TX_TS]
        tx_xid[0] = state[TX_XID]
        tx_end[0] = -1
        txs = 1
    while pos + 5 <= end:
        if buf[pos] != COPY_DATA:
            status = OTHER
            break
        length = _u32(buf, pos + 1)
        stop = pos + 1 + length
        if length < 5 or length > 0x7FFFFFFF:
            status, state[BAD_AT], state[BAD_WHY] = BAD, pos, SHORT
            break
        if stop > end:
            break
        if rows >= row_at.size or txs >= tx_lsn.size or controls >= control_at.size:
            status = FULL
            break
        kind = buf[pos + 5]
        if kind == KEEPALIVE:
            if length < 22:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, SHORT
                break
            state[WAL_END] = max(state[WAL_END], _i64(buf, pos + 6))
            if buf[pos + 22] != 0:
                state[REPLY] = 1
            pos = stop
            continue
        if kind != XLOG_DATA:
            status, state[BAD_AT], state[BAD_WHY] = BAD, pos, UNKNOWN_COPY
            break
        if length < 30:
            status, state[BAD_AT], state[BAD_WHY] = BAD, pos, SHORT
            break
        p = pos + 30
        what = buf[p]
        p += 1
        if state[IN_STREAM] == 1 and (
            what == INSERT
            or what == UPDATE
            or what == DELETE
            or what == RELATION
            or what == TRUNCATE
            or what == MESSAGE
            or what == TYPE
        ):
            p += 4  # in a stream block these messages start with their xid
            if p > stop:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, TRUNCATED
                break
        if what == INSERT or what == UPDATE or what == DELETE:
            if state[IN_TX] != 1 and state[IN_STREAM] != 1:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, ROW_OUTSIDE
                break
            if p + 5 > stop:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, TRUNCATED
                break
            row_kind[rows] = what
            row_rel[rows] = _u32(buf, p)
            row_at[rows] = p + 4
            row_end[rows] = stop
            row_tx[rows] = txs - 1
            row_seq[rows] = state[NEXT_SEQ]
            if state[IN_STREAM] == 1:
                row_xid[rows] = _u32(buf, p - 4)
            state[NEXT_SEQ] += 1
            rows += 1
        elif what == BEGIN:
            if state[IN_TX] == 1 or state[IN_STREAM] == 1:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, SECOND_BEGIN
                break
            if p + 20 != stop:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, TRUNCATED
                break
            state[IN_TX] = 1
            state[TX_LSN] = _i64(buf, p)
            state[TX_TS] = _i64(buf, p + 8) + PG_EPOCH_US
            state[TX_XID] = _u32(buf, p + 16)
            state[NEXT_SEQ] = 0
            tx_lsn[txs] = state[TX_LSN]
            tx_ts[txs] = state[TX_TS]
            tx_xid[txs] = state[TX_XID]
            tx_end[txs] = -1
            txs += 1
        elif what == COMMIT:
            if state[IN_TX] != 1:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, LONE_COMMIT
                break
            if p + 25 != stop:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, TRUNCATED
                break
            state[IN_TX] = 0
            tx_end[txs - 1] = _i64(buf, p + 9)
            tx_rows[txs - 1] = rows
        elif what == RELATION or what == TRUNCATE:
            control_kind[controls] = what
            control_at[controls] = p
            control_end[controls] = stop
            control_rows[controls] = rows
            control_tx[controls] = txs - 1
            control_seq[controls] = state[NEXT_SEQ]
            controls += 1
            if what == TRUNCATE and p + 4 <= stop:
                state[NEXT_SEQ] += _u32(buf, p)  # one change per relation
        elif what == ORIGIN or what == TYPE or what == MESSAGE:  # not needed
            pass
        elif what == STREAM_START or what == STREAM_STOP or what == STREAM_COMMIT or what == STREAM_ABORT:
            if streams == 0:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, STREAM
                break
            if state[IN_TX] == 1 or (state[IN_STREAM] == 1) != (what == STREAM_STOP):
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, STREAM_PLACE
                break
            if what == STREAM_START:
                size = 5
            elif what == STREAM_STOP:
                size = 0
            else:
                size = 29 if what == STREAM_COMMIT else 8
            if p + size != stop:
                status, state[BAD_AT], state[BAD_WHY] = BAD, pos, TRUNCATED
                break
            control_kind[controls] = what
            control_at[controls] = p
            control_end[controls] = stop
            control_rows[controls] = rows
            control_tx[controls] = txs - 1
            control_seq[controls] = state[NEXT_SEQ]
            controls += 1
            if what == STREAM_START:
                state[IN_STREAM], state[NEXT_SEQ] = 1, 0
            elif what == STREAM_STOP:
                state[IN_STREAM] = 0
        elif (
            what == BEGIN_PREPARE
            or what == PREPARE
            or what == COMMIT_PREPARED
            or what == ROLLBACK_PREPARED
            or what == STREAM_PREPARE
        ):
            status, state[BAD_AT], state[BAD_WHY] = BAD, pos, PREPARED
            break
        else:
            status, state[BAD_AT], state[BAD_WHY] = BAD, pos, UNKNOWN_KIND
            break
        state[WAL_END] = max(state[WAL_END], _i64(buf, pos + 6))
        pos = stop
    return status, pos, rows, txs, controls


def index_frames(
    buf: Bytes, start: int, end: int, index: FrameIndex, state: Ints, *, streams: bool = False
) -> tuple[int, int, int, int, int]:
    """
    List the complete frames of ``buf[start:end]``.

    Returns (status, consumed, rows, transactions, controls) and updates ``state``.
    Malformed input raises; a frame that is not complete yet is left for the next call.
    """
    status, pos, rows, txs, controls = _index_frames(
        buf, start, end, 1 if streams else 0, state,
        index.row_kind, index.row_at, index.row_end, index.row_rel, index.row_tx, index.row_seq,
        index.row_xid, index.tx_lsn, index.tx_ts, index.tx_xid, index.tx_end, index.tx_rows,
        index.control_kind, index.control_at, index.control_end, index.control_rows, index.control_tx,
        index.control_seq,
    )  # fmt: skip
    if status == BAD:
        raise protocol_error(int(state[BAD_WHY]), int(state[BAD_AT]))
    return int(status), int(pos), int(rows), int(txs), int(controls)


@njit(cache=True, nogil=True)
def _tuple(buf, p, end, ncols, off, length, row):
    """Cells of one TupleData; returns the byte after it, or -(reason)."""
    if p + 2 > end:
        return -TRUNCATED
    if _u16(buf, p) != ncols:
        return -WIDTH
    p += 2
    for c in range(ncols):
        if p >= end:
            return -TRUNCATED
        kind = buf[p]
        p += 1
        if kind == TEXT_CELL or kind == BINARY_CELL:
            if p + 4 > end:
                return -TRUNCATED
            n = _u32(buf, p)
            p += 4
            if p + n > end:
                return -TRUNCATED
            off[c, row] = p
            length[c, row] = n
            p += n
        elif kind == NULL_CELL:
            off[c, row] = 0
            length[c, row] = NULL
        elif kind == UNCHANGED_CELL:
            off[c, row] = 0
            length[c, row] = UNCHANGED
        else:
            return -CELL
    return p


@njit(cache=True, nogil=True)
def _same(buf, a, alen, b, blen):
    if alen != blen:
        return False
    if alen <= 0:
        return True
    for i in range(alen):
        if buf[a + i] != buf[b + i]:
            return False
    return True


@njit(cache=True, nogil=True)
def _locate_cells(
    buf,
    rows,
    row_kind,
    row_at,
    row_end,
    ncols,
    key,
    n_off,
    n_len,
    o_off,
    o_len,
    op,
    old,
    key_changed,
    unchanged,
):
    """Fill cell offsets for the messages `rows`; returns (error reason, message offset, unchanged cells)."""
    cells_unchanged = 0
    for i in range(rows.size):
        m = rows[i]
        p = row_at[m]
        end = row_end[m]
        what = row_kind[m]
        old[i] = OLD_NONE
        key_changed[i] = 0
        unchanged[i] = 0
        for c in range(ncols):
            n_len[c, i] = ABSENT
            o_len[c, i] = ABSENT
        op[i] = OP_INSERT
        if what != INSERT:
            op[i] = OP_UPDATE if what == UPDATE else OP_DELETE
            mark = buf[p] if p < end else 0
            if mark == OLD_KEY_TUPLE or mark == OLD_TUPLE:
                old[i] = OLD_KEY if mark == OLD_KEY_TUPLE else OLD_FULL
                p = _tuple(buf, p + 1, end, ncols, o_off, o_len, i)
                if p < 0:
                    return -p, row_at[m], 0
                if mark == OLD_KEY_TUPLE:
                    for c in range(ncols):
                        if key[c] == 0:
                            o_len[c, i] = ABSENT
            elif what == DELETE:
                return TUPLE, row_at[m], 0
        if what != DELETE:
            if p >= end or buf[p] != NEW_TUPLE:
                return TUPLE, row_at[m], 0
            p = _tuple(buf, p + 1, end, ncols, n_off, n_len, i)
            if p < 0:
                return -p, row_at[m], 0
            for c in range(ncols):
                if n_len[c, i] == UNCHANGED:
                    if old[i] != OLD_NONE and o_len[c, i] >= NULL:
                        n_off[c, i] = o_off[c, i]
                        n_len[c, i] = o_len[c, i]
                    else:
                        unchanged[i] += 1
                        cells_unchanged += 1
            if what == UPDATE and old[i] != OLD_NONE:
                for c in range(ncols):
                    if key[c] != 0 and n_len[c, i] != UNCHANGED:
                        if not _same(buf, o_off[c, i], o_len[c, i], n_off[c, i], n_len[c, i]):
                            key_changed[i] = 1
        if p != end:
            return LEFTOVER, row_at[m], 0
    return OK, 0, cells_unchanged


@dataclass(slots=True)
class Cells:
    """Where the cells of some rows of one relation are; column-major."""

    op: npt.NDArray[np.int8]
    old: npt.NDArray[np.int8]
    key_changed: Bytes
    unchanged: npt.NDArray[np.int16]
    unchanged_total: int
    new_off: Ints
    new_len: Ints
    old_off: Ints
    old_len: Ints


def locate_cells(buf: Bytes, rows: Ints, index: FrameIndex, ncols: int, key: Bytes) -> Cells:
    n = rows.size
    shape = (ncols, n)
    cells = Cells(
        np.empty(n, np.int8), np.empty(n, np.int8), np.empty(n, np.uint8), np.empty(n, np.int16), 0,
        np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64),
    )  # fmt: skip
    why, at, unchanged = _locate_cells(
        buf, rows, index.row_kind, index.row_at, index.row_end, ncols, key,
        cells.new_off, cells.new_len, cells.old_off, cells.old_len,
        cells.op, cells.old, cells.key_changed, cells.unchanged,
    )  # fmt: skip
    if why:
        raise protocol_error(int(why), int(at))
    cells.unchanged_total = int(unchanged)
    return cells


@njit(cache=True, nogil=True)
def _measure(length, offsets):
    """Arrow offsets of a string column; returns the number of nulls."""
    total = 0
    nulls = 0
    offsets[0] = 0
    for i in range(length.size):
        n = length[i]
        if n >= 0:
            total += n
        else:
            nulls += 1
        offsets[i + 1] = total
    return nulls


@njit(cache=True, nogil=True)
def _copy_cells(buf, off, length, offsets, data, validity, nulls):
    for i in range(length.size):
        n = length[i]
        if n > 0:
            copy_bytes(buf, off[i], off[i] + n, data, offsets[i])
        if nulls > 0 and n >= 0:
            validity[i >> 3] |= np.uint8(1 << (i & 7))


def gather(buf: Bytes, off: Ints, length: Ints) -> tuple[npt.NDArray[Any], Bytes, Bytes | None, int]:
    """One column as Arrow buffers: (offsets, data, validity or None, null count)."""
    n = length.size
    offsets = np.empty(n + 1, np.int32)
    nulls = int(_measure(length, offsets))
    data = np.empty(int(offsets[n]), np.uint8)
    validity = np.zeros((n + 7) >> 3, np.uint8)
    _copy_cells(buf, off, length, offsets, data, validity, nulls)
    return offsets, data, (validity if nulls else None), nulls


@njit(cache=True, nogil=True)
def _unchanged_lists(length, counts, offsets, values):
    at = 0
    offsets[0] = 0
    for i in range(counts.size):
        if counts[i] > 0:
            for c in range(length.shape[0]):
                if length[c, i] == UNCHANGED:
                    values[at] = c
                    at += 1
        offsets[i + 1] = at


def unchanged_lists(cells: Cells) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
    """For each row the indexes of its unchanged cells, as Arrow list offsets and values."""
    offsets = np.empty(cells.op.size + 1, np.int32)
    values = np.empty(cells.unchanged_total, np.int16)
    _unchanged_lists(cells.new_len, cells.unchanged, offsets, values)
    return offsets, values
