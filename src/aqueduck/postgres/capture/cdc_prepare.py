"""
Prepare the source of a `postgres_cdc` query: publication, slot, and the position at which the stream begins.

For a new query, both may be created.  A query that continues from its checkpoint needs the slot that it had: a new slot
would leave changes out, which is an error, never a silent gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from aqueduck.model.errors import (
    ConfigError,
    PublicationError,
    SlotConflictError,
    SlotLostError,
    UnpublishedError,
)
from aqueduck.model.schema import TableSchema, lsn_text
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.publications.publications import create_publication_sql, refuse_without_identity
from aqueduck.postgres.publications.published import (
    publication_exists,
    publication_marks,
    publication_oid,
    published_tables,
    refuse_narrowed,
    refuse_unpublished,
)
from aqueduck.postgres.publications.slots import announced_slot, check_slot, missing_slot, slot_info
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.history import KnownPast, move_mark, read_mark, refuse_another_history
from aqueduck.postgres.session.quoting import identifier, table_identifier
from aqueduck.postgres.session.server import ServerInfo, read_server, require_logical_wal
from aqueduck.state_files.files import SlotMark

__all__ = ["CdcSource", "look_again", "prepare_cdc", "resume_cdc"]

Connection = psycopg.Connection[Any]
_UNPUBLISHED = "begin anew with another checkpointLocation, after a new read of the tables"
_COMPARE = "begin anew with another checkpointLocation, and compare what was written since"
_AGAIN = "changes between the checkpoint and the slot are gone: begin anew with another checkpointLocation"


@dataclass(frozen=True, slots=True)
class CdcSource:
    """What a query must know about its source."""

    database: str
    system_identifier: str
    timeline: int
    position: int
    tables: tuple[TableSchema, ...]
    """The wanted tables that the publication has now; all if none are named."""
    marks: dict[str, str]
    """How they are published, see `published.publication_marks`."""
    publication_oid: int
    slot: SlotMark | None
    """The slot's position."""
    seen: SlotMark | None = None
    """The slot's position at the last look."""


def prepare_cdc(
    dsn: str,
    *,
    slot: str,
    publication: str,
    tables: Sequence[str],
    create: bool,
    start: int | None = None,
    plugin: str = "pgoutput",
) -> CdcSource:
    """For a new query: use what exists, or create it with `create`; the stream begins at the slot's position, or at `start`."""
    with connect(dsn) as conn:
        server = _server(conn)
        found = slot_info(conn, slot)
        check_slot(found, name=slot, database=server.database, position=None, plugin=plugin)
        if found is None and not create:
            raise missing_slot(slot, plugin, "create: true")
        if create and not publication_exists(conn, publication):
            _create_publication(conn, publication, tables)
        known = _wanted(conn, publication, tables, plugin)
        found_now = _as_found(conn, server, slot, publication, tables, known)
        return replace(found_now, position=max(announced_slot(conn, slot, plugin), start or 0))


def resume_cdc(
    dsn: str,
    *,
    slot: str,
    publication: str,
    tables: Sequence[str],
    position: int,
    system_identifier: str,
    timeline: int | None = None,
    restart_lsn: int | None = None,
    published_by: int | None = None,
    marks: Mapping[str, str] | None = None,
    plugin: str = "pgoutput",
) -> CdcSource:
    """For a query that continues from `position`: refuse a source that no longer has the changes after it."""
    with connect(dsn) as conn:
        server = _server(conn)
        if system_identifier != server.system_identifier:
            raise SlotConflictError(
                "the checkpoint belongs to another PostgreSQL cluster",
                hint="point dsn to that cluster, or begin anew with another checkpointLocation",
            )
        found = slot_info(conn, slot)
        mark = SlotMark(timeline, restart_lsn, slot) if timeline and restart_lsn else None
        past = KnownPast(position, timeline, mark, "the checkpoint", _COMPARE)
        refuse_another_history(conn, dsn, past, server, found)
        if found is None:
            raise SlotLostError(
                f"the slot {slot} does not exist, but the checkpoint is at {lsn_text(position)}", hint=_AGAIN
            )
        check_slot(found, name=slot, database=server.database, position=None, plugin=plugin)
        # Only what Spark has committed is confirmed, so the slot cannot be ahead of the checkpoint.
        if found.confirmed_flush_lsn is not None and found.confirmed_flush_lsn > position:
            confirmed, ours = lsn_text(found.confirmed_flush_lsn), lsn_text(position)
            raise SlotLostError(
                f"the slot {slot} is at {confirmed}, beyond the checkpoint's {ours}: it was re-created or moved",
                hint=_AGAIN,
            )
        known = _wanted(conn, publication, tables, plugin)
        found_now = _as_found(conn, server, slot, publication, tables, known)
        if published_by not in (None, found_now.publication_oid):
            raise UnpublishedError(
                f"the publication {publication} was dropped and created again: changes in between were not sent",
                hint=_UNPUBLISHED,
            )
        # A table that left for good is remembered: it has a gap once it is back.
        refuse_unpublished(conn, publication, marks or {}, found_now.marks, _UNPUBLISHED)
        return replace(found_now, position=position, marks={**(marks or {}), **found_now.marks})


def look_again(dsn: str, slot: str, publication: str, source: CdcSource) -> CdcSource:
    """
    While a query runs: the slot's position.

    Raises if tables were not published for a while, or if the slot has moved back, as on a restored server.
    """
    with connect(dsn) as conn:
        mark = read_mark(conn, slot)
        if mark is not None and mark.timeline == source.timeline:
            known = KnownPast(source.position, source.timeline, source.slot, "the checkpoint", _COMPARE)
            source = replace(source, slot=move_mark(known, source.seen, mark), seen=mark)
        now = publication_marks(conn, publication)
        refuse_unpublished(conn, publication, source.marks, now, _UNPUBLISHED)
        return source


def _as_found(
    conn: Connection,
    server: ServerInfo,
    slot: str,
    publication: str,
    tables: Sequence[str],
    known: tuple[TableSchema, ...],
) -> CdcSource:
    return CdcSource(
        server.database,
        server.system_identifier,
        server.timeline,
        0,
        known,
        _marks(conn, publication, tables, known),
        publication_oid(conn, publication),
        read_mark(conn, slot),
    )


def _marks(
    conn: Connection, publication: str, tables: Sequence[str], known: Sequence[TableSchema]
) -> dict[str, str]:
    """The marks of the wanted tables."""
    marks, oids = publication_marks(conn, publication), {str(table.oid) for table in known}
    return {key: mark for key, mark in sorted(marks.items()) if not tables or key in oids}


def _server(conn: Connection) -> ServerInfo:
    server = read_server(conn)
    require_logical_wal(server)
    return server


def _create_publication(conn: Connection, name: str, tables: Sequence[str]) -> None:
    if not tables:
        raise ConfigError(
            f"the publication {name} does not exist, and it is not said which tables it should have",
            hint="set table or tables, or create the publication",
        )
    described = [describe_table(conn, table, need_key=False) for table in tables]
    for table in described:
        refuse_without_identity(table)
    with translate_errors(f"create the publication {name}", conn=conn):
        conn.execute(create_publication_sql(name, described).encode())


def _wanted(
    conn: Connection, publication: str, tables: Sequence[str], plugin: str
) -> tuple[TableSchema, ...]:
    published = published_tables(conn, publication)
    refuse_narrowed(conn, publication, plugin)
    if not tables:
        return published
    described = [describe_table(conn, table, need_key=False) for table in tables]
    oids = {table.oid for table in published}
    for table in described:
        if table.oid not in oids:
            raise PublicationError(
                f"the publication {publication} does not publish {table.qualified}",
                hint=f"alter publication {identifier(publication)} add table {table_identifier(table)}",
                table=table.qualified,
            )
    return tuple(described)
