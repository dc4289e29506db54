"""
Slots: read, create, drop, and the decision whether one still fits the lake.

Everything is idempotent.  `check_slot` is pure; `history` decides whether the server's history is ours.
Publications are in `publications`, the server's settings in `server`; `wire` and `capture` read through a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psycopg
import structlog
from psycopg.rows import dict_row

from aqueduck.model.errors import SlotConflictError, SlotLostError, TwoPhaseSlotError
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.postgres.publications.publications import drop_publication, ensure_publication
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier, literal
from aqueduck.postgres.session.server import ServerInfo, read_server
from aqueduck.state_files.files import Confirmation

__all__ = [
    "ServerInfo",
    "SlotInfo",
    "announced_slot",
    "check_slot",
    "create_slot",
    "drop_publication",
    "drop_slot",
    "ensure_publication",
    "list_slots",
    "look_at_slot",
    "missing_slot",
    "read_server",
    "slot_info",
]

log = structlog.get_logger()

PLUGIN = "pgoutput"

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot as the server shows it."""

    name: str
    plugin: str | None
    database: str | None
    active: bool
    confirmed_flush_lsn: int | None
    """None for a slot without a plugin, such as a physical slot."""
    wal_status: str | None
    """reserved, extended, unreserved or lost."""
    invalidation_reason: str | None
    """Why the slot can no longer be read: wal_removed, rows_removed, …"""
    temporary: bool
    two_phase: bool
    """Whether transactions are sent when they are prepared."""
    retained_bytes: int
    """WAL that the server retains because of this slot."""
    restart_lsn: int | None = field(default=None, compare=False)
    """Where decoding begins; it only moves forward, even across a crash."""


def slot_info(conn: Connection, name: str) -> SlotInfo | None:
    """The server's information about a slot; `None` if it does not exist."""
    query = _slot_query(conn.info.server_version).encode()
    with translate_errors(f"read the slot {name}", conn=conn), conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(query, {"name": name}).fetchone()
    if row is None:
        return None
    positions = ("confirmed_flush_lsn", "restart_lsn")
    parsed = {name: None if row[name] is None else parse_lsn(row[name]) for name in positions}
    return SlotInfo(**{**row, **parsed})


def look_at_slot(conn: Connection, name: str) -> tuple[bool, int]:
    """Whether the slot is being read now, and the server's position."""
    with translate_errors(f"look at the slot {name}", conn=conn):
        row = conn.execute(
            "select exists (select from pg_replication_slots where slot_name = %s and active), (case when"
            " pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end)::text",
            (name,),
        ).fetchone()
    assert row is not None
    return row[0], parse_lsn(row[1])


def list_slots(conn: Connection) -> list[SlotInfo]:
    """Every slot of the server, by name."""
    with translate_errors("list the slots", conn=conn):
        rows = conn.execute("select slot_name::text from pg_replication_slots order by 1").fetchall()
    found = (slot_info(conn, name) for (name,) in rows)
    return [info for info in found if info is not None]


def create_slot(conn: Connection, name: str, plugin: str = PLUGIN) -> int:
    """
    Create the group's slot and return the position that it starts from.

    An existing slot is used if it is ours. No copy may depend on the snapshot of this call: it is older than
    the position.
    """
    found = slot_info(conn, name)
    if found is None:
        role = f"alter role {identifier(conn.info.user)} replication"
        with translate_errors(f"create the slot {name}", conn=conn, fix=role):
            row = conn.execute(
                "select lsn::text from pg_create_logical_replication_slot(%s, %s)", (name, plugin)
            ).fetchone()
        assert row is not None
        return parse_lsn(row[0])
    check_slot(found, name=name, database=_database(conn), position=None, plugin=plugin)
    assert found.confirmed_flush_lsn is not None
    return found.confirmed_flush_lsn


def announced_slot(conn: Connection, name: str, plugin: str = PLUGIN) -> int:
    """The result of `create_slot`; logs what a new slot means for the server."""
    there = slot_info(conn, name) is not None
    begin = create_slot(conn, name, plugin)
    if not there:
        log.warning(
            "PERMANENT SLOT CREATED: the server keeps all WAL from here on until it is read, or the slot dropped",
            slot=name,
            position=lsn_text(begin),
            drop=f"aqueduck slots drop {name}",
        )
    return begin


def missing_slot(name: str, plugin: str, otherwise: str) -> SlotLostError:
    """The error for a role that may not create a slot: the statement that creates it, or that grants the right."""
    create = f"select pg_create_logical_replication_slot({literal(name)}, {literal(plugin)})"
    return SlotLostError(f"the slot {name} does not exist", hint=f"{create}; or set {otherwise}")


def drop_slot(conn: Connection, name: str) -> None:
    """Drop a slot; a missing slot is no error, and a slot that is being read raises `SlotActiveError`."""
    found = slot_info(conn, name)
    if found is None:
        return
    if found.database != _database(conn):
        raise _conflict(name, f"belongs to {_of_database(found)}")
    with translate_errors(f"drop the slot {name}", conn=conn):
        try:
            conn.execute("select pg_drop_replication_slot(%s)", (name,))
        except psycopg.errors.UndefinedObject:
            return  # it was dropped meanwhile


def check_slot(
    info: SlotInfo | None,
    *,
    name: str,
    database: str,
    position: int | None,
    lake: str = "",
    noted: Confirmation | None = None,
    trusted: bool = False,
    plugin: str = PLUGIN,
) -> None:
    """
    Raise if reading the slot from the `lake`'s `position` on would leave changes out.

    `position` is `None` while the lake has none: then a missing or a new slot is accepted.  A
    server moves a slot only if a client confirms.  So if the slot is beyond both our position and the confirmation that we
    `noted`, another program made or moved it (unless it is `trusted`), or the lake was restored
    from a backup: changes in between are lost.
    """
    if info is None:
        if position is not None:
            raise _lost(name, f"does not exist, but the lake is at {lsn_text(position)}")
        return
    if info.plugin != plugin or info.temporary:
        kind = "a temporary slot" if info.temporary else f"for {info.plugin or 'physical replication'}"
        raise _conflict(name, f"is {kind}, not a permanent one for {plugin}")
    if info.database != database:
        raise _conflict(name, f"belongs to {_of_database(info)}, not to the database {database}")
    if info.two_phase:
        raise TwoPhaseSlotError(
            f"the slot {name} has two_phase: it sends transactions that may still be rolled back",
            hint="set another slot_name for the group: a slot without two_phase is made, and misses no commit",
        )
    if info.wal_status == "lost" or info.invalidation_reason:
        raise _lost(name, f"was invalidated by the server ({info.invalidation_reason or 'wal_removed'})")
    confirmed = info.confirmed_flush_lsn
    if position is None or confirmed is None or confirmed <= position:
        return
    if noted is not None and noted.is_ahead_of(durable=position, lake=lake):
        raise _lost(
            name,
            f"is at {lsn_text(confirmed)}, and the lake, which was at {lsn_text(noted.durable)} before,"
            f" at {lsn_text(position)}: it was restored from an older backup",
        )
    if trusted or (noted is not None and noted.covers(confirmed, durable=position, lake=lake)):
        return
    raise _lost(
        name,
        f"is at {lsn_text(confirmed)}, beyond the lake's {lsn_text(position)}:"
        " it was re-created or moved by another program, or the lake was restored from an older backup",
        "; if only state_dir was lost and nothing else used the slot: aqueduck run --trust-slot",
    )


def _slot_query(version: int) -> str:
    if version >= 170000:
        reason = "invalidation_reason"
    elif version >= 160000:
        reason = "case when conflicting then 'rows_removed' when wal_status = 'lost' then 'wal_removed' end"
    else:
        reason = "case when wal_status = 'lost' then 'wal_removed' end"
    return f"""
        select slot_name::text as name, plugin::text, database::text, active, temporary,
               {"two_phase" if version >= 140000 else "false"} as two_phase,
               confirmed_flush_lsn::text, restart_lsn::text, wal_status, {reason} as invalidation_reason,
               coalesce(pg_wal_lsn_diff(
                   case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end,
                   restart_lsn), 0)::int8 as retained_bytes
        from pg_replication_slots where slot_name = %(name)s
    """


def _database(conn: Connection) -> str:
    """The database's name on the server: a pooler may use another one."""
    with translate_errors("ask for the database", conn=conn):
        row = conn.execute("select current_database()::text").fetchone()
    assert row is not None
    return str(row[0])


def _of_database(info: SlotInfo) -> str:
    return f"the database {info.database}" if info.database else "physical replication"


def _lost(name: str, problem: str, more: str = "") -> SlotLostError:
    return SlotLostError(
        f"the slot {name} {problem}",
        hint="changes may be missing between the lake and the slot: the tables need a new copy"
        f" (on_slot_loss: resync){more}",
    )


def _conflict(name: str, problem: str) -> SlotConflictError:
    return SlotConflictError(
        f"the slot {name} {problem}",
        hint=f"set another slot_name for the group, or run: select pg_drop_replication_slot({literal(name)})",
    )
