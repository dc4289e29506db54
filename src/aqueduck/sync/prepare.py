"""
Prepare source and lake for a group: publication, slot, target tables, first position.

`prepare_group` is idempotent, checks before it changes anything where possible, and removes what it created if a later
step fails.  A table that cannot be prepared does not stop the others: it is listed in `refused`.  Single tables, also
those that are added later, are prepared in `tables.prepare_tables`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import structlog

from aqueduck.config.sync import GroupConfig, SyncConfig, group_dir
from aqueduck.lake.commit.commit import transact
from aqueduck.lake.ledger.own_targets import ensure_own_targets
from aqueduck.lake.ledger.parking import ensure_parking, forget_parked
from aqueduck.lake.ledger.partition_marks import ensure_marks
from aqueduck.lake.ledger.progress import Position, lake_mark, read_position, write_position
from aqueduck.lake.ledger.table_states import ensure_table_states, forget_tables, read_states, write_state
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.lake.target.places import notice_changes
from aqueduck.lake.target.set_layouts import fit_layouts
from aqueduck.model.errors import AqueduckError, RegistryIncompleteError, Retry
from aqueduck.model.schema import TableName, lsn_text
from aqueduck.postgres.catalog.structure import read_structure
from aqueduck.postgres.publications.ownership import noting, read_ownership, refuse_foreign_slot
from aqueduck.postgres.publications.slots import create_slot, drop_slot
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.server import read_server, require_logical_wal
from aqueduck.state_files.files import NOT_SENT, read_sendings, write_sendings
from aqueduck.state_files.private_files import private_directory
from aqueduck.sync.control import FileControl, Wanted, open_control
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.publishing import owned_parts, ownership_after, publish, read_sent, undo_on_failure
from aqueduck.sync.slot_history import lost_slot, record_trusted
from aqueduck.sync.tables.prepare_tables import (
    PreparedTable,
    describe_tables,
    is_for,
    prepare_tables,
    refuse_recreated,
    state_if_broken,
    want_layouts,
)
from aqueduck.sync.tables.table_options import is_other, known_projections

__all__ = ["PreparedGroup", "prepare", "prepare_group", "stray"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """What a query of the group needs to know."""

    group: GroupConfig
    tables: dict[int, PreparedTable]
    position: int
    system_identifier: str
    timeline: int
    refused: dict[str, AqueduckError] = field(default_factory=dict)
    """Tables that could not be prepared, by source name."""


def prepare(config: SyncConfig, *, adopt: bool = False) -> Iterator[str]:
    """`aqueduck init`: prepare every group; yields a line about each for people, and raises the first error at the end."""
    failed: list[AqueduckError] = []
    with (
        contextlib.closing(open_lake(config.lake)) as lake,
        contextlib.closing(open_control(config)) as control,
    ):
        yield f"registry: {'none, the file alone is used' if isinstance(control, FileControl) else 'schema aqueduck'}"
        for wanted in control.wanted():
            if wanted.removed or not wanted.enabled:
                continue
            group = wanted.group
            try:
                ready = prepare_group(config, wanted, lake, adopt=adopt)
            except AqueduckError as exc:
                if exc.retry is Retry.AUTO:
                    raise
                failed.append(exc)
                continue
            yield (
                f"group {group.name}: slot {group.slot_name}, publication {group.publication},"
                f" {len(ready.tables)} tables, position {lsn_text(ready.position)}"
            )
            for error in ready.refused.values():
                yield f"group {group.name}: {error}"
        for also in failed[1:]:
            yield str(also)
        for first in failed:
            raise first


def prepare_group(
    config: SyncConfig,
    wanted: Wanted,
    lake: LakeSession,
    *,
    trust_slot: bool = False,
    adopt: bool = False,
    renew: Collection[str] = (),
) -> PreparedGroup:
    """
    Prepare the group; raises errors that concern the group as a whole, or all of its tables.

    With `adopt`, an existing slot, publication and targets become Aqueduck's own.  `renew` are sources that are to be copied
    again, whatever their state.
    """
    if wanted.problem is not None:
        raise wanted.problem
    group = wanted.group
    directory = private_directory(group_dir(config, group))
    with connect(config.source.dsn) as conn:
        server = read_server(conn)
        require_logical_wal(server)
        tables, refused = describe_tables(conn, config, group, group.tables, known_projections(lake, group))
        if refused and not tables:
            raise next(iter(refused.values()))
        stored = read_position(lake, group.name)
        owned = read_ownership(conn, group.name)
        owns = owned_parts(conn, group, owned, adopt=adopt, filled=stored is not None)
        lost = lost_slot(conn, config, group, lake, stored, server, trust_slot)
        if lost is not None:
            if group.on_slot_loss == "stop":
                raise lost
            if not owns.slot:
                refuse_foreign_slot(group.slot_name)
            log.warning("the slot was lost: all tables are re-copied", group=group.name, reason=str(lost))
            drop_slot(conn, group.slot_name)
            stored = None
        if trust_slot and stored is not None:
            record_trusted(conn, group, directory / "confirmed", stored, lake_mark(lake, group.name))
        before, sent = read_sendings(directory / "publication"), read_sent(conn, group)
        unsent = {
            oid for oid in tables if oid not in sent or not sent[oid].continues(before.get(oid, sent[oid]))
        }
        if not owns.slot:
            refuse_foreign_slot(group.slot_name)
        if adopt:
            tables = {oid: replace(table, adopt=True) for oid, table in tables.items()}
        with (
            noting(conn, group.name, owned, ownership_after(group, owned, owns)),
            undo_on_failure(conn, group),
        ):
            publish(conn, group, [t.schema for t in tables.values()], ours=owns.publication)
            start = create_slot(conn, group.slot_name, group.plugin)
            position = start if stored is None else stored.position
            if stored is None:  # a new beginning, maybe in another cluster
                renew = [table.source for table in group.tables]
            strays = _refuse_strays(conn, lake, wanted, tables, refused)
            for oid in _prepare_lake(lake, group, tables, refused, renew, unsent, strays):
                forget_journal(directory, oid)
            if stored is None:
                for note in ("confirmed", "slot"):
                    (directory / note).unlink(missing_ok=True)
                for oid in tables:
                    forget_journal(directory, oid)
                first = Position(group.name, position, None, server.system_identifier, server.timeline)
                _begin_at(lake, group, tables, first)
            # Last, so that a gap is found again if this is interrupted.
            now, known = read_sent(conn, group), read_states(lake, group.name)
            seen = {oid: (now if oid in tables else before).get(oid, NOT_SENT) for oid in known}
            write_sendings(directory / "publication", seen)
    return PreparedGroup(group, tables, position, server.system_identifier, server.timeline, refused)


def stray(source: str, group: str) -> RegistryIncompleteError:
    """The error of a table that the lake has for a group, although it is neither registered nor removed."""
    return RegistryIncompleteError(
        f"the lake has it in the group {group}, but it is neither registered nor removed",
        hint=f"to keep it: select aqueduck.add_table('{source}', group_name => '{group}') with its target, mode and options;"
        f" to give it up, after that: select aqueduck.remove_table('{source}')",
        table=source,
    )


def _refuse_strays(
    conn: psycopg.Connection[Any],
    lake: LakeSession,
    wanted: Wanted,
    tables: Mapping[int, PreparedTable],
    refused: dict[str, AqueduckError],
) -> set[int]:
    """Tables that the lake has for the group although they are neither registered nor removed, by OID."""
    ensure_table_states(lake)
    names = {table.source_table.qualified for table in wanted.group.tables}
    unknown = {
        oid: state
        for oid, state in read_states(lake, wanted.group.name).items()
        if oid not in tables
        and state.source not in names
        and wanted.parting(oid, state.source, state.target, state.mode) is None
    }
    found = read_structure(conn, list(unknown)).tables if unknown else frozenset()
    for oid in found:
        schema = unknown[oid].schema
        source = unknown[oid].source if schema is None else str(TableName(schema.schema, schema.name))
        refused[source] = stray(source, wanted.group.name)
    return set(found)


def _prepare_lake(
    lake: LakeSession,
    group: GroupConfig,
    tables: dict[int, PreparedTable],
    refused: dict[str, AqueduckError],
    renew: Collection[str],
    unsent: Collection[int],
    strays: Collection[int],
) -> list[int]:
    """
    Make the lake's states those of the group's tables and of `strays`; tables that changed meanwhile wait for a new copy.

    Strays, which no group follows, wait as well, and so do the tables in `unsent`, whose changes were not sent.
    Returns the tables that are new to the lake, or that it forgot.
    """
    ensure_table_states(lake)
    ensure_own_targets(lake)
    ensure_parking(lake)
    ensure_marks(lake)
    known = read_states(lake, group.name)
    notice_changes(lake)
    refuse_recreated(group, tables, refused, known, renew)
    waiting = {t.target_table for t in group.tables if t.source in refused}
    others = {oid for oid, s in known.items() if oid in tables and not is_for(s, tables[oid])}
    kept = waiting | {known[oid].target for oid in strays}
    gone = [s for oid, s in known.items() if oid in others or (oid not in tables and s.target not in kept)]
    known = {oid: s for oid, s in known.items() if oid not in others}
    other = [
        known[oid] for oid, table in tables.items() if oid in known and is_other(known[oid], table.schema)
    ]
    missed = [
        known[oid]
        for oid, table in tables.items()
        if oid in known and oid in unsent and table.initial_copy and known[oid] not in other
    ]
    again = {state.oid for state in (*other, *missed)}
    want_layouts(lake, tables.values())
    broken = [
        state_if_broken(lake, known[oid], table)
        for oid, table in tables.items()
        if oid in known and oid not in again
    ]
    changed = [state for state in broken if state is not None]
    changed += [replace(known[oid], ready=False, copy_position=0, error=None) for oid in strays]
    for state in other:
        log.warning("table is re-copied: its options changed", group=group.name, table=state.source)
        in_lake = tables[state.oid].schema.in_lake
        changed.append(replace(state, ready=False, copy_position=0, error=None, schema=in_lake))
    for state in missed:
        log.warning("table is re-copied: it was not published", group=group.name, table=state.source)
        changed.append(replace(state, ready=False, copy_position=0, error=None))

    def write() -> None:
        oids = [state.oid for state in gone]
        forget_tables(lake, group.name, *oids)
        write_state(lake, group.name, changed)

    transact(lake, write)
    new = {oid: table for oid, table in tables.items() if oid not in known}
    filled = {s.target for s in gone if s.oid not in others}
    failed = prepare_tables(lake, group.name, new, now=0, filled=filled)
    if failed and len(failed) == len(tables):
        raise next(iter(failed.values()))
    for oid, error in failed.items():
        refused[new[oid].source] = error
        del tables[oid]
    uuids = {state.target: state.target_uuid for state in read_states(lake, group.name).values()}
    unfit = fit_layouts(lake, uuids, functools.partial(transact, lake))
    for oid, table in list(tables.items()):
        if table.target in unfit:
            refused[table.source] = unfit[table.target]
            del tables[oid]
    return [*new, *again, *(state.oid for state in gone)]


def _begin_at(
    lake: LakeSession, group: GroupConfig, tables: Mapping[int, PreparedTable], first: Position
) -> None:
    """Begin anew: copy again all that the lake had of the group."""
    known = read_states(lake, group.name)

    def write() -> None:
        forget_parked(lake, group.name, *tables)
        anew = [
            replace(known[oid], ready=not table.initial_copy, copy_position=0, error=None)
            for oid, table in tables.items()
        ]
        write_state(lake, group.name, anew)
        write_position(lake, first)

    transact(lake, write)
