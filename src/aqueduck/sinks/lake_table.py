"""
Events in a DuckLake table, delivered exactly once: a batch and the bookmark are committed in one lake snapshot.

`LakeEvents` is a sink that stores its own bookmark (`model.event_table.TableSink`).  `sinks.postgres_table` is the
same for PostgreSQL.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from aqueduck import faults
from aqueduck.config.sync import LakeConfig
from aqueduck.envelopes.json_events import segment_batches
from aqueduck.lake.fold.change_rows import EVENT_SCHEMA
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import LAKE, ident, idents, lake_table
from aqueduck.lake.target.inlined import count_inlined, flush_where_due
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import CatalogUnreachableError, LakeBusyError, LakeWriteError
from aqueduck.model.event_table import EVENT_COLUMNS, TableSink, check_columns
from aqueduck.model.retries import doubling, retried
from aqueduck.model.schema import TableName
from aqueduck.sinks.bookmark_lake import BOOKMARKS, LakeBookmarks

__all__ = ["LakeEvents", "check_events_lake"]

TRIES = 8
_ARRIVED = "arrived_events"


class LakeEvents(TableSink, LakeBookmarks):
    """Appends to `table`, which is created if it is missing."""

    batch_bytes_max: int | None = None

    def __init__(self, config: LakeConfig, table: TableName, slot: str) -> None:
        super().__init__(config, slot)
        self._table = table
        self._failed = False

    # -- the sink

    def recover(self, bookmark: Bookmark | None) -> None:
        self._parts = ()
        if not _columns(self._lake, self._table):
            self._create()
        check_columns(self._table.qualified, _columns(self._lake, self._table))

    def _create(self) -> None:
        name = lake_table(self._table)
        columns = ", ".join(f"{ident(c.name)} {c.lake}" for c in EVENT_COLUMNS)
        doing, of = "making the sink's table", self._table.qualified
        schema = f"create schema if not exists {ident(LAKE)}.{ident(self._table.schema)}"
        self._lake.execute(schema, doing=doing, table=of)
        self._lake.execute(f"create table if not exists {name} ({columns})", doing=doing, table=of)

    # -- the bookmark

    def load(self) -> Bookmark | None:
        if self._failed:
            self._reopen()
        self._known = super().load()
        return self._known

    def _reopen(self) -> None:
        """Reconnect after a failure; a retry may fix any error, because the lake was reachable before."""
        try:
            self._lake.reopen()
        except CatalogUnreachableError as exc:
            raise LakeWriteError(
                f"the connection to the lake was lost: {exc.message}", hint=exc.hint
            ) from exc
        self._failed = False

    def save(self, bookmark: Bookmark) -> None:
        """Write the batch and the bookmark in one transaction; other writers of the lake may commit before it."""
        self._failed = True
        delays = doubling(0.05, 4.0, times=TRIES - 1)
        retried(lambda: self._commit(bookmark), delays, time.sleep, on=LakeBusyError)
        self._tidy()
        self._known, self._parts, self._failed = bookmark, (), False

    def _commit(self, bookmark: Bookmark) -> None:
        with self._lake.transaction():
            self._refuse_second_service(super().load())
            self._insert()
            faults.point("sink.written")
            self._put(bookmark)

    def _tidy(self) -> None:
        """Flush old bookmarks and inlined events from the catalog."""
        inlined = self._lake.memory.inlined_rows
        if BOOKMARKS not in inlined:
            count_inlined(self._lake, (BOOKMARKS, self._table))
        rows = sum(part.events for part in self._parts)
        inlined[BOOKMARKS] += 1
        inlined[self._table] += rows if rows <= self._lake.config.inline_rows else 0
        flush_where_due(self._lake, (BOOKMARKS, self._table))

    def _insert(self) -> None:
        if not self._parts:
            return
        names = idents(c.name for c in EVENT_COLUMNS)
        members = idents(c.member for c in EVENT_COLUMNS)
        with lake_errors("writing events", table=self._table.qualified):
            self._lake.con.register(
                _ARRIVED, pa.RecordBatchReader.from_batches(EVENT_SCHEMA, self._batches())
            )
            try:
                self._lake.con.execute(
                    f"insert into {lake_table(self._table)} ({names}) select {members} from {_ARRIVED}"
                )
            finally:
                self._lake.con.unregister(_ARRIVED)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for part in self._parts:
            yield from segment_batches(part.path)


def check_events_lake(config: LakeConfig, table: TableName) -> str:
    """The line of `aqueduck check` about the sink in an existing lake; creates nothing."""
    with open_lake(config, read_only=True) as lake:
        found = _columns(lake, table)
    if not found:
        return f"{table.qualified} will be created"
    check_columns(table.qualified, found)
    return f"{table.qualified} can take events"


def _columns(lake: LakeSession, table: TableName) -> dict[str, str]:
    rows = lake.execute(
        "select column_name, data_type from duckdb_columns()"
        " where database_name = ? and schema_name = ? and table_name = ?",
        (LAKE, table.schema, table.name),
        doing="looking at the sink's table",
        table=table.qualified,
    )
    return dict(rows)
