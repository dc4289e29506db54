"""
Convert PostgreSQL's binary numerics to the lake's decimals: integers without the decimal point.

A numeric is groups of four decimal digits, the power of 10 000 of the first group, and a sign.  Nothing is rounded: a
number that does not fit its column's type is an error.  NaN becomes null, as for its text.  Nothing here does I/O.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

from aqueduck.postgres.decode.pgoutput import Bytes, Ints

__all__ = ["decode_decimals"]

_NAN, _NEGATIVE = 0xC000, 0x4000
_IS_NULL, _IS_NONE = -2, -1


def decode_decimals(
    buf: Bytes, off: Ints, length: Ints, kind: pa.DataType, validity: Bytes
) -> tuple[Any, int]:
    """The numbers and the count of nulls; -1 if a cell is not a number of that type."""
    most = 10**kind.precision - 1
    if pa.types.is_decimal64(kind):
        out = np.empty(length.size, np.int64)
        return out, int(_decimals(buf, off, length, kind.scale, most, out, validity))
    out = np.empty(2 * length.size, np.int64)
    parts = np.array([most >> 32 * j & 0xFFFFFFFF for j in range(4)], np.int64)
    return out, int(_long_decimals(buf, off, length, kind.scale, parts, out, validity))


@njit(cache=True, nogil=True, inline="always")
def _short(buf, p):
    return (np.int64(buf[p]) << 8) | np.int64(buf[p + 1])


@njit(cache=True, nogil=True)
def _head(buf, p, n, whole, digits):
    """Of a cell: its groups of digits (or its kind), how many come before a group of only `digits`, and whether it is negative."""
    if n == -1:
        return _IS_NULL, 0, False
    if n < 8:
        return _IS_NONE, 0, False
    groups, weight, sign = _short(buf, p), _short(buf, p + 2), _short(buf, p + 4)
    if sign == _NAN:
        return _IS_NULL, 0, False
    before = (weight - 0x10000 if weight >= 0x8000 else weight) + whole + 1
    if n != 8 + 2 * groups or (sign != 0 and sign != _NEGATIVE) or groups > max(before + (digits > 0), 0):
        return _IS_NONE, 0, False
    return groups, before, sign == _NEGATIVE


@njit(cache=True, nogil=True, inline="always")
def _group(buf, p, groups, k):
    return _short(buf, p + 8 + 2 * k) if 0 <= k < groups else np.int64(0)


@njit(cache=True, nogil=True)
def _decimals(buf, off, length, scale, most, out, validity):
    """Numbers up to `most`."""
    whole, digits = scale // 4, scale % 4  # after the decimal point: groups, and the digits of one more
    power, cut = 10**digits, 10 ** (4 - digits)
    nulls = 0
    for i in range(length.size):
        out[i] = 0
        p = off[i]
        groups, before, negative = _head(buf, p, length[i], whole, digits)
        if groups == _IS_NULL:
            nulls += 1
            continue
        if groups == _IS_NONE:
            return -1
        value = np.int64(0)
        for k in range(before):
            if value > most // 10_000:
                return -1
            value = value * 10_000 + _group(buf, p, groups, k)
        if digits > 0:
            four = _group(buf, p, groups, before)
            if value > most // power or four % cut != 0:
                return -1
            value = value * power + four // cut
        if value > most:
            return -1
        out[i] = -value if negative else value
        validity[i >> 3] |= np.uint8(1 << (i & 7))
    return nulls


@njit(cache=True, nogil=True, inline="always")
def _times_plus(parts, factor, more, most):
    """In place; returns whether the result is at most `most`."""
    for j in range(4):
        product = parts[j] * factor + more
        parts[j] = product & 0xFFFFFFFF
        more = product >> 32
    for j in (3, 2, 1, 0):
        if parts[j] != most[j]:
            return more == 0 and parts[j] < most[j]
    return more == 0


@njit(cache=True, nogil=True)
def _long_decimals(buf, off, length, scale, most, out, validity):
    """Numbers up to `most`: computed in four parts of 32 bits, returned as two of 64."""
    whole, digits = scale // 4, scale % 4
    power, cut = 10**digits, 10 ** (4 - digits)
    parts = np.empty(4, np.int64)
    nulls = 0
    for i in range(length.size):
        out[2 * i] = 0
        out[2 * i + 1] = 0
        p = off[i]
        groups, before, negative = _head(buf, p, length[i], whole, digits)
        if groups == _IS_NULL:
            nulls += 1
            continue
        if groups == _IS_NONE:
            return -1
        parts[:] = 0
        for k in range(before):
            if not _times_plus(parts, 10_000, _group(buf, p, groups, k), most):
                return -1
        if digits > 0:
            four = _group(buf, p, groups, before)
            if four % cut != 0 or not _times_plus(parts, power, four // cut, most):
                return -1
        low = parts[0] | (parts[1] << 32)
        high = parts[2] | (parts[3] << 32)
        if negative:
            low = -low
            high = ~high + (low == 0)
        out[2 * i] = low
        out[2 * i + 1] = high
        validity[i >> 3] |= np.uint8(1 << (i & 7))
    return nulls
