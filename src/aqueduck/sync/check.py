"""
The preflight: every requirement of a configuration, what is wrong, and how to fix it.

Each check returns its finding or raises the error that the service would raise later, with the exact
statement that fixes it as the hint. Nothing is created. Requirements of all flows on a server are in
`service.check_server`, checks of the lake in `service.check_lake`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from aqueduck.config.sync import GroupConfig, SyncConfig, TableConfig, group_dir
from aqueduck.lake.ledger.progress import read_position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.versions import current_version, tables_at
from aqueduck.model.errors import (
    AqueduckError,
    ConfigError,
    PrivilegeError,
    SlotLimitError,
)
from aqueduck.model.schema import TableName, TableSchema
from aqueduck.postgres.catalog.reader_functions import foreign_functions
from aqueduck.postgres.catalog.row_security import refuse_row_security
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.ownership import (
    read_ownership,
    refuse_foreign_publication,
    refuse_foreign_slot,
)
from aqueduck.postgres.publications.publications import (
    publishes_exactly,
    refuse_foreign,
    refuse_without_columns,
    refuse_without_identity,
    refuse_without_key,
)
from aqueduck.postgres.publications.published import refuse_narrowed
from aqueduck.postgres.publications.slots import slot_info
from aqueduck.postgres.registry.registry import check_registry, lake_of
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.failures import RAISE_SLOTS, RAISE_WALSENDERS, THEN_RESTART
from aqueduck.postgres.session.quoting import identifier, literal, table_identifier
from aqueduck.postgres.session.server import ServerInfo, read_server
from aqueduck.service.check_lake import check_catalog, check_data_path, check_state_dir, existing_lake
from aqueduck.service.check_server import (
    CheckResult,
    Connection,
    check_pooler,
    encryption_of,
    refused,
    result_of,
    server_checks,
)
from aqueduck.service.check_spark import spark_checks
from aqueduck.service.tracing import check_traces
from aqueduck.state_files.private_files import refuse_others_directory
from aqueduck.sync.control import Wanted, wanted_groups
from aqueduck.sync.publishing import Owned, owned_parts
from aqueduck.sync.slot_history import lost_slot
from aqueduck.sync.tables.prepare_tables import PreparedTable, check_prepared
from aqueduck.sync.tables.table_options import with_projection
from aqueduck.web.server import check_server

__all__ = ["run_checks"]

COPY_CONNECTIONS = 1
"""Slots and walsenders that the initial copy uses temporarily, besides one per group."""


def run_checks(config: SyncConfig) -> list[CheckResult]:
    """Run every check that can be run; checks that depend on a failed connection are skipped."""
    with existing_lake(config.lake) as lake:
        results = list(_source_checks(config, lake))
    return [
        *results,
        result_of("data path", check_data_path, config.lake),
        result_of("catalog", check_catalog, config.lake),
        result_of("state directory", check_state_dir, config.state_dir),
        result_of("traces", check_traces, config.tracing),
        result_of("HTTP server", check_server, config.server, os.environ),
        *spark_checks(config.spark),
    ]


# -- The server


def _source_checks(config: SyncConfig, lake: LakeSession | None) -> Iterator[CheckResult]:
    with contextlib.ExitStack() as stack:
        try:
            conn = stack.enter_context(connect(config.source.dsn))
            server = read_server(conn)
        except AqueduckError as exc:
            yield refused("connection", exc)
            return
        wanted = wanted_groups(conn, config)
        groups = [each.group for each in wanted]
        captures = {group.capture for group in groups}
        yield from server_checks(server, config.source.dsn, captures)
        yield encryption_of(conn)
        yield result_of("free slots", _check_slots, conn, server, groups)
        if captures != {"poll"}:
            yield result_of("free walsenders", _check_walsenders, conn, server, groups)
        yield result_of("pooler", check_pooler, conn, captures)
        yield _registry_check(conn)
        for each in wanted:
            yield from _row_checks(each)
            if each.problem is None or each.group.name in {group.name for group in config.groups}:
                yield from _group_checks(conn, server, config, each.group, lake)


def _row_checks(wanted: Wanted) -> Iterator[CheckResult]:
    """Rows of the registry that a start cannot use."""
    if wanted.problem is not None:
        yield refused(f"registry of the group {wanted.group.name}", wanted.problem)
    for source, error in wanted.unusable.items():
        yield refused(f"table {source}", error)


def _check_slots(conn: Connection, server: ServerInfo, wanted: Sequence[GroupConfig]) -> str:
    missing = [group for group in wanted if slot_info(conn, group.slot_name) is None]
    copies = any(_copies(group) and group.capture != "poll" for group in missing)
    needed = len(missing) + (COPY_CONNECTIONS if copies else 0)
    return _within("slots", needed, server.slots_used, server.max_replication_slots, RAISE_SLOTS)


def _check_walsenders(conn: Connection, server: ServerInfo, wanted: Sequence[GroupConfig]) -> str:
    groups = [group for group in wanted if group.capture != "poll"]
    slots = [slot_info(conn, group.slot_name) for group in groups]
    needed = sum(slot is None or not slot.active for slot in slots)
    needed += COPY_CONNECTIONS if any(map(_copies, groups)) else 0
    return _within("walsenders", needed, server.wal_senders_used, server.max_wal_senders, RAISE_WALSENDERS)


def _copies(group: GroupConfig) -> bool:
    return any(table.initial_copy for table in group.tables)


def _within(what: str, needed: int, used: int, limit: int, fix: str) -> str:
    if needed > limit - used:
        raise SlotLimitError(
            f"{needed} {what} needed, {max(limit - used, 0)} of {limit} free",
            hint=fix.format(used + needed) + THEN_RESTART,
        )
    return f"{limit - used} of {limit} free, {needed} needed"


def _registry_check(conn: Connection) -> CheckResult:
    """Check the registry. Without its privileges the file alone is enough, so the grants are only a note."""
    result = result_of("registry", check_registry, conn)
    if isinstance(result.error, PrivilegeError):
        return CheckResult(
            result.name, True, f"{result.detail}: the file alone says what is synced", result.fix
        )
    return result


# -- Groups and their tables


def _group_checks(
    conn: Connection, server: ServerInfo, config: SyncConfig, group: GroupConfig, lake: LakeSession | None
) -> Iterator[CheckResult]:
    yield result_of(f"group {group.name}", _check_group, conn, config, group)
    yield result_of(f"slot {group.slot_name}", _check_slot, conn, server, config, group, lake)
    tables: list[TableSchema] = []
    for table in group.tables:
        yield result_of(f"table {table.source}", _check_table, conn, config, group, table, tables)
    if lake is not None:
        yield from _target_checks(lake, config, group, tables)
    name = f"publication {group.publication}"
    if group.users_publication:
        yield result_of(name, _check_users_publication, conn, group)
        return
    if len(tables) == len(group.tables) and publishes_exactly(conn, group.publication, tables):
        yield CheckResult(name, True, f"publishes all {len(tables)} tables")
        return
    yield result_of(name, _check_publication, conn, server, group, _owned(conn, group, lake))
    for found in tables:
        yield result_of(f"ownership of {found.qualified}", _check_owner, conn, server, group, found)


def _check_group(conn: Connection, config: SyncConfig, group: GroupConfig) -> str:
    refuse_others_directory(group_dir(config, group))
    lake = lake_of(conn, group.name)
    if lake is not None and lake != config.lake.data_path:
        raise ConfigError(
            f"the group {group.name} fills another lake, {lake}",
            hint="choose another name for the group; if it is the same lake at a new location:"
            f" select aqueduck.release_group({literal(group.name)})",
        )
    return "its name is free" if lake is None else "fills this lake"


def _check_slot(
    conn: Connection, server: ServerInfo, config: SyncConfig, group: GroupConfig, lake: LakeSession | None
) -> str:
    stored = None if lake is None else read_position(lake, group.name)
    owned = _owned(conn, group, lake)
    lost = lost_slot(conn, config, group, lake, stored, server)
    if lost is not None and group.on_slot_loss == "stop":
        raise lost
    info = slot_info(conn, group.slot_name)
    if lost is not None:
        return f"is lost, so all tables will be re-copied: {lost.message}"
    if info is None:
        return "will be created"
    if not owned.slot:
        refuse_foreign_slot(group.slot_name)
    return f"exists, keeps {info.retained_bytes / (1 << 20):.1f} MiB of WAL"


def _owned(conn: Connection, group: GroupConfig, lake: LakeSession | None) -> Owned:
    """Whether slot and publication are ours, as a start would determine it."""
    if lake is None:
        return Owned(slot=True, publication=True)  # only a start that has the lake can know
    try:
        noted = read_ownership(conn, group.name)
    except AqueduckError:  # a registry of an earlier version, which a start upgrades
        noted = None
    return owned_parts(conn, group, noted, adopt=False, filled=read_position(lake, group.name) is not None)


def _target_checks(
    lake: LakeSession, config: SyncConfig, group: GroupConfig, tables: list[TableSchema]
) -> Iterator[CheckResult]:
    """Whether the lake's tables are those that the service created, or can be created and filled."""
    known = tables_at(lake, current_version(lake)).get(group.name, {})
    by_name = {table.source_table: table for table in group.tables}
    for schema in tables:
        wanted = by_name[TableName(schema.schema, schema.name)]
        name = f"target {wanted.target_table.qualified}"
        yield result_of(name, _check_target, lake, config, group, schema, wanted, known)


def _check_target(
    lake: LakeSession,
    config: SyncConfig,
    group: GroupConfig,
    schema: TableSchema,
    wanted: TableConfig,
    known: dict[int, TableState],
) -> str:
    state = known.get(schema.oid)
    bound = with_projection(schema, wanted, config.mask_salt_env, None if state is None else state.projection)
    table = PreparedTable(bound, wanted.target_table, wanted.initial_copy, wanted.table_mode, wanted.adopt)
    check_prepared(lake, group, table, known)
    return "fits" if state is not None else "can be filled"


def _check_table(
    conn: Connection, config: SyncConfig, group: GroupConfig, wanted: TableConfig, found: list[TableSchema]
) -> str:
    """
    The table exists, has a key and a replica identity, matches its options, and may be read; added to `found`
    if it exists.
    """
    mode = wanted.table_mode
    table = describe_table(conn, wanted.source, need_key=mode.needs_key, publication=group.users_publication)
    found.append(table)
    refuse_without_columns(table)
    needs_identity = not table.key and table.identity != "f"
    if mode.needs_key:
        refuse_without_identity(table)
    if mode.follows_keys:
        refuse_without_key(table, mode.name)
    in_lake = with_projection(table, wanted, config.mask_salt_env).in_lake
    with translate_errors(f"read the rights on {table.qualified}", table.qualified, conn=conn):
        row = conn.execute(
            "select has_schema_privilege(c.relnamespace, 'usage'), has_table_privilege(c.oid, 'select'), "
            "current_user::text from pg_class c where c.oid = %s",
            (table.oid,),
        ).fetchone()
    assert row is not None
    schema_usable, readable, role = row
    to = identifier(role)
    grants = [] if schema_usable else [f"grant usage on schema {identifier(table.schema)} to {to}"]
    grants += [] if readable else [f"grant select on {table_identifier(table)} to {to}"]
    if grants:
        raise PrivilegeError(
            f"the role {role} may not read {table.qualified}", hint="; ".join(grants), table=table.qualified
        )
    refuse_row_security(conn, table)
    key = f"key {', '.join(in_lake.key)}" if in_lake.key else "no key"
    note = ", its replica identity will be set to full" if needs_identity else ""
    if functions := foreign_functions(conn, table):
        note += f"; NOTE: its indexes or statistics call {', '.join(functions)}, which can run with the rights of {role}"
    return f"{len(in_lake.columns)} columns, {key}{note}"


def _check_users_publication(conn: Connection, group: GroupConfig) -> str:
    refuse_narrowed(conn, group.publication, group.plugin)
    return "is used as it is"


def _check_publication(conn: Connection, server: ServerInfo, group: GroupConfig, owned: Owned) -> str:
    name, to = identifier(group.publication), identifier(server.role)
    with translate_errors(f"read the publication {group.publication}", conn=conn):
        row = conn.execute(
            "select pg_has_role(pubowner, 'usage') from pg_publication where pubname = %s",
            (group.publication,),
        ).fetchone()
    if row is None:
        if not server.can_create_in_db:
            raise PrivilegeError(
                f"the role {server.role} may not create publications in {server.database}",
                hint=f"grant create on database {identifier(server.database)} to {to}",
            )
        return "will be created"
    if not owned.publication:
        refuse_foreign_publication(group.publication)
    if not row[0]:
        raise PrivilegeError(
            f"the publication {group.publication} must be changed, but belongs to another role",
            hint=f"alter publication {name} owner to {to}",
        )
    return "will be changed"


def _check_owner(conn: Connection, server: ServerInfo, group: GroupConfig, table: TableSchema) -> str:
    refuse_foreign(conn, group.publication, table, [wanted.source_table for wanted in group.tables])
    return f"{server.role} may publish it"
