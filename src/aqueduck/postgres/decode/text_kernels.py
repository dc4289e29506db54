"""
Read the lines of test_decoding, and write them as pgoutput's messages; numba kernels over the rows of a step.

    BEGIN 764
    table public.t: INSERT: id[integer]:1 "odd [name]"["odd type"[]]:'it''s' doc[text]:null
    table public.t: UPDATE: old-key: id[integer]:1 new-tuple: id[integer]:2 … doc[text]:unchanged-toast-datum
    table public.t: DELETE: id[integer]:2        (or: (no-tuple-data))
    table public.t, public.u: TRUNCATE: (no-flags)
    COMMIT 764 (at 2026-01-31 12:00:00.123456+00)

A line with an unknown table or unknown columns stops the kernel; `text_rows` looks them up and continues.  Names and types
are compared byte by byte.  Lines are checked before they are read: a malformed line is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from aqueduck.model.byte_copy import copy_bytes
from aqueduck.postgres.decode.pgoutput import (
    BEGIN,
    COMMIT,
    COPY_DATA,
    DELETE,
    INSERT,
    NEW_TUPLE,
    NULL_CELL,
    OLD_KEY_TUPLE,
    OLD_TUPLE,
    TEXT_CELL,
    TRUNCATE,
    UNCHANGED_CELL,
    UPDATE,
    XLOG_DATA,
    Bytes,
    _i64,
    _u32,
)

__all__ = ["TextTable", "TextTables", "commits", "frames", "parse_line", "parse_truncate", "walk"]

Ints = npt.NDArray[np.int64]
Texts = tuple[Bytes, Ints]
"""Texts one after the other, and the offset of each; the last number is the end."""

# what stopped `frames`
DONE, FULL, UNKNOWN, TRUNCATES, BAD = range(5)
# slots of its state
AT, TX, SKIP_TO, SKIPPING, LINE, LINE_END, LEARNT, OPEN = range(8)
STATE_SLOTS = 8
# what stopped the reading of a value or a tuple, instead of the offset after it
OTHER_COLUMNS, MALFORMED = -1, -2


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table that lines may name; without an OID if it is not wanted."""

    oid: int = 0
    full: bool = False
    types: bytes = b""
    """The types of a whole row in lines; empty before the first one."""
    columns: tuple[str, ...] = ()
    kept: tuple[bool, ...] = ()
    """The indexes of the columns in the rows that are written."""


class TextTables(dict[bytes, TextTable]):
    """Tables by their names in lines."""

    def describes(self, oid: int) -> bool:
        return any(table.oid == oid for table in self.values())

    def forget(self, oids: Collection[int]) -> None:
        for name in [name for name, table in self.items() if table.oid in oids]:
            del self[name]

    def arrays(self) -> tuple[Texts, Ints, Texts, Ints, Texts, Ints]:
        """For the kernel: names, facts, types and first columns of the tables; names and offsets of all columns."""
        facts = np.array([(t.oid, t.full, sum(t.kept)) for t in self.values()], np.int64).reshape(-1, 3)
        starts = np.cumsum([0, *(len(t.columns) for t in self.values())], dtype=np.int64)
        columns = [column.encode() for t in self.values() for column in t.columns]
        places = [np.where(t.kept, np.cumsum(t.kept) - 1, -1) for t in self.values() if t.kept]
        flat = np.concatenate(places).astype(np.int64) if places else np.empty(0, np.int64)
        types = _texts([t.types for t in self.values()])
        return _texts(list(self)), facts, types, starts, _texts(columns), flat


def _texts(texts: Sequence[bytes]) -> Texts:
    return np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)], dtype=np.int64)


@njit(cache=True, nogil=True)
def _walk(raw, pos, end):
    while pos + 5 <= end:
        if raw[pos] != COPY_DATA:
            return pos, True
        stop = pos + 1 + _u32(raw, pos + 1)
        if stop > end:
            break
        pos = stop
    return pos, False


def walk(raw: Bytes, start: int, end: int) -> tuple[int, bool]:
    """The end of the complete rows, and whether another message follows."""
    used, other = _walk(raw, start, end)
    return int(used), bool(other)


@njit(cache=True, nogil=True)
def _line(raw, pos):
    """The start of the line of the row at `pos`, and the end of the row; 0 for the trailer, -1 if malformed."""
    stop = pos + 1 + _u32(raw, pos + 1)
    p = pos + 5
    if stop > raw.size or stop < p:
        return -1, raw.size
    if stop - p >= 19 and raw[p] == 80:
        p += 19
    if stop - p == 2 and raw[p] == 255:
        return 0, stop
    if (
        stop - p < 19
        or raw[p] != 0
        or raw[p + 1] != 2
        or _u32(raw, p + 2) != 8
        or _u32(raw, p + 14) != stop - p - 18
    ):
        return -1, stop
    return p + 18, stop


@njit(cache=True, nogil=True)
def _number(raw, p, end):
    value = 0
    while p < end and 48 <= raw[p] <= 57:
        value = value * 10 + raw[p] - 48
        p += 1
    return value, p


@njit(cache=True, nogil=True)
def _commit_time(raw, a, b):
    """Microseconds since 2000 of the time in a COMMIT line, which is written in UTC."""
    p = a
    while p < b and raw[p] != 40:  # (
        p += 1
    p += 4  # (at_
    year, p = _number(raw, p, b)
    month, p = _number(raw, p + 1, b)
    day, p = _number(raw, p + 1, b)
    hour, p = _number(raw, p + 1, b)
    minute, p = _number(raw, p + 1, b)
    second, p = _number(raw, p + 1, b)
    fraction = 0
    digits = 0
    if p < b and raw[p] == 46:
        q = p + 1
        fraction, p = _number(raw, q, b)
        digits = p - q
    for _ in range(6 - digits):
        fraction *= 10
    y = year - 1 if month <= 2 else year  # days since 2000-03-01, with the leap day last
    m = month - 3 if month > 2 else month + 9
    days = 365 * y + y // 4 - y // 100 + y // 400 + (153 * m + 2) // 5 + day - 1 - 730425
    return (((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000_000 + fraction


@njit(cache=True, nogil=True)
def _commits(raw, out):
    n = 0
    pos = 0
    while pos + 5 <= raw.size:
        a, stop = _line(raw, pos)
        if a > 0 and stop - a > 7 and raw[a] == 67 and raw[a + 1] == 79:  # CO
            if n < out.shape[0]:
                out[n, 0] = _i64(raw, a - 12)
                out[n, 1] = _commit_time(raw, a, stop)
            n += 1
        pos = stop
    return n


def commits(raw: Bytes) -> Ints:
    """The end of each commit of a step, and its time, in order; lines do not contain where a transaction begins."""
    out = np.empty((int(_commits(raw, np.empty((0, 2), np.int64))), 2), np.int64)
    _commits(raw, out)
    return out


@njit(cache=True, nogil=True, inline="always")
def _put(out, at, value, n):
    for i in range(n):
        out[at + i] = (value >> (8 * (n - 1 - i))) & 255
    return at + n


@njit(cache=True, nogil=True)
def _name_end(raw, p, end):
    """The end of a name, that is, the next character that is not part of it; any part of the name may be quoted."""
    while p < end:
        c = raw[p]
        if c == 34:  # "
            p += 1
            while p < end and not (raw[p] == 34 and not (p + 1 < end and raw[p + 1] == 34)):
                p += 2 if raw[p] == 34 else 1
        elif c == 58 or c == 44 or c == 91:  # : , [
            return p
        p += 1
    return p


@njit(cache=True, nogil=True)
def _type_end(raw, p, end):
    """The offset after the closing bracket of a type that begins at `p`."""
    depth = 1
    while p < end:
        c = raw[p]
        if c == 34:
            p += 1
            while p < end and not (raw[p] == 34 and not (p + 1 < end and raw[p + 1] == 34)):
                p += 2 if raw[p] == 34 else 1
        elif c == 91:
            depth += 1
        elif c == 93:
            depth -= 1
            if depth == 0:
                return p + 1
        p += 1
    return p


@njit(cache=True, nogil=True)
def _same(raw, a, b, known, first, last):
    """Whether ``raw[a:b]`` is ``known[first:last]``."""
    if b - a != last - first:
        return False
    for i in range(b - a):
        if raw[a + i] != known[first + i]:
            return False
    return True


@njit(cache=True, nogil=True)
def _same_name(raw, a, b, known, first, last):
    """Whether a column's name is the known one, without its quotes: the server decides which names need them."""
    if raw[a] != 34:
        return _same(raw, a, b, known, first, last)
    p = a + 1
    while p < b - 1 and first < last:
        if raw[p] != known[first]:
            return False
        p += 2 if raw[p] == 34 else 1
        first += 1
    return p == b - 1 and first == last


@njit(cache=True, nogil=True)
def _value(raw, p, end, out, at, write):
    """Copy the value at `p` as a cell; returns (after the value, after the cell), or MALFORMED."""
    if p >= end:
        return MALFORMED, at
    quoted = p
    if raw[p] == 66 and p + 1 < end and raw[p + 1] == 39:  # B'…'
        quoted = p + 1
    if raw[quoted] == 39:
        q = quoted + 1
        cell = at + 5
        while True:
            if q >= end:
                return MALFORMED, at
            if raw[q] == 39:
                if q + 1 < end and raw[q + 1] == 39:
                    q += 1
                else:
                    break
            if write:
                out[cell] = raw[q]
            cell += 1
            q += 1
        if write:
            out[at] = TEXT_CELL
            _put(out, at + 1, cell - at - 5, 4)
        return q + 1, cell
    q = p
    while q < end and raw[q] != 32:
        q += 1
    n = q - p
    if n == 0:
        return MALFORMED, at
    if n == 4 and raw[p] == 110 and raw[p + 1] == 117:  # null
        if write:
            out[at] = NULL_CELL
        return q, at + 1
    if raw[p] == 117:  # unchanged-toast-datum
        if write:
            out[at] = UNCHANGED_CELL
        return q, at + 1
    if (n == 4 and raw[p] == 116) or (n == 5 and raw[p] == 102):  # true, false
        n = 1
    if write:
        out[at] = TEXT_CELL
        _put(out, at + 1, n, 4)
        copy_bytes(raw, p, p + n, out, at + 5)
    return q, at + 5 + n


@njit(cache=True, nogil=True)
def _tuple(raw, p, end, out, at, names, own, columns, places, kept, types, kinds, last_kind, whole, lenient):
    """
    The cells from `p` on, up to the end or to another tuple; returns (after them, after what was written).

    ``own[i]:own[i + 1]`` is where the name of column i is in `names`.  Of a `whole` row all columns are there, with the types that they
    had, ``types[kinds:last_kind]``; of an old image some are left out.
    OTHER_COLUMNS or MALFORMED as the first result says what is wrong.
    """
    at = _put(out, at, kept, 2)
    done = 0
    number = 0
    while p < end and raw[p] == 32 and not (end - p > 11 and raw[p + 1] == 110 and raw[p + 4] == 45):  # _new-
        a = p + 1
        b = _name_end(raw, a, end)
        if b >= end or raw[b] != 91:
            return MALFORMED, at
        value = _type_end(raw, b + 1, end)
        if value >= end or raw[value] != 58:
            return MALFORMED, at
        if whole:
            after_kind = kinds + value - b
            if number >= columns or not _same_name(raw, a, b, names, own[number], own[number + 1]):
                return OTHER_COLUMNS, at
            if after_kind > last_kind or not _same(raw, b, value, types, kinds, after_kind):
                return OTHER_COLUMNS, at
            kinds = after_kind
        else:
            place = number
            while place < columns and not _same_name(raw, a, b, names, own[place], own[place + 1]):
                place += 1
            if place < columns:
                number = place
            elif lenient:
                p, _ = _value(raw, value + 1, end, out, at, False)
                if p < 0:
                    return MALFORMED, at
                continue
            else:
                return OTHER_COLUMNS, at
        to = places[number]
        number += 1
        while to >= 0 and done < to:
            out[at] = NULL_CELL
            at += 1
            done += 1
        p, after = _value(raw, value + 1, end, out, at, to >= 0)
        if p < 0:
            return MALFORMED, at
        if to >= 0:
            at = after
            done += 1
    if whole and (number != columns or kinds != last_kind):
        return OTHER_COLUMNS, at
    while done < kept:
        out[at] = NULL_CELL
        at += 1
        done += 1
    return p, at


@njit(cache=True, nogil=True)
def _change(raw, a, end, out, at, heads, ends, facts, types, kinds, starts, names, own, places, lenient):
    """Write a line about rows as a message; returns (status, offset after it); DONE means success."""
    p = _name_end(raw, a + 6, end)
    if p >= end:
        return BAD, at
    if raw[p] == 44:  # ,
        return TRUNCATES, at
    if p + 10 >= end:
        return BAD, at
    op = raw[p + 2]
    if op == TRUNCATE:
        return TRUNCATES, at
    if op != INSERT and op != UPDATE and op != DELETE:
        return BAD, at
    t = 0
    while t < ends.size - 1 and not _same(raw, a + 6, p, heads, ends[t], ends[t + 1]):
        t += 1
    if t == ends.size - 1:
        return UNKNOWN, at
    if facts[t, 0] == 0:
        return DONE, at
    full, kept = facts[t, 1], facts[t, 2]
    columns = starts[t + 1] - starts[t]
    mine, to = own[starts[t] :], places[starts[t] : starts[t + 1]]
    first, last = kinds[t], kinds[t + 1]
    p += 9  # :_INSERT:
    if raw[p + 1] == 40:  # (no-tuple-data)
        return DONE, at
    start = at
    at += 30
    out[at] = op
    at = _put(out, at + 1, facts[t, 0], 4)
    if op == DELETE or (end - p > 9 and raw[p + 1] == 111 and raw[p + 4] == 45):  # _old-
        if op != DELETE:
            p += 9  # _old-key:
        out[at] = OLD_TUPLE if full else OLD_KEY_TUPLE
        p, at = _tuple(
            raw, p, end, out, at + 1, names, mine, columns, to, kept, types, first, last, False, lenient
        )
        if p < 0:
            return BAD if p == MALFORMED else UNKNOWN, start
        if op == UPDATE:
            p += 11  # _new-tuple:
            if p + 1 >= end:
                return BAD, start
            if raw[p + 1] == 40:
                return DONE, start
    if op != DELETE:
        out[at] = NEW_TUPLE
        p, at = _tuple(
            raw, p, end, out, at + 1, names, mine, columns, to, kept, types, first, last, True, lenient
        )
        if p < 0:
            return BAD if p == MALFORMED or lenient else UNKNOWN, start
    if p != end:
        return BAD, start
    _head(raw, a, out, start, at)
    return DONE, at


@njit(cache=True, nogil=True)
def _head(raw, a, out, start, at):
    """The header of the stream's message, with the row's position."""
    out[start] = COPY_DATA
    _put(out, start + 1, at - start - 1, 4)
    out[start + 5] = XLOG_DATA
    for i in range(8):
        out[start + 6 + i] = out[start + 14 + i] = raw[a - 12 + i]
        out[start + 22 + i] = 0


@njit(cache=True, nogil=True)
def _frames(raw, commits, out, state, heads, ends, facts, types, kinds, starts, names, own, places):
    at = 0
    widest = 0
    for t in range(ends.size - 1):
        widest = max(widest, starts[t + 1] - starts[t])
    while state[AT] + 5 <= raw.size:
        pos = state[AT]
        a, stop = _line(raw, pos)
        state[LINE], state[LINE_END] = a, stop
        if a <= 0:
            if a < 0:
                return BAD, at
            state[AT] = stop
            continue
        if at + 2 * (stop - a) + 128 + 4 * widest > out.size:
            return FULL, at
        what = raw[a]
        if what == BEGIN:
            tx = state[TX]
            if tx >= commits.shape[0] or state[OPEN] == 1:
                return BAD, at
            state[OPEN] = 1
            state[SKIPPING] = 1 if commits[tx, 0] <= state[SKIP_TO] else 0
            if state[SKIPPING] == 0:
                xid, _ = _number(raw, a + 6, stop)
                end = at + 30
                out[end] = BEGIN
                end = _put(out, end + 1, commits[tx, 0] - 1, 8)
                end = _put(out, end, commits[tx, 1], 8)
                end = _put(out, end, xid, 4)
                _head(raw, a, out, at, end)
                at = end
        elif what == COMMIT:
            tx = state[TX]
            if tx >= commits.shape[0] or state[OPEN] == 0:
                return BAD, at
            state[OPEN] = 0
            state[TX] += 1
            if state[SKIPPING] == 0:
                end = at + 30
                out[end] = COMMIT
                out[end + 1] = 0
                end = _put(out, end + 2, commits[tx, 0] - 1, 8)
                end = _put(out, end, commits[tx, 0], 8)
                end = _put(out, end, commits[tx, 1], 8)
                _head(raw, a, out, at, end)
                at = end
        elif what == 116:  # table
            if state[OPEN] == 0:
                return BAD, at
            if state[SKIPPING] == 0:
                lenient = state[LEARNT] == pos + 1
                status, at = _change(
                    raw,
                    a,
                    stop,
                    out,
                    at,
                    heads,
                    ends,
                    facts,
                    types,
                    kinds,
                    starts,
                    names,
                    own,
                    places,
                    lenient,
                )
                if status == UNKNOWN:
                    state[LEARNT] = pos + 1
                    return UNKNOWN, at
                if status == BAD:
                    return BAD, at
                if status == TRUNCATES:
                    state[AT] = stop
                    return TRUNCATES, at
        elif what != 109:  # message
            return BAD, at
        state[AT] = stop
    return DONE, at


def frames(raw: Bytes, commits: Ints, tables: TextTables, out: Bytes, state: Ints) -> tuple[int, int]:
    """Continue with the rows of a step; returns what stopped it, and the bytes written."""
    (heads, ends), facts, (types, kinds), starts, (names, own), places = tables.arrays()
    status, size = _frames(
        raw, commits, out, state, heads, ends, facts, types, kinds, starts, names, own, places
    )
    return int(status), int(size)


# -- lines that are read one by one, because they are rare


def parse_line(line: bytes) -> tuple[bytes, bytes, list[str]]:
    """The table of a line, and the columns of its whole row and their types, if it has one."""
    raw = np.frombuffer(line, np.uint8)
    end = len(line)
    p = int(_name_end(raw, 6, end))
    name, op, p = line[6:p], line[p + 2 : p + 3], p + 9
    columns: list[str] = []
    types = b""
    nowhere = np.empty(0, np.uint8)
    whole = op != b"D"
    if line[p : p + 9] == b" old-key:":
        p += 9
    while p < end and line[p : p + 1] == b" ":
        if line[p : p + 11] == b" new-tuple:":
            columns, types = [], b""
            p += 11
            continue
        b = int(_name_end(raw, p + 1, end))
        value = int(_type_end(raw, b + 1, end))
        columns.append(_unquoted(line[p + 1 : b]))
        types += line[b:value]
        p = int(_value(raw, value + 1, end, nowhere, 0, False)[0])
        if p < 0:
            break
    return name, types if whole else b"", columns


def parse_truncate(line: bytes) -> list[bytes]:
    """The tables in a line about a truncate."""
    raw = np.frombuffer(line, np.uint8)
    names = []
    p = 6
    while True:
        end = int(_name_end(raw, p, len(line)))
        names.append(line[p:end])
        if line[end : end + 1] != b",":
            return names
        p = end + 2


def _unquoted(name: bytes) -> str:
    """A name as the catalog has it."""
    text = name.decode()
    return text[1:-1].replace('""', '"') if text.startswith('"') else text
