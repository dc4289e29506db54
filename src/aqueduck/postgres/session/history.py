"""
Whether a position belongs to the history of the connected server.

A promoted standby begins a new timeline at the position that it had reached. What its former primary wrote
after that position never happened there, although the WAL soon passes that position again. The server keeps a
file with the end of each earlier timeline: `read_timelines` reads it, `check_history` decides. A server that
was restored from a copy of its data directory has no new timeline: there, the slot reveals it, because its
`restart_lsn` only moves forward. `read_mark` reads it, `move_mark` decides whether it moved back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq

from aqueduck.model.errors import ConfigError, SlotLostError, SourceError
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.postgres.publications.slots import SlotInfo
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier
from aqueduck.postgres.session.server import ServerInfo
from aqueduck.postgres.session.wire import connect_replication, raise_failed
from aqueduck.state_files.files import SlotMark, read_slot, write_slot

__all__ = [
    "KnownPast",
    "SlotWatch",
    "check_history",
    "move_mark",
    "parse_timelines",
    "read_mark",
    "read_timelines",
    "refuse_another_history",
]

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class KnownPast:
    """What we know about a source from our last reading."""

    position: int
    """Everything up to here was read."""
    timeline: int | None = None
    """The timeline of that position; None if an older version did not store it."""
    slot: SlotMark | None = None
    """The slot's position at our last look."""
    whose: str = "the lake"
    way_out: str = "the tables need a new copy (on_slot_loss: resync)"


def refuse_another_history(
    conn: Connection, dsn: str, known: KnownPast, server: ServerInfo, slot: SlotInfo | None
) -> None:
    """
    Raise `SlotLostError` if the known position is not in this server's history, or if that cannot be
    determined.
    """
    left: Mapping[int, int] | None = {}
    if known.timeline not in (None, server.timeline):
        left = read_timelines(conn, dsn, server.timeline)
    check_history(known, server, left, slot)


def check_history(
    known: KnownPast, server: ServerInfo, left: Mapping[int, int] | None, slot: SlotInfo | None = None
) -> None:
    """
    The decision of `refuse_another_history`.

    `left` has the ends of the server's earlier timelines; None if the role may not read them.
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
    if slot is not None and slot.restart_lsn is not None:
        _refuse_moved_back(known, SlotMark(server.timeline, slot.restart_lsn, slot.name))
    if known.timeline in (None, server.timeline):
        return
    assert known.timeline is not None
    if left is None:
        if slot is None or (slot.confirmed_flush_lsn or 0) < known.position:
            raise _unknown(known, server)
        return  # a standby that had this position kept it
    if known.position > left.get(known.timeline, -1):
        where = f" at {lsn_text(left[known.timeline])}" if known.timeline in left else ", of another server"
        raise _another(
            known,
            f"the server is on timeline {server.timeline}, which branches off timeline {known.timeline}{where},"
            f" and {at} of timeline {known.timeline}: a standby took over that was behind",
        )


def read_mark(conn: Connection, name: str) -> SlotMark | None:
    """A slot's position, with the timeline of the server that shows it; None if there is none, or on a standby."""
    with translate_errors(f"look at the slot {name}", conn=conn):
        row = conn.execute(_MARK, (name,)).fetchone()
    return None if row is None or None in row else SlotMark(row[1], parse_lsn(row[0]), name)


def move_mark(known: KnownPast, seen: SlotMark | None, now: SlotMark) -> SlotMark | None:
    """
    The mark to remember after another look; raises `SlotLostError` if the slot is before `known.slot`.

    A position that only the last look saw (`seen`) may not have been on the server's disk, so a crash may
    move the slot back to before it. Two looks agree on the lower one; the mark itself is never lowered.
    """
    _refuse_moved_back(known, now)
    if seen is None or not seen.is_comparable(now):
        return known.slot
    agreed = min(seen, now, key=lambda mark: mark.restart_lsn)
    if known.slot is not None and known.slot.is_ahead_of(agreed):
        return known.slot
    return SlotMark(agreed.timeline, agreed.restart_lsn, now.slot)


class SlotWatch:
    """Remembers a slot's position in the state file `slot`, look by look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: SlotMark | None = None
        """The position at the last look."""

    def look(self, conn: Connection, slot: str, timeline: int, known: KnownPast) -> None:
        """
        Raises `SlotLostError` if the server shows the slot before the position in the file.

        The position of a server on another timeline than `timeline`, whose history was checked, says nothing:
        the next start decides.
        """
        now = read_mark(conn, slot)
        if now is None or now.timeline != timeline:
            return
        before = read_slot(self._path)
        mark, self._seen = move_mark(replace(known, slot=before), self._seen, now), now
        if mark is not None and mark != before:
            write_slot(self._path, mark)


def read_timelines(conn: Connection, dsn: str, timeline: int) -> dict[int, int] | None:
    """The end of each earlier timeline; None if the role has no way to read it."""
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


_MARK = """
    select restart_lsn::text,
           case when not pg_is_in_recovery()
                then ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int end
    from pg_replication_slots where slot_name = %s
"""


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


def _refuse_moved_back(known: KnownPast, now: SlotMark) -> None:
    if known.slot is not None and known.slot.is_ahead_of(now):
        raise _another(
            known,
            f"the slot {now.slot} is before the position that it had already reached,"
            f" and {known.whose} is at {lsn_text(known.position)}:"
            " the server was restored from an older backup, and has continued from there",
        )


def _another(known: KnownPast, problem: str) -> SlotLostError:
    return SlotLostError(problem, hint=f"changes that the source lost were read from it: {known.way_out}")


def _unknown(known: KnownPast, server: ServerInfo) -> SlotLostError:
    return SlotLostError(
        f"the server is on timeline {server.timeline}, {known.whose} on timeline {known.timeline}, and the role"
        f" {server.role} may not read where the server left that one",
        hint=f"grant execute on function pg_read_file(text) to {identifier(server.role)}, in the database {server.database};"
        f" or {known.way_out}",
    )
