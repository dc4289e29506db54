"""
Fold a few changes without the engine: planning its statements costs more than folding them.

The rules are those of `fold`, and a property test compares the two.  Cells stay PostgreSQL's text; the engine
casts them when they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from aqueduck.lake.session.storage import open_input
from aqueduck.model.changes import OP_DELETE, OP_INSERT, SegmentRef
from aqueduck.model.columns.projection import filters_rows
from aqueduck.model.errors import LakeWriteError
from aqueduck.model.schema import TableSchema
from aqueduck.model.visibility import Visibility, visibility_of

__all__ = ["SMALL_ROWS", "SmallEffect", "is_small", "small_effect"]

SMALL_ROWS = 500
"""The most changes of a run that are folded here; for more, the engine is as fast."""

_PRESENT, _FRESH = 1, 2


@dataclass(frozen=True, slots=True)
class SmallEffect:
    """The net effect of a run, as text: the final rows (n0, n1, …), and the keys to delete first (k0, k1, …)."""

    rows: pa.Table
    keys: pa.Table


def is_small(segments: Sequence[SegmentRef], schema: TableSchema) -> bool:
    """Whether a run can be folded here: a few changes of a table with a key, all of whose values were sent."""
    projection = schema.streamed.projection
    return (
        bool(schema.key)
        and (projection is None or not (projection.changes_columns or filters_rows(schema)))
        and sum(s.rows for s in segments) <= SMALL_ROWS
        and not any(s.unchanged for s in segments)
    )


def small_effect(
    segments: Sequence[SegmentRef],
    schema: TableSchema,
    skip_before: int | Visibility = 0,
    skip_from: int | Visibility | None = None,
) -> SmallEffect:
    """The net effect of a run for which `is_small` holds."""
    rows = [s for s in segments if s.kind == "rows"]
    table = _read(rows, schema, skip_before, skip_from)
    if any(s.updates or s.deletes for s in rows):
        live, gone = _net(table, schema.key_indexes)
        table = table.take(pa.array(live, pa.int64()))
    else:
        gone = []
    names = [f"n{i}" for i in range(len(schema.columns))]
    keys = [pa.array([key[i] for key in gone], pa.string()) for i in range(len(schema.key))]
    return SmallEffect(table.select(names), pa.table(keys, [f"k{i}" for i in range(len(keys))]))


def _read(
    segments: Sequence[SegmentRef],
    schema: TableSchema,
    skip_before: int | Visibility,
    skip_from: int | Visibility | None,
) -> pa.Table:
    names = ["_op", "_ord", "_kc", *(f"n{i}" for i in range(len(schema.columns)))]
    names += [f"o{k}" for k in schema.key_indexes]
    tables = []
    for segment in segments:
        with _opened(segment.path) as file:
            table = pa.ipc.open_file(file).read_all()
        if skip_before:
            table = _filtered(table, skip_before, shown=False)
        if skip_from is not None:
            table = _filtered(table, skip_from, shown=True)
        tables.append(table.select(names))
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def _opened(path: str) -> pa.NativeFile:
    try:
        return open_input(path)
    except OSError as exc:
        raise LakeWriteError("a staged segment is missing") from exc


def _filtered(table: pa.Table, position: int | Visibility, *, shown: bool) -> pa.Table:
    masks = [visibility_of(position).mask(batch) for batch in table.to_batches()]
    mask = pa.chunked_array(masks, pa.bool_())
    return table.filter(mask if shown else pc.invert(mask))


def _net(table: pa.Table, key: Sequence[int]) -> tuple[list[int], list[tuple[Any, ...]]]:
    """The places of the rows that exist afterwards, and the keys that the target may have."""
    after = list(zip(*(table.column(f"n{k}").to_pylist() for k in key), strict=True))
    before = list(zip(*(table.column(f"o{k}").to_pylist() for k in key), strict=True))
    ops, moved = table.column("_op").to_pylist(), table.column("_kc").to_pylist()
    moves = any(moved)
    first: dict[tuple[Any, ...], int] = {}
    last: dict[tuple[Any, ...], int] = {}
    for place, op in enumerate(ops):
        if op == OP_DELETE or (moves and moved[place]):
            code = place << 2
            first.setdefault(before[place], code)
            last[before[place]] = max(code, last.get(before[place], 0))
        if op != OP_DELETE:
            fresh = op == OP_INSERT or moved[place]
            code = place << 2 | _PRESENT | (_FRESH if fresh else 0)
            first.setdefault(after[place], code)
            last[after[place]] = code
    live = sorted(code >> 2 for code in last.values() if code & _PRESENT)
    return live, [k for k, code in first.items() if not code & _FRESH]
