"""
Decode `COPY … TO STDOUT` in text format into columns.

The text of a cell comes from the type's output function, as in pgoutput: a copy equals the stream because
both are the same text.  `index_rows()` walks one
buffer of CopyData frames; `locate_cells()` finds the cells of its rows and removes the escapes in
place.  `pgoutput.gather()` gathers a column.  Nothing here does I/O.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from aqueduck.postgres.decode.pgoutput import NULL, OK, TRUNCATED, WIDTH, Bytes, Ints, protocol_error

__all__ = ["index_rows", "locate_cells"]


@njit(cache=True, nogil=True)
def _index_rows(buf, end, row_at, row_end):
    """Payloads of the complete CopyData frames; returns (rows, consumed, other message next)."""
    rows = 0
    pos = 0
    while pos + 5 <= end:
        if buf[pos] != 100:
            return rows, pos, 1
        if rows >= row_at.size:
            return rows, pos, 0
        length = (
            (np.int64(buf[pos + 1]) << 24)
            | (np.int64(buf[pos + 2]) << 16)
            | (np.int64(buf[pos + 3]) << 8)
            | np.int64(buf[pos + 4])
        )
        stop = pos + 1 + length
        if stop > end:
            break
        row_at[rows] = pos + 5
        row_end[rows] = stop
        rows += 1
        pos = stop
    return rows, pos, 0


def index_rows(buf: Bytes, end: int, row_at: Ints, row_end: Ints) -> tuple[int, int, bool]:
    """List the rows in ``buf[:end]``: (rows, bytes consumed, whether another kind of message follows)."""
    rows, used, other = _index_rows(buf, end, row_at, row_end)
    return int(rows), int(used), bool(other)


@njit(cache=True, nogil=True)
def _unescape(c):
    if c == 98:
        return 8
    if c == 102:
        return 12
    if c == 110:
        return 10
    if c == 114:
        return 13
    if c == 116:
        return 9
    if c == 118:
        return 11
    return c


@njit(cache=True, nogil=True)
def _locate_cells(buf, rows, row_at, row_end, ncols, off, length):
    for r in range(rows):
        p = row_at[r]
        end = row_end[r] - 1  # the newline
        if end < p or buf[end] != 10:
            return TRUNCATED, p
        for c in range(ncols):
            start = p
            out = p
            if p + 1 < end + 1 and buf[p] == 92 and buf[p + 1] == 78:  # \N
                off[c, r] = 0
                length[c, r] = NULL
                p += 2
            else:
                while p < end and buf[p] != 9 and buf[p] != 92:
                    p += 1
                out = p
                while p < end and buf[p] != 9:
                    if buf[p] == 92:
                        p += 1
                        if p >= end:
                            return TRUNCATED, row_at[r]
                        buf[out] = _unescape(buf[p])
                    else:
                        buf[out] = buf[p]
                    out += 1
                    p += 1
                off[c, r] = start
                length[c, r] = out - start
            if c + 1 < ncols:
                if p >= end or buf[p] != 9:
                    return WIDTH, row_at[r]
                p += 1
        if p != end:
            return WIDTH, row_at[r]
    return OK, 0


def locate_cells(buf: Bytes, rows: int, row_at: Ints, row_end: Ints, ncols: int) -> tuple[Ints, Ints]:
    """Offsets and lengths of the cells, column-major; escapes are removed in `buf` itself."""
    off = np.empty((ncols, rows), np.int64)
    length = np.empty((ncols, rows), np.int64)
    why, at = _locate_cells(buf, rows, row_at, row_end, ncols, off, length)
    if why:
        raise protocol_error(int(why), int(at))
    return off, length
