"""
The rows of a step of a `test_decoding` slot, as frames of the replication stream.

Some servers offer no other plugin.  Its lines contain names of tables, columns and types, and the values as text, like
pgoutput's messages.  So each line becomes such a message (`text_kernels`), and the decoder sees no
difference.  Missing information is read from the current catalog, by name: OIDs, keys, modifiers of types, and
which tables are published.

A transaction's position is in its last line and is needed in its first, so a step is kept in a file until it is complete.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from aqueduck.model.errors import ProtocolError
from aqueduck.model.schema import TableName, TableSchema, parse_table_name
from aqueduck.postgres.decode import text_kernels as kernels
from aqueduck.postgres.decode.pgoutput import Bytes
from aqueduck.postgres.decode.step_rows import frame_of

__all__ = ["TextRows"]

PIECE_BYTES = 1 << 20

#: the published table to which a table's changes belong, its own or the root of its partitions, and whether it is that itself
Published = Callable[[TableName], tuple[TableSchema, bool] | None]


class TextRows:
    """Frames of one reader's steps over a `test_decoding` slot."""

    step_bytes = open_bytes = 0
    """Not counted: no bulk reader uses them."""

    def __init__(self, position: int, published: Published, directory: Path) -> None:
        self._position = position
        self._published = published
        self._directory = directory
        self._spool: IO[bytes] | None = None
        self._tables = kernels.TextTables()
        self._marks: dict[int, str] = {}

    @property
    def relations(self) -> tuple[int, ...]:
        """Tables with a full identity, whose lines do not contain whether they have a key."""
        return tuple({table.oid for table in self._tables.values() if table.full})

    @property
    def position(self) -> int:
        return self._position

    def begin(self, marks: Mapping[int, str], now: int) -> None:
        """Another step.  Tables may have been published since, and others may have lost their key."""
        self._tables.forget({0, *(oid for oid, mark in marks.items() if self._marks.get(oid) != mark)})
        self._marks.update(marks)
        if self._spool is not None:
            self._spool.close()
        self._spool = tempfile.TemporaryFile(dir=self._directory)

    def convert(self, raw: Bytes, start: int, end: int) -> tuple[int, list[Bytes], bool]:
        """Keep the rows for `end`; returns how much of ``raw`` was used, and whether another message follows."""
        used, other = kernels.walk(raw, start, end)
        assert self._spool is not None
        self._spool.write(memoryview(raw[start:used]))  # type: ignore[arg-type]
        return used, [], other

    def end(self, position: int) -> Iterator[Bytes]:
        """The frames of the step, after which everything that was committed before `position` was read."""
        assert self._spool is not None
        self._spool.flush()
        last = self._position
        if size := self._spool.tell():
            raw = np.frombuffer(mmap.mmap(self._spool.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
            commits = kernels.commits(raw)
            yield from self._frames(raw, commits)
            last = int(commits[-1, 0]) if len(commits) else last
        self._position = max(self._position, position, last)

    def _frames(self, raw: Bytes, commits: kernels.Ints) -> Iterator[Bytes]:
        state = np.zeros(kernels.STATE_SLOTS, np.int64)
        state[kernels.SKIP_TO] = self._position
        room = PIECE_BYTES
        while True:
            out = np.empty(room, np.uint8)
            status, size = kernels.frames(raw, commits, self._tables, out, state)
            room = PIECE_BYTES
            if size:
                yield out[:size]
            line = bytes(raw[state[kernels.LINE] : state[kernels.LINE_END]])
            if status == kernels.DONE:
                return
            if status == kernels.FULL and not size:
                room = 2 * len(line) + 65536
            elif status in (kernels.UNKNOWN, kernels.TRUNCATES):
                for payload in self._learn(line) if status == kernels.UNKNOWN else self._truncate(line):
                    yield np.frombuffer(frame_of(0, payload), np.uint8)
            elif status == kernels.BAD:
                raise ProtocolError("a line of test_decoding cannot be read", offset=int(state[kernels.AT]))

    def _learn(self, line: bytes) -> Iterator[bytes]:
        """An unknown table, or unknown columns: described in the form of pgoutput."""
        try:
            name, types, names = kernels.parse_line(line)
        except UnicodeDecodeError as exc:
            raise ProtocolError("a line of test_decoding has a column whose name is no text") from exc
        found = self._published(_table_name(name))
        if found is None:
            self._tables[name] = kernels.TextTable()
            return
        table, _ = found
        if not types:  # only an old image, which lacks some columns
            _refuse_other_key(table, names)
            names = [c.name for c in table.columns]
        known = {c.name for c in table.columns}
        kept = tuple(n in known for n in names)
        self._tables[name] = kernels.TextTable(table.oid, table.identity == "f", types, tuple(names), kept)
        yield _description(table, [n for n in names if n in known])

    def _truncate(self, line: bytes) -> Iterator[bytes]:
        """Of partitions, only the root counts, as with pgoutput."""
        found = [self._published(_table_name(name)) for name in kernels.parse_truncate(line)]
        tables = [table for table, is_itself in filter(None, found) if is_itself]
        for table in tables:
            if not self._tables.describes(table.oid):
                yield _description(table, [c.name for c in table.columns])
        if tables:
            oids = b"".join(struct.pack("!I", table.oid) for table in tables)
            yield b"T" + struct.pack("!IB", len(tables), 0) + oids


def _description(table: TableSchema, names: Sequence[str]) -> bytes:
    """A Relation message for these columns."""
    columns = {c.name: c for c in table.columns}
    key = tuple(columns) if table.identity == "f" else table.key
    body = [b"R", struct.pack("!I", table.oid), table.schema.encode(), b"\0", table.name.encode(), b"\0"]
    body += [table.identity.encode(), struct.pack("!H", len(names))]
    for column in map(columns.__getitem__, names):
        typmod = -1 if column.base_oid else column.typmod  # the stream has none for a domain
        body.append(struct.pack("!B", column.name in key) + column.name.encode() + b"\0")
        body.append(struct.pack("!Ii", column.type_oid, typmod))
    return b"".join(body)


def _refuse_other_key(table: TableSchema, names: Sequence[str]) -> None:
    if table.identity != "f" and not set(table.key) <= set(names):
        raise ProtocolError(
            f"the key of {table.qualified} has other columns than in changes that still wait",
            offset=None,
            hint="re-copy the table: test_decoding sends names only, which the catalog no longer has",
        )


def _table_name(name: bytes) -> TableName:
    try:
        return parse_table_name(name.decode(), default_schema="public")
    except ValueError as exc:
        raise ProtocolError("a line of test_decoding names no table") from exc
