"""
Convert PostgreSQL's text to JSON values, one cell at a time: numba kernels for `json_kernels`.

Each function writes at an offset of a buffer that is large enough.  It returns the offset behind the value, or -1 if the
text is not valid for the type.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from aqueduck.model.byte_copy import copy_bytes

__all__ = [
    "BOOL",
    "BYTES",
    "FLOAT",
    "INTEGER",
    "JSON",
    "NULL_WORD",
    "NUMERIC",
    "TEXT",
    "write_array",
    "write_hex",
    "write_number",
    "write_scalar",
]

# JSON kinds: how a cell's text is converted
TEXT, INTEGER, FLOAT, NUMERIC, BOOL, BYTES, JSON = range(7)

_HEX = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_HEX_LOWER = np.frombuffer(b"0123456789abcdef", np.uint8)
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
NULL_WORD = np.frombuffer(b"null", np.uint8)
_TRUE = np.frombuffer(b"true", np.uint8)
_FALSE = np.frombuffer(b"false", np.uint8)


@njit(cache=True, nogil=True)
def write_number(value, out, at):
    if value < 0:
        out[at] = 45
        at += 1
        value = -value
    left = np.uint64(value)
    ten = np.uint64(10)
    digits = 1
    power = ten
    while left >= power and digits < 19:
        digits += 1
        power *= ten
    for i in range(digits):
        rest = left // ten
        out[at + digits - 1 - i] = 48 + np.uint8(left - rest * ten)
        left = rest
    return at + digits


@njit(cache=True, nogil=True)
def write_hex(value, out, at):
    digits = 1
    while value >> (4 * digits) > 0:
        digits += 1
    for i in range(digits):
        out[at + i] = _HEX[(value >> (4 * (digits - 1 - i))) & 15]
    return at + digits


@njit(cache=True, nogil=True)
def _quoted(source, start, stop, clean, out, at):
    """Write a JSON string."""
    out[at] = 34
    at += 1
    if clean:
        at = copy_bytes(source, start, stop, out, at)
    else:
        for i in range(start, stop):
            c = source[i]
            if c >= 32 and c != 34 and c != 92:
                out[at] = c
                at += 1
                continue
            out[at] = 92
            short = np.uint8(0)
            if c == 34 or c == 92:
                short = c
            elif c == 10:
                short = np.uint8(110)
            elif c == 13:
                short = np.uint8(114)
            elif c == 9:
                short = np.uint8(116)
            elif c == 8:
                short = np.uint8(98)
            elif c == 12:
                short = np.uint8(102)
            if short != 0:
                out[at + 1] = short
                at += 2
            else:
                out[at + 1] = 117
                out[at + 2] = 48
                out[at + 3] = 48
                out[at + 4] = _HEX_LOWER[c >> 4]
                out[at + 5] = _HEX_LOWER[c & 15]
                at += 6
    out[at] = 34
    return at + 1


@njit(cache=True, nogil=True)
def _nibble(c):
    if 48 <= c <= 57:
        return np.int64(c) - 48
    if 97 <= c <= 102:
        return np.int64(c) - 87
    return np.int64(-1)


@njit(cache=True, nogil=True)
def _base64(source, start, stop, out, at):
    """Write hexadecimal bytea text as quoted base64; -1 if the text is not hexadecimal."""
    n = stop - start
    if n < 2 or n % 2 != 0 or source[start] != 92 or source[start + 1] != 120:
        return -1
    out[at] = 34
    at += 1
    bits = np.int64(0)
    have = 0
    p = start + 2
    while p < stop:
        high = _nibble(source[p])
        low = _nibble(source[p + 1])
        if high < 0 or low < 0:
            return -1
        bits = (bits << 8) | (high << 4) | low
        have += 1
        if have == 3:
            out[at] = _BASE64[(bits >> 18) & 63]
            out[at + 1] = _BASE64[(bits >> 12) & 63]
            out[at + 2] = _BASE64[(bits >> 6) & 63]
            out[at + 3] = _BASE64[bits & 63]
            at += 4
            bits = np.int64(0)
            have = 0
        p += 2
    if have == 1:
        out[at] = _BASE64[(bits >> 2) & 63]
        out[at + 1] = _BASE64[(bits << 4) & 63]
        out[at + 2] = 61
        out[at + 3] = 61
        at += 4
    elif have == 2:
        out[at] = _BASE64[(bits >> 10) & 63]
        out[at + 1] = _BASE64[(bits >> 4) & 63]
        out[at + 2] = _BASE64[(bits << 2) & 63]
        out[at + 3] = 61
        at += 4
    out[at] = 34
    return at + 1


@njit(cache=True, nogil=True)
def _integer(source, start, stop, out, at):
    first = start + 1 if start < stop and source[start] == 45 else start
    if first >= stop:
        return -1
    for i in range(first, stop):
        if source[i] < 48 or source[i] > 57:
            return -1
    return copy_bytes(source, start, stop, out, at)


@njit(cache=True, nogil=True)
def _named(source, start, stop):
    """Whether a number is NaN, Infinity or -Infinity, by its first letter."""
    first = start + 1 if start < stop and source[start] == 45 else start
    return first < stop and (source[first] == 78 or source[first] == 73)


@njit(cache=True, nogil=True)
def _is_decimal(source, start, stop):
    """Whether the text is a JSON number: digits, optionally a point and an exponent."""
    p = start + 1 if start < stop and source[start] == 45 else start
    begin = p
    while p < stop and 48 <= source[p] <= 57:
        p += 1
    if p == begin:
        return False
    if p < stop and source[p] == 46:
        p += 1
        begin = p
        while p < stop and 48 <= source[p] <= 57:
            p += 1
        if p == begin:
            return False
    if p < stop and (source[p] == 101 or source[p] == 69):
        p += 1
        if p < stop and (source[p] == 43 or source[p] == 45):
            p += 1
        begin = p
        while p < stop and 48 <= source[p] <= 57:
            p += 1
        if p == begin:
            return False
    return p == stop


@njit(cache=True, nogil=True)
def _json(source, start, stop, out, at):
    """Write JSON unchanged except for line breaks, which can only be between tokens."""
    depth = 0
    inside = False
    escaped = False
    content = False
    for i in range(start, stop):
        c = source[i]
        if inside:
            if c < 32:
                return -1
            if escaped:
                escaped = False
            elif c == 92:
                escaped = True
            elif c == 34:
                inside = False
        elif c == 34:
            inside = True
            content = True
        elif c == 123 or c == 91:
            depth += 1
            content = True
        elif c == 125 or c == 93:
            depth -= 1
            if depth < 0:
                return -1
        elif c == 10 or c == 13 or c == 9 or c == 32:
            c = np.uint8(32)
        elif c < 32:
            return -1
        else:
            content = True
        out[at] = c
        at += 1
    if inside or depth != 0 or not content:
        return -1
    return at


@njit(cache=True, nogil=True)
def write_scalar(kind, source, start, stop, clean, out, at):
    """Write one value; -1 if its text is not valid for the type."""
    if kind == TEXT:
        return _quoted(source, start, stop, clean, out, at)
    if kind == INTEGER:
        return _integer(source, start, stop, out, at)
    if kind == FLOAT:
        if _named(source, start, stop):
            return _quoted(source, start, stop, clean, out, at)
        if not _is_decimal(source, start, stop):
            return -1
        return copy_bytes(source, start, stop, out, at)
    if kind == NUMERIC:
        if not _named(source, start, stop) and not _is_decimal(source, start, stop):
            return -1
        return _quoted(source, start, stop, clean, out, at)
    if kind == BOOL:
        if stop - start != 1:
            return -1
        if source[start] == 116:
            return copy_bytes(_TRUE, 0, 4, out, at)
        if source[start] == 102:
            return copy_bytes(_FALSE, 0, 5, out, at)
        return -1
    if kind == BYTES:
        return _base64(source, start, stop, out, at)
    return _json(source, start, stop, out, at)


@njit(cache=True, nogil=True)
def _is_null_word(source, start, stop):
    return (
        stop - start == 4
        and (source[start] | 32) == 110
        and (source[start + 1] | 32) == 117
        and (source[start + 2] | 32) == 108
        and (source[start + 3] | 32) == 108
    )


@njit(cache=True, nogil=True)
def write_array(kind, source, start, stop, out, at, scratch):
    """Write an array literal as a JSON array; a multidimensional array stays text."""
    p = start
    if p < stop and source[p] == 91:  # [2:4]={…}: explicit bounds
        while p < stop and source[p] != 61:
            p += 1
        p += 1
    if p >= stop or source[p] != 123 or source[stop - 1] != 125:
        return -1
    p += 1
    if p < stop and source[p] == 123:
        return _quoted(source, start, stop, False, out, at)
    out[at] = 91
    at += 1
    last = stop - 1
    while p < last:
        n = 0
        quoted = source[p] == 34
        if quoted:
            p += 1
            while p < last and source[p] != 34:
                if source[p] == 92:
                    p += 1
                scratch[n] = source[p]
                n += 1
                p += 1
            if p >= last:
                return -1
            p += 1
        else:
            while p < last and source[p] != 44:
                if source[p] == 92:
                    p += 1
                scratch[n] = source[p]
                n += 1
                p += 1
        if not quoted and _is_null_word(scratch, 0, n):
            at = copy_bytes(NULL_WORD, 0, 4, out, at)
        else:
            at = write_scalar(kind, scratch, 0, n, False, out, at)
            if at < 0:
                return -1
        if p < last:
            if source[p] != 44 or p + 1 == last:
                return -1
            out[at] = 44
            at += 1
            p += 1
    out[at] = 93
    return at + 1
