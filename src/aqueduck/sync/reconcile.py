"""
Bring the running groups in line with the registered configuration, and write back the observed state.

The registry (`control`) has the desired state: groups are started, stopped and removed, tables are added and
removed (`group_tables`), requests are executed. `service` prepares and starts groups and keeps them running.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import structlog

from aqueduck.config.sync import GroupConfig
from aqueduck.lake.commit.commit import transact
from aqueduck.lake.ledger.table_states import ensure_table_states, forget_group, forget_tables, read_states
from aqueduck.lake.target.mode_rows import remove_target
from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    RegistryIncompleteError,
    ServiceLockedError,
    SlotActiveError,
    SourceUnreachableError,
)
from aqueduck.overview import metrics
from aqueduck.postgres.publications.ownership import read_ownership
from aqueduck.postgres.publications.publications import drop_publication
from aqueduck.postgres.publications.slots import drop_slot, slot_info
from aqueduck.postgres.registry.registry import GroupObservation, TableObservation, TableRow
from aqueduck.postgres.session.connection import connect
from aqueduck.sync.control import (
    Control,
    Parting,
    RegistryControl,
    Wanted,
    inline_limits,
    open_control,
    reopen_registry,
)
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.groups.group_tables import add_tables, follow_name, remove_tables
from aqueduck.sync.observe import (
    errored_group,
    errored_tables,
    observe_group,
    observe_tables,
    waiting_tables,
)
from aqueduck.sync.prepare import stray

if TYPE_CHECKING:  # the service owns the reconciler
    from aqueduck.sync.service import SyncService

__all__ = ["Reconciler", "switch_tables"]

log = structlog.get_logger()

RECONCILE_SECONDS = 10.0  # even without a notice
RECONCILE_SECONDS_POOLED = 1.0  # a pooler does not forward notices
REOPEN_SECONDS = 5.0  # after the connection was lost


class Reconciler:
    """The registry and the groups of one service; not thread-safe."""

    def __init__(self, service: SyncService, control: Control) -> None:
        self._service = service
        self._control: Control | None = control
        self._reopen = reopen_registry if isinstance(control, RegistryControl) else open_control
        self._reopen_at = 0.0
        self._observed_at = 0.0
        self._reconciled_at = 0.0
        self._beat_at: dict[str, float] = {}
        self._listed: set[str] = set()
        self._taken_down: list[TableRow] = []
        self.known_at = datetime.now(UTC)
        """When the desired state was last read, and the observed state last written."""
        self.error: AqueduckError | None = None
        """Why the desired state is currently unknown."""

    def close(self) -> None:
        if self._control is not None:
            self._control.close()

    def follow(self) -> None:
        """
        Apply changes within a moment, and write the observed state once a second.

        While the registry cannot be read, the desired state is unknown: everything continues unchanged.
        """
        try:
            if self._control is None:
                if time.monotonic() < self._reopen_at:
                    return
                self._control = self._reopen(self._service.config)
                self._reconciled_at = -RECONCILE_SECONDS
            self._follow(self._control)
        except ServiceLockedError:
            raise
        except AqueduckError as exc:
            self._lose(exc)
        else:
            self.error = self._unlisted()
            self.known_at = datetime.now(UTC)

    def _lose(self, error: AqueduckError) -> None:
        if not self._service.outage.covers(error) and str(self.error) != str(error):
            log.warning("registry out of reach", error=str(error))
        self.error = error
        if self._control is not None:
            self._control.close()
        self._control = None
        self._reopen_at = time.monotonic() + REOPEN_SECONDS

    def _follow(self, control: Control) -> None:
        now = time.monotonic()
        seconds = RECONCILE_SECONDS if control.listens else RECONCILE_SECONDS_POOLED
        noticed = control.has_notice()
        if noticed or now - self._reconciled_at >= seconds:
            self._reconciled_at = now
            self._reconcile(control.wanted(), noticed=noticed)
            self.forget_rows()
        if now - self._observed_at >= 1.0:
            self._observed_at = now
            self.observe()
        self._heartbeat(control)

    def _unlisted(self) -> AqueduckError | None:
        """Groups that run or are errored here and are missing in the registry, without being marked as removed."""
        missing = sorted((set(self._service.running) | set(self._service.errored)) - self._listed)
        if not missing:
            return None
        return RegistryIncompleteError(
            f"the registry does not have the group {', '.join(missing)} any more, although it was not removed: it continues unchanged",
            hint=f"re-create it with its tables: select aqueduck.create_group('{missing[0]}'), then aqueduck.add_table(…)",
        )

    def observe(self) -> None:
        """Write the current observed state."""
        tables: list[TableObservation] = []
        groups: list[GroupObservation] = []
        for name, runner in self._service.running.items():
            runner.refresh()
            wanted = self._service.wanted[name]
            tables += observe_tables(runner, wanted).values()
            if wanted.id is not None:
                groups.append(observe_group(runner, wanted.id))
        for name, wanted in self._service.wanted.items():
            if (
                self._service.holds(name)
                and name not in self._service.running.keys() | self._service.errored.keys()
            ):
                tables += waiting_tables(wanted, self._service.refused(name))
        for name, errored in self._service.errored.items():
            wanted = self._service.wanted[name]
            tables += errored_tables(wanted, errored.error)
            if wanted.id is not None:
                groups.append(errored_group(wanted.id, errored.error))
        if self._control is not None:
            self._control.observe(tables, groups)

    def _heartbeat(self, control: Control) -> None:
        for name, runner in self._service.running.items():
            seconds = runner.group.heartbeat_interval_ms / 1000
            if seconds and time.monotonic() - self._beat_at.get(name, 0.0) >= seconds:
                self._beat_at[name] = time.monotonic()
                control.heartbeat()

    def prepare(self, wanted_groups: list[Wanted]) -> Iterator[Wanted]:
        """At a start: take down removed groups; returns the groups to prepare."""
        self._listed = {wanted.group.name for wanted in wanted_groups}
        for wanted in wanted_groups:
            if wanted.removed:
                self.take_down(wanted)
            else:
                yield wanted
        self.forget_rows()

    def _reconcile(self, wanted_groups: list[Wanted], *, noticed: bool = False) -> None:
        """Apply the desired state group by group; after a notice also to errored groups."""
        self._listed = {wanted.group.name for wanted in wanted_groups}
        known = self._service.wanted
        # A group whose rows cannot be read keeps the configuration that was read last.
        self._service.lake.limits = inline_limits(
            [known.get(w.group.name, w) if w.problem is not None else w for w in wanted_groups]
        )
        # Groups that gain tables come before groups that lose them: a moved table is handed over.
        for wanted in sorted(wanted_groups, key=self._loses_tables):
            if not noticed and self._stands(wanted):
                continue
            error: AqueduckError | None = None
            try:
                self._reconcile_group(wanted, wanted_groups)
            except (ConnectionLostError, SourceUnreachableError):
                raise
            except AqueduckError as exc:
                error = exc
            self._record(wanted, error)

    def _record(self, wanted: Wanted, error: AqueduckError | None) -> None:
        """Record why a group does not follow its configuration: a running group continues unchanged, another one is errored."""
        runner = self._service.running.get(wanted.group.name)
        if runner is None:
            if error is not None:
                self._service.set_errored(wanted, error)
            return
        if error is not None and str(error) != str(runner.unfollowed):
            log.warning("cannot do what the registry wants", group=wanted.group.name, error=str(error))
            metrics.count_error(error.code, flow="sync", group=wanted.group.name)
        runner.record_unfollowed(error)

    def _stands(self, wanted: Wanted) -> bool:
        """Whether a group cannot run for a reason that is still unresolved."""
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
            if self._service.holds(name):
                self._service.stop_group(name)
            if wanted.removed:
                self.take_down(wanted)
            else:
                before = self._service.wanted.get(name, wanted).rows.values()
                self._service.wanted[name] = wanted.as_observed({row.id: row.observed for row in before})
            return
        if wanted.problem is not None:
            raise wanted.problem
        if not runs or _other_settings(self._service.wanted[name].group, wanted.group):
            if runs:
                self._service.stop_group(name)
            self._service.prepare_group(wanted)
            self._service.start_group(name)
        else:
            if any(row.resync_wanted for row in wanted.rows.values()):
                self._service.watch.look(self._service.running[name])  # use the current table
            self._change_tables(wanted, all_wanted)
        self._act_on_requests(wanted)

    def _change_tables(self, wanted: Wanted, all_wanted: list[Wanted]) -> None:
        """Add and remove tables while the group's query runs."""
        runner = self._service.running[wanted.group.name]
        self._service.wanted[wanted.group.name] = wanted
        for row in wanted.rows.values():
            oid = row.observed.source_oid
            table = None if oid is None or row.removed else runner.tables.get(oid)
            if table is not None and table.source != str(row.source):
                follow_name(runner, table.schema.oid, row.source)
        gone = {**self._gone(runner, wanted, all_wanted), **_dropped(runner, wanted)}
        if gone:
            for oid, parting in gone.items():
                name = runner.tables[oid].schema.qualified
                log.info("table removed", group=wanted.group.name, table=name, reason=parting.why)
            remove_tables(runner, gone)
        self.forget_tables(wanted)
        runner.book.record_strays(_strays(runner, wanted))
        runner.book.accept(*(n for n, e in runner.book.refused.items() if not _concerns(n, e, wanted)))
        known = {(t.schema.qualified, t.target, t.mode) for t in runner.tables.values()}
        new = [
            t
            for t in wanted.group.tables
            if (t.source_table.qualified, t.target_table, t.table_mode) not in known
        ]
        if new:
            renew = [name for name, row in wanted.rows.items() if row.resync_wanted]
            add_tables(runner, new, handover=lambda oid: self._giver(oid, runner), renew=renew)
            for oid, table in runner.tables.items():  # a new table is copied anyway
                new_here = (table.schema.qualified, table.target, table.mode) not in known
                if new_here and table.source in renew:
                    runner.book.record_resync(oid, wanted.rows[table.source].resync_requested)
        switch_tables(runner, wanted)

    def _gone(self, runner: GroupRunner, wanted: Wanted, all_wanted: list[Wanted]) -> dict[int, Parting]:
        """Tables to remove from a group now; a table that moves stays until its new group has it."""
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
        partings = {oid: _parting(runner, oid, wanted) for oid in surplus if oid not in waits}
        return {oid: parting for oid, parting in partings.items() if parting is not None}

    def _giver(self, oid: int, taker: GroupRunner) -> GroupRunner | None:
        """The group that currently replicates a table which moves to another group."""
        for runner in self._service.running.values():
            if runner is not taker and runner.book.is_ready(oid):
                return runner
        return None

    def _is_taken_over(self, oid: int) -> bool:
        return any(runner.copier.schedule.handover(oid) for runner in self._service.running.values())

    def _act_on_requests(self, wanted: Wanted) -> None:
        runner = self._service.running[wanted.group.name]
        for oid, table in runner.tables.items():
            row = wanted.rows.get(table.source)
            if row is None:
                continue
            done = runner.book.requests_done(oid)
            if row.retry_wanted and done.retry < row.retry_requested:
                runner.book.record_retry(oid, row.retry_requested)
                runner.copier.retry_now(oid)
            if row.resync_wanted and done.resync < row.resync_requested:
                log.info("resync", group=wanted.group.name, table=table.schema.qualified)
                runner.resync(oid)
                runner.book.record_resync(oid, row.resync_requested)

    def forget_tables(self, wanted: Wanted) -> None:
        """Remove the tables' entries from the lake's ledger, and drop their targets if requested."""
        gone, lake, group = wanted.removed_tables, self._service.lake, wanted.group.name
        if not gone:
            return
        runner = self._service.running.get(group)

        def remove() -> None:
            ensure_table_states(lake)
            known = read_states(lake, group)
            for row in gone:
                if row.drop_target:
                    for state in known.values():  # other entries were dropped, or are not ours
                        if (state.target, state.mode) == (row.target, row.table_mode):
                            remove_target(lake, row.target, row.table_mode, state.target_uuid)
                    if row.observed.source_oid is not None:  # if it was added again, it starts anew
                        forget_tables(lake, group, row.observed.source_oid)
                elif not wanted.wants(row):
                    left = [s.oid for s in known.values() if row.is_of(s.oid, s.source, s.target, s.mode)]
                    forget_tables(
                        lake, group, *(oid for oid in left if runner is None or oid not in runner.tables)
                    )

        with self._service.commit_lock:
            transact(lake, remove)
        self._taken_down += gone

    def forget_rows(self) -> None:
        """Delete the rows from the registry, as the last step: until then they mark the removal."""
        if self._taken_down and self._control is not None:
            self._control.forget(tables=self._taken_down)
        self._taken_down = []

    def take_down(self, wanted: Wanted) -> None:
        """Remove a group: its tables, slot, publication, and entry in the lake's ledger."""
        name = wanted.group.name
        self.forget_tables(wanted)
        with connect(self._service.config.source.dsn) as conn:
            owned = read_ownership(conn, name)
            if owned is not None and owned.slot == wanted.group.slot_name:
                _drop_slot_soon(conn, wanted.group.slot_name)
            elif slot_info(conn, wanted.group.slot_name) is not None:
                log.warning("slot not dropped: Aqueduck did not make it", slot=wanted.group.slot_name)
            if owned is not None and owned.publication == wanted.group.publication:
                drop_publication(conn, wanted.group.publication)
        forget_group(self._service.lake, name)
        assert self._control is not None
        self._control.forget(group=wanted)
        self._service.wanted.pop(name, None)
        log.info("group removed", group=name)


def _parting(runner: GroupRunner, oid: int, wanted: Wanted) -> Parting | None:
    table = runner.tables[oid]
    return wanted.parting(oid, table.schema.qualified, table.target, table.mode)


def _dropped(runner: GroupRunner, wanted: Wanted) -> dict[int, Parting]:
    """Tables whose targets are to be dropped, including a table that was re-added at once: it starts anew."""
    dropped = {(row.target, row.table_mode) for row in wanted.removed_tables if row.drop_target}
    return {
        oid: Parting("it was removed", drop_target=True)
        for oid, table in runner.tables.items()
        if (table.target, table.mode) in dropped
    }


def _strays(runner: GroupRunner, wanted: Wanted) -> dict[str, AqueduckError]:
    """Tables that run although they are neither registered nor removed: they continue, and this is reported."""
    lost = [oid for oid in _surplus(runner, wanted) if _parting(runner, oid, wanted) is None]
    found: dict[str, AqueduckError] = {
        runner.tables[oid].source: stray(runner.tables[oid].source, wanted.group.name) for oid in lost
    }
    for source in found.keys() - runner.book.strays.keys():
        log.error("table is not in the registry", group=wanted.group.name, error=str(found[source]))
    return found


def _concerns(source: str, error: AqueduckError, wanted: Wanted) -> bool:
    """Whether a table that could not be added is still wanted: it is registered, or was not removed."""
    if source in {table.source for table in wanted.group.tables} or source in wanted.rows:
        return True
    given_up = any(str(row.source) == source for row in wanted.removed_tables)
    return isinstance(error, RegistryIncompleteError) and not given_up


def _surplus(runner: GroupRunner, wanted: Wanted) -> list[int]:
    """Running tables that no longer belong to this group."""
    names = {(t.source_table.qualified, t.target_table, t.table_mode) for t in wanted.group.tables}
    return [oid for oid, t in runner.tables.items() if (t.schema.qualified, t.target, t.mode) not in names]


def switch_tables(runner: GroupRunner, wanted: Wanted) -> None:
    """Disable and enable tables; at a start, also retry failed ones once."""
    for oid, table in runner.tables.items():
        disabled = table.source in wanted.disabled
        if disabled != (oid in runner.book.disabled):
            runner.set_enabled(oid, not disabled)


def _drop_slot_soon(conn: psycopg.Connection[Any], name: str, *, seconds: float = 10.0) -> None:
    """Drop the slot shortly after its capture stopped: the server needs a moment to notice."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return drop_slot(conn, name)
        except SlotActiveError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _other_settings(running: GroupConfig, wanted: GroupConfig) -> bool:
    """Whether the group must restart to apply its settings."""
    options = {table.source: table.options for table in running.tables}
    return running.model_copy(update={"tables": ()}) != wanted.model_copy(update={"tables": ()}) or any(
        options.get(table.source, table.options) != table.options for table in wanted.tables
    )
