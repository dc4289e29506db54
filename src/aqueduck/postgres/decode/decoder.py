"""
Turn buffers of replication frames into Arrow record batches, one table at a time.

`Decoder.decode()` takes the bytes that `wire` read and returns *items*: ordered pieces of
the stream (rows of one table, a truncate, a commit).  The decoder remembers only the
relations that the server described and the transactions that are open (several, if the server streams
them before they end: see `streamed`).  Bytes are parsed in `pgoutput`; `stage` stores
the items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from aqueduck.model.columns.projection import only_needed
from aqueduck.model.errors import ProtocolError
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.decode import pgoutput as wireformat
from aqueduck.postgres.decode import pgoutput_messages as messages
from aqueduck.postgres.decode.arrow_columns import column_of, own_lsns, unchanged_of
from aqueduck.postgres.decode.layouts import Layout, make_layout, merged
from aqueduck.postgres.decode.stream_tables import GivenTables, StreamTables
from aqueduck.postgres.decode.streamed import Description, Finish, Forget, StreamedTransaction

__all__ = [
    "Commit",
    "CommitChoice",
    "Decoder",
    "Layout",
    "Rows",
    "StreamItem",
    "Truncate",
    "commit_after",
    "last_commit",
    "make_layout",
    "warm_up",
]


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
    stream: int = 0
    """The streamed transaction of the rows; they have no position and no time until it ends."""


@dataclass(frozen=True, slots=True)
class Truncate:
    layout: Layout
    ord: int
    lsn: int = 0
    time_us: int = 0
    xid: int = 0
    seq: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """All items before this one belong to transactions that ended at or before `position`."""

    position: int
    time_us: int
    transactions: int


StreamItem = Rows | Truncate | Commit | Forget | Finish

IndexPoint = tuple[int, int, int]
"""The numbers of rows, transactions and control messages of the index before a place in it."""

CommitChoice = Callable[[wireformat.Ints, int], Iterable[int]]
"""After which ended transactions a `Commit` follows, in order; given the number of rows before the end of each, and before the first."""


def last_commit(rows: wireformat.Ints, before: int) -> Iterable[int]:
    """Only after the last: transactions that arrived together are cut together."""
    return range(rows.size)[-1:]


def commit_after(step: int) -> CommitChoice:
    """After each transaction that ends `step` rows or more after the previous commit, and the last; with 0, after every one."""

    def chosen(rows: wireformat.Ints, before: int) -> Iterator[int]:
        committed = before
        for n, upto in enumerate(rows.tolist()):
            if upto - committed >= step or n == rows.size - 1:
                yield n
                committed = upto

    return chosen


class Decoder:
    """
    Decodes the stream of one slot.

    `tables` selects the wanted tables and completes what the stream does not contain; rows of other tables are skipped.  The
    selection may change later, see `know`.  With `streams`, the server was asked to send transactions before they
    end.  `commits` chooses the transactions after which a `Commit` is returned.  With `own_lsn`, each row has the position of
    its own message in an additional column.
    """

    def __init__(
        self,
        tables: StreamTables,
        *,
        first_ord: int = 0,
        first_version: int = 0,
        streams: bool = False,
        commits: CommitChoice = last_commit,
        own_lsn: bool = False,
    ) -> None:
        self._tables = tables
        self._commits = commits
        self._own_lsn = own_lsn
        self._layouts: dict[int, Layout | None] = {}
        self._described: dict[int, Description] = {}
        self._asked_streams = streams
        self._streams: dict[int, StreamedTransaction] = {}
        self._stream: StreamedTransaction | None = None  # whose block is being received
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

    def know(self, tables: StreamTables) -> None:
        """
        From the next buffer on, these tables are wanted.

        The server does not repeat the description of a table for this, so its last description of each table is kept, including
        those of tables that were not wanted.
        """
        before, self._tables = self._tables, tables
        coming_in = self._stream
        for stream in (None, *self._streams.values()):
            self._stream = stream
            for relation in [d.relation for d in self._described_here.values()]:
                if before.find(relation) != tables.find(relation):
                    self._learn(relation)
        self._stream = coming_in

    def decode(self, buf: wireformat.Bytes, end: int) -> tuple[list[StreamItem], int, bool]:
        """
        Decode the complete frames of ``buf[:end]``.

        Returns the items, how many bytes were used, and whether a message follows that is not
        CopyData (which the connection handles).
        """
        items: list[StreamItem] = []
        at = 0
        while True:
            status, at, rows, txs, controls = wireformat.index_frames(
                buf, at, end, self._index, self._state, streams=self._asked_streams
            )
            items.extend(self._items(buf, rows, txs, controls))
            if status != wireformat.FULL:
                return items, at, status == wireformat.OTHER

    def _items(self, buf: wireformat.Bytes, rows: int, txs: int, controls: int) -> Iterator[StreamItem]:
        """The indexed messages in order, divided where blocks of streamed transactions begin and end."""
        index = self._index
        done: IndexPoint = (0, 0, 0)
        for mark in np.flatnonzero(_BOUNDS[index.control_kind[:controls]]).tolist():
            here = (int(index.control_rows[mark]), int(index.control_tx[mark]) + 1, mark)
            yield from self._section(buf, done, here)
            yield from self._bound(buf, mark)
            done = (here[0], here[1], mark + 1)
        yield from self._section(buf, done, (rows, txs, controls))

    def _section(self, buf: wireformat.Bytes, start: IndexPoint, stop: IndexPoint) -> Iterator[StreamItem]:
        if self._stream is None:
            yield from self._whole(buf, start, stop)
            return
        at = start[0]
        for c in range(start[2], stop[2]):
            yield from self._upto_control(buf, at, c)
            at = int(self._index.control_rows[c])
        yield from self._rows(buf, at, stop[0])

    def _whole(self, buf: wireformat.Bytes, start: IndexPoint, stop: IndexPoint) -> Iterator[StreamItem]:
        """Transactions that arrive whole: rows between control messages, and commits after those that `commits` chooses."""
        index = self._index
        at, tx, control = start
        ended = np.flatnonzero(index.tx_end[tx : stop[1]] >= 0) + tx
        reported = 0
        for n in self._commits(index.tx_rows[ended], at):
            last = int(ended[n])
            while control < stop[2] and int(index.control_tx[control]) <= last:
                yield from self._upto_control(buf, at, control)
                at, control = int(index.control_rows[control]), control + 1
            yield from self._rows(buf, at, int(index.tx_rows[last]))
            yield self._commit(last, n + 1 - reported)
            at, reported = int(index.tx_rows[last]), n + 1
        for c in range(control, stop[2]):
            yield from self._upto_control(buf, at, c)
            at = int(index.control_rows[c])
        yield from self._rows(buf, at, stop[0])

    def _upto_control(self, buf: wireformat.Bytes, at: int, c: int) -> Iterator[StreamItem]:
        yield from self._rows(buf, at, int(self._index.control_rows[c]))
        yield from self._control(buf, c)

    def _commit(self, tx: int, transactions: int) -> Commit:
        return Commit(int(self._index.tx_end[tx]), int(self._index.tx_ts[tx]), transactions)

    def _control(self, buf: wireformat.Bytes, c: int) -> Iterator[StreamItem]:
        if int(self._index.control_kind[c]) == wireformat.RELATION:
            relation = messages.parse_relation(self._message(buf, c))
            self._described_here[relation.oid] = Description(relation, self.next_version)
            self._learn(relation)
        else:
            yield from self._truncates(buf, c)

    def _message(self, buf: wireformat.Bytes, c: int) -> bytes:
        return bytes(buf[int(self._index.control_at[c]) : int(self._index.control_end[c])])

    def _truncates(self, buf: wireformat.Bytes, c: int) -> Iterator[Truncate]:
        index, stream = self._index, self._stream
        at, tx, seq = int(index.control_at[c]), int(index.control_tx[c]), int(index.control_seq[c])
        oids = messages.parse_truncate(self._message(buf, c))
        if stream is not None:
            seq += stream.changes
            part = int.from_bytes(bytes(buf[at - 4 : at]), "big")
            stream.record(np.array([part]), np.array([seq]))
        for n, oid in enumerate(oids):
            layout = self._layout(oid, at)
            if layout is None:
                continue
            if stream is not None:
                yield Truncate(layout, seq + n, xid=stream.xid, seq=seq + n, stream=stream.xid)
            else:
                common = (int(index.tx_lsn[tx]), int(index.tx_ts[tx]), int(index.tx_xid[tx]))
                yield Truncate(layout, self._take_ords(1), *common, seq + n)

    def _bound(self, buf: wireformat.Bytes, c: int) -> Iterator[StreamItem]:
        """A block of a streamed transaction begins or ends, or such a transaction ends."""
        kind, raw = int(self._index.control_kind[c]), self._message(buf, c)
        if kind == wireformat.STREAM_START:
            xid, first = messages.parse_stream_start(raw)
            if first:
                self._streams[xid] = StreamedTransaction(xid)
            self._stream = self._streamed(xid)
        elif kind == wireformat.STREAM_STOP:
            assert self._stream is not None, "checked when the buffer was indexed"
            self._stream.changes += int(self._index.control_seq[c])
            self._stream = None
        elif kind == wireformat.STREAM_COMMIT:
            yield from self._finish(messages.parse_stream_commit(raw))
        else:
            xid, part = messages.parse_stream_abort(raw)
            stream = self._streams.get(xid)
            if stream is None:
                return  # no change of it was received
            if part == xid:
                del self._streams[xid]
                yield Forget(xid, 0)
            elif (first_void := stream.roll_back(part)) is not None:
                yield Forget(xid, first_void)

    def _streamed(self, xid: int) -> StreamedTransaction:
        try:
            return self._streams[xid]
        except KeyError:
            raise ProtocolError(
                f"the streamed transaction {xid} continues without its beginning", offset=None
            ) from None

    def _finish(self, end: messages.WireStreamCommit) -> Iterator[StreamItem]:
        stream = self._streamed(end.xid)
        del self._streams[end.xid]
        found = {
            v: (relation, self._tables.find_committed(relation)) for v, relation in stream.unresolved.items()
        }
        tables = {
            version: self._finished(merged(known, relation, self._tables.resolve, self._tables.keyed))
            for version, (relation, known) in found.items()
            if known is not None
        }
        for oid, description in stream.described.items():
            if oid not in self._described or description.number > self._described[oid].number:
                # The server will not describe it again to the next transaction.
                layout = stream.layouts[oid]
                layout = replace(layout, table=tables.get(layout.version, layout.table)) if layout else None
                self._described[oid], self._layouts[oid] = description, layout
        first_ord = self._take_ords(stream.changes)
        yield Finish(end.xid, end.lsn, end.time_us, first_ord, stream.changes, tables)
        yield Commit(end.position, end.time_us, 1)

    @property
    def _here(self) -> dict[int, Layout | None]:
        """The relations as the current transaction sees them."""
        return self._layouts if self._stream is None else self._stream.layouts

    @property
    def _described_here(self) -> dict[int, Description]:
        """The descriptions that the server sent to it."""
        return self._described if self._stream is None else self._stream.described

    def _learn(self, relation: messages.WireRelation) -> None:
        known = self._tables.find(relation)
        if known is None:
            self._here[relation.oid] = None
            self.next_version += 1
            return
        if self._stream is None:
            table = merged(known, relation, self._tables.resolve, self._tables.keyed)
        else:
            if not self._tables.is_visible(relation.oid):
                self._settle_at_commit(relation)
            table = merged(known, relation, self._resolve_later(relation), self._keyed_later(relation))
        # Also if it looks the same: the server describes a relation again after it was altered, and a
        # column that was dropped and added again has the same name.
        # column that was dropped and added again has the same name.
        self._here[relation.oid] = make_layout(
            self._kept(table, relation), self.next_version, table, own_lsn=self._own_lsn
        )
        self.next_version += 1

    def _finished(self, table: TableSchema) -> TableSchema:
        return table if table.projection is None else self._tables.settle(table)

    def _kept(self, table: TableSchema, relation: messages.WireRelation) -> TableSchema:
        """The staged columns: all columns of a table without a projection."""
        if table.projection is None:
            return table
        if self._stream is None:
            return only_needed(self._tables.settle(table))
        # What the transaction itself changed in the columns is not visible before it has committed.
        self._settle_at_commit(relation)
        return table.settled(None)

    def _resolve_later(self, relation: messages.WireRelation) -> Callable[[Column], Column]:
        """A streamed transaction may use types that it created, which are not visible before it has committed."""

        def resolve(column: Column) -> Column:
            self._settle_at_commit(relation)
            return column

        return resolve

    def _keyed_later(self, relation: messages.WireRelation) -> Callable[[TableSchema], bool]:
        """Like `_resolve_later`, for a dropped key.  Rows that were divided by a key can still be read whole."""

        def keyed(_: TableSchema) -> bool:
            self._settle_at_commit(relation)
            return True

        return keyed

    def _settle_at_commit(self, relation: messages.WireRelation) -> None:
        assert self._stream is not None
        self._stream.unresolved[self.next_version] = relation

    def _layout(self, oid: int, at: int) -> Layout | None:
        try:
            return self._here[oid]
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
        index = self._index
        rel = index.row_rel[start:stop]
        if self._stream is None:
            first = self._take_ords(stop - start)
            ords = np.arange(first, first + stop - start)
        else:
            ords = index.row_seq[start:stop] + self._stream.changes
            self._stream.record(index.row_xid[start:stop], ords)
        if (rel == rel[0]).all():
            groups = [np.arange(start, stop)]
        else:
            order = np.argsort(rel, kind="stable")
            cuts = np.flatnonzero(np.diff(rel[order])) + 1
            groups = [g + start for g in np.split(order, cuts)]
        for rows in groups:
            layout = self._layout(int(index.row_rel[rows[0]]), int(index.row_at[rows[0]]))
            if layout is not None:
                yield self._table_rows(buf, layout, rows, ords[rows - start])

    def _table_rows(
        self, buf: wireformat.Bytes, layout: Layout, rows: wireformat.Ints, ords: wireformat.Ints
    ) -> Rows:
        index = self._index
        cells = wireformat.locate_cells(buf, rows, index, layout.key_mask.size, layout.key_mask)
        tx = index.row_tx[rows]
        stream = 0 if self._stream is None else self._stream.xid
        none = np.zeros(rows.size, np.int64) if stream else None
        arrays: list[pa.Array] = [
            pa.array(cells.op),
            pa.array(ords),
            pa.array(index.tx_lsn[tx] if none is None else none),
            pa.array(index.row_seq[rows] if none is None else ords),
            pa.array(index.tx_ts[tx] if none is None else none),
            pa.array(index.tx_xid[tx] if none is None else np.full(rows.size, stream)),
            pa.array(cells.key_changed.view(np.bool_)),
            pa.array(cells.old),
            unchanged_of(cells, layout),
        ]
        arrays += [column_of(buf, layout, i, cells.new_off, cells.new_len) for i in range(len(layout.sent))]
        arrays += [column_of(buf, layout, i, cells.old_off, cells.old_len) for i in layout.old_columns]
        if self._own_lsn:
            arrays.append(pa.array(own_lsns(buf, index.row_at[rows])))
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
            stream=stream,
        )


#: by the kind of a control message: whether it is a bound of streamed transactions
_BOUNDS = np.zeros(256, np.bool_)
_BOUNDS[
    [wireformat.STREAM_START, wireformat.STREAM_STOP, wireformat.STREAM_COMMIT, wireformat.STREAM_ABORT]
] = True


def warm_up() -> None:
    """Have numba compile the kernels, or load them from its cache, before the first change arrives."""
    column = Column("id", 25, -1)
    decoder = Decoder(GivenTables({1: TableSchema(1, "public", "t", (column,), ("id",), "d")}))
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
