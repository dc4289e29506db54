"""
Prepare the source of an events flow: publication, slot, and the position to start from.

Only the slot is ever created. A slot that no longer has the changes after the bookmark is refused before
anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from aqueduck.config.events import PostgresCdcConfig
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import BookmarkError, SlotLostError
from aqueduck.model.schema import TableSchema, lsn_text, parse_lsn
from aqueduck.postgres.publications.published import published_tables, refuse_narrowed
from aqueduck.postgres.publications.slots import SlotInfo, announced_slot, check_slot, missing_slot, slot_info
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.history import KnownPast, refuse_another_history
from aqueduck.postgres.session.server import ServerInfo, read_server, require_logical_wal
from aqueduck.state_files.files import Confirmation, read_confirmation, read_slot, write_confirmation

__all__ = [
    "FROM_THE_SLOT",
    "PreparedSource",
    "check_slot_position",
    "prepare_source",
    "refuse_another_past",
    "refuse_lost",
]

FROM_THE_SLOT = "remove the bookmark to start from what the slot retains; earlier changes are lost"


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """What the query needs to know about the source."""

    database: str
    system_identifier: str
    timeline: int
    position: int
    tables: tuple[TableSchema, ...]
    """The tables in the publication now; the stream announces later ones."""


def prepare_source(
    source: PostgresCdcConfig,
    dsn: str,
    bookmark: Bookmark | None,
    confirmed: Path,
    *,
    trust_slot: bool = False,
) -> PreparedSource:
    """Refuse what cannot work, create the slot if allowed, and return the start position."""
    with connect(dsn) as conn:
        server = read_server(conn)
        require_logical_wal(server)
        tables = published_tables(conn, source.publication_name)
        refuse_narrowed(conn, source.publication_name, source.plugin)
        info = refuse_lost(conn, dsn, source, server, bookmark, confirmed, trust_slot=trust_slot)
        if source.slot_type == "temporary":
            position = server.current_lsn
        else:
            if trust_slot:
                _record_trusted(info, bookmark, confirmed)
            begin = announced_slot(conn, source.slot_name, source.plugin)
            position = bookmark.position if bookmark is not None else _first_position(source, begin)
    return PreparedSource(server.database, server.system_identifier, server.timeline, position, tables)


def _first_position(source: PostgresCdcConfig, begin: int) -> int:
    return max(begin, parse_lsn(source.start_lsn)) if source.start_lsn else begin


def _record_trusted(info: SlotInfo | None, bookmark: Bookmark | None, confirmed: Path) -> None:
    """Record the slot's position as if we had written it ourselves; the capture checks the slot against it."""
    confirmed_lsn = None if info is None else info.confirmed_flush_lsn
    if bookmark is not None and confirmed_lsn is not None and confirmed_lsn > bookmark.position:
        write_confirmation(confirmed, Confirmation(confirmed_lsn, bookmark.position))


def refuse_lost(
    conn: psycopg.Connection[Any],
    dsn: str,
    source: PostgresCdcConfig,
    server: ServerInfo,
    bookmark: Bookmark | None,
    confirmed: Path,
    *,
    trust_slot: bool = False,
) -> SlotInfo | None:
    """
    Raise if the slot cannot be read from the bookmark on; the file `confirmed` has the position that we confirmed
    last. Returns the slot if it exists.
    """
    if bookmark is not None and bookmark.system_identifier != server.system_identifier:
        raise BookmarkError(
            "the bookmark belongs to another PostgreSQL cluster",
            hint=f"point to that cluster, or {FROM_THE_SLOT}",
        )
    info = slot_info(conn, source.slot_name)
    if source.slot_type != "temporary":
        if not (trust_slot and info is not None):
            check_slot_position(source, server, info, bookmark, read_confirmation(confirmed))
        refuse_another_past(conn, dsn, server, info, bookmark, confirmed.with_name("slot"))
    return info


def refuse_another_past(
    conn: psycopg.Connection[Any],
    dsn: str,
    server: ServerInfo,
    info: SlotInfo | None,
    bookmark: Bookmark | None,
    slot_path: Path,
) -> None:
    """
    Raise if the bookmark's position is not in this server's history; the file at `slot_path` has the slot's last recorded
    position.
    """
    if bookmark is not None:
        known = KnownPast(
            bookmark.position, bookmark.timeline, read_slot(slot_path), "the bookmark", FROM_THE_SLOT
        )
        refuse_another_history(conn, dsn, known, server, info)


def check_slot_position(
    source: PostgresCdcConfig,
    server: ServerInfo,
    info: SlotInfo | None,
    bookmark: Bookmark | None,
    noted: Confirmation | None,
) -> None:
    """Raise if reading the slot from the bookmark on would skip events."""
    name = source.slot_name
    if info is None:
        if bookmark is not None:
            raise SlotLostError(
                f"the slot {name} does not exist, but the bookmark is at {lsn_text(bookmark.position)}",
                hint=FROM_THE_SLOT,
            )
        if not source.create_slot_if_missing:
            raise missing_slot(name, source.plugin, "create_slot_if_missing: true")
        return
    check_slot(info, name=name, database=server.database, position=None, plugin=source.plugin)
    confirmed_lsn = info.confirmed_flush_lsn
    if bookmark is None or confirmed_lsn is None or confirmed_lsn <= bookmark.position:
        return
    at = f"the slot {name} is at {lsn_text(confirmed_lsn)}, beyond the bookmark's {lsn_text(bookmark.position)}"
    if noted is not None and noted.is_ahead_of(durable=bookmark.position):
        raise SlotLostError(
            f"{at}, which was at {lsn_text(noted.durable)} before: the bookmark is an older copy",
            hint=FROM_THE_SLOT,
        )
    if noted is None or not noted.covers(confirmed_lsn, durable=bookmark.position):
        raise SlotLostError(
            f"{at}: it was re-created or moved by another program",
            hint=f"{FROM_THE_SLOT}; if only state_dir was lost and nothing else used the slot: aqueduck run --trust-slot",
        )
