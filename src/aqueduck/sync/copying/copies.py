"""
Initial copies of a group's tables, beside its stream.

`Copier` takes the tables that are due (`copy_schedule`), reads them with Spark jobs under an exported snapshot
(`copy_reader`) and commits the files (`copy_commits`).  Small tables share a snapshot, a job and a transaction.  A copy
that failed and may be retried continues later with the missing chunks, see `copy_journal`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path

import structlog

from aqueduck import faults
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.model.errors import AqueduckError, CopyDisturbedError, ResyncNeededError, own_error
from aqueduck.model.schema import lsn_text
from aqueduck.overview import metrics
from aqueduck.postgres.session.server import flush_wal
from aqueduck.sync.copying.copy_commits import CopyCommits
from aqueduck.sync.copying.copy_journal import forget_journal, journaled_files, journals_of
from aqueduck.sync.copying.copy_reader import CopyJobs, CopyReader, CopySettings, table_bytes
from aqueduck.sync.copying.copy_schedule import SMALL_BYTES, CopySchedule
from aqueduck.sync.copying.progress import Progress
from aqueduck.sync.tables.column_versions import ColumnVersions
from aqueduck.sync.tables.table_book import TableBook

__all__ = ["Copier"]

log = structlog.get_logger()

PATIENCE_SECONDS = 600.0


class Copier:
    """Copies for one group, in their own threads."""

    def __init__(
        self,
        settings: CopySettings,
        book: TableBook,
        jobs: CopyJobs,
        versions: ColumnVersions,
        has_everything_before: Callable[[int], bool],
        *,
        is_outage: Callable[[AqueduckError], bool] = lambda _error: False,
    ) -> None:
        self.settings = settings
        self.jobs = jobs
        self.schedule = CopySchedule()
        self.progress = Progress(book.group)
        self.commits = CopyCommits(book, versions)
        self._book = book
        self._has_everything_before = has_everything_before
        """Whether the lake has applied or parked every change that was committed before a position."""
        self._is_outage = is_outage
        """Whether an error belongs to an outage of the source, which is logged once."""
        self._stopping = threading.Event()
        self._reader = CopyReader(settings, book, jobs, self.progress, self._stopping)
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix=f"copy-{book.group}")
        self._futures: dict[int, Future[None]] = {}

    @property
    def journals(self) -> Path:
        return journals_of(self._book.directory)

    def kept_files(self) -> set[str]:
        """Names of files that no catalog knows, and that a copy will still need."""
        return journaled_files(self.journals.glob("*"))

    # -- decide

    def start(self) -> None:
        """Start the copies that are due and not yet running."""
        due = self.schedule.due(self._book.states, disabled=self._book.disabled, is_busy=self._is_busy)
        for oid in due.replays:
            self._submit([oid], self._replay)
        for oid in due.handovers:
            self._submit([oid], self._take_over)
        if due.copies:
            begun = [oid for oid in due.copies if (self.journals / str(oid)).exists()]
            for batch in self.schedule.batches(due.copies, self._sizes(due.copies), begun):
                self._submit(batch, self._copy)

    def _sizes(self, oids: Sequence[int]) -> Mapping[int, int]:
        alone = dict.fromkeys(oids, SMALL_BYTES + 1)
        if len(oids) == 1:
            return alone
        try:
            return table_bytes(self.settings.dsn, oids)
        except Exception as exc:  # noqa: BLE001 - only a matter of speed; the copy itself will say what is wrong
            log.debug("sizes unknown", error=type(exc).__name__)
            return alone

    def _submit(self, oids: list[int], work: Callable[[list[TableState]], None]) -> None:
        future = self._pool.submit(self._try, oids, work)
        self._futures.update(dict.fromkeys(oids, future))

    def _is_busy(self, oid: int) -> bool:
        return oid in self._futures and not self._futures[oid].done()

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self._futures.values())

    def is_copying(self, oid: int) -> bool:
        """Whether a copy of the table is running; when it is committed, a further copy would change nothing."""
        awaits_copy = self._is_busy(oid) and self._book.states[oid].awaits_copy
        return awaits_copy and self.schedule.handover(oid) is None

    def again(self, oid: int) -> None:
        """Copy a table again, whether or not it failed before."""
        self.forget(oid)
        self.start()

    def retry_now(self, oid: int) -> None:
        """An operator reports that the cause of a failure was removed."""
        self.schedule.retry_now(oid)
        self.start()

    def forget(self, oid: int) -> None:
        """Forget what is stored here for a table, such as its failures and the chunks of a copy."""
        forget_journal(self._book.directory, oid)
        self.schedule.forget(oid)
        self.progress.forget(oid)

    def raise_failures(self) -> None:
        """Raise the first failure, for a caller that waits for all copies."""
        self.schedule.raise_failures()

    def log_progress(self) -> None:
        """Log a line for each copy that takes long."""
        self.progress.log(self._book.states, self._is_busy)

    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Finish a running copy commit; abandon copies that are still being read, which continue at the next start."""
        self._stopping.set()
        while self.busy:
            self.jobs.cancel()  # also those that are just starting
            wait(list(self._futures.values()), timeout=0.5)
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- run, in threads of the pool

    def _try(self, oids: list[int], work: Callable[[list[TableState]], None]) -> None:
        if self._stopping.is_set():
            return
        known = self._book.states
        states = [known[oid] for oid in oids if oid in known]
        try:
            work(states)
        except Exception as exc:  # noqa: BLE001 - any error is recorded as an error of these tables
            self._failed(states, own_error(exc))
        else:
            self.schedule.succeeded(oids)

    def _failed(self, states: Sequence[TableState], error: AqueduckError) -> None:
        if self._stopping.is_set():
            return
        if len(states) > 1:  # one of them is the cause: copy each alone to find it
            self.schedule.failed_together([state.oid for state in states])
            return
        for state in states:
            if not self._book.is_current(state):
                return
            if isinstance(error, ResyncNeededError) and self.settings.resync_on_type_change:
                with self._book.commit_lock:
                    self._book.await_copy(state.oid)
                forget_journal(self._book.directory, state.oid)
                error = CopyDisturbedError(error.message, table=error.table)  # copied after a pause
            self.schedule.failed(state.oid, error)
            metrics.count_error(error.code, flow="sync", group=self._book.group)
            if not self._is_outage(error):
                log.warning("table not ready", group=self._book.group, table=state.source, error=str(error))

    def _copy(self, states: list[TableState]) -> None:
        states = self.commits.not_committed(states)
        if not states:
            return
        began = datetime.now(UTC)
        read = self._reader.read(states, began)
        if self.settings.by_sql or read.needs_changes:
            self._wait_for_changes(read.position)
        faults.point("copy.before_landing")
        rows = self.commits.commit(read)
        faults.point("copy.landed")
        for copy in read.copies:
            oid = copy.state.oid
            self.progress.end(oid, rows[oid])
            copy.journal.clear()
            log.info(
                "copy finished", group=self._book.group, table=copy.state.source, rows=rows[oid],
                seconds=round((datetime.now(UTC) - began).total_seconds(), 1), position=lsn_text(read.position),
            )  # fmt: skip

    def _wait_for_changes(self, position: int) -> None:
        """Wait until the lake has every change that was committed between two sessions, or around one; only then are the rows combined."""
        if self.settings.by_sql:
            flush_wal(self.settings.dsn)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._has_everything_before(position):
            if self._stopping.wait(0.1) or time.monotonic() > deadline:
                raise CopyDisturbedError("the stream did not reach the copy's position in time")

    def _replay(self, states: list[TableState]) -> None:
        """Apply the parked changes of a table that failed, if that is possible now."""
        [state] = states
        if self.commits.replay(state):
            log.info("table continues", group=self._book.group, table=state.source)

    def _take_over(self, states: list[TableState]) -> None:
        [state] = states
        handover = self.schedule.handover(state.oid)
        if handover is not None:  # otherwise the table was removed meanwhile
            handover(state)
            self.schedule.handed_over(state.oid)
