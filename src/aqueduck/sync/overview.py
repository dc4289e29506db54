"""
The picture of a running sync service: `overview.values.Overviews`, made from the knowledge of the service and
its groups.

It is quick enough for once a second. Slower parts (the lake's files, the slots, the processes) are read less
often, and the lake only between commits. This module only reads the service.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog
from psycopg.conninfo import conninfo_to_dict

from aqueduck import __version__
from aqueduck.lake.upkeep.health import read_health
from aqueduck.model.errors import AqueduckError
from aqueduck.model.lifecycle import SyncState
from aqueduck.model.schema import lsn_text
from aqueduck.overview.problems import Problems, difference
from aqueduck.overview.processes import SLOW_SECONDS, processes
from aqueduck.overview.values import (
    CopyOverview,
    FlowOverview,
    GroupOverview,
    GroupState,
    LakeOverview,
    Overview,
    ProcessUsage,
    TableOverview,
)
from aqueduck.postgres.registry.registry import TableObservation, TableRow, rows_of
from aqueduck.postgres.session.connection import connect
from aqueduck.service.verify_schedule import summary
from aqueduck.sync.control import Wanted
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.observe import (
    errored_tables,
    group_error,
    observe_tables,
    table_error,
    table_state,
    waiting_tables,
)
from aqueduck.sync.verify_schedule import subject

if TYPE_CHECKING:  # the service starts the server that shows it
    from aqueduck.sync.service import SyncService

__all__ = ["SyncOverviews"]

log = structlog.get_logger()

FLOW = "sync"


class SyncOverviews:
    """The overviews of one service; `overview` is not thread-safe."""

    def __init__(self, service: SyncService) -> None:
        self._service = service
        self._started_at = datetime.now(UTC)
        self._problems = Problems(FLOW)
        self._database = conninfo_to_dict(service.config.source.dsn).get("dbname") or ""
        self._slow_at = -SLOW_SECONDS
        self._lake: LakeOverview | None = None
        self._retained: dict[str, int | None] = {}
        self._processes: tuple[ProcessUsage, ...] = ()

    def overview(self) -> Overview:
        groups = tuple(self._groups())
        if time.monotonic() - self._slow_at >= SLOW_SECONDS:
            self._look_slowly(groups)
        groups = tuple(replace(g, retained_bytes=self._retained.get(g.name)) for g in groups)
        return Overview(
            at=datetime.now(UTC),
            version=__version__,
            started_at=self._started_at,
            flows=(self._flow(groups),),
            lake=self._lake,
            errors=self._problems.recent(),
            processes=self._processes,
        )

    def _flow(self, groups: tuple[GroupOverview, ...]) -> FlowOverview:
        service, error = self._service, self._service.source_error
        known = [table.verified for group in groups for table in group.tables]
        doing = () if service.verifier is None else service.verifier.doing
        return FlowOverview(
            name=FLOW,
            kind="sync",
            source=str(self._database),
            groups=groups,
            error=self._problems.see(None if error is None else str(error)),
            seen_at=service.seen_at,
            verification=summary(service.config.verify, known, doing),
        )

    def _verified(self, table: TableOverview, error: str | None = None) -> TableOverview:
        """
        Add the table's error and the last comparison: a difference is shown as the error if there is no
        other.
        """
        verified = self._service.verdicts[subject(table.group, table.source)]
        text = error or difference(verified, f"aqueduck tables resync -c FILE {table.source}")
        problem = self._problems.see(text, group=table.group, table=table.source)
        return replace(table, verified=verified, error=problem)

    def _look_slowly(self, groups: tuple[GroupOverview, ...]) -> None:
        self._slow_at = time.monotonic()
        self._processes = tuple(processes())
        service = self._service
        if service.commit_lock.acquire(blocking=False):
            try:
                self._lake = read_health(service.lake)
            except AqueduckError as exc:  # the groups report it as well; the last result keeps its time
                log.warning("the lake's health cannot be read", error=str(exc))
            finally:
                service.commit_lock.release()
        try:
            with connect(service.config.source.dsn) as conn:
                self._retained = {row["name"]: row["retained_bytes"] for row in rows_of(conn, "groups")}
        except AqueduckError:  # there may be no registry; an unreachable one is the flow's error
            self._retained = {}

    def _groups(self) -> Iterator[GroupOverview]:
        service = self._service
        runners = dict(service.running)
        for name, wanted in dict(service.wanted).items():
            runner = runners.get(name)
            if runner is not None:
                yield self._running(runner, wanted)
            else:
                yield self._standing(name, wanted)

    def _standing(self, name: str, wanted: Wanted) -> GroupOverview:
        """A group that does not run: not yet, no longer, or because it cannot."""
        errored = self._service.errored.get(name)
        state: GroupState = "starting" if wanted.enabled else "disabled"
        seen = {found.id: found for found in waiting_tables(wanted, self._service.refused(name))}
        if errored is not None:
            state = "errored"
            seen |= {found.id: found for found in errored_tables(wanted, errored.error)}
        problem = self._problems.see(None if errored is None else str(errored.error), group=name)
        rows = [row for row in wanted.rows.values() if not row.removed]
        tables = tuple(
            self._verified(_table(name, row, seen[row.id]), seen[row.id].error_message) for row in rows
        )
        return GroupOverview(
            name=name, state=state, slot_name=wanted.group.slot_name, error=problem, tables=tables
        )

    def _running(self, runner: GroupRunner, wanted: Wanted) -> GroupOverview:
        status, report, name = runner.refresh(), runner.report(), runner.group.name
        state: GroupState = "retrying" if status.state == "retrying" else "streaming"
        wrong = group_error(runner)
        proven = None if wrong is None else str(wrong)
        error = self._problems.see(status.last_error if state == "retrying" else proven, group=name)
        tables = tuple(self._tables(runner, wanted))
        return GroupOverview(
            name=name,
            state=state,
            capture=runner.group.capture,
            reader=status.reader,
            bulk_trouble=status.bulk_trouble,
            slot_name=runner.group.slot_name,
            position=lsn_text(status.position),
            seen=lsn_text(status.seen),
            lag_bytes=status.lag_bytes,
            lag_seconds=status.lag_seconds,
            freshness_seconds=status.freshness_seconds,
            batches=status.batches,
            transactions=status.transactions,
            changes=int(report.get("rows", 0)),
            received_bytes=int(report.get("received_bytes", 0)),
            decode_seconds=float(report.get("decode_seconds", 0.0)),
            staged_bytes=status.staged_bytes,
            unfinished_bytes=status.unfinished_bytes,
            paused=status.paused,
            held=status.held,
            restarts=status.restarts,
            last_sync_at=max((t.last_sync_at for t in tables if t.last_sync_at), default=None),
            error=error,
            tables=tables,
        )

    def _tables(self, runner: GroupRunner, wanted: Wanted) -> Iterator[TableOverview]:
        """The tables that SQL shows, plus those that only the file has, and those that are not registered."""
        group, seen = runner.group.name, observe_tables(runner, wanted)
        listed = {str(row.source): row for row in wanted.rows.values() if not row.removed}
        oids = {table.source: oid for oid, table in runner.tables.items() if oid in runner.states}
        for source, row in listed.items():
            found = seen.get(row.id, row.observed)
            yield self._shown(runner, _table(group, row, found), oids.get(source), found.error_message)
        for source in oids.keys() - listed.keys():
            oid = oids[source]
            yield self._shown(runner, _unlisted(runner, oid), oid, table_error(runner, oid))
        for source, error in runner.book.refused.items():
            if source not in listed and source not in oids:
                yield self._shown(runner, _refused(wanted, source), None, str(error))

    def _shown(
        self, runner: GroupRunner, made: TableOverview, oid: int | None, error: str | None
    ) -> TableOverview:
        counts = runner.status.tables.get(oid) if oid is not None else None
        made = self._verified(made, error)
        if oid is not None:
            made = replace(made, layout=runner.book.layout_of(oid))
        if counts is None:
            return made
        return replace(
            made,
            inserts=counts.inserts,
            updates=counts.updates,
            deletes=counts.deletes,
            truncates=counts.truncates,
        )


def _unlisted(runner: GroupRunner, oid: int) -> TableOverview:
    """A table that runs without a row: there is no registry, or it lacks the table."""
    table, counts = runner.tables[oid], runner.status.tables.get(oid)
    return TableOverview(
        group=runner.group.name,
        source=table.source,
        target=str(table.target),
        state=table_state(runner, oid),
        rows_synced=0 if counts is None else counts.changes + counts.copied,
        last_sync_at=None if counts is None or counts.applied is None else counts.applied[1],
    )


def _refused(wanted: Wanted, source: str) -> TableOverview:
    targets = {table.source: str(table.target_table) for table in wanted.group.tables}
    return TableOverview(
        group=wanted.group.name, source=source, target=targets.get(source, ""), state=SyncState.ERRORED
    )


def _table(group: str, row: TableRow, seen: TableObservation) -> TableOverview:
    return TableOverview(
        group=group,
        source=str(row.source),
        target=str(row.target),
        mode=row.mode,
        source_column=row.source_column,
        source_value=row.source_value,
        state=seen.state,
        state_since=row.state_since,
        enabled=row.enabled,
        rows_synced=seen.rows_synced,
        queued_changes=seen.queued_changes,
        queued_bytes=seen.queued_bytes,
        last_sync_at=seen.last_sync_at,
        failures=seen.consecutive_failures,
        retry_at=seen.retry_at,
        copy_lsn=None if seen.snapshot_lsn is None else lsn_text(seen.snapshot_lsn),
        applied_lsn=None if seen.applied_lsn is None else lsn_text(seen.applied_lsn),
        lag_bytes=seen.lag_bytes,
        lag_seconds=seen.lag_seconds,
        copy=_copy(seen),
        parked_rows=seen.parked_rows,
        parked_bytes=seen.parked_bytes,
        parked_since=seen.parked_since,
    )


def _copy(seen: TableObservation) -> CopyOverview | None:
    if seen.copy_bytes_total is None:
        return None
    done = seen.state not in (SyncState.PENDING, SyncState.SNAPSHOT)
    share = 1.0 if done else min(1.0, seen.copy_bytes / max(1, seen.copy_bytes_total))
    seconds = None
    if seen.copy_started_at is not None:
        seconds = ((seen.copy_finished_at or datetime.now(UTC)) - seen.copy_started_at).total_seconds()
    return CopyOverview(
        rows=seen.copy_rows,
        bytes=seen.copy_bytes,
        bytes_total=seen.copy_bytes_total,
        share=share,
        seconds=seconds,
        seconds_left=seconds * (1 - share) / share if seconds and share and not done else None,
        done=done,
    )
