"""
Whether a position is one of the past of the server that we are connected to.

A standby that is promoted begins a new timeline at the position that it had reached.  What its former primary wrote after
that position never happened there, although WAL soon passes it again.  The server keeps a file that says where each earlier
timeline was left: `read_timelines` reads it, `check_history` decides.  A server that was put back from a copy of its
data directory has no new timeline: there, the slot shows it, because its `restart_lsn` only moves forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from aqueduck.model.errors import ConfigError, SlotLostError, SourceError
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.postgres.publications.slots import SlotInfo, slot_info
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier
from aqueduck.postgres.session.server import ServerInfo
from aqueduck.postgres.session.wire import connect_replication, raise_failed
from aqueduck.state_files.files import SlotMark

__all__ = [
    "KnownPast",
    "check_history",
    "parse_timelines",
    "read_timelines",
    "refuse_another_history",
    "slot_mark",
]

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class KnownPast:
    """What we know of a source since we last read it."""

    position: int
    """Everything up to here was read."""
    timeline: int | None = None
    """On which timeline; None where an older version did not keep it."""
    slot: SlotMark | None = None
    """How far the slot was when we last looked."""
    whose: str = "the lake"
    way_out: str = "the tables need a new copy (on_slot_loss: resync)"


def refuse_another_history(
    conn: Connection, dsn: str, known: KnownPast, server: ServerInfo, slot: SlotInfo | None
) -> None:
    """Raise `SlotLostError` if this server never was where we know it to have been, or if that cannot be told."""
    left: Mapping[int, int] | None = {}
    if known.timeline not in (None, server.timeline):
        left = read_timelines(conn, dsn, server.timeline)
    check_history(known, server, left, slot)


def check_history(
    known: KnownPast, server: ServerInfo, left: Mapping[int, int] | None, slot: SlotInfo | None = None
) -> None:
    """
    The decision of `refuse_another_history`.

    `left` says where the server's earlier timelines were left; None if the role may not read it.
    """
    if server.in_recovery:
        return
    at = f"{known.whose} is at {lsn_text(known.position)}"
    if known.position > server.current_lsn:
        raise _another(
            known,
            f"{at}, beyond the server's {lsn_text(server.current_lsn)}:"
            " it was restored from an older backup, or took over while it was behind",
        )
    if (
        slot is not None
        and known.slot is not None
        and known.slot.is_ahead_of(slot.restart_lsn, server.timeline)
    ):
        raise _another(
            known,
            f"the slot {slot.name} stands before where it stood already, and {at}:"
            " the server was restored from an older backup, and has gone on from there",
        )
    if known.timeline in (None, server.timeline):
        return
    assert known.timeline is not None
    if left is None:
        if slot is None or (slot.confirmed_flush_lsn or 0) < known.position:
            raise _unknown(known, server)
        return  # it was carried along by a standby that had this position
    if known.position > left.get(known.timeline, -1):
        where = f" at {lsn_text(left[known.timeline])}" if known.timeline in left else ", of another server"
        raise _another(
            known,
            f"the server is on timeline {server.timeline}, which branches off timeline {known.timeline}{where},"
            f" and {at} of timeline {known.timeline}: a standby took over that was behind",
        )


def slot_mark(conn: Connection, name: str, timeline: int) -> SlotMark | None:
    """How far a slot is; None where there is none."""
    info = slot_info(conn, name)
    return None if info is None or info.restart_lsn is None else SlotMark(timeline, info.restart_lsn)


def read_timelines(conn: Connection, dsn: str, timeline: int) -> dict[int, int] | None:
    """Where each timeline before this one was left; None if the role may read it in no way."""
    if timeline == 1:
        return {}
    ways: tuple[Callable[[], str], ...] = (
        lambda: _by_sql(conn, timeline),
        lambda: _by_replication(dsn, timeline),
    )
    for read in ways:
        with contextlib.suppress(SourceError, ConfigError):
            return parse_timelines(read())
    return None


def parse_timelines(text: str) -> dict[int, int]:
    """A timeline history file: timeline, position, reason; comments begin with #."""
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return {int(line[0]): parse_lsn(line[1]) for line in lines if len(line) >= 2}


def _by_sql(conn: Connection, timeline: int) -> str:
    with translate_errors("read the server's timelines", conn=conn):
        row = conn.execute("select pg_read_file(%s)", (f"pg_wal/{timeline:08X}.history",)).fetchone()
    assert row is not None
    return str(row[0])


def _by_replication(dsn: str, timeline: int) -> str:
    pgconn = connect_replication(dsn)
    try:
        result = pgconn.exec_(f"TIMELINE_HISTORY {timeline}".encode())
        raise_failed(result, pq.ExecStatus.TUPLES_OK, "read the server's timelines")
        return (result.get_value(0, 1) or b"").decode()
    finally:
        pgconn.finish()


def _another(known: KnownPast, problem: str) -> SlotLostError:
    return SlotLostError(problem, hint=f"changes that the source lost were read from it: {known.way_out}")


def _unknown(known: KnownPast, server: ServerInfo) -> SlotLostError:
    return SlotLostError(
        f"the server is on timeline {server.timeline}, {known.whose} on timeline {known.timeline}, and the role"
        f" {server.role} may not read where the server left that one",
        hint=f"grant execute on function pg_read_file(text) to {identifier(server.role)}, in the database {server.database};"
        f" or {known.way_out}",
    )
