"""
How far the lake is: one row per group, written in the transaction that writes the data.

This is the only durable record of progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from aqueduck.lake.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.sql import LAKE, qualified

__all__ = ["Position", "ensure_progress", "read_position", "write_position"]

TABLE = qualified(LAKE, OWN_SCHEMA, "progress")


@dataclass(frozen=True, slots=True)
class Position:
    """Everything the source committed up to `position` is in the lake."""

    group: str
    position: int
    commit_time_us: int | None
    system_identifier: str
    timeline: int


def ensure_progress(session: LakeSession) -> None:
    """Make the table if it is not there."""
    session.execute(
        f"create table if not exists {TABLE} (group_name varchar, position ubigint, commit_time timestamptz,"
        " system_identifier varchar, timeline integer, updated_at timestamptz)",
        doing="preparing the lake",
    )


def read_position(session: LakeSession, group: str) -> Position | None:
    ensure_progress(session)
    rows, _ = session.query(
        f"select position, epoch_us(commit_time), system_identifier, timeline from {TABLE} where group_name = ?",
        [group],
    )
    return Position(group, *rows[0]) if rows else None


def write_position(session: LakeSession, position: Position) -> None:
    """Inside an open transaction."""
    session.execute(
        f"delete from {TABLE} where group_name = ?", [position.group], doing="writing the position"
    )
    at = position.commit_time_us
    time = None if at is None else datetime.fromtimestamp(at / 1e6, UTC)
    session.execute(
        f"insert into {TABLE} values (?, ?, ?, ?, ?, now())",
        [position.group, position.position, time, position.system_identifier, position.timeline],
        doing="writing the position",
    )
