"""
Bring what runs in line with what people want, and write back what is.

What is wanted is in the registry (`control`): groups are started, stopped and taken down, tables come and go
(`group_tables`), requests are acted on.  How a group is prepared, started and kept running is in `service`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psycopg
import structlog

from aqueduck.app.control import Control, Wanted, inline_limits, open_control
from aqueduck.app.group import GroupRunner
from aqueduck.app.group_tables import add_tables, follow_name, remove_tables
from aqueduck.app.observe import (
    RequestsDone,
    errored_group,
    errored_tables,
    observe_group,
    observe_tables,
)
from aqueduck.config import GroupConfig
from aqueduck.errors import AqueduckError, ConnectionLostError, SlotActiveError, SourceUnreachableError
from aqueduck.lake.commit import transact
from aqueduck.lake.keeping import remove_target
from aqueduck.lake.table_states import forget_group, forget_tables
from aqueduck.postgres.connection import connect
from aqueduck.postgres.publications import drop_publication
from aqueduck.postgres.slots import drop_slot

if TYPE_CHECKING:  # the service has its groups reconciled
    from aqueduck.app.service import SyncService

__all__ = ["Reconciler", "switch_tables"]

log = structlog.get_logger()

RECONCILE_SECONDS = 10.0  # also without a notice
RECONCILE_SECONDS_POOLED = 1.0  # a pooler passes no notices on


class Reconciler:
    """The registry and the groups of one service; for one thread."""

    def __init__(self, service: SyncService, control: Control) -> None:
        self._service = service
        self._control = control
        self._observed_at = 0.0
        self._reconciled_at = 0.0
        self._beat_at: dict[str, float] = {}

    def close(self) -> None:
        self._control.close()

    def follow(self) -> None:
        """Act on changes within a moment, and write what is once a second; a lost connection is made again."""
        try:
            now = time.monotonic()
            seconds = RECONCILE_SECONDS if self._control.listens else RECONCILE_SECONDS_POOLED
            noticed = self._control.has_notice()
            if noticed or now - self._reconciled_at >= seconds:
                self._reconciled_at = now
                self._reconcile(noticed=noticed)
            if now - self._observed_at >= 1.0:
                self._observed_at = now
                self.observe()
            self._heartbeat()
        except (ConnectionLostError, SourceUnreachableError) as exc:
            log.warning("registry out of reach", error=str(exc))
            self._control.close()
            self._observed_at = time.monotonic() + 5.0
        if self._control.conn is None and self._had_registry and time.monotonic() >= self._observed_at:
            self._reopen()

    @property
    def _had_registry(self) -> bool:
        return any(wanted.id is not None for wanted in self._service.wanted.values())

    def _reopen(self) -> None:
        try:
            self._control = open_control(self._service.config)
            self._reconcile()
        except AqueduckError as exc:
            log.warning("registry out of reach", error=str(exc))
            self._observed_at = time.monotonic() + 5.0

    def observe(self) -> None:
        """Write what is, as of now."""
        tables, groups = [], []
        for name, runner in self._service.running.items():
            runner.refresh()
            wanted = self._service.wanted[name]
            tables += observe_tables(runner, wanted)
            if wanted.id is not None:
                groups.append(observe_group(runner, wanted.id))
        for name, errored in self._service.errored.items():
            wanted = self._service.wanted[name]
            tables += errored_tables(wanted, errored.error)
            if wanted.id is not None:
                groups.append(errored_group(wanted.id, errored.error))
        self._control.observe(tables, groups)

    def _heartbeat(self) -> None:
        for name, runner in self._service.running.items():
            seconds = runner.group.heartbeat_interval_ms / 1000
            if seconds and time.monotonic() - self._beat_at.get(name, 0.0) >= seconds:
                self._beat_at[name] = time.monotonic()
                self._control.heartbeat()

    def _reconcile(self, *, noticed: bool = False) -> None:
        """Bring what runs in line with what is wanted, group by group; after a notice also those that stand."""
        wanted_groups = self._control.wanted()
        self._service.lake.limits = inline_limits(wanted_groups)
        # First who gets tables, then who gives them: a table that moves is handed over.
        for wanted in sorted(wanted_groups, key=self._loses_tables):
            if not noticed and self._stands(wanted):
                continue
            try:
                self._reconcile_group(wanted, wanted_groups)
            except (ConnectionLostError, SourceUnreachableError):
                raise
            except AqueduckError as exc:
                if wanted.group.name in self._service.running:
                    log.warning("cannot do what the registry wants", group=wanted.group.name, error=str(exc))
                else:
                    self._service.set_errored(wanted, exc)

    def _stands(self, wanted: Wanted) -> bool:
        """Whether a group cannot run for a reason that nobody has done anything about."""
        errored = self._service.errored.get(wanted.group.name)
        if errored is None or errored.due or wanted.removed or not wanted.enabled:
            return False
        return wanted.group == self._service.wanted[wanted.group.name].group

    def _loses_tables(self, wanted: Wanted) -> bool:
        runner = self._service.running.get(wanted.group.name)
        return runner is not None and bool(_surplus(runner, wanted))

    def _reconcile_group(self, wanted: Wanted, all_wanted: list[Wanted]) -> None:
        name = wanted.group.name
        runs = name in self._service.running
        if wanted.removed or not wanted.enabled:
            if runs or name in self._service.errored:
                self._service.stop_group(name)
            if wanted.removed:
                self.take_down(wanted)
            return
        if not runs or _other_settings(self._service.wanted[name].group, wanted.group):
            if runs:
                self._service.stop_group(name)
            self._service.prepare_group(wanted)
            self._service.start_group(name)
        else:
            if any(row.resync_wanted for row in wanted.rows.values()):
                self._service.watch.look(self._service.running[name])  # the table that is there now is meant
            self._change_tables(wanted, all_wanted)
        self._act_on_requests(wanted)

    def _change_tables(self, wanted: Wanted, all_wanted: list[Wanted]) -> None:
        """Tables come and go while the group's query runs."""
        runner = self._service.running[wanted.group.name]
        self._service.wanted[wanted.group.name] = wanted
        for row in wanted.rows.values():
            oid = row.observed.source_oid
            if oid in runner.tables and not row.removed and runner.tables[oid].source != str(row.source):
                follow_name(runner, oid, row.source)
        dropped = {(row.target, row.table_mode) for row in wanted.removed_tables if row.drop_target}
        # Also one that was added again at once: it begins anew.
        drop = [oid for oid, table in runner.tables.items() if (table.target, table.mode) in dropped]
        gone = {*self._gone(runner, wanted, all_wanted), *drop}
        if gone:
            for oid in gone:
                log.info("table removed", group=wanted.group.name, table=runner.tables[oid].schema.qualified)
            remove_tables(runner, gone, drop=drop)
        self.forget_tables(wanted)
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
                if new_here and table.source in renew:
                    done = runner.requests_done.setdefault(oid, RequestsDone())
                    done.resync = wanted.rows[table.source].resync_requested
        switch_tables(runner, wanted)

    def _gone(self, runner: GroupRunner, wanted: Wanted, all_wanted: list[Wanted]) -> list[int]:
        """Tables to take out of a group now: those that another one is taking over stay until it has them."""
        elsewhere = {
            t.source_table.qualified
            for other in all_wanted
            if other.group.name in self._service.running and other.group.name != wanted.group.name
            for t in other.group.tables
        }
        surplus = _surplus(runner, wanted)
        moving = {
            oid
            for oid in surplus
            if runner.tables[oid].schema.qualified in elsewhere and runner.states[oid].ready
        }
        waits = {oid for oid in moving if self._is_taken_over(oid)}
        return [oid for oid in surplus if oid not in waits]

    def _giver(self, oid: int, taker: GroupRunner) -> GroupRunner | None:
        """The group that carries a table which comes to another one."""
        for runner in self._service.running.values():
            if runner is not taker and oid in runner.states and runner.states[oid].ready:
                return runner
        return None

    def _is_taken_over(self, oid: int) -> bool:
        return any(oid in runner.copier.handovers for runner in self._service.running.values())

    def _act_on_requests(self, wanted: Wanted) -> None:
        runner = self._service.running[wanted.group.name]
        for oid, table in runner.tables.items():
            row = wanted.rows.get(table.source)
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

    def forget_tables(self, wanted: Wanted) -> None:
        """Rows of tables that were removed: out of the lake where that was asked for, then out of the registry."""
        gone = wanted.removed_tables
        if not gone:
            return

        def remove() -> None:
            for row in gone:
                if row.drop_target:
                    remove_target(self._service.lake, row.target, row.table_mode)
                    if row.observed.source_oid is not None:  # if it was added again, it begins anew
                        forget_tables(self._service.lake, wanted.group.name, row.observed.source_oid)

        with self._service.commit_lock:
            transact(self._service.lake, remove)
        self._control.forget(tables=gone)

    def take_down(self, wanted: Wanted) -> None:
        """A removed group: its tables, its slot, its publication, its place in the lake's books."""
        name = wanted.group.name
        self.forget_tables(wanted)
        with connect(self._service.config.source.dsn) as conn:
            _drop_slot_soon(conn, wanted.group.slot_name)
            if not wanted.group.users_publication:
                drop_publication(conn, wanted.group.publication)
        forget_group(self._service.lake, name)
        self._control.forget(group=wanted)
        self._service.wanted.pop(name, None)
        log.info("group removed", group=name)


def _surplus(runner: GroupRunner, wanted: Wanted) -> list[int]:
    """Tables that run and are not wanted here any more."""
    names = {(t.source_table.qualified, t.target_table, t.table_mode) for t in wanted.group.tables}
    return [oid for oid, t in runner.tables.items() if (t.schema.qualified, t.target, t.mode) not in names]


def switch_tables(runner: GroupRunner, wanted: Wanted) -> None:
    """Disable and enable tables; at a start, also try once what failed before."""
    for oid, table in runner.tables.items():
        disabled = table.source in wanted.disabled
        if disabled != (oid in runner.copier.disabled):
            runner.set_enabled(oid, not disabled)


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
