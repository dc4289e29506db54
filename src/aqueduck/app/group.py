"""
One group while the service runs: its query, its tables, its commits.

`GroupRunner` puts together what the other layers offer: the query hands it the units of a batch, it
decides which tables are applied and which are parked, commits, and counts.  Tables come and go while
the query runs.  Copies are in `copies`; which groups run, and when they are started again, is decided in
`service`; what people see of it is put together in `observe`.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from pyspark.sql import SparkSession

from aqueduck import metrics
from aqueduck.app.copies import Copier
from aqueduck.app.copy_journal import forget_journal
from aqueduck.app.options import is_other, known_projections
from aqueduck.app.prepare import (
    PreparedGroup,
    PreparedTable,
    describe_tables,
    group_dir,
    prepare_tables,
    publish,
    refuse_recreated,
)
from aqueduck.app.status import GroupStatus, Parked, TableCounts
from aqueduck.app.tracing import BatchTimes
from aqueduck.batches import Unit
from aqueduck.changes import SegmentRef
from aqueduck.config import GroupConfig, SyncConfig, TableConfig
from aqueduck.errors import (
    AqueduckError,
    CatalogUnreachableError,
    DataPathError,
    LakeBusyError,
    LakeError,
    ResyncNeededError,
    TableDisabledError,
)
from aqueduck.lake.apply import table_directories
from aqueduck.lake.catalog import LakeSession
from aqueduck.lake.commit import BatchPlan, TableFailed, commit_batch, transact
from aqueduck.lake.evolve import same_columns, widen, wider_columns
from aqueduck.lake.keeping import remove_target
from aqueduck.lake.parking import copy_to_parking, forget_parked, parked_totals
from aqueduck.lake.partition_marks import forget_marks
from aqueduck.lake.progress import Position, lake_mark, read_position
from aqueduck.lake.table_states import TableState, forget_state, read_states, write_state
from aqueduck.lake.units import UnitFiles, UnitWriter, parked_units, plan_batch, remove_scratch, skips_of
from aqueduck.notes import note_position, write_skips, write_tables
from aqueduck.postgres.capture_settings import CaptureSettings
from aqueduck.postgres.connection import connect
from aqueduck.postgres.server import flushed_position, settled_position
from aqueduck.postgres.table_copy import export_snapshot
from aqueduck.postgres.tables import describe_oid
from aqueduck.projection import is_clear
from aqueduck.schema import TableName, TableSchema, lsn_text
from aqueduck.spark.copy_job import run_copy
from aqueduck.spark.sync_query import SyncQuery

__all__ = ["GroupRunner", "source_name"]

log = structlog.get_logger()

Units = list[tuple[Unit, UnitFiles | None]]


def source_name(table: PreparedTable) -> str:
    """The source's name as configuration and registry write it."""
    return str(TableName(table.schema.schema, table.schema.name))


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
        self.group: GroupConfig = ready.group
        self.ready = ready
        self.tables: dict[int, PreparedTable] = dict(ready.tables)
        self.refused: dict[str, AqueduckError] = dict(ready.refused)
        """Tables that could not be added, by source name."""
        self.leaving: set[int] = set()
        """Tables that another group takes over, and that stay until it has them."""
        self.directory = group_dir(config, ready.group)
        self.status = GroupStatus(ready.group.name, position=ready.position)
        self.truncated: set[int] = set()
        """Tables that were truncated as a whole, until `watch` has seen it in the catalog."""
        self.run_id = uuid.uuid4().hex[:8]
        self.failures = 0
        self._versions: dict[tuple[int, int, str], TableSchema] = {}
        self.requests_done: dict[int, Any] = {}
        """Requests about tables that were begun, see `observe`."""
        self.rows_before: dict[int, int] = {}
        """What the registry had counted when the service started."""
        self.on_commit: Callable[[list[str]], None] | None = None
        """Called with the segments of a batch right after its commit; a bench times them."""
        self.on_traced: Callable[[BatchTimes], None] | None = None
        """Called after each batch, where traces are wanted."""
        known = read_states(lake, ready.group.name)
        self.states = {oid: known[oid] for oid in self.tables}
        self.parked: dict[int, Parked] = {
            oid: Parked(*totals) for oid, totals in parked_totals(lake, self.group.name).items()
        }
        for table in self.tables.values():
            self.status.tables[table.schema.qualified] = TableCounts()
        for oid, state in self.states.items():
            if state.ready:  # a crash came between its landing and the end of its journal
                forget_journal(self.directory, oid)
        writer = UnitWriter(
            self.group.name,
            self.run_id,
            config.lake.data_path,
            str(self.directory / "stage"),
            str(self._tables_note),
            str(self._skips_note),
            properties=config.lake.properties,
        )
        self.query = SyncQuery(spark, self.directory, writer, self.commit)
        self.copier = Copier(
            functools.partial(run_copy, spark), config.source.dsn, self.group.name, f"{self.run_id}c", lake, commit_lock,
            self.states, self.directory, self._on_ready, self.has_everything_before, self._version, self._resync_needed,
            self.group.copy_concurrency, self.group.copy_chunk_bytes, self.group.capture == "poll",
        )  # fmt: skip

    # -- notes for capture and tasks

    @property
    def _skips_note(self) -> Path:
        return self.directory / "skips.json"

    @property
    def _tables_note(self) -> Path:
        return self.directory / "tables.json"

    def _tell_tasks(self) -> None:
        """Which tables are not ready, and which still catch up with their copy."""
        write_skips(self._skips_note, skips_of(self.states.values(), self.status.position))

    def _tell_tables(self) -> None:
        """Which tables there are, and where their files go."""
        known = table_directories(self.lake)
        # None where the target is gone: the driver will see, and park the table.
        places = [
            (table.schema, known.get(TableName(table.target.schema.lower(), table.target.name.lower())))
            for table in self.tables.values()
        ]
        write_tables(self._tables_note, places, {oid: t.mode for oid, t in self.tables.items()})

    def _on_ready(self, oids: list[int]) -> None:
        for oid in oids:
            self.parked.pop(oid, None)
        self._tell_tables()
        self._tell_tasks()

    # -- the query

    def start(self, *, once: bool = False) -> None:
        """(Re)start the query at the lake's position, and the copies that are due."""
        for name in ("durable", "capture.json", "hold"):
            (self.directory / name).unlink(missing_ok=True)
        self.status.position = self.stored_position()
        self._versions.clear()  # the capture counts them anew
        self._tell_tables()
        self._tell_tasks()
        self.copier.start()
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
            tables_path=str(self._tables_note),
            lake=lake_mark(self.lake, g.name),
            stage_dir=str(d / "stage"),
            report_path=str(d / "capture.json"),
            hold_path=str(d / "hold"),
            confirmed_path=str(d / "confirmed"),
            durable_path=str(d / "durable"),
            segment_bytes=g.segment_bytes,
            stage_bytes_max=g.stage_bytes_max,
            max_queued_changes=g.max_queued_changes,
            batch_bytes_max=g.batch_bytes_max,
            flush_interval_seconds=g.flush_interval_ms / 1000,
            capture=g.capture,
            plugin=g.plugin,
            poll_interval_seconds=g.poll_interval_ms / 1000,
            poll_step_bytes=g.poll_step_bytes,
            catchup_bytes=g.catchup_bytes,
            stream_in_progress=g.large_transactions == "stream",
        )

    def stop(self) -> None:
        """Finish a commit that is under way, then end the query and the copies."""
        self.query.stop()
        self.copier.stop()

    def has_everything_before(self, position: int) -> bool:
        """Whether all that was committed before `position` is in the lake, applied or parked."""
        if self.status.position >= position:
            return True
        report = self.report()
        return int(report.get("seen", 0)) >= position and not report.get("pending", True)

    # -- commits

    def commit(self, units: Units, position: int, time_us: int) -> None:
        """Called by the query for each batch: one lake transaction."""
        paths = [s.path for unit, _ in units for s in unit.segments if s.path] if self.on_commit else []
        end = Position(self.group.name, position, time_us, self.ready.system_identifier, self.ready.timeline)
        began, before = time.monotonic(), self.status.position
        with self.commit_lock:
            # A table that was removed may still have changes on the way.
            ours = [(unit, files) for unit, files in units if unit.table_oid in self.states]
            self._commit_or_isolate(ours, end)
            if self.on_commit is not None:
                self.on_commit(paths)
            note_position(self.directory / "durable", position)
            self._count(ours, position, time_us)
            self._tell_tasks()
        seconds = time.monotonic() - began
        changes = sum(s.rows for unit, _ in ours if not unit.bucket for s in unit.segments)
        metrics.observe_batch(
            self.group.name,
            phase_seconds={"fold": self.query.fold_seconds, "commit": seconds},
            commit_seconds=seconds,
            changes=changes,
            freshness_seconds=self.status.freshness_seconds,
        )
        if self.on_traced is not None:
            self.on_traced(
                BatchTimes(
                    group=self.group.name,
                    ended=time.time(),
                    fold_seconds=self.query.fold_seconds,
                    commit_seconds=seconds,
                    source_commit=time_us / 1e6 if time_us else None,
                    lsn_from=lsn_text(before),
                    lsn_to=lsn_text(position),
                    changes=changes,
                    tables=len({unit.table_oid for unit, _ in ours}),
                )
            )
        remove_scratch(units)

    def _commit_or_isolate(self, units: Units, end: Position) -> None:
        """A table that fails is parked, in the same batch; the others go on."""
        changed: list[TableState] = []
        while True:
            refs = parked_units(units, self.states)
            parked = copy_to_parking(self.config.lake.data_path, self.group.name, self.run_id, refs)
            plan = plan_batch(
                units, self.states, end, before=self.status.position, parked=parked, version=self._version
            )
            try:
                plan, evolved = self._evolved(plan)
                plan = replace(plan, changed=(*changed, *evolved))
                commit_batch(self.lake, plan)
                self.states.update((state.oid, state) for state in evolved)
            except TableFailed as failed:
                state = self.states[failed.oid]
                again = isinstance(failed.error, ResyncNeededError) and self.group.on_type_change == "resync"
                what = "table is copied again" if again else "table failed"
                log.warning(what, group=self.group.name, table=state.source, error=str(failed.error))
                error = None if again else str(failed.error)
                position = 0 if again else state.copy_position
                self.states[failed.oid] = replace(state, ready=False, error=error, copy_position=position)
                changed.append(self.states[failed.oid])
                if again:
                    forget_journal(self.directory, failed.oid)
                else:
                    self.copier.failed(failed.oid, failed.error)
                metrics.count_error(failed.error.code, flow="sync", group=self.group.name)
            else:
                break
        for segment in parked:
            before = self.parked.get(segment.table_oid, Parked(0, 0, datetime.now(UTC)))
            self.parked[segment.table_oid] = before.plus(segment.rows, segment.bytes)

    def _evolved(self, plan: BatchPlan) -> tuple[BatchPlan, list[TableState]]:
        """The plan after wider types, which come first and by themselves; and states of tables whose columns change."""
        tables, evolved = [], []
        for table in plan.tables:
            state, versions = self.states[table.oid], [run.schema for run in table.runs]
            old = state.schema
            if old is not None and any(not same_columns(old, version) for version in versions):
                try:
                    wider, versions = wider_columns(old, versions)
                    if wider != old:
                        state = replace(state, schema=wider)
                        transact(self.lake, functools.partial(self._widen, state, old))
                        self.states[table.oid] = state
                except (LakeBusyError, CatalogUnreachableError, DataPathError):
                    raise  # not the table's fault
                except LakeError as exc:
                    raise TableFailed(table.oid, exc) from exc
                evolved.append(replace(state, schema=versions[-1]))
                log.info("columns changed", group=self.group.name, table=state.source)
            runs = tuple(replace(run, schema=v) for run, v in zip(table.runs, versions, strict=True))
            tables.append(replace(table, schema=state.schema, runs=runs))
        return replace(plan, tables=tuple(tables)), evolved

    def _widen(self, state: TableState, old: TableSchema) -> None:
        assert state.schema is not None
        widen(self.lake, state.target, old, state.schema)
        write_state(self.lake, self.group.name, [state])

    def _version(self, segment: SegmentRef) -> TableSchema:
        """The columns of a segment, with their numbers in the catalog; asked once for each version."""
        key = (segment.table_oid, segment.version, segment.schema_json)
        if key not in self._versions:
            schema = TableSchema.from_json(segment.schema_json)
            if schema.projection is None or not is_clear(schema):  # else the capture has asked
                schema = self._numbered(schema)
            self._versions[key] = schema.in_lake
        return self._versions[key]

    def _numbered(self, schema: TableSchema) -> TableSchema:
        state = self.states.get(schema.oid)
        now = None
        try:
            with connect(self.config.source.dsn) as conn:
                now = describe_oid(conn, schema.oid, need_key=False, projection=schema.projection)
        except AqueduckError:  # it is gone, or cannot be asked: names have to do
            log.debug("table not described", table=schema.qualified)
        known = None if state is None or state.schema is None else state.schema.streamed
        return schema.numbered(now, known)

    def _count(self, units: Units, position: int, time_us: int) -> None:
        status = self.status
        for unit, _ in units:
            if unit.bucket:
                continue  # buckets of one run name the same segments
            counts = status.tables[self.tables[unit.table_oid].schema.qualified]
            if self.states[unit.table_oid].ready:
                counts.applied = (position, datetime.now(UTC))
            if unit.truncate is not None:
                counts.truncates += 1
                self.truncated.add(unit.table_oid)
            for segment in unit.segments:
                counts.changes += segment.rows
                counts.inserts += segment.inserts
                counts.updates += segment.updates
                counts.deletes += segment.deletes
        status.batches += 1
        status.position = position
        status.last_commit_at = datetime.now(UTC)
        status.freshness_seconds = max(0.0, time.time() - time_us / 1e6)
        self.failures = 0

    # -- what the capture says

    def refresh(self) -> GroupStatus:
        """The status with what the capture last reported."""
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
        status.paused = bool(report.get("paused", False))
        status.held = bool(report.get("held", False))
        status.last_error = report.get("trouble") or status.last_error
        status.queued = {int(oid): (rows, size) for oid, (rows, size) in report.get("queued", {}).items()}
        waits = bool(report.get("pending", False))
        oldest = report.get("oldest_us")
        status.lag_bytes = max(0, status.seen - status.position) if waits else 0
        status.lag_seconds = max(0.0, time.time() - oldest / 1e6) if waits and oldest else 0.0
        return status

    def report(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads((self.directory / "capture.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return report

    # -- tables come and go

    def add_tables(
        self,
        tables: Iterable[TableConfig],
        *,
        handover: Callable[[int], GroupRunner | None],
        renew: Collection[str] = (),
    ) -> None:
        """Follow more tables from now on; what cannot be added is in `refused`.  `renew` as for `prepare_group`."""
        dsn = self.config.source.dsn
        with connect(dsn) as conn:
            options = known_projections(self.lake, self.group)
            found, refused = describe_tables(conn, self.config, self.group, tables, options)
            now = flushed_position(dsn)
            with self.commit_lock:
                known = read_states(self.lake, self.group.name)
                refuse_recreated(self.group, found, refused, known, renew)
                replaced = [
                    s
                    for s in known.values()
                    if s.oid not in self.tables | found
                    and (s.target, s.mode.source_value)
                    in {(t.target, t.mode.source_value) for t in found.values()}
                ]
                transact(self.lake, lambda: self._forget_in_lake(s.oid for s in replaced))
                failed = prepare_tables(
                    self.lake, self.group.name, found, now=now, filled={s.target for s in replaced}
                )
                states = read_states(self.lake, self.group.name)
                for oid, table in found.items():
                    name = source_name(table)
                    if oid in failed:
                        refused[name] = failed[oid]
                        continue
                    self.refused.pop(name, None)
                    forget_journal(self.directory, oid)
                    self.tables[oid] = table
                    self.states[oid] = states[oid]
                    self.status.tables.setdefault(table.schema.qualified, TableCounts())
                    log.info("table added", group=self.group.name, table=table.schema.qualified)
                self._tell_tables()
                self._tell_tasks()
            for name, error in refused.items():
                if str(error) != str(self.refused.get(name)):
                    log.warning("table not added", group=self.group.name, table=name, error=str(error))
            self.refused.update(refused)
            # The capture knows them before the first change can come.
            publish(conn, self.group, [t.schema for t in self.tables.values()])
        for oid in found:
            giver = handover(oid)
            if giver is not None and oid in self.states and not self.states[oid].ready:
                self.copier.handovers[oid] = functools.partial(self._take_over, giver)
        self.copier.start()

    def remove_tables(self, oids: Iterable[int], *, drop: Iterable[int] = ()) -> None:
        """Follow these tables no more; the lake's tables stay, but for those in `drop`."""
        gone, dropped = set(oids), set(drop)
        with connect(self.config.source.dsn) as conn:
            rest = [t.schema for oid, t in self.tables.items() if oid not in gone]
            publish(conn, self.group, rest)
        with self.commit_lock:
            transact(self.lake, lambda: self._forget_in_lake(gone, dropped))
            for oid in gone:
                self.forget_table(oid)
            self._tell_tables()
            self._tell_tasks()

    def _forget_in_lake(self, oids: Iterable[int], dropped: Collection[int] = ()) -> None:
        for oid in oids:
            forget_state(self.lake, self.group.name, oid)
            forget_parked(self.lake, self.group.name, oid)
            forget_marks(self.lake, self.group.name, oid)
            if oid in dropped:
                remove_target(self.lake, self.tables[oid].target, self.tables[oid].mode)

    def leave_table(self, oid: int) -> None:
        """The source table is gone; the lake's table and what the lake knows of it stay."""
        with self.commit_lock:
            self.forget_table(oid)
            self._tell_tables()
            self._tell_tasks()

    def follow_name(self, oid: int, name: TableName) -> None:
        """The source table was renamed or moved to another schema; its target keeps its name."""
        table = self.tables[oid]
        schema = replace(table.schema, schema=name.schema, name=name.name)
        log.info(
            "table renamed", group=self.group.name, table=schema.qualified, before=table.schema.qualified
        )
        with self.commit_lock:
            counts = self.status.tables.pop(table.schema.qualified, TableCounts())
            self.status.tables[schema.qualified] = counts
            self.tables[oid] = replace(table, schema=schema)
            self._tell_tables()

    def forget_table(self, oid: int) -> None:
        """Out of our memory; the caller holds `commit_lock`."""
        table = self.tables.pop(oid, None)
        self.states.pop(oid, None)
        self.parked.pop(oid, None)
        self.leaving.discard(oid)
        self.truncated.discard(oid)
        self.copier.forget(oid)
        if table is not None:
            self.status.tables.pop(table.schema.qualified, None)

    def _take_over(self, giver: GroupRunner, state: TableState) -> None:
        """
        Go on with a table where another group is, without a new copy.

        Both publish it by now.  A transaction that commits after the position below is published whole
        here, because whatever was open before has ended by then; everything before it, the giver has applied.
        """
        settled = self._settled_position()
        deadline = time.monotonic() + 600
        while not giver.has_everything_before(settled):
            if time.monotonic() > deadline or not giver.query.active:
                break  # the ordinary copy, then
            time.sleep(0.05)
        with self.commit_lock:
            theirs = giver.states.get(state.oid)
            if (
                theirs is None
                or not theirs.ready
                or is_other(theirs, self.tables[state.oid].schema)
                or not giver.has_everything_before(settled)
            ):
                giver.leaving.discard(state.oid)
                self.copier.handovers.pop(state.oid, None)
                return
            position = max(settled, giver.status.position)
            ready = replace(state, ready=True, copy_position=position, error=None, schema=theirs.schema)
            self.copier.finish_locked(
                ready,
                f"{state.source} moves from {giver.group.name} to {self.group.name}",
                also=lambda: forget_state(self.lake, giver.group.name, state.oid),
            )
            giver.forget_table(state.oid)
            giver._tell_tables()
            giver._tell_tasks()
        with connect(self.config.source.dsn) as conn:
            publish(conn, giver.group, [t.schema for t in giver.tables.values()])
        log.info("table moved", table=state.source, group=self.group.name, came_from=giver.group.name)

    def _settled_position(self) -> int:
        """A position by which every transaction has ended that was open now."""
        if self.group.capture == "poll":
            return settled_position(self.config.source.dsn)
        snapshot = export_snapshot(self.config.source.dsn)
        snapshot.close()
        return snapshot.position

    def _resync_needed(self, oid: int) -> None:
        if self.group.on_type_change == "resync":
            with self.commit_lock:
                self.copier.set_state(replace(self.states[oid], ready=False, copy_position=0, error=None))
            forget_journal(self.directory, oid)

    def resync(self, oid: int) -> None:
        """Have a table copied again; its changes are parked from the next batch on."""
        with self.commit_lock:
            self.copier.set_state(replace(self.states[oid], ready=False, copy_position=0, error=None))
            self._tell_tasks()
        self.copier.again(oid)

    def set_enabled(self, oid: int, enabled: bool) -> None:
        """A disabled table's changes are parked, and replayed when it is enabled again."""
        state = self.states[oid]
        if enabled:
            self.copier.disabled.discard(oid)
            self.copier.start()
            return
        self.copier.disabled.add(oid)
        if state.ready:
            why = str(TableDisabledError(f"{state.source} is disabled"))
            with self.commit_lock:
                self.copier.set_state(replace(self.states[oid], ready=False, error=why))
                self._tell_tasks()
