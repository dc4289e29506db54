"""
The service: prepares the groups, runs a query for each, and starts them again when they fail.

`SyncService` is the same object for `aqueduck run`, the demo and the benches.  A failure that
may pass by itself (`Retry.AUTO`) restarts the query from the lake's position, with backoff; any
other ends the service with its error.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any

import psycopg
import structlog

from aqueduck import metrics
from aqueduck.app.actions import RegistryActions
from aqueduck.app.control import Control, Wanted, open_control
from aqueduck.app.copy_journal import journaled_files, journals_of
from aqueduck.app.group import GroupRunner, source_name
from aqueduck.app.group_tables import add_tables, follow_name, remove_tables
from aqueduck.app.maintenance_sync import Maintainer
from aqueduck.app.observe import RequestsDone, observe_group, observe_tables
from aqueduck.app.overviews import SyncOverviews
from aqueduck.app.prepare import PreparedGroup, group_dir, prepare_group
from aqueduck.app.status import GroupStatus
from aqueduck.app.tracing import Traces, open_traces
from aqueduck.app.watch import SourceWatch
from aqueduck.config import GroupConfig, SyncConfig
from aqueduck.errors import (
    AqueduckError,
    ConnectionLostError,
    Retry,
    SlotActiveError,
    SlotLostError,
    SourceUnreachableError,
)
from aqueduck.lake.catalog import LakeSession, open_lake
from aqueduck.lake.commit import transact
from aqueduck.lake.inlined import count_inlined
from aqueduck.lake.keeping import remove_target
from aqueduck.lake.orphans import remove_orphans
from aqueduck.lake.parking import remove_parking_orphans
from aqueduck.lake.progress import progress_table
from aqueduck.lake.table_states import forget_group
from aqueduck.postgres.connection import connect
from aqueduck.postgres.group_lock import GroupLocks
from aqueduck.postgres.publications import drop_publication
from aqueduck.postgres.slots import drop_slot
from aqueduck.schema import lsn_text
from aqueduck.spark.session import build_session
from aqueduck.web.server import serve

__all__ = ["SyncService", "run_service"]

log = structlog.get_logger()

BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
WATCH_SECONDS = 5.0
RECONCILE_SECONDS = 10.0  # also without a notice
RECONCILE_SECONDS_POOLED = 1.0  # a pooler passes no notices on


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
        self._locks: GroupLocks | None = None
        self._spark: Any = None
        self._observed_at = 0.0
        self._reconciled_at = 0.0
        self._beat_at: dict[str, float] = {}
        self._maintainer: Maintainer | None = None
        self._traces: Traces | None = None
        self._watch = SourceWatch()
        self._watched_at = 0.0

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
        self._traces = open_traces(self.config.tracing)
        self._lake = open_lake(self.config.lake)
        self._locks = GroupLocks(self.config.source.dsn)
        for (
            group
        ) in self.config.groups:  # before the file is written into the registry that another service follows
            self._lock(group.name)
        self._control = open_control(self.config)
        for wanted in self._control.wanted():
            if wanted.removed:
                self._take_down(self._control, wanted)
            elif wanted.enabled:
                self._prepare_group(wanted, trust_slot=trust_slot)
            else:
                self._unlock(wanted.group.name)

    def _lock(self, name: str) -> None:
        assert self._locks is not None
        self._locks.take(name)

    def _unlock(self, name: str) -> None:
        assert self._locks is not None
        self._locks.release(name)

    def _prepare_group(self, wanted: Wanted, *, trust_slot: bool = False) -> None:
        group = wanted.group
        self._lock(group.name)
        renew = [name for name, row in wanted.rows.items() if row.resync_wanted]
        ready = prepare_group(self.config, group, self.lake, trust_slot=trust_slot, renew=renew)
        targets = [t.target for t in ready.tables.values()]
        journals = journals_of(group_dir(self.config, group)).glob("*")
        remove_orphans(self.lake, group.name, targets, names=journaled_files(journals))
        remove_parking_orphans(self.lake, group.name)
        count_inlined(self.lake, [progress_table(group.name), *targets])
        self._ready[group.name] = ready
        self._wanted[group.name] = wanted
        for error in ready.refused.values():
            log.warning("table not added", group=group.name, error=str(error))
        if self._control is not None and wanted.removed_tables:
            self._forget_tables(self._control, wanted)

    def start(self, *, once: bool = False) -> None:
        for name in self._ready:
            self._start_group(name, once=once)

    def _start_group(self, name: str, *, once: bool = False) -> None:
        ready = self._ready[name]
        runner = GroupRunner(self.config, self.spark, self.lake, self.commit_lock, ready)
        runner.on_traced = None if self._traces is None else self._traces.batch
        self._runners[name] = runner
        self._switch_tables(runner, self._wanted[name])
        for oid, table in runner.tables.items():  # a copy that is due anyway is what was asked for
            row = self._wanted[name].rows.get(source_name(table))
            if row is not None and row.resync_wanted and runner.states[oid].awaits_copy:
                runner.requests_done.setdefault(oid, RequestsDone()).resync = row.resync_requested
        runner.start(once=once)
        log.info("group started", group=name, position=lsn_text(ready.position), tables=len(ready.tables))

    def check(self) -> None:
        """Raise what ended a query, if anything did."""
        for runner in self._runners.values():
            runner.query.check()

    def supervise(self, stopping: threading.Event) -> None:
        """Keep the queries running until told to stop."""
        self._maintainer = Maintainer(self)
        self._maintainer.start()
        while not stopping.wait(0.2):
            for runner in list(self._runners.values()):
                runner.copier.start()
                runner.copier.tell_progress()
                if not runner.query.active:
                    self._recover(runner, stopping)
            self._follow_registry()
            self._watch_sources()

    def _watch_sources(self) -> None:
        if time.monotonic() - self._watched_at < WATCH_SECONDS:
            return
        self._watched_at = time.monotonic()
        for runner in self._runners.values():
            try:
                self._watch.look(runner)
            except AqueduckError as exc:
                log.warning("the source's catalog cannot be read", group=runner.group.name, error=str(exc))

    def _recover(self, runner: GroupRunner, stopping: threading.Event) -> None:
        try:
            runner.query.check()
        except AqueduckError as exc:
            runner.status.last_error = str(exc)
            metrics.count_error(exc.code, flow="sync", group=runner.group.name)
            if isinstance(exc, SlotLostError) and runner.group.on_slot_loss == "resync":
                self._begin_again(runner.group.name)
                return
            if exc.retry is not Retry.AUTO:
                raise
            delay = BACKOFF_SECONDS[min(runner.failures, len(BACKOFF_SECONDS) - 1)]
            runner.failures += 1
            runner.status.restarts += 1
            metrics.count_retry(flow="sync", group=runner.group.name)
            runner.status.state = "retrying"
            log.warning("group stopped", group=runner.group.name, error=str(exc), retry_in_seconds=delay)
            if stopping.wait(delay):
                return
        self._restart(runner)

    def _begin_again(self, name: str) -> None:
        """The slot is gone, and the group is to be copied again."""
        wanted = self._wanted[name]
        self._stop_group(name)
        self._prepare_group(wanted)
        self._start_group(name)

    def _restart(self, runner: GroupRunner) -> None:
        try:
            assert self._locks is not None
            self._locks.keep()
        except (ConnectionLostError, SourceUnreachableError) as exc:
            log.warning("group waits for the source", group=runner.group.name, error=str(exc))
            return  # the query stays as it is, and is looked at again
        targets = [t.target for t in runner.tables.values()]
        copier = runner.copier
        with self.commit_lock:
            remove_orphans(
                self.lake, runner.group.name, targets, keep=copier.run_id, names=copier.kept_files()
            )
        runner.start()
        log.info("group restarted", group=runner.group.name, position=lsn_text(runner.stored_position()))

    # -- the registry: what people want, and what is

    def _follow_registry(self) -> None:
        """Act on changes within a moment, and write what is once a second; a lost connection is made again."""
        assert self._control is not None
        try:
            now = time.monotonic()
            seconds = RECONCILE_SECONDS if self._control.listens else RECONCILE_SECONDS_POOLED
            if self._control.has_notice() or now - self._reconciled_at >= seconds:
                self._reconciled_at = now
                self._reconcile(self._control)
            if now - self._observed_at >= 1.0:
                self._observed_at = now
                self._observe(self._control)
            self._heartbeat(self._control)
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

    def _heartbeat(self, control: Control) -> None:
        for name, runner in self._runners.items():
            seconds = runner.group.heartbeat_interval_ms / 1000
            if seconds and time.monotonic() - self._beat_at.get(name, 0.0) >= seconds:
                self._beat_at[name] = time.monotonic()
                control.heartbeat()

    def _reconcile(self, control: Control) -> None:
        """Bring what runs in line with what is wanted, group by group."""
        wanted_groups = control.wanted()
        # First who gets tables, then who gives them: a table that moves is handed over.
        for wanted in sorted(wanted_groups, key=self._loses_tables):
            try:
                self._reconcile_group(control, wanted, wanted_groups)
            except (ConnectionLostError, SourceUnreachableError):
                raise
            except AqueduckError as exc:
                log.warning("cannot do what the registry wants", group=wanted.group.name, error=str(exc))

    def _loses_tables(self, wanted: Wanted) -> bool:
        runner = self._runners.get(wanted.group.name)
        return runner is not None and bool(self._surplus(runner, wanted))

    def _surplus(self, runner: GroupRunner, wanted: Wanted) -> list[int]:
        """Tables that run and are not wanted here any more."""
        names = {(t.source_table.qualified, t.target_table, t.table_mode) for t in wanted.group.tables}
        return [
            oid for oid, t in runner.tables.items() if (t.schema.qualified, t.target, t.mode) not in names
        ]

    def _reconcile_group(self, control: Control, wanted: Wanted, all_wanted: list[Wanted]) -> None:
        name = wanted.group.name
        runs = name in self._runners
        if wanted.removed or not wanted.enabled:
            if runs:
                self._stop_group(name)
            if wanted.removed:
                self._take_down(control, wanted)
            return
        if not runs or _other_settings(self._wanted[name].group, wanted.group):
            if runs:
                self._stop_group(name)
            self._forget_tables(control, wanted)
            self._prepare_group(wanted)
            self._start_group(name)
        else:
            if any(row.resync_wanted for row in wanted.rows.values()):
                self._watch.look(self._runners[name])  # the table that is there now is meant
            self._change_tables(control, wanted, all_wanted)
        self._act_on_requests(wanted)

    def _change_tables(self, control: Control, wanted: Wanted, all_wanted: list[Wanted]) -> None:
        """Tables come and go while the group's query runs."""
        runner = self._runners[wanted.group.name]
        self._wanted[wanted.group.name] = wanted
        for row in wanted.rows.values():
            oid = row.observed.source_oid
            if (
                oid in runner.tables
                and not row.removed
                and source_name(runner.tables[oid]) != str(row.source)
            ):
                follow_name(runner, oid, row.source)
        surplus = self._surplus(runner, wanted)
        elsewhere = {
            t.source_table.qualified
            for other in all_wanted
            if other.group.name in self._runners and other.group.name != wanted.group.name
            for t in other.group.tables
        }
        moving = {
            oid
            for oid in surplus
            if runner.tables[oid].schema.qualified in elsewhere and runner.states[oid].ready
        }
        waits = {oid for oid in moving if self._is_taken_over(oid)}
        gone = [oid for oid in surplus if oid not in waits]
        if gone:
            dropped = {(row.target, row.table_mode) for row in wanted.removed_tables if row.drop_target}
            drop = [oid for oid in gone if (runner.tables[oid].target, runner.tables[oid].mode) in dropped]
            for oid in gone:
                log.info("table removed", group=wanted.group.name, table=runner.tables[oid].schema.qualified)
            remove_tables(runner, gone, drop=drop)
        self._forget_tables(control, wanted)
        known = {(t.schema.qualified, t.target, t.mode) for t in runner.tables.values()}
        new = [
            t
            for t in wanted.group.tables
            if (t.source_table.qualified, t.target_table, t.table_mode) not in known
        ]
        if new:
            renew = [name for name, row in wanted.rows.items() if row.resync_wanted]
            add_tables(runner, new, handover=lambda oid: self._giver(oid, runner), renew=renew)
            for oid, table in runner.tables.items():  # a new table's copy is what was asked for
                new_here = (table.schema.qualified, table.target, table.mode) not in known
                if new_here and source_name(table) in renew:
                    done = runner.requests_done.setdefault(oid, RequestsDone())
                    done.resync = wanted.rows[source_name(table)].resync_requested
        self._switch_tables(runner, wanted)

    def _giver(self, oid: int, taker: GroupRunner) -> GroupRunner | None:
        """The group that carries a table which comes to another one."""
        for runner in self._runners.values():
            if runner is not taker and oid in runner.states and runner.states[oid].ready:
                runner.leaving.add(oid)
                return runner
        return None

    def _is_taken_over(self, oid: int) -> bool:
        return any(oid in runner.copier.handovers for runner in self._runners.values())

    def _switch_tables(self, runner: GroupRunner, wanted: Wanted) -> None:
        """Disable and enable tables; at a start, also try once what failed before."""
        for oid, table in runner.tables.items():
            disabled = source_name(table) in wanted.disabled
            if disabled != (oid in runner.copier.disabled):
                runner.set_enabled(oid, not disabled)

    def _act_on_requests(self, wanted: Wanted) -> None:
        runner = self._runners[wanted.group.name]
        for oid, table in runner.tables.items():
            row = wanted.rows.get(source_name(table))
            if row is None:
                continue
            done = runner.requests_done.setdefault(oid, RequestsDone())
            if row.retry_wanted and done.retry < row.retry_requested:
                done.retry = row.retry_requested
                runner.copier.retry_now(oid)
            if row.resync_wanted and done.resync < row.resync_requested:
                log.info("resync", group=wanted.group.name, table=table.schema.qualified)
                runner.resync(oid)
                done.resync = row.resync_requested

    def _stop_group(self, name: str) -> None:
        self._runners.pop(name).stop()
        self._ready.pop(name)
        self._unlock(name)
        log.info("group stopped", group=name)

    def _forget_tables(self, control: Control, wanted: Wanted) -> None:
        """Rows of tables that were removed: out of the lake where that was asked for, then out of the registry."""
        gone = wanted.removed_tables
        if not gone:
            return

        def remove() -> None:
            for row in gone:
                if row.drop_target:
                    remove_target(self.lake, row.target, row.table_mode)

        with self.commit_lock:
            transact(self.lake, remove)
        control.forget(tables=gone)

    def _take_down(self, control: Control, wanted: Wanted) -> None:
        """A removed group: its tables, its slot, its publication, its place in the lake's books."""
        name = wanted.group.name
        self._forget_tables(control, wanted)
        with connect(self.config.source.dsn) as conn:
            _drop_slot_soon(conn, wanted.group.slot_name)
            if not wanted.group.users_publication:
                drop_publication(conn, wanted.group.publication)
        forget_group(self.lake, name)
        control.forget(group=wanted)
        self._wanted.pop(name, None)
        log.info("group removed", group=name)

    def _observe(self, control: Control) -> None:
        tables, groups = [], []
        for name, runner in self._runners.items():
            runner.refresh()
            wanted = self._wanted[name]
            tables += observe_tables(runner, wanted)
            if wanted.id is not None:
                groups.append(observe_group(runner, wanted.id))
        control.observe(tables, groups)

    def run_once(self, stopping: threading.Event) -> None:
        """Until every copy is in and every query has caught up and ended, or we are told to stop."""
        self._watch_sources()
        for runner in self._runners.values():
            while True:
                while not runner.query.wait(1):
                    if stopping.is_set():
                        return
                runner.query.check()
                runner.copier.start()
                if not runner.copier.busy or stopping.is_set():
                    break
                # A copy that goes on after a crash needs the changes up to its position.
                runner.start(once=True)
            runner.copier.raise_failures()
            self._observe_at_end()

    def _observe_at_end(self) -> None:
        if self._control is not None:
            with contextlib.suppress(ConnectionLostError, SourceUnreachableError):
                self._observe(self._control)

    def stop(self) -> None:
        """Finish the commits that are under way, then end."""
        if self._maintainer is not None:
            self._maintainer.stop()
            self._maintainer = None
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
        if self._traces is not None:
            self._traces.close()
            self._traces = None

    # -- for the demo, the benches and the page

    def runners(self) -> list[GroupRunner]:
        return list(self._runners.values())

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
            runner.copier.raise_failures()
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


def _drop_slot_soon(conn: psycopg.Connection[Any], name: str, *, seconds: float = 10.0) -> None:
    """The capture that read it has just been stopped: the server needs a moment to notice."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return drop_slot(conn, name)
        except SlotActiveError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _other_settings(running: GroupConfig, wanted: GroupConfig) -> bool:
    """Whether a group has to be started again to be what is wanted."""
    options = {table.source: table.options for table in running.tables}
    return running.model_copy(update={"tables": ()}) != wanted.model_copy(update={"tables": ()}) or any(
        options.get(table.source, table.options) != table.options for table in wanted.tables
    )


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
        if once:
            service.start(once=True)
            service.run_once(stopping)
            return
        with serve(config.server, SyncOverviews(service), RegistryActions(config.source.dsn)):
            service.start()
            service.supervise(stopping)
    finally:
        service.stop()
        log.info("stopped")
