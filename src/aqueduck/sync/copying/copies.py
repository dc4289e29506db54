"""
Initial copies of a group's tables, beside its stream.

`Copier` takes the tables that are not ready and copies them with Spark jobs under an exported snapshot; how a copy
takes effect is in `landings`.  Small tables share a snapshot, a job and a transaction.  A copy that
fails for a passing reason goes on later with the chunks that are missing, see `copy_journal`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from aqueduck import faults
from aqueduck.lake.commit.commit import transact
from aqueduck.lake.commit.copy_commit_modes import can_go_on, prepare_copy
from aqueduck.lake.commit.copy_files import ChunkFile
from aqueduck.lake.fold.fold_tasks import TASK_MEMORY
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import Directories, read_directories
from aqueduck.lake.session.files import file_prefix
from aqueduck.lake.target.apply import refuse_names
from aqueduck.lake.target.places import OTHER, check_place, notice_changes
from aqueduck.model.changes import SegmentRef
from aqueduck.model.columns.projection import only_needed
from aqueduck.model.errors import (
    AqueduckError,
    CopyDisturbedError,
    ResyncNeededError,
    SourceError,
    own_error,
)
from aqueduck.model.lifecycle import Lifecycle, fail, retry_is_due
from aqueduck.model.lifecycle import TableState as Life
from aqueduck.model.schema import TableName, TableSchema, lsn_text
from aqueduck.overview import metrics
from aqueduck.postgres.catalog.tables import describe_oid
from aqueduck.postgres.copy.table_copy import (
    ExportedSnapshot,
    export_snapshot,
    export_snapshot_by_sql,
    plan_chunks,
    read_column_marks,
    snapshot_xmin,
)
from aqueduck.postgres.publications.publications import refuse_without_columns
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.server import flush_wal, settled_position
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.copying.copy_commits import Landings
from aqueduck.sync.copying.copy_journal import CopyJournal, forget_journal, journaled_files, journals_of
from aqueduck.sync.copying.running_copy import RunningCopy, check_undisturbed, refuse_changed

__all__ = ["Copier", "CopyProgress"]

log = structlog.get_logger()

SMALL_BYTES = 4 << 20
SMALL_TABLES_MAX = 25
PROGRESS_SECONDS = 5.0
PATIENCE_SECONDS = 600.0


@dataclass(slots=True)
class CopyProgress:
    """One copy, as far as its tasks have said."""

    journal: CopyJournal
    began_at: datetime
    ended_at: datetime | None = None
    rows_at_end: int = 0

    @property
    def bytes_total(self) -> int:
        return sum(c.bytes for c in self.journal.chunks)

    def rows(self) -> int:
        return self.rows_at_end if self.ended_at else sum(f.rows for _, f in self.journal.done().values())

    def bytes(self) -> int:
        if self.ended_at:
            return self.bytes_total
        chunks = self.journal.chunks
        return sum(chunks[number].bytes for number in self.journal.done() if number < len(chunks))

    def share(self) -> float:
        return 1.0 if self.ended_at else self.bytes() / max(1, self.bytes_total)

    def seconds_left(self) -> float | None:
        share = self.share()
        elapsed = (datetime.now(UTC) - self.began_at).total_seconds()
        return elapsed * (1 - share) / share if share else None


@dataclass
class Copier:
    """Copies for one group; all access to the lake goes through `commit_lock`."""

    run_job: Callable[[CopyJob], list[ChunkFile]]
    """`run_copy` with a Spark session."""
    dsn: str
    group: str
    run_id: str
    lake: LakeSession
    commit_lock: threading.Lock
    states: dict[int, TableState]
    """Shared with the group's committer; changed under `commit_lock` only."""
    directory: Path
    on_ready: Callable[[Mapping[int, int]], None]
    has_everything_before: Callable[[int], bool]
    """Whether the lake has (applied or parked) all that was committed before a position."""
    numbered: Callable[[TableSchema, Sequence[SegmentRef]], list[SegmentRef]] = lambda copied, segments: list(
        segments
    )
    """Parked segments with the numbers of their columns, after a copy with these columns."""
    on_resync_needed: Callable[[int], bool] = lambda oid: False
    """Whether a table that cannot be applied as it is gets a new copy."""
    concurrency: int = 2
    chunk_bytes: int = 64 << 20
    by_sql: bool = False
    """Whether snapshots are taken without a replication connection."""
    task_memory: int = TASK_MEMORY
    may_have_parked: Callable[[int], bool] = lambda oid: True
    """False if surely nothing is parked of a table: asking the lake takes a third of a landing."""
    cancel_jobs: Callable[[], None] = lambda: None
    """Ends jobs that are under way; what they have copied is in their journals."""

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix=f"copy-{self.group}")
        self._stopping = threading.Event()
        self.progress: dict[int, CopyProgress] = {}
        self.failures: dict[int, Lifecycle] = {}
        """Tables that failed, here or in a commit, until they are ready again."""
        self.disabled: set[int] = set()
        self.unsettled = {oid for oid, state in self.states.items() if not state.ready}
        """Tables that were published while transactions may have been open; what those had done before is in no stream."""
        self.handovers: dict[int, Callable[[TableState], None]] = {}
        """Tables that another group hands over instead of a copy."""
        self._futures: dict[int, Future[None]] = {}
        self._alone: set[int] = set()
        """Small tables that failed together with others: next time by themselves."""
        self.landings = Landings(
            self.lake, self.group, self.commit_lock, self.states, self.directory, self.disabled, self.on_ready,
            self.numbered, self.may_have_parked,
        )  # fmt: skip
        self._told_at = time.monotonic()

    @property
    def journals(self) -> Path:
        return journals_of(self.directory)

    def kept_files(self) -> set[str]:
        """Names of files that no catalog knows, and that a copy will still need."""
        return journaled_files(self.journals.glob("*"))

    # -- what is to be done

    def start(self) -> None:
        """Begin what is due and not under way."""
        due = [oid for oid, state in list(self.states.items()) if self._is_due(oid, state)]
        replays = [oid for oid in due if self.states[oid].error is not None]
        for oid in replays:
            self._submit([oid], self._replay)
        handed = [oid for oid in due if oid in self.handovers]
        for oid in handed:
            self._submit([oid], self._take_over)
        copies = [oid for oid in due if oid not in replays and oid not in handed]
        if copies:
            for batch in self._batches(copies):
                self._submit(batch, self._copy)

    def _is_due(self, oid: int, state: TableState) -> bool:
        if state.ready or oid in self.disabled or self._is_busy(oid):
            return False
        failed = self.failures.get(oid)
        return failed is None or retry_is_due(failed, datetime.now(UTC))

    def _is_busy(self, oid: int) -> bool:
        return oid in self._futures and not self._futures[oid].done()

    def is_copying(self, oid: int) -> bool:
        """Whether a copy is under way: once it is in, the table is what it would be after another one."""
        return self._is_busy(oid) and self.states[oid].awaits_copy and oid not in self.handovers

    def _batches(self, oids: list[int]) -> list[list[int]]:
        """Large tables one by one, small ones together."""
        sizes = self._sizes(oids)
        small = [o for o in oids if sizes.get(o, 0) <= SMALL_BYTES and o not in self._alone]
        small = [o for o in small if not (self.journals / str(o)).exists()]
        alone = [[o] for o in oids if o not in set(small)]
        return alone + [small[i : i + SMALL_TABLES_MAX] for i in range(0, len(small), SMALL_TABLES_MAX)]

    def _sizes(self, oids: list[int]) -> dict[int, int]:
        if len(oids) == 1:
            return {oids[0]: SMALL_BYTES + 1}
        try:
            with connect(self.dsn) as conn:
                rows = conn.execute(
                    "select o::int8, coalesce((select sum(pg_relation_size(relid)) from pg_partition_tree(o::oid::regclass)),"
                    " 0)::int8 + coalesce(pg_relation_size(o::oid), 0) from unnest(%s::int8[]) o",
                    (oids,),
                ).fetchall()
        except Exception as exc:  # noqa: BLE001 - only a matter of speed; the copy itself will say what is wrong
            log.debug("sizes unknown", error=type(exc).__name__)
            return dict.fromkeys(oids, SMALL_BYTES + 1)
        return dict(rows)

    def _submit(self, oids: list[int], work: Callable[[list[TableState]], None]) -> None:
        future = self._pool.submit(self._try, oids, work)
        self._futures.update(dict.fromkeys(oids, future))

    def again(self, oid: int) -> None:
        """Copy a table once more, whatever became of it before."""
        self.forget(oid)
        self.start()

    def forget(self, oid: int) -> None:
        """What is known of a table here, such as its failures and the chunks of a copy."""
        forget_journal(self.directory, oid)
        for memory in (self.failures, self.progress, self.handovers):
            memory.pop(oid, None)
        self.disabled.discard(oid)

    def retry_now(self, oid: int) -> None:
        """Somebody says that the reason of a failure is gone."""
        if oid in self.failures:
            self.failures[oid] = replace(self.failures[oid], retry_at=datetime.now(UTC))
        self.start()

    def failed(self, oid: int, error: AqueduckError) -> None:
        """A table failed, here or in a commit."""
        now = datetime.now(UTC)
        self.failures[oid] = fail(self.failures.get(oid, Lifecycle(Life.PENDING, now)), error, now)

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self._futures.values())

    def raise_failures(self) -> None:
        """For those who wait for all copies: the first that failed."""
        for life in self.failures.values():
            assert life.failure is not None
            raise AqueduckError.from_text(life.failure.message) or AqueduckError(life.failure.message)

    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """A landing comes to its end; what is still being read is given up, and goes on at the next start."""
        self._stopping.set()
        while self.busy:
            self.cancel_jobs()  # also those that only begin now
            wait(list(self._futures.values()), timeout=0.5)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def tell_progress(self) -> None:
        """A line in the log for each copy that takes long."""
        if time.monotonic() - self._told_at < PROGRESS_SECONDS:
            return
        self._told_at = time.monotonic()
        for oid, progress in list(self.progress.items()):
            state = self.states.get(oid)
            if state is None or progress.ended_at is not None or not self._is_busy(oid):
                continue
            if progress.bytes_total > SMALL_BYTES:
                left = progress.seconds_left()
                log.info(
                    "copying", group=self.group, table=state.source, rows=progress.rows(),
                    done=f"{100 * progress.share():.0f} %", seconds_left=None if left is None else round(left),
                )  # fmt: skip

    # -- doing it, in threads of the pool

    def _try(self, oids: list[int], work: Callable[[list[TableState]], None]) -> None:
        if self._stopping.is_set():
            return
        states = [self.states[oid] for oid in oids if oid in self.states]
        try:
            work(states)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is about these tables and has to be seen
            error = own_error(exc)
            if self._stopping.is_set():
                return
            if len(states) > 1:  # one of them: see which
                self._alone.update(oids)
                return
            for state in states:
                if self.landings.is_over(state):
                    return
                if isinstance(error, ResyncNeededError) and self.on_resync_needed(state.oid):
                    error = CopyDisturbedError(error.message, table=error.table)  # after a pause, by itself
                self.failed(state.oid, error)
                metrics.count_error(error.code, flow="sync", group=self.group)
                log.warning("table not ready", group=self.group, table=state.source, error=str(error))
        else:
            for oid in oids:
                self.failures.pop(oid, None)
                self._alone.discard(oid)

    def _copy(self, states: list[TableState]) -> None:
        states = self.landings.not_landed(states)
        if not states:
            return
        began = datetime.now(UTC)
        if self.by_sql:  # otherwise the snapshot itself waits
            self._settle(states)
        time_us = self._source_time_us() if any(state.mode.keeps for state in states) else 0
        snapshot = (
            export_snapshot_by_sql(self.dsn) if self.by_sql else export_snapshot(self.dsn, self.is_stopping)
        )
        try:
            copies = self._begin(states, snapshot, began, time_us)
            prefix = f"{file_prefix(self.group)}{self.run_id}"
            items = [(copy, item) for copy in copies for item in copy.items(prefix)]
            job = CopyJob(
                self.dsn, snapshot.name, self.lake.config.data_path, tuple(item for _, item in items),
                self.lake.config.properties, self.task_memory,
            )  # fmt: skip
            files = self._read(job, copies)
            again: dict[int, list[ChunkFile]] = {copy.state.oid: [] for copy in copies}
            for (copy, item), file in zip(items, files, strict=True):
                if item.note is None:
                    again[copy.state.oid].append(file)
        finally:
            snapshot.close()
        if self.by_sql or any(copy.beside or len(copy.journal.sessions) > 1 for copy in copies):
            self._wait_for_changes(snapshot.position)
        faults.point("copy.before_landing")
        rows = self.landings.land(copies, again, snapshot.position)
        faults.point("copy.landed")
        for copy in copies:
            progress = self.progress.get(copy.state.oid)
            if progress is not None:  # otherwise it was removed right after
                progress.rows_at_end = rows[copy.state.oid]
                progress.ended_at = datetime.now(UTC)
            copy.journal.clear()
            log.info(
                "copy finished", group=self.group, table=copy.state.source, rows=rows[copy.state.oid],
                seconds=round((datetime.now(UTC) - began).total_seconds(), 1), position=lsn_text(snapshot.position),
            )  # fmt: skip

    def _settle(self, states: Sequence[TableState]) -> None:
        """Before the first copy of tables: wait for transactions that wrote to them when they were not published yet."""
        oids = {state.oid for state in states}
        if oids & self.unsettled:
            settled_position(self.dsn, given_up=self.is_stopping)
            self.unsettled -= oids

    def _source_time_us(self) -> int:
        """
        The server's time.

        Taken before a snapshot: whoever had taken a time to commit with before has committed when the snapshot is made.
        """
        with connect(self.dsn) as conn, translate_errors("ask the server for the time", conn=conn):
            row = conn.execute("select (extract(epoch from clock_timestamp()) * 1000000)::int8").fetchone()
        assert row is not None
        return int(row[0])

    def _begin(
        self, states: list[TableState], snapshot: ExportedSnapshot, began: datetime, time_us: int
    ) -> list[RunningCopy]:
        copies = []
        # All of it as the snapshot has it: the stream brings every change of columns that came after.
        with snapshot.connect(self.dsn) as conn:
            planned = []
            xmin = snapshot_xmin(conn)
            columns = read_column_marks(conn, [state.oid for state in states])
            for state in states:
                described = describe_oid(
                    conn, state.oid, need_key=state.mode.needs_key, projection=state.projection
                )
                refuse_without_columns(described)
                schema = only_needed(described).in_lake
                planned.append((state, schema, plan_chunks(conn, schema, chunk_bytes=self.chunk_bytes)))
        with self.commit_lock:
            directories, uuids = self._prepare([(state, schema) for state, schema, _ in planned])
            beside = {
                state.oid
                for state, schema, _ in planned
                if not can_go_on(self.lake, state, schema, missing=directories.of(state.target) is None)
            }
        for oid in beside:
            forget_journal(self.directory, oid)
        for state, schema, chunks in planned:
            place = directories.place(state.target, state.mode)
            assert place is not None, "_prepare makes the others"
            journal = CopyJournal(self.journals / str(state.oid))
            session = journal.begin(
                schema, place, chunks,
                columns=columns[state.oid], moment=snapshot.moment, xmin=xmin, time_us=time_us,
            )  # fmt: skip
            copies.append(
                RunningCopy(state, schema, place, journal, session, state.oid in beside, uuids[state.oid])
            )
            self.progress[state.oid] = CopyProgress(journal, began)
            log.info(
                "copy started" if session.number == 0 else "copy goes on", group=self.group, table=state.source,
                chunks=len(journal.missing()),
            )  # fmt: skip
        return copies

    def _prepare(
        self, tables: Sequence[tuple[TableState, TableSchema]]
    ) -> tuple[Directories, dict[int, str | None]]:
        """
        Targets as the copy needs them; one that is missing is made when the copy lands, if that can be.

        Besides, which table each is: one that is yet to be made is none of those that somebody else makes meanwhile.
        """
        directories = read_directories(self.lake)
        notice_changes(self.lake)
        early, uuids = [], {}
        for state, schema in tables:
            source = TableName(schema.schema, schema.name)
            there = check_place(self.lake, state.target, state.target_uuid, source, may_be_missing=True)
            refuse_names(state.target, schema, state.mode)
            uuids[state.oid] = state.target_uuid if there else OTHER
            if directories.place(state.target, state.mode) is None or (there and not state.mode.plain):
                early.append((state, schema))
                uuids[state.oid] = state.target_uuid if there else None
        if not early:
            return directories, uuids

        def prepare() -> None:
            for state, schema in early:
                prepare_copy(self.lake, state, schema)

        # In one transaction: after each that makes a table, DuckLake reads its whole catalog again.
        transact(self.lake, prepare)
        return read_directories(self.lake), uuids

    def _read(self, job: CopyJob, copies: Sequence[RunningCopy]) -> list[ChunkFile]:
        """The job; a name that it did not find any more is no reason to wait for a person if the table is still there."""
        try:
            files = self.run_job(job)
        except SourceError:
            with connect(self.dsn) as conn:
                refuse_changed(conn, copies)
            raise
        with connect(self.dsn) as conn:
            check_undisturbed(conn, copies)
        return files

    def _wait_for_changes(self, position: int) -> None:
        """What was committed between two sessions, or around one, has to be known before the rows are put together."""
        if self.by_sql:
            flush_wal(self.dsn)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.has_everything_before(position):
            if self._stopping.wait(0.1) or time.monotonic() > deadline:
                raise CopyDisturbedError("the stream did not reach the copy's position in time")

    def _replay(self, states: list[TableState]) -> None:
        """A table that failed: what was parked meanwhile, if it can be applied now."""
        [state] = states
        if self.landings.replay(state):
            log.info("table goes on", group=self.group, table=state.source)

    def _take_over(self, states: list[TableState]) -> None:
        [state] = states
        self.handovers[state.oid](state)
        self.handovers.pop(state.oid, None)
