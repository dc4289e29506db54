"""
One running group: its tables, its query and its copies.

`GroupRunner` combines four collaborators: `table_book` knows the group's tables, `group_commits` commits the batches of
the query, `group_tables` adds and removes tables, and `copies` copies them.  `service` decides which groups run and when
they are restarted; `observe` computes the state that users see.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog
from pyspark.sql import SparkSession

from aqueduck.config.sync import GroupConfig, SyncConfig, group_dir
from aqueduck.lake.fold.fold_tasks import FoldedTasks, FoldTaskWriter, remove_scratch, settled
from aqueduck.lake.ledger.parking import ord_after_parked
from aqueduck.lake.ledger.progress import Position, lake_mark, read_position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.model.batches import LeftToDriver
from aqueduck.model.errors import AqueduckError
from aqueduck.model.retries import restart_delay
from aqueduck.model.schema import lsn_text
from aqueduck.overview import metrics
from aqueduck.overview.values import VerifyOverview
from aqueduck.overview.verification import NEVER
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.service.probe import Proof
from aqueduck.service.tracing import BatchTimes
from aqueduck.spark.query.copy_job import cancel_copies, run_copy
from aqueduck.spark.query.sync_query import SyncQuery
from aqueduck.state_files.files import read_report, write_durable
from aqueduck.sync.copying.copies import Copier
from aqueduck.sync.copying.copy_reader import CopyJobs, CopySettings
from aqueduck.sync.groups.group_commits import GroupCommits
from aqueduck.sync.prepare import PreparedGroup
from aqueduck.sync.slot_history import refuse_another_source
from aqueduck.sync.status import GroupStatus
from aqueduck.sync.tables.column_versions import ColumnVersions
from aqueduck.sync.tables.prepare_tables import PreparedTable
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["GroupRunner"]

log = structlog.get_logger()

LOOK_SECONDS = 0.5
"""How long a look at the lake waits for a commit."""


class GroupRunner:
    """One running group."""

    def __init__(
        self,
        config: SyncConfig,
        spark: SparkSession,
        lake: LakeSession,
        commit_lock: threading.Lock,
        ready: PreparedGroup,
        *,
        verified: Callable[[str], VerifyOverview] = lambda _source: NEVER,
        on_traced: Callable[[BatchTimes], None] | None = None,
        is_outage: Callable[[AqueduckError], bool] = lambda _error: False,
    ) -> None:
        self.config = config
        self.lake = lake
        self.commit_lock = commit_lock
        self.group: GroupConfig = ready.group
        self.ready = ready
        self.timeline = ready.timeline
        """The timeline of the server that the query reads."""
        self.unfollowed: AqueduckError | None = None
        """Why the group runs with its earlier configuration and not with the registered one: for example, a row that cannot be read."""
        self.proof = Proof()
        """What the source's catalog showed about the group."""
        self.directory = group_dir(config, ready.group)
        self.status = GroupStatus(ready.group.name, position=ready.position)
        self.run_id = uuid.uuid4().hex[:8]
        self.failures = 0
        self.retry_at: float | None = None
        """When a failed query is restarted."""
        self._look_seconds = LOOK_SECONDS
        self.read_to = 0
        """The position that a single run (`--once`) has read to; there may have been nothing to commit."""
        self.on_commit: Callable[[list[str]], None] | None = None
        """Called with the segments of a batch right after its commit; a benchmark measures them."""
        self.verified = verified
        """The result of the service's last comparison of a table."""
        self.on_traced = on_traced
        """Called after each batch if traces are exported."""
        self.book = TableBook(self.status, lake, commit_lock, self.directory)
        self.book.begin(ready.tables, ready.refused)
        self.versions = ColumnVersions(config.source.dsn, self.book)
        writer = FoldTaskWriter(
            self.group.name,
            self.run_id,
            config.lake.data_path,
            str(self.book.scratch),
            str(self.book.tables_path),
            str(self.book.skips_path),
            properties=config.lake.properties,
            task_memory=self.group.task_memory,
        )
        self.query = SyncQuery(spark, self.directory, writer, self.commit)
        jobs = f"copies of {self.group.name} {self.run_id}"
        self.copier = Copier(
            CopySettings(
                config.source.dsn,
                f"{self.run_id}c",
                concurrency=self.group.copy_concurrency,
                chunk_bytes=self.group.copy_chunk_bytes,
                by_sql=self.group.capture == "poll",
                task_memory=self.group.task_memory,
                resync_on_type_change=self.group.on_type_change == "resync",
            ),
            self.book,
            CopyJobs(functools.partial(run_copy, spark, jobs), functools.partial(cancel_copies, spark, jobs)),
            self.versions,
            self.has_everything_before,
            is_outage=is_outage,
        )
        self.commits = GroupCommits(
            self.book,
            self.versions,
            self.copier.schedule,
            config.lake.data_path,
            self.run_id,
            self.group.on_type_change == "resync",
        )

    @property
    def tables(self) -> Mapping[int, PreparedTable]:
        """The tables that the group follows."""
        return self.book.tables

    @property
    def states(self) -> Mapping[int, TableState]:
        """The states of the tables in the lake."""
        return self.book.states

    # -- the query

    def start(self, *, once: bool = False) -> None:
        """Start or restart the query at the lake's position, and start the copies that are due."""
        for name in ("durable", "capture.json", "hold"):
            (self.directory / name).unlink(missing_ok=True)
        stored = read_position(self.lake, self.group.name)
        assert stored is not None, "prepare_group wrote it"
        # Another server may have taken over since the last start.
        self.timeline = refuse_another_source(self.config, self.group, stored)
        self.status.position = stored.position
        self.versions.clear()
        self.book.inform_capture()
        self.book.inform_tasks()
        self.copier.start()
        self._look_seconds = -1 if once else LOOK_SECONDS  # a single run has no later look
        self.query.start(self.settings(self.stored_position()), once=once)
        self.status.state = "streaming"
        self.status.moved_at = time.monotonic()
        self.retry_at = None

    @property
    def reads(self) -> bool:
        """Whether the query runs, and its capture has reported since the last start."""
        return self.query.active and self.retry_at is None and self.status.reading

    def stored_position(self) -> int:
        stored = read_position(self.lake, self.group.name)
        assert stored is not None, "prepare_group wrote it"
        return stored.position

    def settings(self, position: int) -> CaptureSettings:
        g = self.group
        return CaptureSettings(
            dsn=self.config.source.dsn,
            slot=g.slot_name,
            publication=g.publication,
            position=position,
            first_ord=max(position, ord_after_parked(self.lake, g.name)),
            lake=lake_mark(self.lake, g.name),
            system_identifier=self.ready.system_identifier,
            timeline=self.timeline,
            directory=str(self.directory),
            segment_bytes=g.segment_bytes,
            stage_bytes_max=g.stage_bytes_max,
            max_queued_changes=g.max_queued_changes,
            batch_bytes_max=g.batch_bytes_max,
            fold_concurrency=g.fold_concurrency,
            flush_interval_seconds=g.flush_interval_ms / 1000,
            capture=g.capture,
            plugin=g.plugin,
            poll_interval_seconds=g.poll_interval_ms / 1000,
            poll_step_bytes=g.poll_step_bytes,
            catchup_bytes=g.catchup_bytes,
            silence_timeout_seconds=self.config.source.silence_timeout_seconds,
            stream_in_progress=g.large_transactions == "stream",
        )

    def stop(self) -> None:
        """Finish a running commit, then end the query and the copies."""
        self.query.stop()
        self.copier.stop()

    def has_everything_before(self, position: int) -> bool:
        """Whether the lake has applied or parked every change that was committed before `position`."""
        if max(self.status.position, self.read_to) >= position:
            return True
        report = self.report()
        return int(report.get("seen", 0)) >= position and not report.get("pending", True)

    def commit(self, tasks: FoldedTasks, position: int, time_us: int) -> None:
        """Called by the query for each batch: one lake transaction."""
        paths = [s.path for task, _ in tasks for s in task.segments if s.path] if self.on_commit else []
        end = Position(self.group.name, position, time_us, self.ready.system_identifier, self.timeline)
        began, before = time.monotonic(), self.status.position
        with self.commit_lock:
            # The batch may still contain changes of a table that was removed.
            ours = [(task, outcome) for task, outcome in tasks if task.table_oid in self.states]
            self.commits.commit(ours, end)
            if self.on_commit is not None:
                self.on_commit(paths)
            write_durable(self.directory / "durable", position)
            self.book.count((task for task, _ in ours), position)
            self.committed(position, time_us)
            self.book.inform_tasks()
            self.book.inform_of_layouts()
            outcomes = settled(ours, self.states, before)
        self._measure(outcomes, end, before, time.monotonic() - began)
        remove_scratch(tasks, str(self.book.scratch))

    def _measure(self, tasks: FoldedTasks, end: Position, before: int, seconds: float) -> None:
        """Count a batch, and trace it if traces are exported."""
        name, fold_seconds = self.group.name, self.query.fold_seconds
        changes = sum(s.rows for task, _ in tasks if not task.bucket for s in task.segments)
        metrics.observe_batch(
            name,
            phase_seconds={"fold": fold_seconds, "commit": seconds},
            commit_seconds=seconds,
            changes=changes,
            freshness_seconds=self.status.freshness_seconds,
        )
        for _, outcome in tasks:
            metrics.count_fold_task(name, outcome if isinstance(outcome, LeftToDriver) else "files")
        if self.on_traced is not None:
            self.on_traced(
                BatchTimes(
                    group=name,
                    ended=time.time(),
                    fold_seconds=fold_seconds,
                    commit_seconds=seconds,
                    source_commit=end.commit_time_us / 1e6 if end.commit_time_us else None,
                    lsn_from=lsn_text(before),
                    lsn_to=lsn_text(end.position),
                    changes=changes,
                    tables=len({task.table_oid for task, _ in tasks}),
                )
            )

    # -- the capture's report

    def refresh(self) -> GroupStatus:
        """The status, with the capture's last report."""
        report = self.report()
        status = self.status
        status.seen = max(status.position, int(report.get("seen", 0)))
        status.transactions = int(report.get("transactions", 0))
        status.staged_bytes = int(report.get("staged_bytes", 0))
        status.unfinished_bytes = int(report.get("unfinished_bytes", 0))
        streams = bool(report.get("streams_in_progress", True))
        if status.streams_in_progress and not streams and self.group.large_transactions == "stream":
            log.warning("the server cannot stream a transaction: read whole", group=self.group.name)
        status.streams_in_progress = streams
        status.reading = bool(report)
        status.reader = str(report.get("reader", status.reader))
        trouble, before = report.get("bulk_trouble"), status.bulk_trouble
        if trouble and not before:
            log.warning("backlogs cannot be read in bulk: streamed", group=self.group.name, reason=trouble)
        status.bulk_trouble = trouble
        status.paused = bool(report.get("paused", False))
        status.held = bool(report.get("held", False))
        status.last_error = report.get("trouble") or status.last_error
        status.queued = {int(oid): (rows, size) for oid, (rows, size) in report.get("queued", {}).items()}
        waits = bool(report.get("pending", False))
        oldest = report.get("oldest_us")
        status.lag_bytes = max(0, status.seen - status.position) if waits else 0
        status.lag_seconds = max(0.0, time.time() - oldest / 1e6) if waits and oldest else 0.0
        if not (waits and oldest):
            status.moved_at = time.monotonic()
        return status

    def report(self) -> dict[str, Any]:
        """The capture's last report."""
        return read_report(self.directory / "capture.json")

    @contextlib.contextmanager
    def between_commits(self) -> Iterator[bool]:
        """
        Keep commits away for a look at the lake; yields false if one takes longer than a look waits.

        What the service shows and watches must not stop with a commit that hangs.
        """
        free = self.commit_lock.acquire(timeout=self._look_seconds)
        try:
            yield free
        finally:
            if free:
                self.commit_lock.release()

    # -- what the service decides

    def failed(self, error: AqueduckError, *, retries: bool) -> None:
        """Record why the query or a copy ended, and whether the group is to be tried again."""
        self.status.last_error = str(error)
        if retries:
            self.status.state = "retrying"

    def restart_later(self) -> float:
        """Let the query restart after a pause, which grows with each failure; returns its seconds."""
        delay = restart_delay(self.failures)
        self.retry_at = time.monotonic() + delay
        self.failures += 1
        self.status.restarts += 1
        return delay

    def record_read(self, position: int) -> None:
        """A single run has read to this position."""
        self.read_to = position

    def record_unfollowed(self, error: AqueduckError | None) -> None:
        """Record why the group keeps its earlier configuration; None if it follows the registered one."""
        self.unfollowed = error

    # -- its tables

    def forget_tables(self, oids: Collection[int]) -> None:
        """Forget the table; the caller holds `commit_lock`."""
        self.book.forget(oids)
        for oid in oids:
            self.copier.forget(oid)

    def resync(self, oid: int) -> None:
        """Re-copy a table unless a copy is running; its changes are parked from the next batch on."""
        with self.commit_lock:
            if self.copier.is_copying(oid):
                return
            self.book.await_copy(oid)
        self.copier.again(oid)

    def fail_table(self, oid: int, error: AqueduckError) -> None:
        """The table cannot be written; park its changes until the cause is removed.  The caller holds `commit_lock`."""
        log.warning("table failed", group=self.group.name, table=self.states[oid].source, error=str(error))
        self.book.fail(oid, error)
        self.copier.schedule.failed(oid, error)
        metrics.count_error(error.code, flow="sync", group=self.group.name)

    def set_enabled(self, oid: int, enabled: bool) -> None:
        """Park the changes of a disabled table, and replay them when it is enabled again."""
        with self.commit_lock:
            if enabled:
                self.book.enable(oid)
            else:
                self.book.disable(oid)
        if enabled:
            self.copier.start()

    def committed(self, position: int, time_us: int) -> None:
        """The lake has one more batch."""
        self.failures = 0
        status = self.status
        status.batches += 1
        status.position = position
        status.moved_at = time.monotonic()
        status.last_commit_at = datetime.now(UTC)
        status.freshness_seconds = max(0.0, time.time() - time_us / 1e6)
