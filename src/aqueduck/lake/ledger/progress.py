"""
The position of each group, written in the same lake transaction as its rows.

Each group has a table `aqueduck.progress_<group>` with one row that is updated in
place.  DuckLake detects conflicts by table: two services of the same group that commit at the
same time conflict on this table, so that only one of them succeeds, while different groups
never conflict here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from aqueduck.lake.session.catalog import METADATA, OWN_SCHEMA, LakeSession
from aqueduck.lake.session.sql import LAKE, lake_table, literal
from aqueduck.model.schema import Column, TableName

__all__ = [
    "Position",
    "forget_position",
    "lake_mark",
    "move_position",
    "progress_cells",
    "progress_table",
    "read_position",
    "write_position",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = """
    group_name varchar, "position" bigint, commit_time timestamp with time zone,
    system_identifier varchar, timeline integer, updated_at timestamp with time zone
"""


@dataclass(frozen=True, slots=True)
class Position:
    """A group's position: the lake has all changes of the group's source up to it."""

    group: str
    position: int
    """The end of the last commit, as an LSN."""
    commit_time_us: int | None
    """The time of that commit, in microseconds since the Unix epoch; None before the first batch."""
    system_identifier: str
    """Which PostgreSQL cluster the position belongs to."""
    timeline: int


def progress_table(group: str) -> TableName:
    """The lake table that holds the group's position."""
    return TableName(OWN_SCHEMA, f"progress_{group}")


def read_position(session: LakeSession, group: str) -> Position | None:
    """The group's position; None if nothing was written yet."""
    # `duckdb_tables` asks the catalog about every table, and is needed only for a table that is not committed.
    if not lake_mark(session, group) and not _exists(session, group):
        return None
    rows = session.execute(
        'select "position", epoch_us(commit_time), system_identifier, timeline'
        f" from {lake_table(progress_table(group))}",
        doing="reading the position",
    )
    if not rows:
        return None
    [row] = rows
    return Position(group, *row)


def lake_mark(session: LakeSession, group: str) -> str:
    """An identifier of this lake among all that the group may have filled; a copy of its catalog has the same one."""
    rows = session.execute(
        f"select t.table_uuid::varchar from {METADATA}.ducklake_table t join {METADATA}.ducklake_schema s using (schema_id)"
        " where s.schema_name = ? and t.table_name = ? and t.end_snapshot is null and s.end_snapshot is null",
        (OWN_SCHEMA, progress_table(group).name),
        doing="reading the position",
    )
    return str(rows[0][0]) if rows else ""


def write_position(session: LakeSession, position: Position) -> None:
    """Set the group's position; the caller has a transaction open."""
    session.memory.positions.pop(position.group, None)
    table = lake_table(progress_table(position.group))
    if not _exists(session, position.group):
        _execute(session, f"create table {table} ({_COLUMNS})")
    if not _update(session, position, "true"):
        _execute(
            session,
            f"insert into {table} values ({literal(position.group)}, {position.position}, {_time(position)},"
            f" {literal(position.system_identifier)}, {position.timeline}, now())",
        )


def forget_position(session: LakeSession, group: str) -> None:
    """Drop the position of a group that was removed."""
    session.memory.positions.pop(group, None)
    _execute(session, f"drop table if exists {lake_table(progress_table(group))}")


def move_position(session: LakeSession, position: Position, *, start: int) -> bool:
    """Move the group's position if it is exactly `start`; otherwise change nothing and return False."""
    return _update(session, position, f'"position" = {start}')


def progress_cells(position: Position) -> tuple[tuple[Column, ...], tuple[str | None, ...]]:
    """The columns of a progress table, and the row of this position as PostgreSQL's text."""
    us = position.commit_time_us
    now = datetime.now(UTC)
    values = (
        ("group_name", 25, position.group),
        ("position", 20, str(position.position)),
        ("commit_time", 1184, None if us is None else _time_text(_EPOCH + timedelta(microseconds=us))),
        ("system_identifier", 25, position.system_identifier),
        ("timeline", 23, str(position.timeline)),
        ("updated_at", 1184, _time_text(now)),
    )
    return tuple(Column(name, oid, -1) for name, oid, _ in values), tuple(text for _, _, text in values)


def _time_text(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S.%f+00")


def _update(session: LakeSession, position: Position, condition: str) -> bool:
    [[count]] = _execute(
        session,
        f'update {lake_table(progress_table(position.group))} set "position" = {position.position},'
        f" commit_time = {_time(position)}, system_identifier = {literal(position.system_identifier)},"
        f" timeline = {position.timeline}, updated_at = now() where {condition}",
    )
    return bool(count)


def _exists(session: LakeSession, group: str) -> bool:
    table = progress_table(group)
    found = session.execute(
        "select 1 from duckdb_tables() where database_name = ? and schema_name = ? and table_name = ?",
        (LAKE, table.schema, table.name),
    )
    return bool(found)


def _time(position: Position) -> str:
    us = position.commit_time_us
    return "null" if us is None else f"make_timestamptz({us})"


def _execute(session: LakeSession, statement: str) -> list[tuple[Any, ...]]:
    return session.execute(statement, doing="writing the position")
