"""
The initial copy of a table, chunk by chunk, under one exported snapshot.

`export_snapshot` makes a temporary slot on a replication connection: the only way to get an MVCC
snapshot together with the position that it corresponds to.  `export_snapshot_by_sql` needs no such connection,
and says by transaction numbers what its snapshot shows.  `plan_chunks` cuts a table into ranges
of pages.  `ChunkReader` is what a task of the copy reads them with: COPY of one range after the other, in binary
where that is the shorter way to the lake's value, or as the same string columns that capture makes of the
stream.  Writing files and committing them is in `lake` and `spark`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq

from aqueduck.model.columns.projection import blank_columns
from aqueduck.model.errors import AqueduckError, CopyDisturbedError
from aqueduck.model.schema import TableName, TableSchema, parse_lsn
from aqueduck.model.visibility import Visibility
from aqueduck.postgres.copy.copy_connections import copy_connections
from aqueduck.postgres.decode import copybinary, copytext
from aqueduck.postgres.decode.pgoutput import gather
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier, literal, table_identifier
from aqueduck.postgres.session.wire import (
    SET_LOCAL_OUTPUT,
    CopyOutStream,
    connect_replication,
    raise_failed,
)

__all__ = [
    "Chunk",
    "ChunkReader",
    "ExportedSnapshot",
    "export_snapshot",
    "export_snapshot_by_sql",
    "plan_chunks",
    "read_column_marks",
    "snapshot_xmin",
]

PAGE_BYTES = 8192
READ_BYTES = 4 << 20
BATCH_ROWS = 65_536
EVEN = 4
GIVE_UP_SECONDS = 0.5

# Between two chunks, the owner may put a view in the table's place: its functions would run as the service.
# Servers before 14.13, 15.8 and 16.4 lack the setting.
_NO_VIEWS = """
    select pg_catalog.set_config(name, 'view', true) from (values ('restrict_nonsystem_relation_kind')) as setting (name)
    where pg_catalog.current_setting(name, true) is not null
"""


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot that other sessions can use while this one stays open, and its visibility."""

    name: str
    visibility: Visibility
    close: Callable[[], None]

    @property
    def position(self) -> int:
        """The snapshot shows nothing that was committed at or after this position."""
        return self.visibility.position

    @contextlib.contextmanager
    def connect(self, dsn: str) -> Iterator[psycopg.Connection[Any]]:
        """
        A connection on which queries see user tables and catalog tables as of the snapshot; catalog functions
        may not.
        """
        with connect(dsn, autocommit=False) as conn, translate_errors("read the copy's snapshot", conn=conn):
            conn.execute(b"set transaction isolation level repeatable read read only")
            conn.execute(f"set transaction snapshot {literal(self.name)}".encode())
            yield conn


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages [first, end) of one table or partition; `end` is None for the last one."""

    number: int
    schema: str
    table: str
    first_page: int
    end_page: int | None
    bytes: int
    relation: int = 0
    filenode: int = 0
    """Changes when the table is rewritten, which moves rows to other pages."""
    since: int | None = None
    """Only row versions written by this transaction or a later one."""


def export_snapshot(dsn: str, given_up: Callable[[], bool] = lambda: False) -> ExportedSnapshot:
    """
    A snapshot with its position.

    It contains exactly the transactions whose commit record is before the position. The server waits for
    transactions that are open now; `given_up` returns whether the caller no longer needs the snapshot.
    """
    pgconn = connect_replication(dsn)
    name = f"aqueduck_copy_{uuid.uuid4().hex[:16]}"
    command = f"CREATE_REPLICATION_SLOT \"{name}\" TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
    if pgconn.server_version < 150000:
        command = f'CREATE_REPLICATION_SLOT "{name}" TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT'
    try:
        with translate_errors("take a snapshot for the copy"):
            result = _answer(pgconn, command, given_up)
        raise_failed(result, pq.ExecStatus.TUPLES_OK)
    except AqueduckError:
        pgconn.finish()
        raise
    position, snapshot = result.get_value(0, 1), result.get_value(0, 2)
    assert position is not None
    assert snapshot is not None
    return ExportedSnapshot(snapshot.decode(), Visibility(parse_lsn(position.decode())), pgconn.finish)


def _answer(pgconn: pq.abc.PGconn, command: str, given_up: Callable[[], bool]) -> pq.abc.PGresult:
    pgconn.send_query(command.encode())
    while True:
        pgconn.consume_input()
        if not pgconn.is_busy():
            break
        select.select([pgconn.socket], [], [], GIVE_UP_SECONDS)
        if given_up():
            raise CopyDisturbedError("the copy was given up before it had a snapshot")
    result = pgconn.get_result()
    assert result is not None
    while pgconn.get_result() is not None:
        pass
    return result


def export_snapshot_by_sql(dsn: str) -> ExportedSnapshot:
    """
    A snapshot on an ordinary connection, in a transaction that stays open: works through a pooler.

    It waits for no transaction. The position is read after the snapshot was taken, so later commits are not
    in it; for earlier commits, see `Visibility`.
    """
    conn = connect(dsn, autocommit=False, application_name="aqueduck copy")
    try:
        with translate_errors("take a snapshot for the copy", conn=conn):
            conn.execute(b"set transaction isolation level repeatable read read only")
            conn.execute(b"set local idle_in_transaction_session_timeout = 0")
            row = conn.execute(
                b"select pg_export_snapshot(), pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text"
            ).fetchone()
        assert row is not None
        return ExportedSnapshot(row[0], Visibility.from_snapshot(row[1], parse_lsn(row[2])), conn.close)
    except BaseException:
        conn.close()
        raise


def snapshot_xmin(conn: psycopg.Connection[Any]) -> int:
    """
    The oldest transaction that was running when the snapshot was taken: everything the snapshot does not show
    is at least this recent.
    """
    with translate_errors("read the snapshot", conn=conn):
        row = conn.execute(
            b"select pg_snapshot_xmin(pg_current_snapshot())::text::numeric % 4294967296"
        ).fetchone()
    assert row is not None
    return int(row[0])


def plan_chunks(conn: psycopg.Connection[Any], table: TableSchema, *, chunk_bytes: int) -> list[Chunk]:
    """Ranges of at most `chunk_bytes` (but at least a page), of the table or of the leaves of its partitions."""
    query = """
        select n.nspname::text, c.relname::text, coalesce(pg_relation_size(c.oid), 0), c.oid::int8, c.relfilenode::int8
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.oid in (select relid from pg_partition_tree(%(oid)s::oid::regclass) where isleaf)
           or (c.oid = %(oid)s and c.relkind = 'r')
        order by c.oid
    """
    with translate_errors("plan the copy", table.qualified, conn=conn):
        relations = conn.execute(query, {"oid": table.oid}).fetchall()
    chunks: list[Chunk] = []
    for schema, name, size, oid, filenode in relations:
        pages = -(-size // PAGE_BYTES)
        firsts = [*_first_pages(pages, size / chunk_bytes), None]
        for first, end in itertools.pairwise(firsts):
            assert first is not None
            share = ((pages if end is None else end) - first) * PAGE_BYTES
            chunks.append(Chunk(len(chunks), schema, name, first, end, share, oid, filenode))
    return chunks


def read_column_marks(conn: psycopg.Connection[Any], oids: Sequence[int]) -> dict[int, dict[int, int]]:
    """
    The transaction that last changed each column's name, type or existence, by table and column number.

    A chunk reads columns by their current names, not by those of the snapshot.
    """
    query = """
        select attrelid::int8, attnum, xmin::text::int8 from pg_attribute where attrelid = any(%s::oid[]) and attnum > 0
    """
    found: dict[int, dict[int, int]] = {}
    with translate_errors("read the columns for the copy", conn=conn):
        for oid, number, changed in conn.execute(query, (list(oids),)).fetchall():
            found.setdefault(oid, {})[number] = changed
    return found


def _first_pages(pages: int, wanted: float) -> list[int]:
    """
    The first pages of this many chunks, or a few more. The last chunks are smaller, so that no core works
    long while the others are idle.
    """
    if wanted <= EVEN:
        count, halves = max(1, math.ceil(wanted)), 0
    else:
        count, halves = math.ceil(wanted / EVEN) * EVEN, EVEN // 2
    step = max(1, -(-pages // count))
    firsts = list(range(0, max(pages, 1), step))
    half = step // 2
    return sorted(
        {*firsts, *(first + half for first in firsts[len(firsts) - halves :] if first + half < pages)}
    )


def copy_sql(columns: str, chunk: Chunk, condition: str | None = None, options: str = "") -> str:
    source = table_identifier(TableName(chunk.schema, chunk.table))
    where = f"ctid >= '({chunk.first_page},0)'::tid"
    if chunk.end_page is not None:
        where += f" and ctid < '({chunk.end_page},0)'::tid"
    if chunk.since is not None:
        where += f" and age(xmin) <= age('{chunk.since}'::xid)"
    if condition is not None:
        where += f" and {condition}"
    return f"copy (select {columns} from only {source} where {where}) to stdout{options}"


class ChunkReader:
    """
    Reads chunks under a snapshot, one after the other, on a connection of its own.

    Each chunk has its own transaction: a session that locks several tables cannot deadlock with a reader that
    holds one and waits for another.
    """

    def __init__(self, dsn: str, snapshot: str) -> None:
        self._dsn = dsn
        self._stream = copy_connections.take(dsn)
        self._begin = (
            "begin isolation level repeatable read read only;"
            f" set transaction snapshot {literal(snapshot)}; {_NO_VIEWS}; {SET_LOCAL_OUTPUT}"
        )

    def rows(
        self, table: TableSchema, chunk: Chunk, condition: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """
        The rows of one chunk for which `condition` holds, as columns n0, n1 and so on: typed as in
        `copybinary`, the others text.
        """
        kinds = [copybinary.binary_type(c) for c in table.columns]
        columns = ", ".join(copybinary.column_sql(c) for c in table.columns)
        begun = False

        def batch(buf: Any, rows: int, row_at: Any, row_end: Any) -> pa.RecordBatch:
            nonlocal begun
            if not begun:
                copybinary.skip_header(buf, row_at, row_end)
                begun = True
            return copybinary.decode_rows(buf, rows, row_at, row_end, kinds)

        return self._copy(copy_sql(columns, chunk, _published(table, condition), " (format binary)"), batch)

    def texts(
        self, table: TableSchema, chunk: Chunk, condition: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one chunk for which `condition` holds, as string columns n0, n1 and so on."""
        blank = blank_columns(table)
        columns = ", ".join("null" if i in blank else identifier(c.name) for i, c in enumerate(table.columns))

        def batch(buf: Any, rows: int, row_at: Any, row_end: Any) -> pa.RecordBatch:
            return _text_batch(buf, rows, row_at, row_end, len(table.columns))

        return self._copy(copy_sql(columns, chunk, _published(table, condition)), batch)

    def _copy(
        self, command: str, batch: Callable[[Any, int, Any, Any], pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        self._stream.execute(self._begin)
        self._stream.start(command)
        yield from (found for found in _decode(self._stream, batch) if found.num_rows)
        self._stream.execute("commit")

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        copy_connections.keep(self._dsn, self._stream)


def _published(table: TableSchema, condition: str | None = None) -> str | None:
    """`condition` combined with the row filter of the table's publication, if it has one."""
    conditions = [condition] if condition is not None else []
    if table.projection is not None and table.projection.published_where:
        conditions.append(table.projection.published_where)
    return " and ".join(conditions) or None


def _decode(
    stream: CopyOutStream, batch: Callable[[Any, int, Any, Any], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    buf = np.empty(2 * READ_BYTES, np.uint8)
    row_at, row_end = np.empty(BATCH_ROWS, np.int64), np.empty(BATCH_ROWS, np.int64)
    fill, ended = 0, False
    while not ended:
        if fill == buf.size:
            buf = np.concatenate([buf, np.empty(buf.size, np.uint8)])
        fill += stream.read_into(buf, fill)
        at = 0
        while True:
            rows, used, other = copytext.index_rows(buf[at:fill], fill - at, row_at, row_end)
            if rows:
                yield batch(buf[at:fill], rows, row_at, row_end)
            at += used
            if other:
                length = stream.message_length(buf, at, fill)
                if length is None:
                    break
                ended = stream.handle(buf, at, length)
                at += length
                if ended:
                    break
            elif rows < BATCH_ROWS:
                break
        rest = fill - at
        buf[:rest] = buf[at:fill].copy()
        fill = rest


def _text_batch(buf: Any, rows: int, row_at: Any, row_end: Any, ncols: int) -> pa.RecordBatch:
    off, length = copytext.locate_cells(buf, rows, row_at, row_end, ncols)
    arrays = []
    for i in range(ncols):
        offsets, data, validity, nulls = gather(buf, off[i], length[i])
        buffers = [
            None if validity is None else pa.py_buffer(validity),
            pa.py_buffer(offsets),
            pa.py_buffer(data),
        ]
        arrays.append(pa.Array.from_buffers(pa.string(), rows, buffers, nulls))
    return pa.RecordBatch.from_arrays(arrays, names=[f"n{i}" for i in range(ncols)])
