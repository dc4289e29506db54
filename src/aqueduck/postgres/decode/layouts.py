"""
Layouts: a table at one version of its columns, and the columns of its segments.

The catalog's description and the stream's are combined here (`merged`); pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from aqueduck.model.columns.projection import blank_columns
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.decode.pgoutput import Bytes
from aqueduck.postgres.decode.pgoutput_messages import WireColumn, WireRelation

__all__ = ["Layout", "make_layout", "merged", "segment_schema"]

FIRST_USER_OID = 16384

OWN_LSN = pa.field("_at", pa.int64(), nullable=False)
"""The position of a row's own message, for flows whose batches may begin and end within a transaction."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A table at one schema version, and the Arrow schema of its segments."""

    table: TableSchema
    version: int
    arrow: pa.Schema
    key_mask: Bytes
    """Indexes in the columns of the stream."""
    old_columns: tuple[int, ...]
    sent: tuple[int, ...]
    """The positions of the table's columns in the stream: a projection may need only some of them."""
    blank: frozenset[int] = frozenset()
    """Columns whose values are not needed, and which are left empty."""


def segment_schema(table: TableSchema, old_columns: tuple[int, ...]) -> pa.Schema:
    fields = [
        pa.field("_op", pa.int8(), nullable=False),
        pa.field("_ord", pa.int64(), nullable=False),
        pa.field("_lsn", pa.int64(), nullable=False),
        pa.field("_seq", pa.int64(), nullable=False),
        pa.field("_ts", pa.int64(), nullable=False),
        pa.field("_xid", pa.int64(), nullable=False),
        pa.field("_kc", pa.bool_(), nullable=False),
        pa.field("_old", pa.int8(), nullable=False),
        pa.field("_unchanged", pa.list_(pa.int16())),
    ]
    fields += [pa.field(f"n{i}", pa.string()) for i in range(len(table.columns))]
    fields += [pa.field(f"o{i}", pa.string()) for i in old_columns]
    return pa.schema(fields)


def make_layout(
    table: TableSchema, version: int, streamed: TableSchema | None = None, *, own_lsn: bool = False
) -> Layout:
    """`streamed` is the table as the stream has it, if that has more columns."""
    names = [c.name for c in table.columns]
    full = table.identity == "f"
    old = tuple(i for i, name in enumerate(names) if full or name in table.key)
    places = {c.name: i for i, c in enumerate((streamed or table).columns)}
    mask = np.array([name in table.key for name in places], np.uint8)
    sent = tuple(places[name] for name in names)
    arrow = segment_schema(table, old)
    arrow = arrow.append(OWN_LSN) if own_lsn else arrow
    return Layout(table, version, arrow, mask, old, sent, frozenset(blank_columns(table)))


def _same_type(column: Column, wired: WireColumn) -> bool:
    # The catalog describes a domain with its base type's modifier, the stream with none.
    typmod = -1 if column.base_oid else column.typmod
    return (column.type_oid, typmod) == (wired.type_oid, wired.typmod)


def merged(
    known: TableSchema,
    relation: WireRelation,
    resolve: Callable[[Column], Column],
    keyed: Callable[[TableSchema], bool],
) -> TableSchema:
    """
    The catalog's description, updated with the stream's.

    With a full identity, the stream does not contain which columns are the key, or whether there still is one: `keyed` says so.
    """
    by_name = {c.name: c for c in known.columns}
    columns = []
    for wired in relation.columns:
        column = by_name.get(wired.name)
        if column is None or not _same_type(column, wired):
            column = Column(wired.name, wired.type_oid, wired.typmod)
            if column.type_oid >= FIRST_USER_OID:
                column = resolve(column)
        columns.append(column)
    names = {c.name for c in columns}
    if relation.identity == "f":
        key = known.key if known.key and set(known.key) <= names and keyed(known) else ()
    else:
        key = tuple(c.name for c in relation.columns if c.is_key)
    return replace(
        known,
        schema=relation.schema,
        name=relation.name,
        columns=tuple(columns),
        key=key,
        identity=relation.identity,
    )
