"""
One group while the service runs: its query, its copies, its commits.

`GroupRunner` puts together what the other layers offer: the query hands it the units of a batch, it
decides which tables are applied and which are parked, commits, and counts.  Which groups run, and when
they are started again, is decided in `service`.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from pyspark.sql import SparkSession

from aqueduck.app.copies import Copier
from aqueduck.app.prepare import PreparedGroup, group_dir
from aqueduck.app.status import GroupStatus, TableCounts
from aqueduck.batches import Unit
from aqueduck.config import GroupConfig, SyncConfig
from aqueduck.lake.apply import table_directory
from aqueduck.lake.catalog import LakeSession
from aqueduck.lake.commit import TableFailed, commit_batch
from aqueduck.lake.parking import copy_to_parking
from aqueduck.lake.progress import Position, read_position
from aqueduck.lake.table_states import TableState, read_states, write_state
from aqueduck.lake.units import (
    UnitFiles,
    UnitWriter,
    parked_units,
    plan_batch,
    remove_scratch,
    write_skips,
)
from aqueduck.lifecycle import ErrorClass
from aqueduck.lifecycle import TableState as LifecycleState
from aqueduck.postgres.capture_settings import CaptureSettings, note_position
from aqueduck.postgres.registry import TableObservation, TableRow
from aqueduck.spark.sync_query import SyncQuery

__all__ = ["GroupRunner"]

log = structlog.get_logger()


class GroupRunner:
    """One group while the service runs."""

    def __init__(
        self,
        config: SyncConfig,
        spark: SparkSession,
        lake: LakeSession,
        commit_lock: threading.Lock,
        ready: PreparedGroup,
    ) -> None:
        self.config = config
        self.lake = lake
        self.commit_lock = commit_lock
        self.ready = ready
        self.directory = group_dir(config, ready.group)
        self.status = GroupStatus(ready.group.name, position=ready.position)
        for table in ready.tables.values():
            self.status.tables[table.schema.qualified] = TableCounts()
        self.run_id = uuid.uuid4().hex[:8]
        self.failures = 0
        self.on_commit: Callable[[list[str]], None] | None = None
        """Called with the segments of a batch right after its commit; a bench times them."""
        self.resyncs: dict[int, int] = {}
        """The last request for a new copy that was begun, by table."""
        self.retries: dict[int, int] = {}
        """The last request to try a failed table again, likewise."""
        self._rows_before: dict[int, int] = {}
        self._applied: dict[int, tuple[int, datetime]] = {}
        known = read_states(lake, ready.group.name)
        self.states = {oid: known[oid] for oid in ready.tables}
        directories = {
            oid: table_directory(lake, t.target)
            for oid, t in ready.tables.items()
            if self.states[oid].error is None
        }
        scratch = str(self.directory / "stage")
        writer = UnitWriter(
            ready.group.name,
            self.run_id,
            config.lake.data_path,
            directories,
            scratch,
            str(self.skips_file),
        )
        self.query = SyncQuery(spark, self.directory, writer, self.commit)
        self.copier = Copier(
            spark, config.source.dsn, ready.group.name, f"{self.run_id}c", lake, commit_lock, self.states, self.directory, self.tell_tasks,
        )  # fmt: skip

    @property
    def skips_file(self) -> Path:
        return self.directory / "skips.json"

    def tell_tasks(self) -> None:
        """Which tables are not ready, and which still catch up with their copy."""
        write_skips(str(self.skips_file), self.states.values(), self.status.position)

    @property
    def group(self) -> GroupConfig:
        return self.ready.group

    def start(self, *, once: bool = False) -> None:
        """(Re)start the query at the lake's position."""
        for name in ("durable", "capture.json", "hold"):
            (self.directory / name).unlink(missing_ok=True)
        self.status.position = self.stored_position()
        self.tell_tasks()
        self.copier.start()
        if once:
            self.copier.wait()
        self.query.start(self.settings(self.stored_position()), once=once)
        self.status.state = "streaming"

    def stored_position(self) -> int:
        stored = read_position(self.lake, self.group.name)
        assert stored is not None, "prepare_group wrote it"
        return stored.position

    def settings(self, position: int) -> CaptureSettings:
        g, d = self.group, self.directory
        return CaptureSettings(
            dsn=self.config.source.dsn,
            slot=g.slot_name,
            publication=g.publication,
            position=position,
            tables=tuple(t.schema.to_json() for t in self.ready.tables.values()),
            stage_dir=str(d / "stage"),
            report_path=str(d / "capture.json"),
            hold_path=str(d / "hold"),
            confirmed_path=str(d / "confirmed"),
            durable_path=str(d / "durable"),
            segment_bytes=g.segment_bytes,
            stage_bytes_max=g.stage_bytes_max,
            batch_bytes_max=g.batch_bytes_max,
            flush_interval_seconds=g.flush_interval_ms / 1000,
        )

    def commit(self, units: list[tuple[Unit, UnitFiles | None]], position: int, time_us: int) -> None:
        """Called by the query for each batch: one lake transaction."""
        paths = [s.path for unit, _ in units for s in unit.segments if s.path] if self.on_commit else []
        end = Position(self.group.name, position, time_us, self.ready.system_identifier, self.ready.timeline)
        with self.commit_lock:
            self._commit_or_isolate(units, end)
            if self.on_commit is not None:
                self.on_commit(paths)
            note_position(self.directory / "durable", position)
            self._count(units, position, time_us)
            self.tell_tasks()
        remove_scratch(units)

    def _commit_or_isolate(self, units: list[tuple[Unit, UnitFiles | None]], end: Position) -> None:
        """A table that fails is parked, in the same batch; the others go on."""
        changed: list[TableState] = []
        while True:
            refs = parked_units(units, self.states)
            parked = copy_to_parking(self.config.lake.data_path, self.group.name, self.run_id, refs)
            plan = plan_batch(
                units, self.states, end, before=self.status.position, parked=parked, changed=changed
            )
            try:
                commit_batch(self.lake, plan)
            except TableFailed as failed:
                state = self.states[failed.oid]
                log.warning(
                    "table failed", group=self.group.name, table=state.source, error=str(failed.error)
                )
                self.states[failed.oid] = replace(state, ready=False, error=str(failed.error))
                changed.append(self.states[failed.oid])
            else:
                return

    def _count(self, units: list[tuple[Unit, UnitFiles | None]], position: int, time_us: int) -> None:
        status = self.status
        for unit, _ in units:
            if unit.bucket:
                continue  # buckets of one run name the same segments
            self._applied[unit.table_oid] = (position, datetime.now(UTC))
            counts = status.tables[self.ready.tables[unit.table_oid].schema.qualified]
            counts.truncates += unit.truncate_first and unit.run == 0
            for segment in unit.segments:
                counts.changes += segment.rows
                counts.inserts += segment.inserts
                counts.updates += segment.updates
                counts.deletes += segment.deletes
        status.batches += 1
        status.position = position
        status.freshness_seconds = max(0.0, time.time() - time_us / 1e6)
        self.failures = 0

    def refresh(self) -> GroupStatus:
        """The status with what the capture last reported."""
        report = self.report()
        status = self.status
        status.seen = max(status.position, int(report.get("seen", 0)))
        status.transactions = int(report.get("transactions", 0))
        status.staged_bytes = int(report.get("staged_bytes", 0))
        status.paused = bool(report.get("paused", False))
        status.held = bool(report.get("held", False))
        status.lag_bytes = max(0, status.seen - status.position) if status.staged_bytes else 0
        return status

    def report(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads((self.directory / "capture.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return report

    def stop(self) -> None:
        """Finish a commit that is under way, then end the query and the copies."""
        self.query.stop()
        self.copier.stop()

    def resync(self, oid: int) -> None:
        """Have a table copied again; its changes are parked from the next batch on."""
        with self.commit_lock:
            state = replace(self.states[oid], ready=False, copy_position=0, error=None)
            with self.lake.transaction():
                write_state(self.lake, self.group.name, [state])
            self.states[oid] = state
            self.tell_tasks()
        self.copier.again(oid)

    def observe(self, oid: int, row: TableRow) -> TableObservation:
        """A table as the registry shows it."""
        state, counts = self.states[oid], self.status.tables[self.ready.tables[oid].schema.qualified]
        before = row.observed
        failure = self.copier.failures.get(oid)
        error = state.error or (None if failure is None else str(failure))
        copying = self.copier.progress.get(oid)
        position, at = self._applied.get(oid, (before.applied_lsn, before.last_sync_at))
        return replace(
            before,
            state=LifecycleState(self.table_state(oid)),
            source_oid=oid,
            active_group_id=before.active_group_id,
            resync_done=max(before.resync_done, self.resyncs.get(oid, 0)),
            retry_done=max(before.retry_done, self.retries.get(oid, 0)),
            snapshot_lsn=state.copy_position or before.snapshot_lsn,
            applied_lsn=position,
            last_sync_at=at,
            error_code=error.split("]")[0].strip("[") if error else None,
            error_class=ErrorClass.CONFIGURATION if error else None,
            error_message=error,
            rows_synced=self._rows_before.setdefault(oid, before.rows_synced) + counts.changes,
            copy_rows=before.copy_rows if copying is None else copying.rows(),
            copy_bytes_total=before.copy_bytes_total if copying is None else copying.bytes_total,
            copy_bytes=before.copy_bytes if copying is None else int(copying.share() * copying.bytes_total),
        )

    def table_state(self, oid: int) -> str:
        """What people call the state of a table."""
        state = self.states[oid]
        if state.error is not None or oid in self.copier.failures:
            return "ERRORED"
        if not state.ready:
            return "SNAPSHOT" if oid in self.copier.progress else "PENDING"
        return "CATCHUP" if state.copy_position > max(self.status.position, self.status.seen) else "STREAMING"
