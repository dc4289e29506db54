"""
Add, remove, rename and hand over tables while the query of their group runs.

A handed-over table moves from one group to another without a new copy.  `reconcile` and `watching` decide when.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import structlog

from aqueduck.config.sync import TableConfig
from aqueduck.lake.commit.commit import transact
from aqueduck.lake.ledger.table_states import TableState, forget_state, forget_tables, read_states
from aqueduck.lake.target.mode_rows import remove_target
from aqueduck.model.errors import AqueduckError
from aqueduck.model.schema import TableName
from aqueduck.postgres.copy.table_copy import export_snapshot
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.server import flushed_position, settled_position
from aqueduck.sync.control import Parting
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.publishing import publish
from aqueduck.sync.tables.prepare_tables import describe_tables, prepare_tables, refuse_recreated
from aqueduck.sync.tables.table_options import is_other, known_projections

__all__ = ["add_tables", "follow_name", "leave_table", "remove_tables"]

log = structlog.get_logger()


def add_tables(
    runner: GroupRunner,
    tables: Iterable[TableConfig],
    *,
    handover: Callable[[int], GroupRunner | None],
    renew: Collection[str] = (),
) -> None:
    """Follow more tables from now on; tables that cannot be added are in `refused`.  `renew` as for `prepare_group`."""
    dsn = runner.config.source.dsn
    with connect(dsn) as conn:
        options = known_projections(runner.lake, runner.group)
        found, refused = describe_tables(conn, runner.config, runner.group, tables, options)
        now = flushed_position(dsn)
        with runner.commit_lock:
            known = read_states(runner.lake, runner.group.name)
            refuse_recreated(runner.group, found, refused, known, renew)
            replaced = [
                s
                for s in known.values()
                if s.oid not in {**runner.tables, **found}
                and (s.target, s.mode.source_value)
                in {(t.target, t.mode.source_value) for t in found.values()}
            ]
            transact(runner.lake, lambda: _forget_in_lake(runner, [s.oid for s in replaced]))
            failed = prepare_tables(
                runner.lake, runner.group.name, found, now=now, filled={s.target for s in replaced}
            )
            states = read_states(runner.lake, runner.group.name)
            for oid, table in found.items():
                name = table.source
                if oid in failed:
                    refused[name] = failed[oid]
                    continue
                forget_journal(runner.directory, oid)
                runner.book.add(table, states[oid])
                log.info("table added", group=runner.group.name, table=table.schema.qualified)
            runner.book.inform_capture()
            runner.book.inform_tasks()
        for name, error in refused.items():
            if str(error) != str(runner.book.refused.get(name)):
                log.warning("table not added", group=runner.group.name, table=name, error=str(error))
        runner.book.refuse(refused)
        # The capture must know the tables before their first change can arrive.
        try:
            publish(conn, runner.group, [t.schema for t in runner.tables.values()])
        except AqueduckError:
            _take_back(runner, found)
            raise
    for oid in found:
        giver = handover(oid)
        if giver is not None and oid in runner.states and not runner.book.is_ready(oid):
            runner.copier.schedule.hand_over(oid, functools.partial(_take_over, runner, giver))
    runner.copier.start()


def _take_back(runner: GroupRunner, oids: Collection[int]) -> None:
    """Remove tables that the publication does not send: otherwise they would be copied once and never updated."""
    with runner.commit_lock:
        transact(runner.lake, lambda: _forget_in_lake(runner, oids))
        runner.forget_tables(oids)


def remove_tables(runner: GroupRunner, partings: Mapping[int, Parting]) -> None:
    """Stop following these tables; the lake's tables stay, except those that are to be dropped."""
    with connect(runner.config.source.dsn) as conn:
        rest = [t.schema for oid, t in runner.tables.items() if oid not in partings]
        publish(conn, runner.group, rest)
    dropped = {oid for oid, parting in partings.items() if parting.drop_target}
    with runner.commit_lock:
        transact(runner.lake, lambda: _forget_in_lake(runner, partings, dropped))
        runner.forget_tables(partings)


def _forget_in_lake(runner: GroupRunner, oids: Iterable[int], dropped: Collection[int] = ()) -> None:
    forget_tables(runner.lake, runner.group.name, *oids)
    for oid in dropped:
        table, state = runner.tables[oid], runner.states.get(oid)
        remove_target(runner.lake, table.target, table.mode, None if state is None else state.target_uuid)


def leave_table(runner: GroupRunner, oid: int) -> None:
    """The source table was dropped; the lake's table and its records in the ledger stay."""
    with runner.commit_lock:
        runner.forget_tables([oid])


def follow_name(runner: GroupRunner, oid: int, name: TableName) -> None:
    """The source table was renamed or moved to another schema; its target keeps its name."""
    before = runner.tables[oid].schema.qualified
    with runner.commit_lock:
        runner.book.rename(oid, name)
    log.info(
        "table renamed", group=runner.group.name, table=runner.tables[oid].schema.qualified, before=before
    )


def _take_over(runner: GroupRunner, giver: GroupRunner, state: TableState) -> None:
    """
    Continue a table at the position of its previous group, without a new copy.

    Both groups publish it now.  A transaction that commits after the position below is completely published here, because
    every transaction that was open before has ended by then; the previous group has applied everything before it.
    """
    settled = _settled_position(runner)
    deadline = time.monotonic() + 600
    while not giver.has_everything_before(settled):
        if time.monotonic() > deadline or not giver.query.active or runner.copier.is_stopping():
            break
        time.sleep(0.05)
    with runner.commit_lock:
        if not runner.book.is_current(state) or runner.copier.is_stopping():
            return
        theirs = giver.states.get(state.oid)
        handed = (
            theirs is not None
            and theirs.ready
            and not is_other(theirs, runner.tables[state.oid].schema)
            and giver.has_everything_before(settled)
        )
        if handed:
            assert theirs is not None
            position = max(settled, giver.status.position)
            ready = replace(
                state, ready=True, copy_position=position, error=None, schema=theirs.schema,
                target_uuid=theirs.target_uuid,
            )  # fmt: skip
            runner.copier.commits.finish(
                ready,
                f"{state.source} moves from {giver.group.name} to {runner.group.name}",
                also=lambda: forget_state(runner.lake, giver.group.name, state.oid),
            )
        else:  # the table is copied; changes that the previous group has not applied yet are older and must not be applied after these
            transact(runner.lake, lambda: forget_tables(runner.lake, giver.group.name, state.oid))
        giver.forget_tables([state.oid])
    with connect(runner.config.source.dsn) as conn:
        publish(conn, giver.group, [t.schema for t in giver.tables.values()])
    if handed:
        log.info("table moved", table=state.source, group=runner.group.name, came_from=giver.group.name)


def _settled_position(runner: GroupRunner) -> int:
    """A position by which every transaction that is open now has ended; a service that is stopped does not wait for it."""
    dsn, given_up = runner.config.source.dsn, runner.copier.is_stopping
    if runner.group.capture == "poll":
        return settled_position(dsn, given_up=given_up)
    snapshot = export_snapshot(dsn, given_up)
    snapshot.close()
    return snapshot.position
