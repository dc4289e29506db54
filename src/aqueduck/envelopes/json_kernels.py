"""
Write changes as JSON text: numba kernels over the cells of a segment.

`render()` runs a small *program* for each row: literals, the row's position and time, and images (sets
of columns).  `json_events` builds the programs, which define the form of an event.  `json_values` writes
single values.  The kernels have no state.  Text that is not valid for its type is reported by column and never shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from aqueduck.envelopes.json_values import (
    NULL_WORD,
    write_array,
    write_hex,
    write_number,
    write_scalar,
)
from aqueduck.model.byte_copy import copy_bytes

__all__ = [
    "ARRAY",
    "FIELDS",
    "IMAGE",
    "LITERAL",
    "LSN",
    "LSN_NUMBER",
    "SEQ",
    "TIME_MS",
    "TIME_US",
    "XID",
    "Cells",
    "Program",
    "Rendered",
    "merge_lines",
    "render",
]

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

ARRAY = 16  # added to the JSON kind of the elements

# steps of a program
LITERAL, LSN, LSN_NUMBER, TIME_MS, TIME_US, XID, SEQ, IMAGE, FIELDS = range(9)

# the state of a cell, besides its text
VALUE, NULL, ABSENT = range(3)

_UNCHANGED = np.frombuffer(b'"__unchanged_toast__":[', np.uint8)

# The most bytes that one byte of text can become: \u00xx.
_GROWTH = 6
_CELL_EXTRA = 8  # a comma, quotes, `null`
_STEP_EXTRA = 40  # a position or a time


@dataclass(frozen=True, slots=True)
class Program:
    """The steps for each variant of a row, and the data that they refer to."""

    steps: Ints  # (code, argument)
    variant_from: Ints
    variant_to: Ints
    literals: Bytes
    literal_at: Ints
    sets: Ints  # columns of all sets, concatenated
    set_at: Ints
    names: Bytes  # "name": of each column
    name_at: Ints
    kinds: Ints


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of some rows, and the other values that a program needs of a row."""

    text: Bytes
    at: Ints  # [column, row]: offset in `text`; one more entry than rows
    states: Bytes  # [column, row]: VALUE, NULL or ABSENT
    variant: npt.NDArray[np.int8]
    lsn: Ints
    time_us: Ints
    xid: Ints
    seq: Ints

    @property
    def rows(self) -> int:
        return int(self.variant.size)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Concatenated lines; `ends` has the end of each."""

    text: Bytes
    ends: Ints
    bad_column: int = -1
    """The column whose text is not valid for its type, or -1."""
    space: Bytes | None = None
    """The buffer that contains `text`."""


@njit(cache=True, nogil=True)
def _clean(text, start, stop):
    """Whether no text of a column needs an escape."""
    column = text[start:stop]
    found = 0
    for i in range(column.size):
        c = column[i]
        found += (c < 32) | (c == 34) | (c == 92)
    return found == 0


@njit(cache=True, nogil=True)
def _fields(
    columns, first, stop, row, names, name_at, kinds, clean, text, at, states, out, place, scratch
):  # fmt: skip
    """Write the columns of one image with a comma after each; returns (end, invalid column or -1)."""
    absent = 0
    for k in range(first, stop):
        c = columns[k]
        state = states[c, row]
        if state == ABSENT:
            absent += 1
            continue
        place = copy_bytes(names, name_at[c], name_at[c + 1], out, place)
        if state == NULL:
            place = copy_bytes(NULL_WORD, 0, 4, out, place)
        else:
            begin = at[c, row]
            end = at[c, row + 1]
            if kinds[c] >= ARRAY:
                place = write_array(kinds[c] - ARRAY, text, begin, end, out, place, scratch)
            else:
                place = write_scalar(kinds[c], text, begin, end, clean[c], out, place)
            if place < 0:
                return place, c
        out[place] = 44
        place += 1
    if absent > 0:
        place = copy_bytes(_UNCHANGED, 0, _UNCHANGED.size, out, place)
        for k in range(first, stop):
            c = columns[k]
            if states[c, row] == ABSENT:
                place = copy_bytes(names, name_at[c], name_at[c + 1] - 1, out, place)
                out[place] = 44
                place += 1
        out[place - 1] = 93
        out[place] = 44
        place += 1
    return place, -1


@njit(cache=True, nogil=True)
def _render(
    steps, variant_from, variant_to, literals, literal_at, sets, set_at, names, name_at, kinds,
    text, at, states, variant, lsn, time_us, xid, seq, out, ends, scratch,
):  # fmt: skip
    rows = variant.size
    clean = np.empty(kinds.size, np.bool_)
    for c in range(kinds.size):
        clean[c] = _clean(text, at[c, 0], at[c, rows])
    place = 0
    known_time, known_at, known_end = np.int64(-1), 0, 0  # most rows have the same time as the previous one
    for i in range(rows):
        for s in range(variant_from[variant[i]], variant_to[variant[i]]):
            code = steps[s, 0]
            arg = steps[s, 1]
            if code == LITERAL:
                place = copy_bytes(literals, literal_at[arg], literal_at[arg + 1], out, place)
            elif code == LSN:
                place = write_hex(lsn[i] >> 32, out, place)
                out[place] = 47
                place = write_hex(lsn[i] & 0xFFFFFFFF, out, place + 1)
            elif code == LSN_NUMBER:
                place = write_number(lsn[i], out, place)
            elif code == TIME_MS:
                if time_us[i] == known_time:
                    place = copy_bytes(out, known_at, known_end, out, place)
                else:
                    known_time, known_at = time_us[i], place
                    place = known_end = write_number(time_us[i] // 1000, out, place)
            elif code == TIME_US:
                place = write_number(time_us[i], out, place)
            elif code == XID:
                place = write_number(xid[i], out, place)
            elif code == SEQ:
                place = write_number(seq[i], out, place)
            else:
                if code == IMAGE:
                    out[place] = 123
                    place += 1
                begin = place
                place, bad = _fields(
                    sets, set_at[arg], set_at[arg + 1], i, names, name_at, kinds, clean, text, at, states,
                    out, place, scratch,
                )  # fmt: skip
                if bad >= 0:
                    return place, bad
                if place > begin:
                    place -= 1  # the last comma
                if code == IMAGE:
                    out[place] = 125
                    place += 1
        ends[i] = place
    return place, -1


def render(program: Program, cells: Cells, space: Bytes | None = None) -> Rendered:
    """Run the program for every row; write into `space` if it is large enough, which avoids page faults."""
    rows = cells.rows
    widest = int(np.max(program.variant_to - program.variant_from))
    fixed = widest * _STEP_EXTRA + program.literals.size + 2 * program.names.size + 64
    fixed += _CELL_EXTRA * program.kinds.size
    most = rows * fixed + _GROWTH * cells.text.size
    out = space if space is not None and space.size >= most else np.empty(most, np.uint8)
    ends = np.empty(rows, np.int64)
    longest = int(np.max(np.diff(cells.at, axis=1), initial=0))
    p = program
    end, bad = _render(
        p.steps, p.variant_from, p.variant_to, p.literals, p.literal_at, p.sets, p.set_at, p.names, p.name_at,
        p.kinds, cells.text, cells.at, cells.states, cells.variant, cells.lsn, cells.time_us, cells.xid, cells.seq,
        out, ends, np.empty(longest + 1, np.uint8),
    )  # fmt: skip
    return Rendered(out[: max(int(end), 0)], ends, int(bad), out)


@njit(cache=True, nogil=True)
def _gather(text, starts, stops, order, out, ends):
    place = 0
    for k in range(order.size):
        i = order[k]
        place = copy_bytes(text, starts[i], stops[i], out, place)
        ends[k] = place


def merge_lines(pieces: list[tuple[Rendered, Ints]]) -> tuple[Rendered, Ints]:
    """Merge lines of several tables in the order of their changes; also returns that order as indexes."""
    order = np.argsort(np.concatenate([ords for _, ords in pieces]), kind="stable")
    if len(pieces) == 1:
        return pieces[0][0], order
    text = np.concatenate([r.text for r, _ in pieces])
    bases = np.cumsum([0, *(r.text.size for r, _ in pieces[:-1])])
    stops = np.concatenate([r.ends + base for (r, _), base in zip(pieces, bases, strict=True)])
    starts = np.concatenate([_starts(r.ends) + base for (r, _), base in zip(pieces, bases, strict=True)])
    out = np.empty(text.size, np.uint8)
    ends = np.empty(order.size, np.int64)
    _gather(text, starts, stops, order, out, ends)
    return Rendered(out, ends), order


def _starts(ends: Any) -> Any:
    starts = np.empty_like(ends)
    if ends.size:
        starts[0] = 0
        starts[1:] = ends[:-1]
    return starts
