"""
Initial copies of a group's tables, beside its stream.

`Copier` takes the tables that are not ready, copies each with a Spark job under an exported
snapshot, and lands it in one lake transaction: the target emptied, the copy's files, the changes
that were parked meanwhile, the table's state.  A copy that fails for a passing reason is tried again later.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from aqueduck.batches import plan_runs
from aqueduck.changes import SegmentRef
from aqueduck.errors import AqueduckError, Retry, own_error
from aqueduck.lake.apply import add_files, empty_target, make_target, table_directory
from aqueduck.lake.catalog import LakeSession
from aqueduck.lake.commit import RunPlan, apply_run, set_lineage
from aqueduck.lake.copy_files import ChunkFile
from aqueduck.lake.files import file_prefix
from aqueduck.lake.parking import forget_parked, parked_segments, remove_parked_files
from aqueduck.lake.table_states import TableState, write_state
from aqueduck.postgres.connection import connect
from aqueduck.postgres.table_copy import export_snapshot, plan_chunks
from aqueduck.postgres.tables import describe_oid
from aqueduck.schema import TableSchema, lsn_text
from aqueduck.spark.copy_job import CopyTask, copied_so_far, run_copy

__all__ = ["Copier", "CopyProgress"]

log = structlog.get_logger()

CHUNK_BYTES = 32 << 20
CONCURRENCY = 2
RETRY_SECONDS = 30.0
RETRY_SECONDS_MAX = 1800.0


@dataclass(slots=True)
class CopyProgress:
    """One copy, as far as its tasks have said."""

    table: str
    bytes_total: int
    chunks_total: int
    began: float
    directory: str
    chunk_bytes: tuple[int, ...]
    ended: float | None = None

    def rows(self) -> int:
        return sum(f.rows for f in copied_so_far(self.directory))

    def share(self) -> float:
        done = sum(self.chunk_bytes[f.chunk] for f in copied_so_far(self.directory))
        return 1.0 if self.ended else done / max(1, self.bytes_total)


@dataclass
class Copier:
    """Copies for one group; all access to the lake goes through `commit_lock`."""

    spark: Any
    dsn: str
    group: str
    run_id: str
    lake: LakeSession
    commit_lock: threading.Lock
    states: dict[int, TableState]
    """Shared with the group's committer; changed under `commit_lock` only."""
    directory: Path
    on_ready: Callable[[], None]

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix=f"copy-{self.group}")
        self._stopping = threading.Event()
        self.progress: dict[int, CopyProgress] = {}
        self.failures: dict[int, AqueduckError] = {}
        self.retry_at: dict[int, float] = {}
        self._failed_times: dict[int, int] = {}
        self._futures: dict[int, Any] = {}

    def start(self) -> None:
        """Begin the copies that are due and not under way."""
        for oid, state in list(self.states.items()):
            if state.ready or (oid in self._futures and not self._futures[oid].done()):
                continue
            now = time.monotonic()
            if state.error is not None:  # it just failed: not again at once
                self.retry_at.setdefault(oid, now + RETRY_SECONDS)
            if now >= self.retry_at.get(oid, 0.0):
                work = self._copy_once if state.error is None else self._replay
                self._futures[oid] = self._pool.submit(self._try, oid, work)

    def again(self, oid: int) -> None:
        """Copy a table once more, whatever became of it before."""
        for memory in (self.failures, self.retry_at, self._failed_times, self.progress):
            memory.pop(oid, None)
        self.start()

    def wait(self) -> None:
        """Until the copies that were begun have ended; raises the first failure."""
        for future in list(self._futures.values()):
            future.result()
        for failure in self.failures.values():
            raise failure

    def stop(self) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def retry_now(self, oid: int) -> None:
        """Somebody says that the reason of a failure is gone."""
        self.retry_at[oid] = 0.0
        self.start()

    def _try(self, oid: int, work: Callable[[TableState], None]) -> None:
        state = self.states[oid]
        try:
            work(state)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is about this table and has to be seen
            error = own_error(exc)
            if self._stopping.is_set():
                return
            times = self._failed_times[oid] = self._failed_times.get(oid, 0) + 1
            self.failures[oid] = error
            delay = min(RETRY_SECONDS * 2 ** (times - 1), RETRY_SECONDS_MAX)
            self.retry_at[oid] = time.monotonic() + (delay if error.retry is Retry.AUTO else float("inf"))
            log.warning("table not ready", group=self.group, table=state.source, error=str(error))
        else:
            for memory in (self.failures, self.retry_at, self._failed_times):
                memory.pop(oid, None)

    def _copy_once(self, state: TableState) -> None:
        began = time.monotonic()
        snapshot = export_snapshot(self.dsn)
        try:
            with connect(self.dsn) as conn:
                schema = describe_oid(conn, state.oid)
                chunks = tuple(plan_chunks(conn, schema, chunk_bytes=CHUNK_BYTES))
            directory = self.directory / "copies" / str(state.oid)
            shutil.rmtree(directory, ignore_errors=True)
            with self.commit_lock:
                make_target(self.lake, state.target, schema)
                place = table_directory(self.lake, state.target)
            self.progress[state.oid] = CopyProgress(
                state.source,
                sum(c.bytes for c in chunks),
                len(chunks),
                began,
                str(directory),
                tuple(c.bytes for c in chunks),
            )
            log.info("copy started", group=self.group, table=state.source, chunks=len(chunks))
            # A name of its own for each copy: the lake may still show the file of an earlier one.
            prefix = f"{file_prefix(self.group)}{self.run_id}-{state.oid}-{uuid.uuid4().hex[:8]}"
            task = CopyTask(
                self.dsn,
                snapshot.name,
                schema,
                chunks,
                self.lake.config.data_path,
                place,
                prefix,
                str(directory),
            )
            files = run_copy(self.spark, task)
        finally:
            snapshot.close()
        self._land(state, schema, files, snapshot.position)
        self.progress[state.oid].ended = time.monotonic()
        log.info(
            "copy finished", group=self.group, table=state.source, rows=sum(f.rows for f in files),
            seconds=round(time.monotonic() - began, 1), position=lsn_text(snapshot.position),
        )  # fmt: skip

    def _replay(self, state: TableState) -> None:
        """A table that failed: what was parked meanwhile, if it can be applied now."""
        ready = replace(state, ready=True, error=None)
        with self.commit_lock:
            parked = parked_segments(self.lake, self.group, state.oid)
            with self.lake.transaction():
                self._finish(ready, parked)
                set_lineage(self.lake, f"replay of {state.source}", {"group": self.group})
            self.states[state.oid] = ready
            self.on_ready()
        remove_parked_files(parked)
        log.info("table goes on", group=self.group, table=state.source)

    def _finish(self, ready: TableState, parked: list[SegmentRef]) -> None:
        """Inside a transaction: apply what was parked after the copy, and mark the table as ready."""
        later = [segment for segment in parked if segment.last_lsn >= ready.copy_position]
        for run in plan_runs(later):
            columns = TableSchema.from_json(run.segments[0].schema_json)
            plan = RunPlan(columns, run.truncate_first, run.segments)
            apply_run(self.lake, ready.target, plan, skip_before=ready.copy_position, group=self.group)
        forget_parked(self.lake, self.group, ready.oid)
        write_state(self.lake, self.group, [ready])

    def _land(self, state: TableState, schema: TableSchema, files: list[ChunkFile], position: int) -> None:
        """Copy, parked changes and state in one lake transaction."""
        ready = replace(state, ready=True, copy_position=position, error=None)
        with self.commit_lock:
            parked = parked_segments(self.lake, self.group, state.oid)
            with self.lake.transaction():
                empty_target(self.lake, state.target, schema)
                add_files(self.lake, state.target, [f.path for f in files if f.path])
                self._finish(ready, parked)
                set_lineage(
                    self.lake, f"copy of {schema.qualified}", {"group": self.group, "lsn": lsn_text(position)}
                )
            self.states[state.oid] = ready
            self.on_ready()
        remove_parked_files(parked)
