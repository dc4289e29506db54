"""The bookmark in a PostgreSQL table with one row per slot, in the source's database or another."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import ConnectionLostError, PrivilegeError, SourceUnreachableError
from aqueduck.model.schema import TableName
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier, table_identifier
from aqueduck.postgres.session.server import read_server

__all__ = ["PostgresBookmarks", "check_bookmark_table", "require_right"]


class PostgresBookmarks:
    """Stores the bookmark as a row of `table`, which is created if it is missing."""

    def __init__(self, dsn: str, table: TableName, slot: str) -> None:
        self._dsn = dsn
        self._name = table
        self._table = table_identifier(table)
        self._slot = slot
        self._own: tuple[TableName, ...] = (table,)
        self._made = False
        self._conn: psycopg.Connection[Any] | None = None

    def _connected(self) -> psycopg.Connection[Any]:
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._dsn, application_name="aqueduck bookmark")
            self._made = False
        return self._conn

    def load(self) -> Bookmark | None:
        conn = self._connected()
        with translate_errors("read the bookmark", conn=conn):
            return self._read(conn) if self._exists(conn) else None

    def _exists(self, conn: psycopg.Connection[Any]) -> bool:
        return conn.execute("select to_regclass(%s)", (self._table,)).fetchone() != (None,)

    def _read(self, conn: psycopg.Connection[Any], *, lock: bool = False) -> Bookmark | None:
        statement = f"select bookmark from {self._table} where slot_name = %s{' for update' if lock else ''}"
        row = conn.execute(statement.encode(), (self._slot,)).fetchone()
        return None if row is None else Bookmark.from_json(json.dumps(row[0]))

    def save(self, bookmark: Bookmark) -> None:
        """Save, and retry once on a new connection if the old one broke; the statement can be repeated."""
        try:
            self._save(bookmark)
        except (ConnectionLostError, SourceUnreachableError):
            self.close()
            self._save(bookmark)

    def _save(self, bookmark: Bookmark) -> None:
        conn = self._connected()
        self._make(conn)
        with translate_errors("write the bookmark", conn=conn), conn.transaction():
            self._put(conn, bookmark)

    def _make(self, conn: psycopg.Connection[Any]) -> None:
        grant = f"grant create on schema {identifier(self._name.schema)} to {identifier(conn.info.user)}"
        with translate_errors(f"make {self._name.qualified}", conn=conn, fix=grant):
            if not self._made and not self._exists(conn):
                conn.execute(
                    f"create table if not exists {self._table} (slot_name text primary key, position pg_lsn not null,"
                    " bookmark jsonb not null, updated_at timestamptz not null default now())".encode()
                )
        self._made = True

    def _put(self, conn: psycopg.Connection[Any], bookmark: Bookmark) -> None:
        text = bookmark.to_json()
        # The slot is confirmed up to this row's position, so the row must be durable.
        conn.execute("set local synchronous_commit = on")
        conn.execute(
            f"insert into {self._table} (slot_name, position, bookmark) values (%s, %s, %s) on conflict (slot_name)"
            " do update set position = excluded.position, bookmark = excluded.bookmark, updated_at = now()".encode(),
            (self._slot, json.loads(text)["position"], text),
        )

    def own_tables(self, system_identifier: str, database: str) -> tuple[str, ...]:
        """Aqueduck's own tables in this database, as schema.name, with partitions; their changes are not events."""
        conn = self._connected()
        server = read_server(conn)
        if (server.system_identifier, server.database) != (system_identifier, database):
            return ()
        with translate_errors("look for partitions of our tables", conn=conn):
            rows = conn.execute(
                "select n.nspname || '.' || c.relname from unnest(%s::text[]) own, pg_partition_tree(to_regclass(own)) t"
                " join pg_class c on c.oid = t.relid join pg_namespace n on n.oid = c.relnamespace",
                ([table_identifier(table) for table in self._own],),
            ).fetchall()
        return tuple({*(table.qualified for table in self._own), *(name for (name,) in rows)})

    def close(self) -> None:
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def check_bookmark_table(conn: psycopg.Connection[Any], table: TableName) -> None:
    """Raise if the table is missing and the role may not create it."""
    with translate_errors("look at the bookmark's table", table.qualified, conn=conn):
        [name] = conn.execute("select to_regclass(%s)", (table_identifier(table),)).fetchall()
        if name == (None,):
            where = f"schema {identifier(table.schema)}"
            require_right(conn, "has_schema_privilege", table.schema, "create", where)


def require_right(conn: psycopg.Connection[Any], function: str, what: str, right: str, named: str) -> None:
    """Raise, with the statement that grants it, if the role lacks a right."""
    row = conn.execute(f"select {function}(%s, %s), current_user::text".encode(), (what, right)).fetchone()
    assert row is not None
    if not row[0]:
        raise PrivilegeError(
            f"the role {row[1]} may not {right} in the {named}",
            hint=f"grant {right} on {named} to {identifier(row[1])}",
        )
