"""
The service: prepares the groups, runs a query for each, and restarts them after failures.

`SyncService` serves `aqueduck run`, the demo and the benchmarks.  A failure that may be temporary (`Retry.AUTO`)
restarts the query from the lake's position, with backoff.  After any other failure the group is `errored`: it waits for
an operator while the other groups continue; if there are no others, the service ends with the error.  `reconcile`
follows changes of the configuration; `groups.group` has one group.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from aqueduck.config.sync import SyncConfig, group_dir
from aqueduck.lake.ledger.parking import remove_parking_orphans
from aqueduck.lake.ledger.progress import progress_table
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.lake.target.inlined import count_inlined
from aqueduck.lake.upkeep.orphans import remove_orphans
from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    DataPathError,
    Retry,
    ServiceLockedError,
    SlotLostError,
    SourceUnreachableError,
)
from aqueduck.model.retries import RESTART_SECONDS
from aqueduck.model.schema import lsn_text
from aqueduck.overview import metrics
from aqueduck.postgres.session.group_lock import GroupLocks
from aqueduck.postgres.session.server import flushed_position
from aqueduck.service.outage import Outage
from aqueduck.service.summary import announce, lake_text, source_text, summarized
from aqueduck.service.tracing import Traces, open_traces
from aqueduck.service.verify_schedule import Verifier
from aqueduck.spark.session.session import build_session
from aqueduck.sync.actions import RegistryActions
from aqueduck.sync.control import Wanted, inline_limits, open_control
from aqueduck.sync.copying.copy_journal import journaled_files, journals_of
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.maintain import Maintainer
from aqueduck.sync.observe import observe_tables, raise_errored_table
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.prepare import PreparedGroup, prepare_group
from aqueduck.sync.reconcile import Reconciler, switch_tables
from aqueduck.sync.status import GroupStatus
from aqueduck.sync.verify_schedule import subject, sync_verdicts, sync_verifier
from aqueduck.sync.watching.column_watch import ColumnWatch
from aqueduck.sync.watching.source_watch import SourceWatch
from aqueduck.sync.watching.target_watch import TargetWatch
from aqueduck.web.server import serve

__all__ = ["SyncService", "run_service"]

log = structlog.get_logger()

ERRORED_SECONDS = 60.0
WATCH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ErroredGroup:
    """A group that waits for a person, and the time of its next automatic try."""

    error: AqueduckError
    retry_at: float

    @property
    def due(self) -> bool:
        return time.monotonic() >= self.retry_at


class SyncService:
    """All groups of one source and one lake."""

    def __init__(self, config: SyncConfig, *, spark: Any = None) -> None:
        self.config = config
        self.commit_lock = threading.Lock()  # one committer per catalog
        self.running: dict[str, GroupRunner] = {}
        self.prepared: dict[str, PreparedGroup] = {}
        self.wanted: dict[str, Wanted] = {}
        self.errored: dict[str, ErroredGroup] = {}
        self._lake: LakeSession | None = None
        self._reconciler: Reconciler | None = None
        self._locks: GroupLocks | None = None
        self._spark: Any = spark
        self._maintainer: Maintainer | None = None
        self.verdicts = sync_verdicts(config)
        self.verifier: Verifier | None = None
        self._traces: Traces | None = None
        self.watch = SourceWatch()
        self._target_watch = TargetWatch()
        self._column_watch = ColumnWatch()
        self._watched_at = 0.0
        self._looked_at = datetime.now(UTC)
        self._blind: AqueduckError | None = None
        self.outage = Outage()

    @property
    def lake(self) -> LakeSession:
        assert self._lake is not None, "prepare() first"
        return self._lake

    @property
    def reconciler(self) -> Reconciler:
        assert self._reconciler is not None, "prepare() first"
        return self._reconciler

    @property
    def spark(self) -> Any:
        if self._spark is None:
            spark = self.config.spark
            self._spark = build_session(spark.master, spark.conf, "aqueduck", state_dir=self.config.state_dir)
        return self._spark

    def prepare(self, *, trust_slot: bool = False, adopt: bool = False) -> None:
        """Refuse everything that can be refused before Spark starts."""
        self._traces = open_traces(self.config.tracing)
        self._lake = open_lake(self.config.lake)
        self._locks = GroupLocks(self.config.source.dsn)
        # Before the file is written into a registry that another service uses.
        for group in self.config.groups:
            self._lock(group.name)
        control = open_control(self.config)
        self._reconciler = Reconciler(self, control)
        groups = control.wanted()
        self.lake.limits = inline_limits(groups)
        for wanted in self._reconciler.prepare(groups):
            if wanted.enabled:
                self._try_to_prepare(wanted, trust_slot, adopt)
            else:
                self.wanted[wanted.group.name] = wanted
                self._unlock(wanted.group.name)
        if not self.prepared:
            self._raise_errored()
        self._reconciler.observe()  # nothing streams before Spark runs

    def holds(self, name: str) -> bool:
        """Whether the group is ours to run: it runs, is errored, or is becoming either."""
        return self._locks is not None and self._locks.has(name)

    def _lock(self, name: str) -> None:
        assert self._locks is not None
        self._locks.take(name)

    def _unlock(self, name: str) -> None:
        assert self._locks is not None
        self._locks.release(name)

    def _try_to_prepare(self, wanted: Wanted, trust_slot: bool, adopt: bool) -> None:
        try:
            self.prepare_group(wanted, trust_slot=trust_slot, adopt=adopt)
        except AqueduckError as exc:
            if exc.retry is Retry.AUTO or isinstance(exc, ServiceLockedError):
                raise
            self.set_errored(wanted, exc)

    def _raise_errored(self) -> None:
        for errored in self.errored.values():
            raise errored.error

    def set_errored(self, wanted: Wanted, error: AqueduckError) -> None:
        """
        Mark the group as errored until a person acts or the cause disappears; its slot keeps its WAL
        position.
        """
        name = wanted.group.name
        known = self.errored.get(name)
        if known is None or str(known.error) != str(error):
            log.error("group errored", group=name, error=str(error))
        self._halt(name)
        self.wanted[name] = wanted
        seconds = RESTART_SECONDS[-1] if error.retry is Retry.AUTO else ERRORED_SECONDS
        self.errored[name] = ErroredGroup(error, time.monotonic() + seconds)

    def prepare_group(self, wanted: Wanted, *, trust_slot: bool = False, adopt: bool = False) -> None:
        group = wanted.group
        self._lock(group.name)
        self.reconciler.forget_tables(wanted)
        renew = [name for name, row in wanted.rows.items() if row.resync_wanted]
        ready = prepare_group(self.config, wanted, self.lake, trust_slot=trust_slot, adopt=adopt, renew=renew)
        targets = [t.target for t in ready.tables.values()]
        journals = journals_of(group_dir(self.config, group)).glob("*")
        remove_orphans(self.lake, group.name, targets, names=journaled_files(journals))
        remove_parking_orphans(self.lake, group.name)
        count_inlined(self.lake, [progress_table(group.name), *targets])
        self.prepared[group.name] = ready
        self.wanted[group.name] = wanted
        self.errored.pop(group.name, None)
        for error in ready.refused.values():
            log.warning("table not added", group=group.name, error=str(error))

    def start(self, *, once: bool = False) -> None:
        for name in self.prepared:
            self.start_group(name, once=once)

    def start_group(self, name: str, *, once: bool = False) -> None:
        ready = self.prepared[name]
        runner = GroupRunner(
            self.config, self.spark, self.lake, self.commit_lock, ready,
            verified=lambda source: self.verdicts[subject(name, str(source))], is_outage=self.outage.covers,
            on_traced=None if self._traces is None else self._traces.batch,
        )  # fmt: skip
        self.running[name] = runner
        switch_tables(runner, self.wanted[name])
        for oid, table in runner.tables.items():  # a copy that is due anyway fulfils the request
            row = self.wanted[name].rows.get(table.source)
            if row is not None and row.resync_wanted and runner.states[oid].awaits_copy:
                runner.book.record_resync(oid, row.resync_requested)
        runner.start(once=once)
        log.info("group started", group=name, position=lsn_text(ready.position), tables=len(ready.tables))

    def refused(self, name: str) -> dict[str, AqueduckError]:
        """Tables that could not be prepared, of a group that is not started yet."""
        return self.prepared[name].refused if name in self.prepared else {}

    def stop_group(self, name: str) -> None:
        """Stop a group that was removed, disabled or changed."""
        self._halt(name)
        self.errored.pop(name, None)
        self._unlock(name)
        log.info("group stopped", group=name)

    def _halt(self, name: str) -> None:
        runner = self.running.pop(name, None)
        if runner is not None:
            runner.stop()
            runner.refresh()
            self.wanted[name] = self.wanted[name].as_observed(observe_tables(runner, self.wanted[name]))
        self.prepared.pop(name, None)

    def check(self) -> None:
        """Raise the error that ended a query, if any."""
        self._raise_errored()
        for runner in self.running.values():
            runner.query.check()

    def supervise(self, stopping: threading.Event) -> None:
        """Keep the queries running until the service is stopped."""
        self._maintainer = Maintainer(self)
        self._maintainer.start()
        self.verifier = sync_verifier(self)
        self.verifier.start()
        while not stopping.wait(0.2):
            for runner in list(self.running.values()):
                runner.copier.start()
                runner.copier.log_progress()
                if not runner.query.active:
                    self._recover(runner)
            self.reconciler.follow()
            for runner, error in self._watch_sources():
                self._failed(runner, error)
            if self.outage.is_on and all(runner.reads for runner in self.running.values()):
                self.outage.end_if_seen(self.seen_at)

    def _watch_sources(self) -> list[tuple[GroupRunner, SlotLostError]]:
        """Returns the groups whose source was restored from a backup: the lake may have changes that it lost."""
        if time.monotonic() - self._watched_at < WATCH_SECONDS:
            return []
        self._watched_at = time.monotonic()
        blind: AqueduckError | None = None
        lost: list[tuple[GroupRunner, SlotLostError]] = []
        looks: list[Callable[[], None]] = [self._keep_locks]
        looks += [functools.partial(self._look_at_source, runner, lost) for runner in self.running.values()]
        for look in looks:
            try:
                look()
            except ServiceLockedError:
                raise  # another service took over
            except AqueduckError as exc:
                blind = exc
        if blind is None:
            self._looked_at = datetime.now(UTC)
        elif not self.outage.covers(blind) and str(blind) != str(self._blind):
            log.warning("the source's catalog cannot be read", error=str(blind))
        self._blind = blind
        for runner in self.running.values():
            try:
                self._target_watch.look(runner)
                self._column_watch.look(runner)
            except AqueduckError as exc:
                if not self.outage.covers(exc):
                    log.warning("tables cannot be looked at", group=runner.group.name, error=str(exc))
        return lost

    def _look_at_source(self, runner: GroupRunner, lost: list[tuple[GroupRunner, SlotLostError]]) -> None:
        try:
            self.watch.look(runner)
        except SlotLostError as exc:
            lost.append((runner, exc))

    def _keep_locks(self) -> None:
        assert self._locks is not None
        self._locks.keep()

    @property
    def seen_at(self) -> datetime:
        """When the source's complete information was last known: the registry, and that the groups stream."""
        known = self._looked_at if self._reconciler is None else self._reconciler.known_at
        return min(known, self._looked_at)

    @property
    def source_error(self) -> AqueduckError | None:
        """Why it is currently unknown."""
        error = None if self._reconciler is None else self._reconciler.error
        return error or self._blind

    def _recover(self, runner: GroupRunner) -> None:
        """
        Handle a query that ended: find the reason, and restart it when due. Never waits, because the other
        groups continue.
        """
        try:
            if runner.retry_at is None:
                runner.query.check()
            elif time.monotonic() < runner.retry_at:
                return
            self._restart(runner)
        except ServiceLockedError:
            raise  # another service took over
        except AqueduckError as exc:
            self._failed(runner, exc)

    def _failed(self, runner: GroupRunner, error: AqueduckError) -> None:
        name, retries = runner.group.name, error.retry is Retry.AUTO
        runner.failed(error, retries=retries)
        metrics.count_error(error.code, flow="sync", group=name)
        if retries:
            delay = runner.restart_later()
            metrics.count_retry(flow="sync", group=name)
            if not self.outage.covers(error):
                log.warning("group stopped", group=name, error=str(error), retry_in_seconds=delay)
            return
        self._halt(name)
        if isinstance(error, SlotLostError) and runner.group.on_slot_loss == "resync":
            try:
                self.prepare_group(self.wanted[name])  # all tables are re-copied
                self.start_group(name)
            except AqueduckError as exc:
                error = exc
            else:
                return
        self.set_errored(self.wanted[name], error)
        if not self.running:
            raise error

    def _restart(self, runner: GroupRunner) -> None:
        self._keep_locks()
        targets = [t.target for t in runner.tables.values()]
        copier = runner.copier
        try:
            with self.commit_lock:
                remove_orphans(
                    self.lake,
                    runner.group.name,
                    targets,
                    keep=copier.settings.run_id,
                    names=copier.kept_files(),
                )
        except DataPathError as exc:  # they do no harm
            log.warning("files of the failed batch stay for now", group=runner.group.name, error=str(exc))
        runner.start()
        if not self.outage.is_on:  # the end of an outage is logged once
            log.info("group restarted", group=runner.group.name, position=lsn_text(runner.stored_position()))

    def run_once(self, stopping: threading.Event) -> None:
        """Run until every copy is complete and every query has caught up and ended, or the service is stopped."""
        for _, lost in self._watch_sources():
            raise lost
        failed: list[AqueduckError] = []
        for runner in self.running.values():
            try:
                if not self._run_to_its_end(runner, stopping):
                    return
                raise_errored_table(runner)
            except AqueduckError as exc:  # let the other groups catch up
                failed.append(exc)
                runner.failed(exc, retries=True)
            self._observe_at_end()
        for error in failed:
            raise error
        self._raise_errored()

    def _run_to_its_end(self, runner: GroupRunner, stopping: threading.Event) -> bool:
        """Whether it finished before the service was stopped."""
        reading_to = 0
        while True:
            while not runner.query.wait(1):
                if stopping.is_set():
                    return False
            runner.query.check()
            runner.record_read(reading_to)
            with contextlib.suppress(SourceUnreachableError, ConnectionLostError):
                self._column_watch.look(runner)  # what it saw at the start is in the lake now
            runner.copier.start()
            if not runner.copier.busy or stopping.is_set():
                break
            # A copy that resumes after a crash needs the changes up to its position.
            reading_to = flushed_position(self.config.source.dsn)
            runner.start(once=True)
        runner.copier.raise_failures()
        return True

    def _observe_at_end(self) -> None:
        with contextlib.suppress(ConnectionLostError, SourceUnreachableError):
            self.reconciler.observe()

    def stop(self) -> None:
        """Finish the current commits, then end."""
        if self.verifier is not None:
            self.verifier.stop()
            self.verifier = None
        if self._maintainer is not None:
            self._maintainer.stop()
            self._maintainer = None
        for runner in self.running.values():
            runner.stop()
        self.running.clear()
        for connection in (self._reconciler, self._locks):
            if connection is not None:
                connection.close()
        self._reconciler = self._locks = None
        if self._spark is not None:
            self._spark.stop()
            self._spark = None
        if self._lake is not None:
            self._lake.close()
            self._lake = None
        if self._traces is not None:
            self._traces.close()
            self._traces = None

    # -- for the page, and for the demo and the benchmarks

    def runners(self) -> list[GroupRunner]:
        return list(self.running.values())

    def runner(self, group: str) -> GroupRunner:
        return self.running[group]

    def status(self, group: str) -> GroupStatus:
        return self.running[group].refresh()

    def position(self, group: str) -> int:
        """The position that the group has reached in the lake."""
        return self.running[group].status.position

    def query_lake(self, sql: str) -> tuple[list[tuple[Any, ...]], list[str]]:
        """Rows and column names of a query on the lake."""
        with self.commit_lock:
            return self.lake.query(sql)


def run_service(config: SyncConfig, *, once: bool, trust_slot: bool = False, adopt: bool = False) -> None:
    """`aqueduck run`: until SIGTERM or ctrl-C, or with `once` until caught up."""
    stopping = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.set())
    service = SyncService(config)
    try:
        service.prepare(trust_slot=trust_slot, adopt=adopt)
        source, target = source_text(config.source.dsn), lake_text(config.lake.catalog, config.lake.data_path)
        if once:
            announce(source=source, target=target, page=None)
            service.start(once=True)
            service.run_once(stopping)
            return
        with (
            summarized(SyncOverviews(service), served=config.server.enabled) as overviews,
            serve(config.server, overviews, RegistryActions(config.source.dsn)) as page,
        ):
            announce(source=source, target=target, page=page)
            service.start()
            service.supervise(stopping)
    finally:
        service.stop()
        log.info("stopped")
