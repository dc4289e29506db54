"""
Make source and lake ready for a group: publication, slot, target tables, first position.

`prepare_group` is idempotent, refuses before it changes anything where it can, and takes back what it
created when a later step fails.  A table that cannot be prepared does not stop the others: it is among
`refused`.  `prepare_tables` does the same for tables that come later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import structlog

from aqueduck.config.sync import GroupConfig, SyncConfig, TableConfig
from aqueduck.lake.commit.commit import transact
from aqueduck.lake.ledger.own_targets import adopt_target, ensure_own_targets, refuse_foreign_target
from aqueduck.lake.ledger.parking import ensure_parking, forget_parked
from aqueduck.lake.ledger.partition_marks import ensure_marks, forget_marks
from aqueduck.lake.ledger.progress import Position, lake_mark, read_position, write_position
from aqueduck.lake.ledger.table_states import (
    TableState,
    ensure_table_states,
    forget_tables,
    read_states,
    write_state,
)
from aqueduck.lake.session.catalog import LakeSession, open_lake
from aqueduck.lake.session.directories import read_directories
from aqueduck.lake.target.apply import check_target, ensure_target, make_target, refuse_names
from aqueduck.lake.target.places import check_place, notice_changes, with_places
from aqueduck.model.columns.projection import Projection
from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    LakeError,
    LakeTableMissingError,
    PartitionedTargetError,
    RegistryIncompleteError,
    Retry,
    SchemaChangeError,
    SlotLostError,
    SourceUnreachableError,
    TableRecreatedError,
    TargetReplacedError,
)
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableName, TableSchema, lsn_text
from aqueduck.postgres.catalog.row_security import refuse_row_security
from aqueduck.postgres.catalog.structure import read_structure
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.ownership import (
    Ownership,
    noting,
    read_ownership,
    refuse_foreign_publication,
    refuse_foreign_slot,
)
from aqueduck.postgres.publications.publications import (
    drop_publication,
    ensure_publication,
    give_identity,
    published_since,
    publishes_exactly,
    refuse_foreign,
    refuse_without_columns,
    refuse_without_identity,
    refuse_without_key,
)
from aqueduck.postgres.publications.published import publication_exists, refuse_narrowed
from aqueduck.postgres.publications.slots import SlotInfo, check_slot, create_slot, drop_slot, slot_info
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.history import KnownPast, refuse_another_history
from aqueduck.postgres.session.server import ServerInfo, read_server, require_logical_wal
from aqueduck.state_files.files import Confirmation, note_confirmation, read_confirmation, read_slot
from aqueduck.state_files.private_files import private_directory
from aqueduck.sync.control import FileControl, Wanted, open_control
from aqueduck.sync.copying.copy_journal import forget_journal
from aqueduck.sync.tables.table_options import is_other, known_projections, with_projection

__all__ = [
    "PreparedGroup",
    "PreparedTable",
    "check_prepared",
    "describe_tables",
    "group_dir",
    "lost_slot",
    "prepare",
    "prepare_group",
    "prepare_tables",
    "publish",
    "refuse_another_source",
    "refuse_recreated",
    "stray",
]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PreparedTable:
    schema: TableSchema
    target: TableName
    initial_copy: bool
    mode: TableMode = UPSERT
    adopt: bool = False
    """Whether a table of the lake that we did not make may be taken for the target."""

    @property
    def source(self) -> str:
        """The source's name as configuration and registry write it."""
        return str(TableName(self.schema.schema, self.schema.name))


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


def group_dir(config: SyncConfig, group: GroupConfig) -> Path:
    """Where the group keeps its stage, checkpoint and notes."""
    return Path(config.state_dir) / group.name


def prepare(config: SyncConfig, *, adopt: bool = False) -> Iterator[str]:
    """`aqueduck init`: prepare every group; yields a line for people about each, and raises the first that failed at the end."""
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
    Raises what concerns the group as a whole, or all of its tables.

    With `adopt`, a slot, a publication and targets that we did not make are ours from now on.  `renew` are sources that
    somebody wants copied again, whatever they are by now.
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
            log.warning("the slot was lost: all tables are copied again", group=group.name, reason=str(lost))
            drop_slot(conn, group.slot_name)
            stored = None
        if trust_slot and stored is not None:
            _note_trusted(conn, group, directory / "confirmed", stored, lake_mark(lake, group.name))
        sent = published_since(conn, group.publication)
        unsent = set() if group.users_publication else tables.keys() - sent.keys()
        if not owns.slot:
            refuse_foreign_slot(group.slot_name)
        if adopt:
            tables = {oid: replace(table, adopt=True) for oid, table in tables.items()}
        with noting(conn, group.name, owned, _noted(group, owned, owns)), _undo_on_failure(conn, group):
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
    return PreparedGroup(group, tables, position, server.system_identifier, server.timeline, refused)


@dataclass(frozen=True, slots=True)
class Owned:
    """Whether we may read the slot and change the publication: they are ours, or do not exist yet."""

    slot: bool
    publication: bool


def owned_parts(
    conn: psycopg.Connection[Any], group: GroupConfig, owned: Ownership | None, *, adopt: bool, filled: bool
) -> Owned:
    """A lake that was `filled` says that they were in use, where no registry says more: also one that was made anew since."""
    slot, publication = (None, None) if owned is None else (owned.slot, owned.publication)
    given = adopt or (owned is not None and owned.adopt) or (filled and slot is None)
    return Owned(
        given or slot == group.slot_name or slot_info(conn, group.slot_name) is None,
        given or publication == group.publication or not publication_exists(conn, group.publication),
    )


def _noted(group: GroupConfig, owned: Ownership | None, owns: Owned) -> Ownership | None:
    """What the registry says afterwards; a publication that only happens to fit stays with who made it."""
    if owned is None:
        return None
    made = group.publication if owns.publication and not group.users_publication else owned.publication
    return replace(owned, slot=group.slot_name, publication=made)


def publish(
    conn: psycopg.Connection[Any],
    group: GroupConfig,
    tables: Sequence[TableSchema],
    *,
    ours: bool | None = None,
) -> None:
    """Have the group's publication send these tables; one that is not ours sends what it sends."""
    if group.users_publication:
        refuse_narrowed(conn, group.publication, group.plugin)
        return
    if ours is None:
        owned = read_ownership(conn, group.name)
        ours = owned is None or owned.publication == group.publication
    exists = publication_exists(conn, group.publication)
    if exists and not ours and not publishes_exactly(conn, group.publication, tables):
        refuse_foreign_publication(group.publication)
    ensure_publication(conn, group.publication, tables)


def describe_tables(
    conn: psycopg.Connection[Any],
    config: SyncConfig,
    group: GroupConfig,
    tables: Iterable[TableConfig],
    before: Mapping[int, Projection],
) -> tuple[dict[int, PreparedTable], dict[str, AqueduckError]]:
    """
    Tables that can be published and applied, by oid; and what is wrong with the others, by source name.

    `before` are the projections that the lake's tables have.
    """
    found: dict[int, PreparedTable] = {}
    refused: dict[str, AqueduckError] = {}
    for table in tables:
        try:
            mode = table.table_mode
            schema = describe_table(
                conn, table.source, need_key=mode.needs_key, publication=group.users_publication
            )
            refuse_without_columns(schema)
            refuse_row_security(conn, schema)
            if not group.users_publication:
                refuse_foreign(conn, group.publication, schema)
            if mode.follows_keys:
                refuse_without_key(schema, mode.name)
            if not mode.needs_key:
                schema = give_identity(conn, schema)
            refuse_without_identity(schema)
            schema = with_projection(schema, table, config.mask_salt_env, before.get(schema.oid))
        except (ConnectionLostError, SourceUnreachableError):
            raise
        except AqueduckError as exc:
            refused[table.source] = exc
        else:
            found[schema.oid] = PreparedTable(
                schema, table.target_table, table.initial_copy, mode, table.adopt
            )
    return found, refused


def prepare_tables(
    lake: LakeSession,
    group: str,
    tables: Mapping[int, PreparedTable],
    *,
    now: int,
    filled: Collection[TableName] = (),
) -> dict[int, AqueduckError]:
    """
    Targets and states of tables that the lake does not know yet; returns what went wrong, by oid.

    Targets in `filled` are those of tables that are no more: a copy replaces them, whatever columns they have.
    """

    def make(some: Mapping[int, PreparedTable]) -> None:
        transact(lake, lambda: _make_tables(lake, group, some, now, filled))

    try:
        make(tables)
        note_targets(lake, group)
    except LakeError:  # one by one, to see which
        failed: dict[int, AqueduckError] = {}
        for oid, table in tables.items():
            try:
                make({oid: table})
            except LakeError as exc:
                failed[oid] = exc
        note_targets(lake, group)
        return failed
    return {}


def note_targets(lake: LakeSession, group: str) -> None:
    """Which tables of the lake the targets are, of those that are there and not known so far."""
    found = with_places(lake, read_states(lake, group).values())
    if found:
        transact(lake, lambda: write_state(lake, group, found))


def _make_tables(
    lake: LakeSession,
    group: str,
    tables: Mapping[int, PreparedTable],
    now: int,
    filled: Collection[TableName],
) -> None:
    states = []
    directories = read_directories(lake)
    for oid, table in tables.items():
        in_lake = table.schema.in_lake
        check_place(lake, table.target, None, may_be_missing=True)
        if table.adopt:
            adopt_target(lake, table.target)
        missing = directories.of(table.target) is None
        if missing and table.initial_copy and directories.planned(table.target, table.mode) is not None:
            refuse_names(table.target, in_lake, table.mode)  # it is made when its copy is committed
        else:
            make = make_target if table.target in filled and table.initial_copy else ensure_target
            make(lake, table.target, in_lake, table.mode)
        position = 0 if table.initial_copy else now
        ready = not table.initial_copy
        states.append(
            TableState(oid, table.schema.qualified, table.target, ready, position, None, in_lake, table.mode)
        )
    forget_marks(lake, group, *tables)
    write_state(lake, group, states)


def refuse_recreated(
    group: GroupConfig,
    tables: dict[int, PreparedTable],
    refused: dict[str, AqueduckError],
    known: Mapping[int, TableState],
    renew: Collection[str],
) -> None:
    """Move tables that took the name of one that the lake knows out of `tables`, unless they are to be copied."""
    before = {(s.source, s.target): s for s in known.values()}
    for oid, table in list(tables.items()):
        old = before.get((table.schema.qualified, table.target))
        if old is None or old.oid == oid or group.on_recreate == "resync" or table.source in renew:
            continue
        del tables[oid]
        refused[table.source] = TableRecreatedError(
            "the table was dropped and created anew; the lake has the rows of the old one",
            hint=f"to replace them by those of the new one: aqueduck tables resync -c FILE {table.source}"
            " (or set on_recreate: resync)",
            table=table.schema.qualified,
        )


def lost_slot(
    conn: psycopg.Connection[Any],
    config: SyncConfig,
    group: GroupConfig,
    lake: LakeSession | None,
    stored: Position | None,
    server: ServerInfo,
    trust_slot: bool = False,
) -> AqueduckError | None:
    """Why the slot cannot be read from the lake's position on, if it cannot; other conflicts are raised."""
    note = group_dir(config, group) / "confirmed"
    try:
        info = slot_info(conn, group.slot_name)
        if stored is not None:
            _check_same_history(conn, config, group, stored, server, info)
        check_slot(
            info,
            name=group.slot_name,
            database=server.database,
            position=None if stored is None else stored.position,
            lake="" if lake is None else lake_mark(lake, group.name),
            noted=read_confirmation(note),
            trusted=trust_slot,
            plugin=group.plugin,
        )
    except SlotLostError as exc:
        return exc
    return None


def _note_trusted(
    conn: psycopg.Connection[Any], group: GroupConfig, note: Path, stored: Position, lake: str
) -> None:
    """Where the slot stands is as good as noted by ourselves: the capture looks at it again."""
    info = slot_info(conn, group.slot_name)
    stands = None if info is None else info.confirmed_flush_lsn
    if stands is not None and stands > stored.position:
        note_confirmation(note, Confirmation(stands, stored.position, lake))


def stray(source: str, group: str) -> RegistryIncompleteError:
    """What is said of a table that the lake has for a group, that nobody wants, and that nobody removed."""
    return RegistryIncompleteError(
        f"the lake follows it in the group {group}, and the registry does not know it, though nobody removed it",
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
    """Tables of which the lake says that they are the group's, and nobody that they are wanted or were removed; by oid."""
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
    The lake's states are those of the group's tables and of `strays`; what changed meanwhile waits for a new copy.

    So do strays, which nobody follows, and tables in `unsent`, whose changes nobody has.
    Returns the tables that the lake did not know, or knows no more.
    """
    ensure_table_states(lake)
    ensure_own_targets(lake)
    ensure_parking(lake)
    ensure_marks(lake)
    known = read_states(lake, group.name)
    notice_changes(lake)
    refuse_recreated(group, tables, refused, known, renew)
    waiting = {t.target_table for t in group.tables if t.source in refused}
    others = {oid for oid, s in known.items() if oid in tables and not _is_for(s, tables[oid])}
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
    broken = [
        _broken(lake, known[oid], table) for oid, table in tables.items() if oid in known and oid not in again
    ]
    changed = [state for state in broken if state is not None]
    changed += [replace(known[oid], ready=False, copy_position=0, error=None) for oid in strays]
    for state in other:
        log.warning("table is copied again: its options changed", group=group.name, table=state.source)
        in_lake = tables[state.oid].schema.in_lake
        changed.append(replace(state, ready=False, copy_position=0, error=None, schema=in_lake))
    for state in missed:
        log.warning("table is copied again: it was not published", group=group.name, table=state.source)
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
    return [*new, *again, *(state.oid for state in gone)]


def _begin_at(
    lake: LakeSession, group: GroupConfig, tables: Mapping[int, PreparedTable], first: Position
) -> None:
    """A new beginning: whatever the lake had of the group came before, and is copied again."""
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


def _is_for(state: TableState, table: PreparedTable) -> bool:
    """Whether the lake's state is about what is wanted now, and not about another target or mode."""
    return (state.target, state.mode) == (table.target, table.mode)


def check_prepared(
    lake: LakeSession, group: GroupConfig, table: PreparedTable, known: Mapping[int, TableState]
) -> None:
    """Raise what a start would say of this table's place in the lake; `known` are the group's states there."""
    tables, refused = {table.schema.oid: table}, dict[str, AqueduckError]()
    refuse_recreated(group, tables, refused, known, ())
    for error in refused.values():
        raise error
    state = known.get(table.schema.oid)
    name = TableName(table.schema.schema, table.schema.name)
    if state is not None and _is_for(state, table):
        if state.ready:
            _check_known(lake, state, table)
        return
    filled = {s.target for oid, s in known.items() if oid != table.schema.oid}
    refuse_names(table.target, table.schema.in_lake, table.mode)
    if not table.adopt:
        refuse_foreign_target(lake, table.target)
    there = check_place(lake, table.target, None, name, may_be_missing=True)
    if there and not (table.target in filled and table.initial_copy):
        check_target(lake, table.target, table.schema.in_lake, table.mode)


def _check_known(lake: LakeSession, state: TableState, table: PreparedTable) -> None:
    check_place(lake, table.target, state.target_uuid, TableName(table.schema.schema, table.schema.name))
    check_target(lake, table.target, state.schema or table.schema.in_lake, table.mode)


def _broken(lake: LakeSession, state: TableState, table: PreparedTable) -> TableState | None:
    """The state of a table that streamed and whose target was changed or dropped since by somebody else."""
    try:
        _check_known(lake, state, table)
    except (LakeTableMissingError, PartitionedTargetError, SchemaChangeError, TargetReplacedError) as exc:
        return replace(state, ready=False, error=str(exc)) if state.ready else None
    return None


def refuse_another_source(config: SyncConfig, group: GroupConfig, stored: Position) -> int:
    """Raise `SlotLostError` if the server is not one that the lake was filled from; returns its timeline."""
    with connect(config.source.dsn) as conn:
        server = read_server(conn)
        _check_same_history(conn, config, group, stored, server, slot_info(conn, group.slot_name))
    return server.timeline


def _check_same_history(
    conn: psycopg.Connection[Any],
    config: SyncConfig,
    group: GroupConfig,
    stored: Position,
    server: ServerInfo,
    slot: SlotInfo | None,
) -> None:
    """The lake's position must be one of this server's past."""
    if stored.system_identifier != server.system_identifier:
        raise SlotLostError(
            f"the lake's group {group.name} was filled from another PostgreSQL cluster",
            hint="point source.dsn to that cluster, use another group name or another lake,"
            " or set on_slot_loss: resync to copy all tables from this one",
        )
    known = KnownPast(stored.position, stored.timeline, read_slot(group_dir(config, group) / "slot"))
    refuse_another_history(conn, config.source.dsn, known, server, slot)


@contextlib.contextmanager
def _undo_on_failure(conn: psycopg.Connection[Any], group: GroupConfig) -> Iterator[None]:
    """Whatever was not there before is not there after a failure."""
    had_slot = slot_info(conn, group.slot_name) is not None
    had_publication = publication_exists(conn, group.publication)
    try:
        yield
    except BaseException:
        if not had_slot:
            drop_slot(conn, group.slot_name)
        if not had_publication:
            drop_publication(conn, group.publication)
        raise
