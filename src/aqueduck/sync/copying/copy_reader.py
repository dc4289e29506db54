"""
Read tables under one exported snapshot into files that no catalog knows yet: the first half of a copy.

The second half, which makes the files part of the lake, is in `copy_commits`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from aqueduck.lake.commit.commit import transact
from aqueduck.lake.commit.copy_commit_modes import can_resume, prepare_copy
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.fold.fold_tasks import TASK_MEMORY
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.directories import Directories, read_directories
from aqueduck.lake.session.files import file_prefix
from aqueduck.lake.target.apply import refuse_names
from aqueduck.lake.target.places import OTHER, check_place, notice_changes, task_layout
from aqueduck.lake.target.set_layouts import planned_layout
from aqueduck.model.columns.projection import only_needed
from aqueduck.model.errors import SourceError
from aqueduck.model.layout import TableLayout
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.tables import describe_oid
from aqueduck.postgres.copy.table_copy import (
    Chunk,
    ExportedSnapshot,
    export_snapshot,
    export_snapshot_by_sql,
    plan_chunks,
    read_column_marks,
    snapshot_xmin,
)
from aqueduck.postgres.publications.publications import refuse_without_columns
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.server import settled_position
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.copying.copy_journal import CopyJournal, forget_journal, journals_of
from aqueduck.sync.copying.progress import Progress
from aqueduck.sync.copying.running_copy import RunningCopy, check_undisturbed, refuse_changed
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["CopyJobs", "CopyReader", "CopySettings", "ReadTables", "table_bytes"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Settings of a group's copies."""

    dsn: str = field(repr=False)
    run_id: str
    """Part of the names of its files."""
    concurrency: int = 2
    chunk_bytes: int = 64 << 20
    by_sql: bool = False
    """Whether snapshots are taken without a replication connection."""
    task_memory: int = TASK_MEMORY
    resync_on_type_change: bool = False
    """Whether a table is re-copied if its parked changes cannot be applied."""


@dataclass(slots=True)
class CopyJobs:
    """Reads the chunks: Spark, by default."""

    run: Callable[[CopyJob], list[ChunkFile]]
    cancel: Callable[[], None] = lambda: None
    """Cancels running jobs; their finished chunks are in the journals."""


@dataclass(frozen=True, slots=True)
class ReadTables:
    """What was read under one snapshot."""

    copies: list[RunningCopy]
    again: dict[int, list[ChunkFile]]
    """Rows that are newer than an earlier session of the same copy, by table."""
    position: int
    """The time of the snapshot."""

    @property
    def needs_changes(self) -> bool:
        """Whether the rows can be combined only after every change before the position is in the lake."""
        return any(copy.beside or len(copy.journal.sessions) > 1 for copy in self.copies)


@dataclass(frozen=True, slots=True)
class CopyReader:
    """Reads the tables of one group."""

    settings: CopySettings
    book: TableBook
    jobs: CopyJobs
    progress: Progress
    stopping: threading.Event

    def read(self, states: list[TableState], began: datetime) -> ReadTables:
        """Read all chunks of these tables that no earlier session has read."""
        by_sql, dsn = self.settings.by_sql, self.settings.dsn
        if by_sql:  # otherwise the snapshot itself waits
            self._settle(states)
        time_us = _source_time_us(dsn) if any(state.mode.keeps for state in states) else 0
        snapshot = export_snapshot_by_sql(dsn) if by_sql else export_snapshot(dsn, self.stopping.is_set)
        try:
            copies = self._begin(states, snapshot, began, time_us)
            again = self._read(snapshot, copies)
        finally:
            snapshot.close()
        return ReadTables(copies, again, snapshot.position)

    def _settle(self, states: Sequence[TableState]) -> None:
        """Before the first copy of tables: wait for transactions that wrote to them before they were published."""
        oids = {state.oid for state in states}
        if not self.book.is_settled(oids):
            settled_position(self.settings.dsn, given_up=self.stopping.is_set)
            self.book.mark_settled(oids)

    def _begin(
        self, states: list[TableState], snapshot: ExportedSnapshot, began: datetime, time_us: int
    ) -> list[RunningCopy]:
        copies = []
        # All columns as of the snapshot: the stream reports every later change of columns.
        with snapshot.connect(self.settings.dsn) as conn:
            planned: list[tuple[TableState, TableSchema, list[Chunk]]] = []
            xmin = snapshot_xmin(conn)
            columns = read_column_marks(conn, [state.oid for state in states])
            for state in states:
                described = describe_oid(
                    conn, state.oid, need_key=state.mode.needs_key, projection=state.projection
                )
                refuse_without_columns(described)
                schema = only_needed(described).in_lake
                chunks = plan_chunks(conn, schema, chunk_bytes=self.settings.chunk_bytes)
                planned.append((state, schema, chunks))
        with self.book.commit_lock:
            directories, uuids = self._prepare([(state, schema) for state, schema, _ in planned])
            layouts = {state.oid: self._layout(state, schema, directories) for state, schema, _ in planned}
            beside = {
                state.oid
                for state, schema, _ in planned
                if not can_resume(self.book.lake, state, schema, missing=directories.of(state.target) is None)
            }
        for oid in beside:
            forget_journal(self.book.directory, oid)
        for state, schema, chunks in planned:
            place = directories.place(state.target, state.mode)
            assert place is not None, "_prepare makes the others"
            journal = CopyJournal(journals_of(self.book.directory) / str(state.oid))
            if self.book.lake.encrypted:  # only DuckLake writes its files
                place = str(journal.rows)
            session = journal.begin(
                schema, place, chunks,
                columns=columns[state.oid], visibility=snapshot.visibility, xmin=xmin, time_us=time_us,
            )  # fmt: skip
            copies.append(
                RunningCopy(
                    state, schema, place, journal, session, state.oid in beside, uuids[state.oid],
                    layouts[state.oid],
                )
            )  # fmt: skip
            self.progress.begin(state.oid, journal, began)
            log.info(
                "copy started" if session.number == 0 else "copy continues", group=self.book.group,
                table=state.source, chunks=len(journal.missing()),
            )  # fmt: skip
        return copies

    def _layout(self, state: TableState, schema: TableSchema, directories: Directories) -> TableLayout:
        """The layout for which tasks write files: of the target, or that which it will get."""
        lake = self.book.lake
        if directories.of(state.target) is None and not lake.encrypted:
            return planned_layout(lake, state.target, schema, state.mode)
        return task_layout(lake, state.target)

    def _prepare(
        self, tables: Sequence[tuple[TableState, TableSchema]]
    ) -> tuple[Directories, dict[int, str | None]]:
        """
        Prepare the targets for the copy; a missing target is created when the copy is committed, if possible.

        Also record the uuid of each target. A target that is yet to be created has none, so a table that someone else creates
        meanwhile is not mistaken for it.
        """
        lake = self.book.lake
        directories = read_directories(lake)
        notice_changes(lake)
        early, uuids = [], {}
        for state, schema in tables:
            source = TableName(schema.schema, schema.name)
            there = check_place(lake, state.target, state.target_uuid, source, may_be_missing=True)
            refuse_names(state.target, schema, state.mode)
            uuids[state.oid] = state.target_uuid if there else OTHER
            if directories.place(state.target, state.mode) is None or (there and not state.mode.plain):
                early.append((state, schema))
                uuids[state.oid] = state.target_uuid if there else None
        if not early:
            return directories, uuids

        def prepare() -> None:
            for state, schema in early:
                prepare_copy(lake, state, schema)

        # In one transaction: DuckLake reads its whole catalog again after each transaction that creates a table.
        transact(lake, prepare)
        return read_directories(lake), uuids

    def _read(self, snapshot: ExportedSnapshot, copies: Sequence[RunningCopy]) -> dict[int, list[ChunkFile]]:
        """Run the job; returns, by table, the files with rows that are newer than an earlier session."""
        config, settings = self.book.lake.config, self.settings
        prefix = f"{file_prefix(self.book.group)}{settings.run_id}"
        items = [(copy, item) for copy in copies for item in copy.items(prefix)]
        job = CopyJob(
            settings.dsn, snapshot.name, config.data_path, tuple(item for _, item in items),
            config.properties, settings.task_memory,
        )  # fmt: skip
        files = self._run(job, copies)
        again: dict[int, list[ChunkFile]] = {copy.state.oid: [] for copy in copies}
        for (copy, item), file in zip(items, files, strict=True):
            if item.journal_path is None:
                again[copy.state.oid].append(file)
        return again

    def _run(self, job: CopyJob, copies: Sequence[RunningCopy]) -> list[ChunkFile]:
        """Run the job; if a name was not found but the table still exists, the copy is retried."""
        try:
            files = self.jobs.run(job)
        except SourceError:
            with connect(self.settings.dsn) as conn:
                refuse_changed(conn, copies)
            raise
        with connect(self.settings.dsn) as conn:
            check_undisturbed(conn, copies)
        return files


def _source_time_us(dsn: str) -> int:
    """
    The server's time.

    It is read before a snapshot is taken: every transaction with an earlier commit time has committed by then.
    """
    with connect(dsn) as conn, translate_errors("ask the server for the time", conn=conn):
        row = conn.execute("select (extract(epoch from clock_timestamp()) * 1000000)::int8").fetchone()
    assert row is not None
    return int(row[0])


def table_bytes(dsn: str, oids: Collection[int]) -> Mapping[int, int]:
    """The sizes of the tables, including their partitions."""
    with connect(dsn) as conn:
        rows = conn.execute(
            "select o::int8, coalesce((select sum(pg_relation_size(relid)) from pg_partition_tree(o::oid::regclass)),"
            " 0)::int8 + coalesce(pg_relation_size(o::oid), 0) from unnest(%s::int8[]) o",
            (list(oids),),
        ).fetchall()
    return dict(rows)
