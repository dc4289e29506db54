"""
The service: prepares the groups, runs a query for each, and starts them again when they fail.

`SyncService` is the same object for `aqueduck run`, the demo and the benches.  A failure that
may pass by itself (`Retry.AUTO`) restarts the query from the lake's position, with backoff; any
other ends the service with its error.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import psycopg
import structlog

from aqueduck.app.control import Control, Wanted, open_control
from aqueduck.app.group import GroupRunner
from aqueduck.app.prepare import PreparedGroup, prepare_group
from aqueduck.app.status import GroupStatus
from aqueduck.config import GroupConfig, SyncConfig
from aqueduck.errors import AqueduckError, ConnectionLostError, Retry, SourceUnreachableError
from aqueduck.lake.catalog import LakeSession, open_lake
from aqueduck.lake.inlined import count_inlined
from aqueduck.lake.orphans import remove_orphans
from aqueduck.lake.parking import forget_parked, remove_parking_orphans
from aqueduck.lake.progress import forget_position, progress_table
from aqueduck.lake.sql import lake_table
from aqueduck.lake.table_states import forget_state, read_states
from aqueduck.postgres.connection import connect, translate_errors
from aqueduck.postgres.group_lock import lock_group, unlock_group
from aqueduck.postgres.publications import drop_publication
from aqueduck.postgres.registry import TableObservation
from aqueduck.postgres.slots import drop_slot
from aqueduck.schema import TableName, lsn_text
from aqueduck.spark.session import build_session

__all__ = ["SyncService", "run_service"]

log = structlog.get_logger()

BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)


class SyncService:
    """All groups of one source and one lake."""

    def __init__(self, config: SyncConfig) -> None:
        self.config = config
        self.commit_lock = threading.Lock()  # one committer per catalog
        self._runners: dict[str, GroupRunner] = {}
        self._ready: dict[str, PreparedGroup] = {}
        self._wanted: dict[str, Wanted] = {}
        self._lake: LakeSession | None = None
        self._control: Control | None = None
        self._locks: psycopg.Connection[Any] | None = None
        self._spark: Any = None
        self._observed_at = 0.0

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
        self._control = open_control(self.config)
        self._locks = connect(self.config.source.dsn, application_name="aqueduck lock")
        for wanted in self._control.wanted():
            if wanted.enabled and not wanted.removed:
                self._prepare_group(wanted, trust_slot=trust_slot)

    def _prepare_group(self, wanted: Wanted, *, trust_slot: bool = False) -> None:
        assert self._locks is not None
        group = wanted.group
        lock_group(self._locks, group.name)
        ready = prepare_group(self.config, group, self.lake, trust_slot=trust_slot)
        targets = [t.target for t in ready.tables.values()]
        remove_orphans(self.lake, group.name, targets)
        remove_parking_orphans(self.lake, group.name)
        count_inlined(self.lake, [progress_table(group.name), *targets])
        self._ready[group.name] = ready
        self._wanted[group.name] = wanted

    def start(self, *, once: bool = False) -> None:
        for name in self._ready:
            self._start_group(name, once=once)

    def _start_group(self, name: str, *, once: bool = False) -> None:
        ready = self._ready[name]
        runner = GroupRunner(self.config, self.spark, self.lake, self.commit_lock, ready)
        self._runners[name] = runner
        runner.start(once=once)
        log.info("group started", group=name, position=lsn_text(ready.position), tables=len(ready.tables))

    def check(self) -> None:
        """Raise what ended a query, if anything did."""
        for runner in self._runners.values():
            runner.query.check()

    def supervise(self, stopping: threading.Event) -> None:
        """Keep the queries running until told to stop."""
        while not stopping.wait(0.2):
            for runner in list(self._runners.values()):
                runner.copier.start()
                if not runner.query.active:
                    self._recover(runner, stopping)
            self._follow_registry()

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
        try:
            self._keep_locks()
        except (ConnectionLostError, SourceUnreachableError) as exc:
            log.warning("group waits for the source", group=runner.group.name, error=str(exc))
            return  # the query stays as it is, and is looked at again
        targets = [t.target for t in runner.ready.tables.values()]
        with self.commit_lock:
            remove_orphans(self.lake, runner.group.name, targets, keep=runner.copier.run_id)
        runner.start()
        log.info("group restarted", group=runner.group.name, position=lsn_text(runner.stored_position()))

    def _keep_locks(self) -> None:
        """The groups' locks went with a lost connection: take them again, unless another service was faster."""
        assert self._locks is not None
        try:
            with translate_errors("keep the groups' locks"):
                self._locks.execute("select 1")
        except AqueduckError:
            self._locks.close()
            self._locks = connect(self.config.source.dsn, application_name="aqueduck lock")
            for name in self._runners:
                lock_group(self._locks, name)

    # -- the registry: what people want, and what is

    def _follow_registry(self) -> None:
        """Act on changes within a moment, and write what is once a second; a lost connection is made again."""
        assert self._control is not None
        try:
            if self._control.has_notice():
                self._reconcile(self._control)
            if time.monotonic() - self._observed_at >= 1.0:
                self._observed_at = time.monotonic()
                self._control.observe(self._observations())
        except (ConnectionLostError, SourceUnreachableError) as exc:
            log.warning("registry out of reach", error=str(exc))
            self._control.close()
            self._observed_at = time.monotonic() + 5.0
        if self._control.conn is None and self._had_registry and time.monotonic() >= self._observed_at:
            self._reopen_control()

    @property
    def _had_registry(self) -> bool:
        return any(wanted.id is not None for wanted in self._wanted.values())

    def _reopen_control(self) -> None:
        try:
            self._control = open_control(self.config)
            self._reconcile(self._control)
        except AqueduckError as exc:
            log.warning("registry out of reach", error=str(exc))
            self._observed_at = time.monotonic() + 5.0

    def _reconcile(self, control: Control) -> None:
        """Bring what runs in line with what is wanted, group by group."""
        for wanted in control.wanted():
            try:
                self._reconcile_group(control, wanted)
            except AqueduckError as exc:
                log.warning("cannot do what the registry wants", group=wanted.group.name, error=str(exc))

    def _reconcile_group(self, control: Control, wanted: Wanted) -> None:
        name = wanted.group.name
        runs = name in self._runners
        if wanted.removed or not wanted.enabled:
            if runs:
                self._stop_group(name)
            if wanted.removed:
                self._take_down(control, wanted)
        elif not runs or _differs(self._wanted[name].group, wanted.group):
            if runs:
                self._stop_group(name)
            self._forget_tables(control, wanted)
            self._prepare_group(wanted)
            self._start_group(name)
        else:
            self._wanted[name] = wanted
        if name in self._runners:
            self._act_on_requests(wanted)

    def _act_on_requests(self, wanted: Wanted) -> None:
        runner = self._runners[wanted.group.name]
        for oid, table in runner.ready.tables.items():
            row = wanted.rows.get(str(TableName(table.schema.schema, table.schema.name)))
            if row is not None and row.retry_wanted and runner.retries.get(oid, 0) < row.retry_requested:
                runner.retries[oid] = row.retry_requested
                runner.copier.retry_now(oid)
            if row is not None and row.resync_wanted and runner.resyncs.get(oid, 0) < row.resync_requested:
                log.info("resync", group=wanted.group.name, table=table.schema.qualified)
                runner.resync(oid)
                runner.resyncs[oid] = row.resync_requested

    def _stop_group(self, name: str) -> None:
        self._runners.pop(name).stop()
        self._ready.pop(name)
        assert self._locks is not None
        unlock_group(self._locks, name)
        log.info("group stopped", group=name)

    def _forget_tables(self, control: Control, wanted: Wanted) -> None:
        """Tables that were removed: out of the lake's books, and out of the lake where that was asked for."""
        gone = wanted.removed_tables
        if not gone:
            return
        group = wanted.group.name
        states = read_states(self.lake, group)
        with self.lake.transaction():
            for row in gone:
                for oid, state in states.items():
                    if state.target == row.target and row.observed.source_oid in (oid, None):
                        forget_state(self.lake, group, oid)
                        forget_parked(self.lake, group, oid)
                if row.drop_target:
                    self.lake.execute(f"drop table if exists {lake_table(row.target)}")
        control.forget(tables=gone)

    def _take_down(self, control: Control, wanted: Wanted) -> None:
        """A removed group: its tables, its slot, its publication, its place in the lake's books."""
        self._forget_tables(control, wanted)
        with connect(self.config.source.dsn) as conn:
            drop_slot(conn, wanted.group.slot_name)
            drop_publication(conn, wanted.group.publication)
        forget_position(self.lake, wanted.group.name)
        control.forget(group=wanted)
        self._wanted.pop(wanted.group.name, None)
        log.info("group removed", group=wanted.group.name)

    def _observations(self) -> list[TableObservation]:
        found = []
        for name, runner in self._runners.items():
            runner.refresh()
            rows = self._wanted[name].rows
            for oid, table in runner.ready.tables.items():
                row = rows.get(str(TableName(table.schema.schema, table.schema.name)))
                if row is not None:
                    found.append(runner.observe(oid, row))
            found += self._wanted[name].refused
        return found

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
            runner.stop()
        self._runners.clear()
        for connection in (self._control, self._locks):
            if connection is not None:
                connection.close()
        self._control = self._locks = None
        if self._spark is not None:
            self._spark.stop()
            self._spark = None
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    # -- for the demo, the benches and the page

    def runner(self, group: str) -> GroupRunner:
        return self._runners[group]

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


def _differs(running: GroupConfig, wanted: GroupConfig) -> bool:
    """Whether a group has to be started again to be what is wanted."""
    return running.model_copy(update={"tables": ()}) != wanted.model_copy(update={"tables": ()}) or sorted(
        (t.source, t.target) for t in running.tables
    ) != sorted((t.source, t.target) for t in wanted.tables)


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
