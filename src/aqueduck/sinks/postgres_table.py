"""
Events in a PostgreSQL table, delivered exactly once: a batch and the bookmark are one transaction.

`EventsTable` is a sink that stores its own bookmark (`model.event_table.TableSink`) as a row of `aqueduck_bookmarks` in
the schema of the table.  Rows are written by COPY, formatted whole columns at a time.  `sinks.lake_table` is the same
for lakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from aqueduck import faults
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.event_table import EVENT_COLUMNS, TableSink, check_columns
from aqueduck.model.schema import TableName
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier, table_identifier
from aqueduck.sinks.bookmark_table import PostgresBookmarks, check_bookmark_table, require_right

__all__ = ["EventsTable", "bookmarks_beside", "check_events_table"]

# Characters that JSON never contains, so no cell needs an escape.
_BETWEEN, _QUOTE = "\x02", "\x01"
_HEX = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS = np.arange(60, -1, -4, dtype=np.uint64)


def bookmarks_beside(table: TableName) -> TableName:
    """The table of bookmarks that belongs to a table of events."""
    return TableName(table.schema, "aqueduck_bookmarks")


class EventsTable(TableSink, PostgresBookmarks):
    """Appends to `table`, which is created if it is missing."""

    batch_bytes_max: int | None = 64 << 20

    def __init__(self, dsn: str, table: TableName, slot: str) -> None:
        super().__init__(dsn, bookmarks_beside(table), slot)
        self._events = table
        self._own = (table, bookmarks_beside(table))

    # -- the sink

    def recover(self, bookmark: Bookmark | None) -> None:
        self._parts = ()
        with connect(self._dsn) as conn:
            if not _columns(conn, self._events)[0]:
                _create(conn, self._events)
            check_columns(self._events.qualified, *_columns(conn, self._events))

    # -- the bookmark

    def load(self) -> Bookmark | None:
        self._known = super().load()
        return self._known

    def save(self, bookmark: Bookmark) -> None:
        """
        Write the batch and the bookmark in one transaction.

        This does not retry: if the reply to a commit is lost, the next `load` shows whether the commit succeeded.
        """
        conn = self._connected()
        self._make(conn)
        name = self._events.qualified
        grant = f"grant insert on {table_identifier(self._events)} to {identifier(conn.info.user)}"
        try:
            with translate_errors("write events", name, conn=conn, fix=grant), conn.transaction():
                self._refuse_second_service(self._read(conn, lock=True))
                self._copy(conn)
                faults.point("sink.written")
                self._put(conn, bookmark)
        except BaseException:
            self.close()
            raise
        self._known, self._parts = bookmark, ()

    def _copy(self, conn: psycopg.Connection[Any]) -> None:
        if not self._parts:
            return
        names = ", ".join(identifier(column.name) for column in EVENT_COLUMNS)
        statement = (
            f"copy {table_identifier(self._events)} ({names}) from stdin"
            f" (format csv, delimiter e'\\x02', quote e'\\x01', escape e'\\x01', encoding 'UTF8')"
        )
        conn.execute("set local timezone = 'UTC'")
        with conn.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            for part in self._parts:
                for batch in _batches(Path(part.path)):
                    copy.write(_copy_rows(batch))


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _copy_rows(batch: pa.RecordBatch) -> memoryview:
    """The rows in COPY's format: NULL is empty, and columns with arbitrary text are quoted."""
    lsn, seq, time, xid, op, schema, table, key, event = (batch.column(c.member) for c in EVENT_COLUMNS)
    plain = (seq, time.cast(pa.timestamp("us")), xid, op)
    names = [pc.replace_substring(name, _QUOTE, _QUOTE * 2) for name in (schema, table)]
    cells = [_lsn_texts(lsn)]
    cells += [_joined(_BETWEEN, cell.cast(pa.large_string())) for cell in plain]
    cells += [
        _joined(_BETWEEN, pc.fill_null(_joined(_QUOTE, cell.cast(pa.large_string()), _QUOTE), ""))
        for cell in (*names, key, event)
    ]
    _, offsets, data = _joined(*cells, "\n").buffers()
    return memoryview(data)[: int(np.frombuffer(offsets, np.int64)[batch.num_rows])]


def _joined(*cells: pa.Array | str) -> pa.Array:
    """The cells of each row as one text; NULL if one of them is NULL."""
    texts = [pa.scalar(c, pa.large_string()) if isinstance(c, str) else c for c in cells]
    return pc.binary_join_element_wise(*texts, pa.scalar("", pa.large_string()))


def _lsn_texts(lsn: pa.Array) -> pa.Array:
    """Positions in PostgreSQL's notation, with all digits."""
    numbers = lsn.to_numpy().astype(np.uint64)
    digits = _HEX[((numbers[:, None] >> _SHIFTS) & np.uint64(15)).astype(np.intp)]
    text = np.insert(digits, 8, ord("/"), axis=1)
    ends = np.arange(0, 17 * len(numbers) + 1, 17, dtype=np.int64)
    return pa.Array.from_buffers(
        pa.large_string(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(text))]
    )


# -- the table


def check_events_table(dsn: str, table: TableName) -> str:
    """The line of `aqueduck check` about the sink; creates nothing."""
    with connect(dsn) as conn:
        found, required = _columns(conn, table)
        with translate_errors("look at the sink's table", table.qualified, conn=conn):
            if found:
                check_columns(table.qualified, found, required)
                name = table_identifier(table)
                require_right(conn, "has_table_privilege", name, "insert", f"table {name}")
                check_bookmark_table(conn, bookmarks_beside(table))
                return f"{table.qualified} can take events"
            schema = identifier(table.schema)
            exists = conn.execute("select to_regnamespace(%s)", (schema,)).fetchone() != (None,)
            if exists:
                require_right(conn, "has_schema_privilege", table.schema, "create", f"schema {schema}")
    return f"{table.qualified} will be created"


def _columns(conn: psycopg.Connection[Any], table: TableName) -> tuple[dict[str, str], list[str]]:
    """A table's column types, empty if the table is missing, and its columns that require a value."""
    with translate_errors("look at the sink's table", table.qualified, conn=conn):
        rows = conn.execute(
            "select attname::text, format_type(atttypid, atttypmod), attnotnull and not atthasdef and attidentity = ''"
            " from pg_attribute where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped",
            (table_identifier(table),),
        ).fetchall()
    return {name: kind for name, kind, _ in rows}, [name for name, _, required in rows if required]


def _create(conn: psycopg.Connection[Any], table: TableName) -> None:
    columns = ", ".join(
        f"{identifier(c.name)} {c.postgres}{'' if c.name == 'key' else ' not null'}" for c in EVENT_COLUMNS
    )
    with translate_errors(f"make the sink's table {table.qualified}", conn=conn), conn.transaction():
        if conn.execute("select to_regnamespace(%s)", (identifier(table.schema),)).fetchone() == (None,):
            conn.execute(f"create schema {identifier(table.schema)}".encode())
        conn.execute(f"create table if not exists {table_identifier(table)} ({columns})".encode())
