"""A lake's files, sizes and lake snapshots, from its catalog.  Reads metadata only, never data."""

from __future__ import annotations

from datetime import UTC, datetime

from aqueduck.lake.session.catalog import METADATA, OWN_SCHEMA, LakeSession
from aqueduck.lake.session.sql import LAKE, literal
from aqueduck.model.schema import TableName
from aqueduck.overview.values import LakeOverview, LakeTable

__all__ = ["read_health"]

_SNAPSHOTS = f"select count(*), max(snapshot_id), min(snapshot_time) from {METADATA}.ducklake_snapshot"
_TABLES = f"""
    select s.schema_name, t.table_name, t.file_count, t.file_size_bytes, t.delete_file_count, t.delete_file_size_bytes
    from ducklake_table_info({literal(LAKE)}) t
    join {METADATA}.ducklake_schema s on s.schema_id = t.schema_id and s.end_snapshot is null
    where s.schema_name <> {literal(OWN_SCHEMA)} order by all
"""


def read_health(session: LakeSession) -> LakeOverview:
    """Read the figures with a few queries of the catalog, too many to run every second."""
    ((count, newest, oldest),) = session.execute(_SNAPSHOTS, doing="counting lake snapshots")
    rows = session.execute(_TABLES, doing="counting the lake's files")
    return LakeOverview(
        catalog=session.kind,
        snapshot_id=newest,
        snapshots=count,
        oldest_snapshot_at=_time(oldest),
        checked_at=datetime.now(UTC),
        tables=tuple(
            LakeTable(
                name=f"{schema}.{name}",
                files=files,
                bytes=size,
                delete_files=delete_files,
                delete_bytes=delete_size,
                inlined_rows=session.memory.inlined_rows.get(TableName(schema, name)),
            )
            for schema, name, files, size, delete_files, delete_size in rows
        ),
    )


def _time(value: datetime | str | None) -> datetime | None:
    """Parse a time, because a catalog in SQLite stores times as text."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value
