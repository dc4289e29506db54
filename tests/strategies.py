"""
Histories of changes for hypothesis, a replay that is too simple to be wrong, and their encoding as segments.

A history is legal: it inserts keys that are absent and touches keys that are present, as the
WAL of a table with a primary key does.  `replay` applies one change after the other to a dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
from hypothesis import strategies as st

from aqueduck.model.changes import OP_DELETE, OP_INSERT, OP_UPDATE, SegmentRef
from aqueduck.model.schema import Column, TableSchema

Row = tuple[str | None, ...]
Key = tuple[str | None, ...]
State = dict[Key, Row]

INT4, TEXT = 23, 25

#: Two key columns that are not the first ones, two columns that may be TOASTed; odd names on purpose.
TABLE = TableSchema(
    oid=16400,
    schema="public",
    name="things",
    columns=(
        Column("big", TEXT, -1),
        Column("Kind of", TEXT, -1, not_null=True),
        Column("n0", INT4, -1),
        Column("id", INT4, -1, not_null=True),
        Column("_ord", TEXT, -1),
    ),
    key=("id", "Kind of"),
    identity="d",
)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Change:
    """One change: the new row (unchanged cells are None), the old key where there is one."""

    op: int
    row: Row | None = None
    old_key: Key | None = None
    unchanged: tuple[int, ...] = ()
    commit: int | None = None
    """The number of its transaction; by default each change is one."""
    seq: int | None = None
    """Its place there."""


def key_of(row: Row, table: TableSchema = TABLE) -> Key:
    return tuple(row[i] for i in table.key_indexes)


def replay(stored: State, history: Iterable[Change], table: TableSchema = TABLE) -> State:
    """Apply the changes one by one."""
    state = dict(stored)
    for change in history:
        if change.op == OP_DELETE:
            assert change.old_key is not None
            del state[change.old_key]
            continue
        assert change.row is not None
        key = key_of(change.row, table)
        if change.op == OP_INSERT:
            assert key not in state
            state[key] = change.row
            continue
        before = state.pop(key if change.old_key is None else change.old_key)
        state[key] = tuple(before[i] if i in change.unchanged else cell for i, cell in enumerate(change.row))
    return state


keys = st.tuples(st.integers(0, 3).map(str), st.sampled_from(["a", "b'\\"]))
texts = st.one_of(st.none(), st.sampled_from(["", "x", "NULL", "\\N", "é🦆", "l" * 40]))
numbers = st.one_of(st.none(), st.integers(-5, 5).map(str))
unchanged_cells = st.sampled_from([(), (), (0,), (4,), (0, 4)])


@st.composite
def rows(draw: st.DrawFn, key: Key) -> Row:
    return (draw(texts), key[1], draw(numbers), key[0], draw(texts))


@st.composite
def states(draw: st.DrawFn) -> State:
    """Rows that a target holds."""
    return {key: draw(rows(key)) for key in draw(st.lists(keys, unique=True, max_size=5))}


@st.composite
def histories(draw: st.DrawFn, stored: State, *, size: int = 14) -> list[Change]:
    """Changes that are legal after `stored`."""
    state = dict(stored)
    history: list[Change] = []
    for _ in range(draw(st.integers(0, size))):
        change = draw(_next_change(state))
        state = replay(state, [change])
        history.append(change)
    return history


@st.composite
def _next_change(draw: st.DrawFn, state: State) -> Change:
    key = draw(keys)
    if key not in state:
        return Change(OP_INSERT, draw(rows(key)))
    what = draw(st.sampled_from(["update", "update", "delete", "move"]))
    if what == "delete":
        return Change(OP_DELETE, old_key=key)
    target = draw(keys) if what == "move" else key
    if target in state:
        target = key
    unchanged = draw(unchanged_cells)
    row = draw(rows(target))
    row = tuple(None if i in unchanged else cell for i, cell in enumerate(row))
    return Change(OP_UPDATE, row, key if target != key else None, unchanged)


def split(history: Sequence[Change], cuts: Iterable[int]) -> list[list[Change]]:
    """The history in pieces, none of them empty."""
    places = [0, *sorted(cut % (len(history) + 1) for cut in cuts), len(history)]
    return [list(history[a:b]) for a, b in itertools.pairwise(places) if a < b]


def time_of(commit: int) -> int:
    return commit * 1_000_000


def _lsn(change: Change, place: int) -> int:
    return 1000 + (place if change.commit is None else 10 * change.commit)


def segment_table(history: Sequence[Change], first_ord: int, table: TableSchema = TABLE) -> pa.Table:
    """The changes as capture stages them."""
    old_keys = [c.old_key for c in history]
    columns = {
        "_op": pa.array([c.op for c in history], pa.int8()),
        "_ord": pa.array([first_ord + 3 * i for i in range(len(history))], pa.int64()),
        "_lsn": pa.array([_lsn(c, i) for i, c in enumerate(history)], pa.int64()),
        "_seq": pa.array([i if c.seq is None else c.seq for i, c in enumerate(history)], pa.int64()),
        "_ts": pa.array([time_of(c.commit or 0) for c in history], pa.int64()),
        "_xid": pa.array([7] * len(history), pa.int64()),
        "_kc": pa.array([c.op == OP_UPDATE and c.old_key is not None for c in history], pa.bool_()),
        "_old": pa.array([0 if c.old_key is None else 1 for c in history], pa.int8()),
        "_unchanged": pa.array([list(c.unchanged) or None for c in history], pa.list_(pa.int16())),
    }
    for i in range(len(table.columns)):
        columns[f"n{i}"] = pa.array([c.row[i] if c.row else None for c in history], pa.string())
    for place, i in sorted((i, p) for p, i in enumerate(table.key_indexes)):
        columns[f"o{place}"] = pa.array([k[i] if k else None for k in old_keys], pa.string())
    return pa.table(columns)


def write_segment(
    directory: Path,
    history: Sequence[Change],
    first_ord: int,
    table: TableSchema = TABLE,
    *,
    batch_rows: int = 3,
) -> SegmentRef:
    """Stage the changes as one segment of several record batches."""
    path = directory / f"{next(_numbers):06d}.arrow"
    data = segment_table(history, first_ord, table)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, data.schema) as writer:
        for batch in data.to_batches(max_chunksize=batch_rows):
            writer.write_batch(batch)
    ops = [c.op for c in history]
    return SegmentRef(
        table_oid=table.oid,
        version=1,
        kind="rows",
        path=str(path),
        rows=len(history),
        bytes=data.nbytes,
        inserts=ops.count(OP_INSERT),
        updates=ops.count(OP_UPDATE),
        deletes=ops.count(OP_DELETE),
        key_changes=sum(c.op == OP_UPDATE and c.old_key is not None for c in history),
        unchanged=sum(bool(c.unchanged) for c in history),
        first_ord=first_ord,
        last_lsn=1 + max(_lsn(c, i) for i, c in enumerate(history)),
        last_ts=0,
        schema_json=table.to_json(),
    )


def stage(
    directory: Path,
    history: Sequence[Change],
    first_ord: int = 5,
    table: TableSchema = TABLE,
    *,
    pieces: int = 2,
) -> list[SegmentRef]:
    """Stage the changes as up to `pieces` segments, in order."""
    size = max(1, -(-len(history) // pieces))
    refs = []
    for start in range(0, len(history), size):
        part = history[start : start + size]
        refs.append(write_segment(directory, part, first_ord + 3 * start, table))
    return refs


def truncate_before(segment: SegmentRef, *, lsn: int = 999, time_us: int = 0) -> SegmentRef:
    """A truncate that comes right before a segment."""
    return replace(
        segment, kind="truncate", path="", rows=0, bytes=0, inserts=0, updates=0, deletes=0, key_changes=0,
        unchanged=0, first_ord=segment.first_ord - 1, commit_lsn=lsn, commit_ts=time_us,
    )  # fmt: skip
