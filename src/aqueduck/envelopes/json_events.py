"""
Convert staged segments to JSON events: select the JSON kind of each column and compile the program of each table.

`EventLines` converts record batches of a segment to lines, a chunk of rows at a time, with the kernels
of `json_kernels`.  `stretch_lines` merges the lines of several tables in the order of their changes.
`envelope` defines the form of events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from aqueduck.envelopes import json_kernels as kernels
from aqueduck.envelopes import json_values as values
from aqueduck.envelopes.envelope import (
    Envelope,
    EventKind,
    Placeholder,
    TemplatePart,
    envelope_template,
    truncate_event,
)
from aqueduck.model.changes import OLD_FULL, OP_UPDATE, SegmentRef
from aqueduck.model.errors import EventValueError, LakeWriteError
from aqueduck.model.schema import Column, TableSchema

__all__ = ["EventLines", "Lines", "json_kind", "segment_batches", "stretch_lines", "warm_up"]

CHUNK_BYTES = 2 << 20

BOOL, BYTEA, INT8, INT2, INT4, JSON, FLOAT4, FLOAT8, NUMERIC, JSONB = (
    16, 17, 20, 21, 23, 114, 700, 701, 1700, 3802,
)  # fmt: skip
_SCALARS = {
    BOOL: values.BOOL,
    BYTEA: values.BYTES,
    INT2: values.INTEGER,
    INT4: values.INTEGER,
    INT8: values.INTEGER,
    FLOAT4: values.FLOAT,
    FLOAT8: values.FLOAT,
    NUMERIC: values.NUMERIC,
    JSON: values.JSON,
    JSONB: values.JSON,
}

# Array types and the JSON kind of their elements; arrays of text, names, dates, times, uuid, addresses and bits
# have strings.  Arrays of other types, such as box with its semicolons, stay text.
_ARRAYS = {
    1000: values.BOOL, 1001: values.BYTES, 1005: values.INTEGER, 1007: values.INTEGER, 1016: values.INTEGER,
    1021: values.FLOAT, 1022: values.FLOAT, 1231: values.NUMERIC, 199: values.JSON, 3807: values.JSON,
    **dict.fromkeys(
        (1002, 1003, 1009, 1014, 1015, 1028, 1040, 1041, 651, 1115, 1182, 1183, 1185, 1187, 1270, 1561, 1563,
         2951, 143, 775, 791), values.TEXT),
}  # fmt: skip

_CODES = {
    Placeholder.LSN: kernels.LSN,
    Placeholder.LSN_NUMBER: kernels.LSN_NUMBER,
    Placeholder.TIME_MS: kernels.TIME_MS,
    Placeholder.TIME_US: kernels.TIME_US,
    Placeholder.XID: kernels.XID,
    Placeholder.SEQ: kernels.SEQ,
}
_AFTER, _BEFORE, _KEY_AFTER, _KEY_BEFORE = range(4)
_IMAGES = {
    Placeholder.AFTER: (kernels.IMAGE, _AFTER),
    Placeholder.BEFORE: (kernels.IMAGE, _BEFORE),
    Placeholder.AFTER_FIELDS: (kernels.FIELDS, _AFTER),
    Placeholder.BEFORE_FIELDS: (kernels.FIELDS, _BEFORE),
}


def json_kind(column: Column) -> int:
    """The JSON kind of a column, by which its text is converted."""
    if column.type_oid in _ARRAYS:
        return kernels.ARRAY + _ARRAYS[column.type_oid]
    return _SCALARS.get(column.type_oid, values.TEXT)


@dataclass(frozen=True, slots=True)
class Lines:
    """Events in order: their text, and for sinks that need them, their keys and names."""

    text: pa.Buffer
    ends: kernels.Ints
    lsn: kernels.Ints
    seq: kernels.Ints
    keys: kernels.Rendered | None = None

    @property
    def rows(self) -> int:
        return int(self.ends.size)


class EventLines:
    """Converts the changes of one table, under one version of its columns, to lines."""

    def __init__(
        self, table: TableSchema, envelope: Envelope, *, database: str = "", with_keys: bool = False
    ) -> None:
        self._table = table
        self._new = [f"n{i}" for i in range(len(table.columns))]
        key = [i for i, c in enumerate(table.columns) if c.name in table.key]
        old = list(range(len(table.columns))) if table.identity == "f" else key
        self._old = [f"o{i}" for i in old]
        columns = [*table.columns, *(table.columns[i] for i in old)]
        sets = {
            _AFTER: list(range(len(self._new))),
            _BEFORE: [len(self._new) + n for n in range(len(old))],
            _KEY_AFTER: key,
            _KEY_BEFORE: [len(self._new) + old.index(i) for i in key],
        }
        self._columns, self._sets = columns, sets
        templates = {
            kind: [*envelope_template(envelope, table, kind, database=database), "\n"] for kind in EventKind
        }
        self._program = self._compiled(templates)
        self._space: kernels.Bytes | None = None
        self._key_program = None
        if with_keys:
            programs = {kind: _key_steps(kind) if key else [] for kind in EventKind}
            self._key_program = _compile(programs, columns, sets)

    def _compiled(self, templates: Mapping[EventKind, Sequence[TemplatePart]]) -> kernels.Program:
        return _compile({k: _coded(s) for k, s in templates.items()}, self._columns, self._sets)

    def lines(self, batch: pa.RecordBatch, *, passing: bool = False) -> Iterator[tuple[Lines, kernels.Ints]]:
        """
        The batch's events and their order, in chunks that need little memory.

        With `passing`, a chunk is valid only until the next one is requested.
        """
        for at, step in self._chunks(batch):
            yield self._chunk(batch.slice(at, step), passing)

    def _chunks(self, batch: pa.RecordBatch) -> Iterator[tuple[int, int]]:
        if batch.num_rows:
            step = max(1, int(CHUNK_BYTES * batch.num_rows / max(1, batch.get_total_buffer_size())))
            yield from ((at, step) for at in range(0, batch.num_rows, step))

    def _chunk(self, batch: pa.RecordBatch, passing: bool) -> tuple[Lines, kernels.Ints]:
        cells = self._cells(batch)
        rendered = self._render(self._program, cells, self._space if passing else None)
        self._space = rendered.space
        keys = None if self._key_program is None else self._render(self._key_program, cells)
        lines = Lines(pa.py_buffer(rendered.text), rendered.ends, cells.lsn, cells.seq, keys)
        return lines, _numbers(batch, "_ord")

    def _render(
        self, program: kernels.Program, cells: kernels.Cells, space: kernels.Bytes | None = None
    ) -> kernels.Rendered:
        rendered = kernels.render(program, cells, space)
        if rendered.bad_column >= 0:
            names = [*self._new, *self._old]
            column = self._table.columns[int(names[rendered.bad_column][1:])]
            raise EventValueError(
                f"the text of column {column.name} is not valid for its type (OID {column.type_oid})",
                table=self._table.qualified,
            )
        return rendered

    def _cells(self, batch: pa.RecordBatch) -> kernels.Cells:
        rows = batch.num_rows
        op = _numbers(batch, "_op")
        old = _numbers(batch, "_old")
        names = [*self._new, *self._old]
        at = np.empty((len(names), rows + 1), np.int64)
        states = np.zeros((len(names), rows), np.uint8)
        texts = []
        base = 0
        for c, name in enumerate(names):
            array = batch.column(name)
            offsets, text = _strings(array)
            at[c] = offsets - (offsets[0] - base)
            if array.null_count:
                states[c] = array.is_null().to_numpy(zero_copy_only=False)
            texts.append(text[offsets[0] : offsets[-1]])
            base += int(offsets[-1] - offsets[0])
        self._mark_unchanged(batch, states)
        full = (op == OP_UPDATE) & (old == OLD_FULL)
        return kernels.Cells(
            np.concatenate(texts) if texts else np.empty(0, np.uint8),
            at,
            states,
            np.where(full, np.int8(EventKind.UPDATE_FULL), op).astype(np.int8),
            _numbers(batch, "_lsn"),
            _numbers(batch, "_ts"),
            _numbers(batch, "_xid"),
            _numbers(batch, "_seq"),
        )

    def _mark_unchanged(self, batch: pa.RecordBatch, states: kernels.Bytes) -> None:
        lists = batch.column("_unchanged")
        if lists.null_count == len(lists):
            return
        columns = lists.flatten().to_numpy(zero_copy_only=False)
        counts = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        states[columns, np.repeat(np.arange(batch.num_rows), counts)] = kernels.ABSENT


def stretch_lines(
    segments: Sequence[SegmentRef], envelope: Envelope, *, database: str = "", with_keys: bool = False
) -> Iterator[Lines]:
    """
    The events of segments that cover one stretch of the stream, in order.

    Events of a single table are yielded chunk by chunk.  Several tables are merged in memory, so a stretch must fit.
    """
    writers: dict[str, EventLines] = {}
    merged: list[tuple[Lines, kernels.Ints]] = []
    alone = len({(s.table_oid, s.version, s.kind) for s in segments}) == 1
    for segment in sorted(segments, key=lambda s: s.first_ord):
        if segment.kind == "truncate":
            merged.append(_truncate_line(segment, envelope, database=database, with_keys=with_keys))
            continue
        writer = writers.get(segment.schema_json)
        if writer is None:
            table = TableSchema.from_json(segment.schema_json)
            writer = EventLines(table, envelope, database=database, with_keys=with_keys)
            writers[segment.schema_json] = writer
        for batch in segment_batches(segment.path):
            for lines, ords in writer.lines(batch, passing=alone):
                if alone:
                    yield lines
                else:
                    merged.append((lines, ords))
    if merged:
        yield _merged(merged)


def _merged(pieces: list[tuple[Lines, kernels.Ints]]) -> Lines:
    rendered = [
        (kernels.Rendered(np.frombuffer(lines.text, np.uint8), lines.ends), ords) for lines, ords in pieces
    ]
    text, order = kernels.merge_lines(rendered)
    keys = None
    if pieces[0][0].keys is not None:
        keys, _ = kernels.merge_lines([(lines.keys, ords) for lines, ords in pieces if lines.keys])
    lsn = np.concatenate([lines.lsn for lines, _ in pieces])[order]
    seq = np.concatenate([lines.seq for lines, _ in pieces])[order]
    return Lines(pa.py_buffer(text.text), text.ends, lsn, seq, keys)


def _truncate_line(
    segment: SegmentRef, envelope: Envelope, *, database: str, with_keys: bool
) -> tuple[Lines, kernels.Ints]:
    table = TableSchema.from_json(segment.schema_json)
    event = truncate_event(
        envelope, table, lsn=segment.commit_lsn, time_us=segment.commit_ts, xid=segment.xid, seq=segment.seq,
        database=database,
    )  # fmt: skip
    text = f"{event}\n".encode()
    keys = kernels.Rendered(np.empty(0, np.uint8), np.zeros(1, np.int64)) if with_keys else None
    one = np.array
    lines = Lines(pa.py_buffer(text), one([len(text)]), one([segment.commit_lsn]), one([segment.seq]), keys)
    return lines, one([segment.first_ord])


# -- programs


def _coded(template: Sequence[TemplatePart]) -> list[tuple[int, int] | str]:
    coded: list[tuple[int, int] | str] = []
    for part in template:
        if isinstance(part, Placeholder):
            coded.append(_IMAGES[part] if part in _IMAGES else (_CODES[part], 0))
        elif coded and isinstance(coded[-1], str):
            coded[-1] += part
        else:
            coded.append(part)
    return coded


def _key_steps(kind: EventKind) -> list[tuple[int, int] | str]:
    return [(kernels.IMAGE, _KEY_BEFORE if kind is EventKind.DELETE else _KEY_AFTER)]


def _compile(
    programs: dict[EventKind, list[tuple[int, int] | str]],
    columns: Sequence[Column],
    sets: dict[int, list[int]],
) -> kernels.Program:
    steps: list[tuple[int, int]] = []
    literals: list[bytes] = []
    begin = np.zeros(max(EventKind) + 1, np.int64)
    end = np.zeros(max(EventKind) + 1, np.int64)
    for kind, program in programs.items():
        begin[kind] = len(steps)
        for step in program:
            if isinstance(step, str):
                steps.append((kernels.LITERAL, len(literals)))
                literals.append(step.encode())
            else:
                steps.append(step)
        end[kind] = len(steps)
    literal_text, literal_at = _joined(literals)
    names, name_at = _joined([json.dumps(c.name, ensure_ascii=False).encode() + b":" for c in columns])
    return kernels.Program(
        np.array(steps or [(0, 0)], np.int64).reshape(-1, 2),
        begin,
        end,
        literal_text,
        literal_at,
        np.array([c for n in sorted(sets) for c in sets[n]], np.int64),
        np.cumsum([0, *(len(sets[n]) for n in sorted(sets))]),
        names,
        name_at,
        np.array([json_kind(c) for c in columns], np.int64),
    )


def _joined(parts: Sequence[bytes]) -> tuple[kernels.Bytes, kernels.Ints]:
    text = np.frombuffer(b"".join(parts) or b"\0", np.uint8)
    return text, np.cumsum([0, *map(len, parts)])


# -- Arrow's buffers


def segment_batches(path: str) -> Iterator[pa.RecordBatch]:
    """The batches of a segment, memory-mapped: the stage is on a local or shared disk."""
    try:
        file = pa.memory_map(path)
    except OSError as exc:
        raise LakeWriteError("a staged segment is missing") from exc
    with file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _strings(array: pa.Array) -> tuple[Any, kernels.Bytes]:
    _, offsets, data = array.buffers()
    found = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return found, np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)


def _numbers(batch: pa.RecordBatch, name: str) -> Any:
    return batch.column(name).to_numpy(zero_copy_only=False)


def warm_up() -> None:
    """Compile the numba kernels, or load them from the cache, before the first change arrives."""
    column = Column("id", 25, -1)
    table = TableSchema(1, "public", "t", (column,), ("id",), "d")
    columns = {
        "_op": pa.array([1], pa.int8()), "_ord": pa.array([0], pa.int64()), "_lsn": pa.array([0], pa.int64()),
        "_seq": pa.array([0], pa.int64()), "_ts": pa.array([0], pa.int64()), "_xid": pa.array([0], pa.int64()),
        "_old": pa.array([0], pa.int8()), "_unchanged": pa.array([None], pa.list_(pa.int16())),
        "n0": pa.array(["x"]), "o0": pa.array([None], pa.string()),
    }  # fmt: skip
    pieces = list(EventLines(table, "default").lines(pa.RecordBatch.from_pydict(columns)))
    _merged([*pieces, *pieces])
