"""
The service: prepares the groups, runs a query for each, and starts them again when they fail.

`SyncService` is the same object for `aqueduck run`, the demo and the benches.  A failure that
may pass by itself (`Retry.AUTO`) restarts the query from the lake's position, with backoff; any
other ends the service with its error.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from aqueduck.app.copies import Copier
from aqueduck.app.prepare import PreparedGroup, group_dir, prepare_group
from aqueduck.app.status import GroupStatus, TableCounts
from aqueduck.batches import Unit
from aqueduck.config import GroupConfig, SyncConfig
from aqueduck.errors import AqueduckError, Retry
from aqueduck.lake.apply import table_directory
from aqueduck.lake.catalog import LakeSession, open_lake
from aqueduck.lake.commit import TableFailed, commit_batch
from aqueduck.lake.inlined import count_inlined
from aqueduck.lake.orphans import remove_orphans
from aqueduck.lake.parking import copy_to_parking, remove_parking_orphans
from aqueduck.lake.progress import Position, progress_table, read_position
from aqueduck.lake.table_states import TableState, read_states
from aqueduck.lake.units import UnitFiles, UnitWriter, parked_units, plan_batch, write_skips
from aqueduck.postgres.capture_settings import CaptureSettings, note_position
from aqueduck.schema import lsn_text
from aqueduck.spark.session import build_session
from aqueduck.spark.sync_query import SyncQuery

__all__ = ["SyncService", "run_service"]

log = structlog.get_logger()

BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)


class GroupRunner:
    """One group while the service runs."""

    def __init__(self, service: SyncService, ready: PreparedGroup) -> None:
        self.service = service
        self.ready = ready
        self.directory = group_dir(service.config, ready.group)
        self.status = GroupStatus(ready.group.name, position=ready.position)
        for table in ready.tables.values():
            self.status.tables[table.schema.qualified] = TableCounts()
        self.run_id = uuid.uuid4().hex[:8]
        self.failures = 0
        self.states = read_states(service.lake, ready.group.name)
        directories = {oid: table_directory(service.lake, t.target) for oid, t in ready.tables.items()}
        scratch = str(self.directory / "stage")
        writer = UnitWriter(
            ready.group.name,
            self.run_id,
            service.config.lake.data_path,
            directories,
            scratch,
            str(self.skips_file),
        )
        self.query = SyncQuery(service.spark, self.directory, writer, self.commit)

        self.copier = Copier(
            service.spark, service.config.source.dsn, ready.group.name, f"{self.run_id}c", service.lake,
            service.commit_lock, self.states, self.directory, self.tell_tasks,
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
        stored = read_position(self.service.lake, self.group.name)
        assert stored is not None, "prepare_group wrote it"
        return stored.position

    def settings(self, position: int) -> CaptureSettings:
        g, d = self.group, self.directory
        return CaptureSettings(
            dsn=self.service.config.source.dsn,
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
        end = Position(self.group.name, position, time_us, self.ready.system_identifier, self.ready.timeline)
        with self.service.commit_lock:
            self._commit_or_isolate(units, end)
            note_position(self.directory / "durable", position)
            self._count(units, position, time_us)
            self.tell_tasks()

    def _commit_or_isolate(self, units: list[tuple[Unit, UnitFiles | None]], end: Position) -> None:
        """A table that fails is parked, in the same batch; the others go on."""
        changed: list[TableState] = []
        while True:
            refs = parked_units(units, self.states)
            parked = copy_to_parking(self.service.config.lake.data_path, self.group.name, self.run_id, refs)
            plan = plan_batch(
                units, self.states, end, before=self.status.position, parked=parked, changed=changed
            )
            try:
                commit_batch(self.service.lake, plan)
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


class SyncService:
    """All groups of one configuration."""

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        self.commit_lock = threading.Lock()  # one committer per catalog
        self._runners: dict[str, GroupRunner] = {}
        self._ready: list[PreparedGroup] = []
        self._lake: LakeSession | None = None
        self._spark: Any = None

    @property
    def lake(self) -> LakeSession:
        assert self._lake is not None, "prepare() first"
        return self._lake

    @property
    def spark(self) -> Any:
        if self._spark is None:
            spark = self.config.spark
            self._spark = build_session(spark.master, spark.conf, "aqueduck")
        return self._spark

    def prepare(self, *, trust_slot: bool = False) -> None:
        """Everything that can be refused is refused here, before Spark starts."""
        self._lake = open_lake(self.config.lake)
        for group in self.config.groups:
            ready = prepare_group(self.config, group, self._lake, trust_slot=trust_slot)
            remove_orphans(self._lake, group.name, [t.target for t in ready.tables.values()])
            remove_parking_orphans(self._lake, group.name)
            count_inlined(
                self._lake, [progress_table(group.name), *(t.target for t in ready.tables.values())]
            )
            self._ready.append(ready)

    def start(self, *, once: bool = False) -> None:
        for ready in self._ready:
            runner = self._runners[ready.group.name] = GroupRunner(self, ready)
            runner.start(once=once)
            log.info(
                "group started",
                group=ready.group.name,
                position=lsn_text(ready.position),
                tables=len(ready.tables),
            )

    def check(self) -> None:
        """Raise what ended a query, if anything did."""
        for runner in self._runners.values():
            runner.query.check()

    def supervise(self, stopping: threading.Event) -> None:
        """Keep the queries running until told to stop."""
        while not stopping.wait(0.2):
            for runner in self._runners.values():
                runner.copier.start()
                if not runner.query.active:
                    self._recover(runner, stopping)

    def _recover(self, runner: GroupRunner, stopping: threading.Event) -> None:
        try:
            runner.query.check()
        except AqueduckError as exc:
            runner.status.last_error = str(exc)
            if exc.retry is not Retry.AUTO:
                raise
            delay = BACKOFF_SECONDS[min(runner.failures, len(BACKOFF_SECONDS) - 1)]
            runner.failures += 1
            runner.status.restarts += 1
            runner.status.state = "retrying"
            log.warning("group stopped", group=runner.group.name, error=str(exc), retry_in_seconds=delay)
            if stopping.wait(delay):
                return
        self._restart(runner)

    def _restart(self, runner: GroupRunner) -> None:
        targets = [t.target for t in runner.ready.tables.values()]
        with self.commit_lock:
            remove_orphans(self.lake, runner.group.name, targets, keep=runner.copier.run_id)
        runner.start()
        log.info("group restarted", group=runner.group.name, position=lsn_text(runner.stored_position()))

    def run_once(self, stopping: threading.Event) -> None:
        """Until every query has caught up and ended, or we are told to stop."""
        for runner in self._runners.values():
            while not runner.query.wait(1):
                if stopping.is_set():
                    return
            runner.query.check()

    def stop(self) -> None:
        """Finish the commits that are under way, then end."""
        for runner in self._runners.values():
            runner.query.stop()
            runner.copier.stop()
        self._runners.clear()
        if self._spark is not None:
            self._spark.stop()
            self._spark = None
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    # -- for the demo, the benches and the page

    def status(self, group: str) -> GroupStatus:
        return self._runners[group].refresh()

    def position(self, group: str) -> int:
        """What the lake has of the group."""
        return self._runners[group].status.position

    def hold(self, group: str, on: bool, *, seconds: float = 30.0) -> None:
        """Let go of the group's slot, or take it again; what WAL holds waits."""
        runner = self._runners[group]
        path = runner.directory / "hold"
        if not on:
            path.unlink(missing_ok=True)
            return
        path.touch()
        _wait(lambda: bool(runner.report().get("held")), seconds, "the capture did not let go of its slot")

    def wait_until_streaming(self, group: str, *, seconds: float) -> None:
        """Until every copy is in and the capture reads the slot."""
        runner = self._runners[group]

        def streams() -> bool:
            self.check()
            for failure in runner.copier.failures.values():
                raise failure
            return bool(runner.report()) and all(state.ready for state in runner.states.values())

        _wait(streams, seconds, "the stream did not start")

    def wait_until_seen(self, group: str, position: int, *, seconds: float) -> None:
        """Until everything the server had written at `position` is in the lake."""
        runner = self._runners[group]

        def caught_up() -> bool:
            self.check()
            report = runner.report()
            return int(report.get("seen", 0)) >= position and not report.get("pending", True)

        _wait(caught_up, seconds, "the lake did not catch up")

    def query_lake(self, sql: str) -> tuple[list[tuple[Any, ...]], list[str]]:
        """Rows and column names of a query on the lake."""
        with self.commit_lock:
            return self.lake.query(sql)


def _wait(done: Any, seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise AqueduckError(f"{complaint} within {seconds:.0f} s")
        time.sleep(0.05)


def run_service(config: SyncConfig, *, once: bool, trust_slot: bool = False) -> None:
    """`aqueduck run`: until SIGTERM or ctrl-C, or with `once` until caught up."""
    stopping = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.set())
    service = SyncService(config)
    try:
        service.prepare(trust_slot=trust_slot)
        service.start(once=once)
        if once:
            service.run_once(stopping)
        else:
            service.supervise(stopping)
    finally:
        service.stop()
    log.info("stopped")
