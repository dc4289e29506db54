"""
One maintenance run over a lake: upkeep of tables, then expiry of lake snapshots, then removal of orphans.

Each step is short and excludes commits while it runs (`LakeWork.exclusive`), so that batches continue between
steps.  If a step conflicts with another writer, the step is given up, never the other write.  A run ends when
nothing is left to do or its time is up.  `sync.maintain` and `fanout.maintain` start runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import structlog

from aqueduck.config.sync import MaintenanceConfig
from aqueduck.lake.upkeep.expiry import count_snapshots, expire_some, remove_some_files
from aqueduck.lake.upkeep.statistics import settle_statistics, statistics_of_files, widen_statistics
from aqueduck.lake.upkeep.table_upkeep import Lake, do_step, flush, read_files, table_id
from aqueduck.model.errors import AqueduckError, LakeBusyError, own_error
from aqueduck.model.schema import TableName
from aqueduck.model.upkeep import ExpiryReport, MaintenanceReport, Rewrite, TableUpkeep, UpkeepStep, next_step
from aqueduck.overview import metrics

__all__ = ["LakeWork", "Progress", "maintain"]

log = structlog.get_logger()

Kept = tuple[int | None, str | None]
"""The first lake snapshot that must be kept, and the reader that needs it."""


@dataclass
class Progress:
    """State kept between runs over the same lake: where the last run stopped, and which tables were checked before."""

    next_table: int = 0
    healed: set[TableName] = field(default_factory=set)


@dataclass
class LakeWork:
    """A lake, and how this process gets access to it."""

    name: str
    flow: str
    exclusive: Callable[[], contextlib.AbstractContextManager[Lake]]
    """Opens the lake and excludes other writers of these tables, in this process and in others."""
    may_renew: Callable[[], bool]
    """Inside `exclusive`: whether the session can be reopened, which a rewrite needs."""
    renew: Callable[[], Lake]
    tables: Callable[[], list[TableName]]
    keep: Callable[[], Kept] = lambda: (None, None)
    """Finds what readers still need; may be slow."""
    remove_orphans: Callable[[Lake, datetime], int] = lambda lake, older_than: 0
    flushed: Callable[[TableName], None] = lambda table: None
    """Called after a table's inlined rows were flushed to files."""
    progress: Progress = field(default_factory=Progress)
    relayout: Callable[[TableName, int], tuple[int, int]] | None = None
    """Inside `exclusive`: rewrites some files from before a change of the layout, see `relayout_step`."""


def maintain(
    work: LakeWork,
    config: MaintenanceConfig,
    *,
    stopping: Callable[[], bool] = lambda: False,
    relayout: bool = False,
) -> MaintenanceReport:
    """Do one run, on request with a rewrite of files that have another layout; an error ends it and is part of the report."""
    run = _Run(work, config, stopping, relayout)
    began = time.monotonic()
    report = run.go()
    report = replace(report, seconds=time.monotonic() - began, longest_hold_seconds=run.longest_hold)
    total, expiry = report.totals, report.expiry
    metrics.observe_maintenance(
        work.flow,
        seconds=report.seconds,
        outcome="failed" if report.error else "complete" if report.complete else "partial",
        files={
            "merged": total.files_merged,
            "rewritten": total.files_rewritten,
            "removed": expiry.files_removed,
            "orphaned": expiry.orphans_removed,
        },
        rows_flushed=total.rows_flushed,
        snapshots_expired=expiry.snapshots_before - expiry.snapshots_after,
    )
    log.info(
        "lake maintained", lake=report.lake, seconds=round(report.seconds, 3), complete=report.complete,
        longest_hold_seconds=round(report.longest_hold_seconds, 3), rows_flushed=total.rows_flushed,
        files_before=total.files_before, files_after=total.files_after,
        bytes_before=total.bytes_before, bytes_after=total.bytes_after,
        snapshots_before=expiry.snapshots_before, snapshots_after=expiry.snapshots_after,
        files_removed=expiry.files_removed, orphans_removed=expiry.orphans_removed,
    )  # fmt: skip
    if report.error is not None:
        log.warning("maintenance stopped", lake=report.lake, error=report.error)
    return report


class _Run:
    def __init__(
        self, work: LakeWork, config: MaintenanceConfig, stopping: Callable[[], bool], relayout: bool
    ) -> None:
        self.work = work
        self._relayout = work.relayout if relayout else None
        self.config = config
        self._stopping = stopping
        self.longest_hold = 0.0
        self._error: str | None = None
        self._deadline = time.monotonic() + config.budget_seconds
        self._now = datetime.now(UTC)

    def go(self) -> MaintenanceReport:
        tables, expiry = [], ExpiryReport()
        try:
            tables = list(self._tables())
            expiry = self._past()
        except Exception as exc:  # noqa: BLE001 - the report shows any error, and the next run tries again
            self._record_failure(exc)
        return MaintenanceReport(
            lake=self.work.name,
            tables=tuple(tables),
            expiry=expiry,
            error=self._error,
            complete=self._error is None and not self._time_is_up,
        )

    def _record_failure(self, exc: Exception) -> None:
        error = own_error(exc)
        metrics.count_error(error.code, flow=self.work.flow)
        self._error = self._error or str(error)

    @property
    def _time_is_up(self) -> bool:
        return self._stopping() or time.monotonic() > self._deadline

    @contextlib.contextmanager
    def _hold(self) -> Iterator[Lake]:
        with self.work.exclusive() as lake:
            began = time.monotonic()
            try:
                yield lake
            finally:
                seconds = time.monotonic() - began
                self.longest_hold = max(self.longest_hold, seconds)
                metrics.observe_hold(self.work.flow, seconds)

    # -- tables

    def _tables(self) -> Iterator[TableUpkeep]:
        """All tables, beginning with the first one that the last run did not reach."""
        progress, tables = self.work.progress, self.work.tables()
        start = progress.next_table % max(1, len(tables))
        for offset in range(len(tables)):
            place = (start + offset) % len(tables)
            if self._time_is_up:
                progress.next_table = place
                return
            done = self._table(tables[place])
            if done is not None:
                yield done

    def _table(self, table: TableName) -> TableUpkeep | None:
        report: TableUpkeep | None = None
        without_effect: set[UpkeepStep] = set()
        more = True
        rewritten = self._lay_out(table)
        while more and not self._time_is_up:
            try:
                with self._hold() as lake:
                    report, more = self._step(lake, table, report, without_effect)
            except LakeBusyError as exc:
                log.info(
                    "upkeep step given up after a conflict",
                    lake=self.work.name,
                    table=table.qualified,
                    reason=str(exc),
                )
                more = False
            except Exception as exc:  # noqa: BLE001 - upkeep of the other tables continues
                self._record_failure(exc)
                more = False
        return report and replace(report, files_rewritten=report.files_rewritten + rewritten)

    def _lay_out(self, table: TableName) -> int:
        """Rewrite the files of a table that have another layout, in steps; returns how many."""
        total, last = 0, -1
        while self._relayout is not None and not self._time_is_up:
            try:
                with self._hold():
                    count, last = self._relayout(table, last)
            except Exception as exc:  # noqa: BLE001 - upkeep of the other tables continues
                self._record_failure(exc)
                break
            if not count:
                break
            total += count
        return total

    def _step(
        self, lake: Lake, table: TableName, report: TableUpkeep | None, without_effect: set[UpkeepStep]
    ) -> tuple[TableUpkeep | None, bool]:
        """Flush, then do the next step of the table; also returns whether there may be more to do."""
        number = table_id(lake, table)
        if number is None:
            return report, False
        lake = self._heal(lake, table, number)
        if report is None:
            files = read_files(lake, number)
            report = TableUpkeep(
                table=table.qualified,
                files_before=len(files),
                bytes_before=sum(file.bytes for file in files),
                delete_files_before=sum(file.removed > 0 for file in files),
            )
        flushed = flush(lake, table)
        self.work.flushed(table)
        step = next_step(read_files(lake, number), delete_share=self.config.delete_share, done=without_effect)
        if isinstance(step, Rewrite) and not self.work.may_renew():
            step = None  # another thread reads through this session; leave it to the next run
        count = 0
        if step is not None:
            count = do_step(lake, table, number, step)
            if isinstance(step, Rewrite):
                lake = self.work.renew()
            if not count:
                without_effect.add(step)
        files = read_files(lake, number)
        merged, rewritten = (0, count) if isinstance(step, Rewrite) else (count, 0)
        report = replace(
            report,
            files_after=len(files),
            bytes_after=sum(file.bytes for file in files),
            delete_files_after=sum(file.removed > 0 for file in files),
            rows_flushed=report.rows_flushed + flushed,
            files_merged=report.files_merged + merged,
            files_rewritten=report.files_rewritten + rewritten,
        )
        return report, step is not None

    def _heal(self, lake: Lake, table: TableName, number: int) -> Lake:
        """Repair statistics once per table, in case a process died between a rewrite and widening them."""
        healed = self.work.progress.healed
        if table not in healed and self.work.may_renew():
            settle_statistics(lake, [table], set())
            if widen_statistics(lake, number, statistics_of_files(lake, number)):
                log.info("statistics widened", lake=self.work.name, table=table.qualified)
                lake = self.work.renew()
            healed.add(table)
        return lake

    # -- lake snapshots

    def _past(self) -> ExpiryReport:
        with self._hold() as lake:
            count = count_snapshots(lake)
        report = ExpiryReport(snapshots_before=count, snapshots_after=count)
        if self.config.retention_hours is not None:
            report = self._expire(report, self.config.retention_hours)
        report = replace(report, files_removed=self._remove_files())
        if not self._time_is_up:
            with self._hold() as lake:
                older_than = self._now - timedelta(hours=self.config.orphan_hours)
                report = replace(report, orphans_removed=self.work.remove_orphans(lake, older_than))
        return report

    def _expire(self, report: ExpiryReport, hours: float) -> ExpiryReport:
        try:
            keep_from, whom = self.work.keep()
        except AqueduckError as exc:  # a reader whose cursor is unknown may need all of them
            log.warning(
                "lake snapshots kept because a reader cannot be queried", lake=self.work.name, error=str(exc)
            )
            return replace(report, kept_for=str(exc))
        older_than = self._now - timedelta(hours=hours)
        while not self._time_is_up:
            with self._hold() as lake:
                gone = expire_some(lake, older_than=older_than, keep_from=keep_from)
                report = replace(report, snapshots_after=count_snapshots(lake))
            if not gone:
                break
        return replace(report, kept_for=whom)

    def _remove_files(self) -> int:
        older_than = self._now - timedelta(hours=self.config.grace_hours)
        removed = 0
        while not self._time_is_up:
            with self._hold() as lake:
                gone = remove_some_files(lake, older_than=older_than)
            removed += gone
            if not gone:
                break
        return removed
