"""
Staged changes as rows, for users' queries (the Spark format `postgres_cdc`) and for tables of events.

`change_rows` returns the same columns for all tables: both images of a row as JSON, or the event in an envelope.
`table_rows` returns the columns of one table with their types.  A `CommitRange` restricts both to changes
whose transaction committed in the range.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aqueduck.envelopes import json_kernels as kernels
from aqueduck.envelopes.envelope import (
    Envelope,
    EventKind,
    Placeholder,
    TemplatePart,
    envelope_template,
    truncate_event,
)
from aqueduck.envelopes.json_events import EventLines, segment_batches
from aqueduck.lake.fold.fold_tasks import task_engine
from aqueduck.lake.fold.segments import Scans
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import ident, literal, string_list
from aqueduck.lake.values.spark_cells import spark_type
from aqueduck.model.changes import OP_DELETE, SegmentRef
from aqueduck.model.columns.typemap import cast_sql, lake_type
from aqueduck.model.schema import TableSchema

__all__ = ["CHANGE_SCHEMA", "EVENT_SCHEMA", "TABLE_META", "CommitRange", "change_rows", "table_rows"]

BATCH_ROWS = 8192
_TIME = pa.timestamp("us", tz="UTC")

_PLACE = [
    ("op", pa.string()), ("schema", pa.string()), ("table", pa.string()), ("lsn", pa.int64()),
    ("commit_lsn", pa.int64()), ("commit_time", _TIME), ("xid", pa.int64()), ("seq", pa.int64()),
]  # fmt: skip
CHANGE_SCHEMA = pa.schema([*_PLACE, ("before", pa.string()), ("after", pa.string())])
EVENT_SCHEMA = pa.schema([*_PLACE, ("key", pa.string()), ("value", pa.string())])
TABLE_META = pa.schema(
    [("_op", pa.string()), ("_commit_lsn", pa.int64()), ("_commit_time", _TIME), ("_seq", pa.int64()),
     ("_unchanged", pa.list_(pa.string()))]
)  # fmt: skip
"""Columns that `table_rows` adds to the table's own."""

_WORDS = pa.array(["", "insert", "update", "delete"])
_BEFORE: dict[EventKind, list[TemplatePart]] = {
    EventKind.INSERT: [],
    EventKind.UPDATE: [],
    EventKind.DELETE: [Placeholder.BEFORE],
    EventKind.UPDATE_FULL: [Placeholder.BEFORE],
}
_AFTER: dict[EventKind, list[TemplatePart]] = {
    EventKind.INSERT: [Placeholder.AFTER],
    EventKind.UPDATE: [Placeholder.AFTER],
    EventKind.DELETE: [],
    EventKind.UPDATE_FULL: [Placeholder.AFTER],
}


@dataclass(frozen=True, slots=True)
class CommitRange:
    """Transactions whose commit record is at or after `first` and before `end`."""

    first: int
    end: int

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        lsn = batch.column("_lsn")
        return batch.filter(pc.and_(pc.greater_equal(lsn, self.first), pc.less(lsn, self.end)))


# -- one shape for all tables


def change_rows(
    segments: Sequence[SegmentRef], span: CommitRange | None, envelope: Envelope | None, database: str = ""
) -> Iterator[pa.RecordBatch]:
    """
    The changes of segments that cover one stretch of the stream, in order.

    Changes of a single table are yielded chunk by chunk.  Several tables are merged in memory, so a stretch must fit.
    """
    pieces = _pieces(segments, span, envelope, database)
    if len({(s.table_oid, s.version, s.kind) for s in segments}) == 1:
        for batch in pieces:
            yield batch.select(batch.schema.names[:-1])
        return
    found = list(pieces)
    if found:
        merged = pa.Table.from_batches(found).combine_chunks().sort_by("_ord")
        yield from merged.drop_columns(["_ord"]).to_batches(max_chunksize=BATCH_ROWS)


def _pieces(
    segments: Sequence[SegmentRef], span: CommitRange | None, envelope: Envelope | None, database: str
) -> Iterator[pa.RecordBatch]:
    writers: dict[str, _ChangeRows] = {}
    for segment in sorted(segments, key=lambda s: s.first_ord):
        if segment.kind == "truncate":
            yield _truncate_row(segment, envelope, database)
            continue
        writer = writers.get(segment.schema_json)
        if writer is None:
            writer = _ChangeRows(TableSchema.from_json(segment.schema_json), envelope, database)
            writers[segment.schema_json] = writer
        for batch in segment_batches(segment.path):
            yield from writer.rows(batch if span is None else span.of(batch))


class _ChangeRows(EventLines):
    """Converts the changes of one table, under one version of its columns, to rows."""

    def __init__(self, table: TableSchema, envelope: Envelope | None, database: str) -> None:
        super().__init__(table, envelope or "default", database=database, with_keys=True)
        if envelope is None:
            self._texts = (self._compiled(_BEFORE), self._compiled(_AFTER))
        else:
            templates = {k: envelope_template(envelope, table, k, database=database) for k in EventKind}
            assert self._key_program is not None
            self._texts = (self._key_program, self._compiled(templates))
        self._schema = _with_order(envelope)

    def rows(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for at, step in self._chunks(batch):
            yield self._rows(batch.slice(at, step))

    def _rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        cells = self._cells(batch)
        texts = [_text_array(self._render(program, cells)) for program in self._texts]
        rows = batch.num_rows
        columns = [
            _WORDS.take(batch.column("_op")),
            pa.repeat(self._table.schema, rows),
            pa.repeat(self._table.name, rows),
            batch.column(
                "_at" if "_at" in batch.schema.names else "_lsn"
            ),  # only `cdc_capture` stages the LSN of each change
            batch.column("_lsn"),
            batch.column("_ts").cast(_TIME),
            batch.column("_xid"),
            batch.column("_seq"),
            *texts,
            batch.column("_ord"),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _with_order(envelope: Envelope | None) -> pa.Schema:
    return (CHANGE_SCHEMA if envelope is None else EVENT_SCHEMA).append(pa.field("_ord", pa.int64()))


def _text_array(rendered: kernels.Rendered) -> pa.Array:
    """Concatenated texts as a column; an empty text, which is not JSON, becomes NULL."""
    rows = rendered.ends.size
    offsets = np.zeros(rows + 1, np.int32)
    offsets[1:] = rendered.ends
    valid = pa.array(np.diff(offsets) > 0)
    buffers = [valid.buffers()[1], pa.py_buffer(offsets), pa.py_buffer(rendered.text)]
    return pa.Array.from_buffers(pa.string(), rows, buffers, -1)


def _truncate_row(segment: SegmentRef, envelope: Envelope | None, database: str) -> pa.RecordBatch:
    table = TableSchema.from_json(segment.schema_json)
    value = None
    if envelope is not None:
        value = truncate_event(
            envelope, table, lsn=segment.commit_lsn, time_us=segment.commit_ts, xid=segment.xid, seq=segment.seq,
            database=database,
        )  # fmt: skip
    row = [
        "truncate", table.schema, table.name, segment.commit_lsn, segment.commit_lsn, segment.commit_ts,
        segment.xid, segment.seq, None, value, segment.first_ord,
    ]  # fmt: skip
    schema = _with_order(envelope)
    arrays = [pa.array([cell], field.type) for cell, field in zip(row, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# -- one table with its types


def table_rows(
    segments: Sequence[SegmentRef], span: CommitRange | None, columns: Sequence[tuple[str, str]]
) -> Iterator[pa.RecordBatch]:
    """
    The changes of one table, in order; `columns` are names and DuckDB types and may include those of `TABLE_META`.

    An update that changes the key becomes two rows: a delete of the old key and an update of the new one.
    A delete has only the columns of the old image.
    """
    for run in _runs(segments):
        if run[0].kind == "truncate":
            yield _truncated(run[0], columns)
            continue
        table = TableSchema.from_json(run[0].schema_json)
        first, end = (0, None) if span is None else (span.first, span.end)
        with (
            task_engine("", len(table.columns)) as con,
            contextlib.closing(Scans(con, run, first, end)) as scans,
            lake_errors("reading changes", table=table.qualified),
        ):
            con.execute("set arrow_lossless_conversion = false")
            names = _scanned(table)
            query = _select(table, columns, scans.scan(names), key_changes=False)
            if any(s.key_changes for s in run):
                more = _select(table, columns, scans.scan(names), key_changes=True)
                query = (
                    f"select * exclude (_ord, _place) from ({query} union all {more}) order by _ord, _place"
                )
            else:
                query = f"select * exclude (_ord, _place) from ({query})"
            yield from con.execute(query).to_arrow_reader(BATCH_ROWS)


def _runs(segments: Sequence[SegmentRef]) -> list[list[SegmentRef]]:
    """Group segments that can be read together: one version of the columns, no truncate in between."""
    runs: list[list[SegmentRef]] = []
    for segment in sorted(segments, key=lambda s: s.first_ord):
        same = runs and (segment.kind, segment.schema_json) == (runs[-1][0].kind, runs[-1][0].schema_json)
        if same and segment.kind == "rows":
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def _old_columns(table: TableSchema) -> list[int]:
    return list(range(len(table.columns))) if table.identity == "f" else list(table.key_indexes)


def _scanned(table: TableSchema) -> list[str]:
    cells = [f"n{i}" for i in range(len(table.columns))] + [f"o{i}" for i in _old_columns(table)]
    return ["_op", "_ord", "_lsn", "_seq", "_ts", "_kc", "_unchanged", *cells]


def _select(table: TableSchema, columns: Sequence[tuple[str, str]], scan: str, *, key_changes: bool) -> str:
    """A query for the changes, or with `key_changes` for the deletes of keys that updates replaced."""
    old = _old_columns(table)
    full = table.identity == "f"
    texts = []
    for i in range(len(table.columns)):
        if key_changes:
            text = f"o{i}" if i in old else "null::varchar"
        elif i in old:
            unchanged = f" or list_contains(_unchanged, {i}::smallint)" if full else ""
            text = f"case when _op = {OP_DELETE}{unchanged} then o{i} else n{i} end"
        else:
            text = f"n{i}"
        texts.append(f"{text} as t{i}")
    places = {c.name: i for i, c in enumerate(table.columns)}
    cells = ", ".join(
        f"cast({_cell(table, places, name, full, key_changes)} as {kind}) as {ident(name)}"
        for name, kind in columns
    )
    inner = f"select _op, _ord, _lsn, _seq, _ts, _unchanged, {', '.join(texts)} from {scan}"
    condition = " where _kc" if key_changes else ""
    return f"select {cells}, _ord, {0 if key_changes else 1} as _place from ({inner}{condition})"


def _cell(table: TableSchema, places: dict[str, int], name: str, full: bool, key_changes: bool) -> str:
    if name in places:
        column = table.columns[places[name]]
        kind, value = lake_type(column), cast_sql(column, f"t{places[name]}")
        return value if spark_type(kind) == kind else f"cast({value} as {spark_type(kind)})"
    if name == "_op":
        return "'delete'" if key_changes else "['insert', 'update', 'delete'][_op]"
    if name == "_commit_time":
        return "make_timestamptz(_ts)"
    if name == "_unchanged":
        names = string_list(c.name for c in table.columns)
        none = full or key_changes
        return "null" if none else f"list_transform(_unchanged, lambda i: {names}[i + 1])"
    return {"_commit_lsn": "_lsn", "_seq": "_seq"}.get(name, "null")


def _truncated(segment: SegmentRef, columns: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    values = {
        "_op": "'truncate'",
        "_commit_lsn": literal(segment.commit_lsn),
        "_commit_time": f"make_timestamptz({segment.commit_ts})",
        "_seq": literal(segment.seq),
    }
    cells = ", ".join(
        f"cast({values.get(name, 'null')} as {kind}) as {ident(name)}" for name, kind in columns
    )
    with task_engine("", len(columns)) as con:
        con.execute("set arrow_lossless_conversion = false")
        [batch] = con.execute(f"select {cells}").to_arrow_reader(1)
        return batch
