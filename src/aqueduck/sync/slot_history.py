"""Whether a group may continue at the lake's position: its slot exists, and the position is in the server's history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from aqueduck.config.sync import GroupConfig, SyncConfig, group_dir
from aqueduck.lake.ledger.progress import Position, lake_mark
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.model.errors import AqueduckError, SlotLostError
from aqueduck.postgres.publications.slots import SlotInfo, check_slot, slot_info
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.history import KnownPast, refuse_another_history
from aqueduck.postgres.session.server import ServerInfo, read_server
from aqueduck.state_files.files import Confirmation, read_confirmation, read_slot, write_confirmation

__all__ = ["lost_slot", "record_trusted", "refuse_another_source"]


def lost_slot(
    conn: psycopg.Connection[Any],
    config: SyncConfig,
    group: GroupConfig,
    lake: LakeSession | None,
    stored: Position | None,
    server: ServerInfo,
    trust_slot: bool = False,
) -> AqueduckError | None:
    """The reason why the slot cannot be read from the lake's position on, if any; other conflicts are raised."""
    confirmed = group_dir(config, group) / "confirmed"
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
            noted=read_confirmation(confirmed),
            trusted=trust_slot,
            plugin=group.plugin,
        )
    except SlotLostError as exc:
        return exc
    return None


def record_trusted(
    conn: psycopg.Connection[Any], group: GroupConfig, confirmed: Path, stored: Position, lake: str
) -> None:
    """Record the position of a trusted slot as confirmed by us; the capture reads the record when it starts."""
    info = slot_info(conn, group.slot_name)
    confirmed_lsn = None if info is None else info.confirmed_flush_lsn
    if confirmed_lsn is not None and confirmed_lsn > stored.position:
        write_confirmation(confirmed, Confirmation(confirmed_lsn, stored.position, lake))


def refuse_another_source(config: SyncConfig, group: GroupConfig, stored: Position) -> int:
    """Raise `SlotLostError` if the lake was not filled from this server; returns the server's timeline."""
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
    """Raise unless the lake's position is in this server's history."""
    if stored.system_identifier != server.system_identifier:
        raise SlotLostError(
            f"the lake's group {group.name} was filled from another PostgreSQL cluster",
            hint="point source.dsn to that cluster, use another group name or another lake,"
            " or set on_slot_loss: resync to copy all tables from this one",
        )
    known = KnownPast(stored.position, stored.timeline, read_slot(group_dir(config, group) / "slot"))
    refuse_another_history(conn, config.source.dsn, known, server, slot)
