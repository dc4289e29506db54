"""
Turn buffers of replication frames into Arrow record batches, one table at a time.

`Decoder.decode()` takes the bytes that `wire` read and returns *runs*: ordered pieces of
the stream (rows of one table, a truncate, a commit).  The decoder remembers the
relations it was told about and the transaction it is in; nothing else.  Parsing bytes is
in `pgoutput`, what becomes of the runs is up to `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aqueduck.errors import ProtocolError
from aqueduck.postgres import pgoutput as wireformat
from aqueduck.postgres import pgoutput_messages as messages
from aqueduck.projection import blank_columns
from aqueduck.schema import Column, TableSchema

FIRST_USER_OID = 16384
_RELATION, _TRUNCATE = ord("R"), ord("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """A table at one schema version, and the Arrow schema of its segments."""

    table: TableSchema
    version: int
    arrow: pa.Schema
    key_mask: wireformat.Bytes
    """By the columns of the stream, like all that is read of it."""
    old_columns: tuple[int, ...]
    sent: tuple[int, ...]
    """Where the table's columns are among those of the stream: a projection may need only some."""
    blank: frozenset[int] = frozenset()
    """Columns whose values nobody needs, and that are left empty."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Changes of one table, in stream order."""

    layout: Layout
    batch: pa.RecordBatch
    inserts: int
    updates: int
    deletes: int
    key_changes: int
    unchanged: int
    first_ord: int


@dataclass(frozen=True, slots=True)
class Truncate:
    layout: Layout
    ord: int
    lsn: int = 0
    time_us: int = 0
    xid: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything before this belongs to transactions that ended at or before `position`."""

    position: int
    time_us: int
    transactions: int


Run = Rows | Truncate | Commit


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


def make_layout(table: TableSchema, version: int, streamed: TableSchema | None = None) -> Layout:
    """`streamed` is the table as the stream has it, where that has more columns."""
    names = [c.name for c in table.columns]
    full = table.identity == "f"
    old = tuple(i for i, name in enumerate(names) if full or name in table.key)
    places = {c.name: i for i, c in enumerate((streamed or table).columns)}
    mask = np.array([name in table.key for name in places], np.uint8)
    sent = tuple(places[name] for name in names)
    return Layout(
        table, version, segment_schema(table, old), mask, old, sent, frozenset(blank_columns(table))
    )


class Decoder:
    """
    Decodes the stream of one slot.

    `tables` are the tables we want, as the catalog describes them: rows of others are
    skipped, and keys of tables with a full replica identity come from here (the wire
    marks all their columns as key).  `more` is asked again when the stream describes one that is not
    among them: it may have been added meanwhile.  `resolve` completes a column that the catalog did not
    have like this: what lies below a type that is not built in is not on the wire.  `settle` does the same for a table with
    a projection, and may leave out columns that nobody needs; without it, the driver has to find out which column is which.
    """

    def __init__(
        self,
        tables: Mapping[int, TableSchema],
        *,
        first_ord: int = 0,
        more: Callable[[], Mapping[int, TableSchema]] | None = None,
        resolve: Callable[[Column], Column] = lambda column: column,
        settle: Callable[[TableSchema], TableSchema] = lambda table: table.settled(None),
        first_version: int = 0,
    ) -> None:
        self._known = dict(tables)
        self._more = more
        self._resolve = resolve
        self._settle = settle
        self._layouts: dict[int, Layout | None] = {}
        self._index = wireformat.FrameIndex.allocate()
        self._state = np.zeros(wireformat.STATE_SLOTS, np.int64)
        self.next_ord = first_ord
        self.next_version = first_version

    @property
    def wal_end(self) -> int:
        """The server's position as of the last frame."""
        return int(self._state[wireformat.WAL_END])

    @property
    def in_transaction(self) -> bool:
        return bool(self._state[wireformat.IN_TX])

    def take_reply_request(self) -> bool:
        """Whether the server asked for a status update since the last call."""
        asked = bool(self._state[wireformat.REPLY])
        self._state[wireformat.REPLY] = 0
        return asked

    def decode(self, buf: wireformat.Bytes, end: int) -> tuple[list[Run], int, bool]:
        """
        Decode the complete frames of ``buf[:end]``.

        Returns the runs, how many bytes were used, and whether a message that is not
        CopyData stands next (the connection's business, not ours).
        """
        runs: list[Run] = []
        at = 0
        while True:
            status, at, rows, txs, controls = wireformat.index_frames(buf, at, end, self._index, self._state)
            runs.extend(self._runs(buf, rows, txs, controls))
            if status != wireformat.FULL:
                return runs, at, status == wireformat.OTHER

    def _runs(self, buf: wireformat.Bytes, rows: int, txs: int, controls: int) -> Iterator[Run]:
        """The indexed messages in order: rows between controls, and one commit after the last whole transaction."""
        index = self._index
        done = np.flatnonzero(index.tx_end[:txs] >= 0)
        committed_rows = int(index.tx_rows[done[-1]]) if done.size else 0
        last_tx = int(done[-1]) if done.size else -1
        at = 0
        commit_pending = done.size > 0
        for c in range(controls):
            upto = int(index.control_rows[c])
            if commit_pending and int(index.control_tx[c]) > last_tx:
                yield from self._rows(buf, at, committed_rows)
                yield self._commit(last_tx, done.size)
                at, commit_pending = committed_rows, False
            yield from self._rows(buf, at, upto)
            at = upto
            yield from self._control(buf, c)
        if commit_pending:
            yield from self._rows(buf, at, committed_rows)
            yield self._commit(last_tx, done.size)
            at = committed_rows
        yield from self._rows(buf, at, rows)

    def _commit(self, tx: int, transactions: int) -> Commit:
        return Commit(int(self._index.tx_end[tx]), int(self._index.tx_ts[tx]), transactions)

    def _control(self, buf: wireformat.Bytes, c: int) -> Iterator[Run]:
        index = self._index
        raw = bytes(buf[int(index.control_at[c]) : int(index.control_end[c])])
        kind = int(index.control_kind[c])
        if kind == _RELATION:
            self._learn(messages.parse_relation(raw))
        elif kind == _TRUNCATE:
            tx = int(index.control_tx[c])
            common = (int(index.tx_lsn[tx]), int(index.tx_ts[tx]), int(index.tx_xid[tx]))
            for n, oid in enumerate(messages.parse_truncate(raw)):
                layout = self._layout(oid, int(index.control_at[c]))
                if layout is not None:
                    yield Truncate(layout, self._take_ords(1), *common, int(index.control_seq[c]) + n)
        else:
            raise ProtocolError(
                f"stream message {chr(kind)!r} is not part of protocol version 1", offset=None
            )

    def _learn(self, relation: messages.WireRelation) -> None:
        if relation.oid not in self._known and self._more is not None:
            self._known.update(self._more())
        known = self._known.get(relation.oid)
        if known is None:
            self._layouts[relation.oid] = None
            return
        table = _merge(known, relation, self._resolve)
        # Also when it looks the same: the server describes a relation again after it was altered, and a
        # column that was dropped and added again has the same name.
        kept = table if table.projection is None else self._settle(table)
        self._layouts[relation.oid] = make_layout(kept, self.next_version, table)
        self.next_version += 1

    def _layout(self, oid: int, at: int) -> Layout | None:
        try:
            return self._layouts[oid]
        except KeyError:
            raise ProtocolError(f"rows of relation {oid} before its description", offset=at) from None

    def _take_ords(self, n: int) -> int:
        first = self.next_ord
        self.next_ord += n
        return first

    def _rows(self, buf: wireformat.Bytes, start: int, stop: int) -> Iterator[Rows]:
        """Rows of one stretch, table by table (stretches never contain a barrier)."""
        if stop <= start:
            return
        rel = self._index.row_rel[start:stop]
        first = self._take_ords(stop - start)
        if (rel == rel[0]).all():
            groups = [np.arange(start, stop)]
        else:
            order = np.argsort(rel, kind="stable")
            cuts = np.flatnonzero(np.diff(rel[order])) + 1
            groups = [g + start for g in np.split(order, cuts)]
        for rows in groups:
            layout = self._layout(int(self._index.row_rel[rows[0]]), int(self._index.row_at[rows[0]]))
            if layout is not None:
                yield self._table_rows(buf, layout, rows, rows - start + first)

    def _table_rows(
        self, buf: wireformat.Bytes, layout: Layout, rows: wireformat.Ints, ords: wireformat.Ints
    ) -> Rows:
        index = self._index
        cells = wireformat.locate_cells(buf, rows, index, layout.key_mask.size, layout.key_mask)
        tx = index.row_tx[rows]
        arrays: list[pa.Array] = [
            pa.array(cells.op),
            pa.array(ords),
            pa.array(index.tx_lsn[tx]),
            pa.array(index.row_seq[rows]),
            pa.array(index.tx_ts[tx]),
            pa.array(index.tx_xid[tx]),
            pa.array(cells.key_changed.view(np.bool_)),
            pa.array(cells.old),
            _unchanged(cells, layout),
        ]
        arrays += [_column(buf, layout, i, cells.new_off, cells.new_len) for i in range(len(layout.sent))]
        arrays += [_column(buf, layout, i, cells.old_off, cells.old_len) for i in layout.old_columns]
        counts = np.bincount(cells.op, minlength=4)
        return Rows(
            layout,
            pa.RecordBatch.from_arrays(arrays, schema=layout.arrow),
            inserts=int(counts[1]),
            updates=int(counts[2]),
            deletes=int(counts[3]),
            key_changes=int(cells.key_changed.sum()),
            unchanged=int((cells.unchanged > 0).sum()) if cells.unchanged_total else 0,
            first_ord=int(ords[0]),
        )


def _strings(buf: wireformat.Bytes, off: wireformat.Ints, length: wireformat.Ints) -> pa.Array:
    offsets, data, validity, nulls = wireformat.gather(buf, off, length)
    buffers = [
        None if validity is None else pa.py_buffer(validity),
        pa.py_buffer(offsets),
        pa.py_buffer(data),
    ]
    return pa.Array.from_buffers(pa.string(), length.size, buffers, nulls)


def _column(
    buf: wireformat.Bytes, layout: Layout, index: int, off: wireformat.Ints, length: wireformat.Ints
) -> pa.Array:
    at = layout.sent[index]
    if index in layout.blank:
        return pa.nulls(length[at].size, pa.string())
    return _strings(buf, off[at], length[at])


def _unchanged(cells: wireformat.Cells, layout: Layout) -> pa.Array:
    if not cells.unchanged_total:
        return pa.nulls(cells.op.size, pa.list_(pa.int16()))
    offsets, values = wireformat.unchanged_lists(cells)
    if len(layout.sent) < layout.key_mask.size:
        offsets, values = _places(layout, offsets, values)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(cells.unchanged == 0))


def _places(
    layout: Layout, offsets: npt.NDArray[np.int32], values: npt.NDArray[np.int16]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]]:
    """Lists of columns of the stream as lists of the table's columns."""
    place = np.full(layout.key_mask.size, -1, np.int16)
    place[list(layout.sent)] = np.arange(len(layout.sent), dtype=np.int16)
    moved = place[values]
    kept = np.concatenate(([0], np.cumsum(moved >= 0)))
    return kept[offsets].astype(np.int32), moved[moved >= 0]


def _same_type(column: Column, wired: messages.WireColumn) -> bool:
    # The catalog describes a domain by its base type's modifier, the wire by none.
    typmod = -1 if column.base_oid else column.typmod
    return (column.type_oid, typmod) == (wired.type_oid, wired.typmod)


def _merge(
    known: TableSchema, relation: messages.WireRelation, resolve: Callable[[Column], Column]
) -> TableSchema:
    """The catalog's description brought up to date with what the wire says."""
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
        key = known.key if set(known.key) <= names else ()
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


def warm_up() -> None:
    """Have numba compile the kernels, or load them from its cache, before the first change comes."""
    column = Column("id", 25, -1)
    decoder = Decoder({1: TableSchema(1, "public", "t", (column,), ("id",), "d")})
    cell = b"\0\1t" + (1).to_bytes(4, "big") + b"x"
    relation = (
        b"R" + (1).to_bytes(4, "big") + b"public\0t\0d\0\1\1id\0" + (25).to_bytes(4, "big") + b"\xff" * 4
    )
    payloads = (
        b"B" + bytes(20),
        relation,
        b"I" + (1).to_bytes(4, "big") + b"N" + cell,
        b"U" + (1).to_bytes(4, "big") + b"N\0\1u",
        b"C" + bytes(25),
    )
    frames = b"".join(b"d" + (len(p) + 29).to_bytes(4, "big") + b"w" + bytes(24) + p for p in payloads)
    decoder.decode(np.frombuffer(frames, np.uint8).copy(), len(frames))
