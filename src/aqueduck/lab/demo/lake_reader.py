"""A reader of a lake that knows nothing of the service: plain DuckDB, as in the README."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import duckdb

from aqueduck.lake.session.engine import load_extension, new_connection
from aqueduck.lake.session.sql import literal

__all__ = ["PlainReader"]

Rows = list[tuple[Any, ...]]


class PlainReader:
    """One DuckDB session that attaches a lake with a SQLite catalog, as `lake`, as soon as the lake is there."""

    def __init__(self, catalog: Path) -> None:
        self._catalog = catalog
        self._con: duckdb.DuckDBPyConnection | None = None

    def ask(self, sql: str) -> tuple[list[str], Rows]:
        """The column names and rows of a query."""
        con = self._attached()
        cursor = con.execute(sql)
        return [column[0] for column in cursor.description or ()], cursor.fetchall()

    def rows(self, sql: str) -> Rows:
        """The rows of a query; none while the lake or the table is not there yet, or the catalog is locked."""
        try:
            return self.ask(sql)[1]
        except duckdb.Error:
            return []

    def close(self) -> None:
        if self._con is not None:
            self._con.close()

    def _attached(self) -> duckdb.DuckDBPyConnection:
        if self._con is None:
            with contextlib.ExitStack() as failed:
                con = new_connection(threads=1)
                failed.callback(con.close)
                for extension in ("ducklake", "sqlite_scanner"):
                    load_extension(con, extension)
                place = literal(f"ducklake:sqlite:{self._catalog}")
                con.execute(f"attach {place} as lake (read_only, meta_busy_timeout 5000)")
                failed.pop_all()
            self._con = con
        return self._con
