"""
Decode `COPY … TO STDOUT (FORMAT binary)` into typed columns.

For types whose binary form has the lake's value in other bytes, converting through text costs more
than the rest of a copy.  `BINARY` lists them; a column of another type is requested as text.
The results equal those of the text, value for value; a test compares the two for
every type.  `copytext` is the same for text.  Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

from aqueduck.model.byte_copy import copy_bytes
from aqueduck.model.columns.typemap import decimal_digits
from aqueduck.model.schema import Column
from aqueduck.postgres.decode.binary_numerics import decode_decimals
from aqueduck.postgres.decode.pgoutput import NULL, OK, TRUNCATED, WIDTH, Bytes, Ints, gather, protocol_error
from aqueduck.postgres.session.quoting import identifier

__all__ = ["BINARY", "binary_type", "cells_of", "column_sql", "decode_column", "skip_header"]

SIGNATURE = b"PGCOPY\n\xff\r\n\0"

JSON = pa.json_(pa.string())
UUID = pa.uuid()

#: by the type's OID: its Arrow type; `binary_type` adds decimals
BINARY: dict[int, pa.DataType] = {
    16: pa.bool_(),
    21: pa.int16(),
    23: pa.int32(),
    20: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    25: pa.string(),
    1043: pa.string(),
    1042: pa.string(),
    17: pa.binary(),
    2950: UUID,
    3802: JSON,  # of jsonb; the text of a json is not always valid for DuckDB
    1083: pa.time64("us"),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
}
_INTS = {2: np.int16, 4: np.int32, 8: np.int64}
_INT64_DIGITS = 18
_DAYS, _MICROSECONDS = 10_957, 946_684_800_000_000  # from 1970, Arrow's epoch, to 2000


def binary_type(column: Column) -> pa.DataType | None:
    """The Arrow type that `decode_column` returns for a column, or None if it is sent as text."""
    digits = decimal_digits(column)
    if digits is not None:
        return pa.decimal64(*digits) if digits[0] <= _INT64_DIGITS else pa.decimal128(*digits)
    return BINARY.get(column.base_oid or column.type_oid)


def column_sql(column: Column) -> str:
    """What to select: the column if its type is listed, otherwise the text of its output function."""
    name = identifier(column.name)
    if binary_type(column) is not None:
        return name
    return f"case when {name} is distinct from null then pg_catalog.concat({name}) end"


def skip_header(buf: Bytes, row_at: Ints, row_end: Ints) -> None:
    """Move the start of the first frame past the header."""
    at = int(row_at[0])
    if int(row_end[0]) - at < 19 or buf[at : at + 11].tobytes() != SIGNATURE:
        raise protocol_error(TRUNCATED, at)
    row_at[0] = at + 19 + int.from_bytes(buf[at + 15 : at + 19].tobytes(), "big")


@njit(cache=True, nogil=True)
def _cells(buf, rows, row_at, row_end, ncols, off, length):
    """Returns (error, place, rows without the trailer)."""
    for r in range(rows):
        p = row_at[r]
        end = row_end[r]
        if end - p < 2:
            return TRUNCATED, p, 0
        count = (np.int64(buf[p]) << 8) | np.int64(buf[p + 1])
        p += 2
        if count == 0xFFFF:
            return (OK if p == end and r == rows - 1 else TRUNCATED), row_at[r], r
        if count != ncols:
            return WIDTH, row_at[r], 0
        for c in range(ncols):
            if end - p < 4:
                return TRUNCATED, row_at[r], 0
            n = (
                (np.int64(buf[p]) << 24)
                | (np.int64(buf[p + 1]) << 16)
                | (np.int64(buf[p + 2]) << 8)
                | np.int64(buf[p + 3])
            )
            p += 4
            if n == 0xFFFFFFFF:
                off[c, r] = 0
                length[c, r] = NULL
            else:
                if end - p < n:
                    return TRUNCATED, row_at[r], 0
                off[c, r] = p
                length[c, r] = n
                p += n
        if p != end:
            return WIDTH, row_at[r], 0
    return OK, 0, rows


def cells_of(buf: Bytes, rows: int, row_at: Ints, row_end: Ints, ncols: int) -> tuple[Ints, Ints]:
    """Offsets and lengths of the cells, column-major; the trailer, if it is among the frames, is not a row."""
    off = np.empty((ncols, rows), np.int64)
    length = np.empty((ncols, rows), np.int64)
    why, at, found = _cells(buf, rows, row_at, row_end, ncols, off, length)
    if why:
        raise protocol_error(int(why), int(at))
    return off[:, :found], length[:, :found]


@njit(cache=True, nogil=True)
def _ints(buf, off, length, out, validity):
    """Integers, or any bytes of that width; returns the number of nulls, -1 for a cell of another width."""
    nulls = 0
    width = out.itemsize
    for i in range(length.size):
        n = length[i]
        if n == width:
            value = np.int64(0)
            for b in range(width):
                value = (value << 8) | np.int64(buf[off[i] + b])
            out[i] = value
            validity[i >> 3] |= np.uint8(1 << (i & 7))
        elif n == NULL:
            out[i] = 0
            nulls += 1
        else:
            return -1
    return nulls


@njit(cache=True, nogil=True)
def _bits(buf, off, length, out, validity):
    nulls = 0
    for i in range(length.size):
        n = length[i]
        if n == 1:
            if buf[off[i]] != 0:
                out[i >> 3] |= np.uint8(1 << (i & 7))
            validity[i >> 3] |= np.uint8(1 << (i & 7))
        elif n == NULL:
            nulls += 1
        else:
            return -1
    return nulls


@njit(cache=True, nogil=True)
def _fixed(buf, off, length, width, out, validity):
    nulls = 0
    for i in range(length.size):
        n = length[i]
        if n == width:
            copy_bytes(buf, off[i], off[i] + n, out, i * width)
            validity[i >> 3] |= np.uint8(1 << (i & 7))
        elif n == NULL:
            nulls += 1
        else:
            return -1
    return nulls


@njit(cache=True, nogil=True)
def _behind_version(buf, off, length, text_off, text_length):
    """A jsonb is a format number, then text; raises unless the number is the known one."""
    for i in range(length.size):
        n = length[i]
        if n == 0 or (n > 0 and buf[off[i]] != 1):
            return False
        text_off[i] = off[i] + 1
        text_length[i] = n - 1 if n > 0 else n
    return True


@njit(cache=True, nogil=True)
def _from_1970(values, shift, least, most):
    """Count from 1970, in place; values outside the lake's type become infinity, as for their text."""
    for i in range(values.size):
        v = values[i]
        if v > most - shift:
            values[i] = most
        elif v == least:  # PostgreSQL's -infinity; the lake's is larger by one
            values[i] = least + 1
        else:
            values[i] = v + shift


def decode_column(buf: Bytes, off: Ints, length: Ints, kind: pa.DataType | None) -> pa.Array:
    """One column; `kind` is the result of `binary_type`."""
    if kind is None or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _texts(buf, off, length, kind or pa.string())
    if kind == JSON:
        text_off, text_length = np.empty_like(off), np.empty_like(length)
        if not _behind_version(buf, off, length, text_off, text_length):
            raise protocol_error(WIDTH, 0)
        return _texts(buf, text_off, text_length, pa.string()).cast(kind)
    rows = length.size
    validity = np.zeros((rows + 7) >> 3, np.uint8)
    out: Any
    if pa.types.is_boolean(kind):
        out = np.zeros((rows + 7) >> 3, np.uint8)
        nulls = int(_bits(buf, off, length, out, validity))
    elif kind == UUID:
        out = np.zeros(16 * rows, np.uint8)
        nulls = int(_fixed(buf, off, length, 16, out, validity))
    elif pa.types.is_decimal(kind):
        out, nulls = decode_decimals(buf, off, length, kind, validity)
    else:
        out = np.empty(rows, _INTS[kind.bit_width // 8])
        nulls = int(_ints(buf, off, length, out, validity))
    if nulls < 0:
        raise protocol_error(WIDTH, 0)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        limits = np.iinfo(out.dtype)
        _from_1970(out, _DAYS if pa.types.is_date(kind) else _MICROSECONDS, limits.min, limits.max)
    buffers = [pa.py_buffer(validity) if nulls else None, pa.py_buffer(out)]
    stored = kind.storage_type if kind == UUID else kind
    found = pa.Array.from_buffers(stored, rows, buffers, nulls)
    return found.cast(kind) if kind == UUID else found


def _texts(buf: Bytes, off: Ints, length: Ints, kind: pa.DataType) -> pa.Array:
    offsets, data, known, nulls = gather(buf, off, length)
    some = None if known is None else pa.py_buffer(known)
    return pa.Array.from_buffers(kind, length.size, [some, pa.py_buffer(offsets), pa.py_buffer(data)], nulls)


def decode_rows(
    buf: Bytes, rows: int, row_at: Ints, row_end: Ints, kinds: Sequence[pa.DataType | None]
) -> pa.RecordBatch:
    """Frames of rows as columns named n0, n1 and so on."""
    off, length = cells_of(buf, rows, row_at, row_end, len(kinds))
    arrays = [decode_column(buf, off[i], length[i], kind) for i, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(arrays, names=[f"n{i}" for i in range(len(kinds))])
