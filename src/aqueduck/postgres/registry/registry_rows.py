"""
The registry's rows for the service: what people want, and what the service writes back.

Reading and writing take one statement each, for any number of tables.  Rows that would not change are not written, so
an idle system produces no WAL that it would then have to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any

import psycopg

from aqueduck.model.lifecycle import ErrorClass, Lifecycle, SyncState
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName, lsn_text, parse_lsn
from aqueduck.postgres.registry.registry_install import change, may_use_groups, registry_errors

__all__ = [
    "GroupObservation",
    "GroupRow",
    "Settings",
    "TableObservation",
    "TableRow",
    "claim_group",
    "delete_removed",
    "lake_of",
    "read_desired",
    "write_group_observed",
    "write_observed",
]

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Effective values, resolved from default, global, group and table; the registry has the defaults."""

    flush_interval_ms: int = 1000
    stage_bytes_max: int = 1 << 30
    batch_bytes_max: int = 1 << 29
    segment_bytes: int = 1 << 25
    max_queued_changes: int = 10_000_000
    fold_concurrency: int = 64
    task_memory: int = 160_000_000
    copy_concurrency: int = 2
    copy_chunk_bytes: int = 1 << 26
    inline_rows: int = 1000
    on_slot_loss: str = "stop"
    on_type_change: str = "resync"
    large_transactions: str = "stream"
    on_partition_change: str = "resync"
    on_recreate: str = "stop"
    heartbeat_interval_ms: int = 0
    publication_by: str = "aqueduck"
    plugin: str = "pgoutput"
    poll_interval_ms: int = 100
    poll_step_bytes: int = 1 << 26
    catchup_bytes: int = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TableObservation:
    """
    A table's observed state, complete, not only the changes.

    `applied_lsn` and the lag refer to changes of this table. If they followed the server's position, each
    write here would move that position and cause the next one.
    """

    id: int
    state: SyncState = SyncState.PENDING
    source_oid: int | None = None
    """`None` keeps the registry's value."""
    active_group_id: int | None = None
    """The group whose query replicates the table."""
    resync_done: int = 0
    retry_done: int = 0
    snapshot_lsn: int | None = None
    applied_lsn: int | None = None
    error_code: str | None = None
    error_class: ErrorClass | None = None
    error_message: str | None = None
    retry_at: datetime | None = None
    consecutive_failures: int = 0
    rows_synced: int = 0
    queued_changes: int = 0
    queued_bytes: int = 0
    last_sync_at: datetime | None = None
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    copy_rows: int = 0
    copy_bytes: int = 0
    copy_bytes_total: int | None = None
    copy_started_at: datetime | None = None
    copy_finished_at: datetime | None = None
    parked_rows: int = 0
    parked_bytes: int = 0
    parked_since: datetime | None = None
    verdict: str = "never"
    """From the service's last comparison with the lake."""
    verified_at: datetime | None = None
    identical_at: datetime | None = None
    differences: int = 0
    verify_note: str | None = None

    def after(self, life: Lifecycle) -> TableObservation:
        """The same table in another lifecycle state."""
        failure = life.failure
        return replace(
            self,
            state=life.state,
            error_code=failure.code if failure else None,
            error_class=failure.error_class if failure else None,
            error_message=failure.message if failure else None,
            retry_at=life.retry_at,
            consecutive_failures=life.failures,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObservation:
    """A group's observed state; `confirmed_flush_lsn` moves only with commits, for the same reason."""

    id: int
    confirmed_flush_lsn: int | None = None
    """`None` keeps the registry's value."""
    last_sync_at: datetime | None = None
    paused: bool = False
    staged_bytes: int = 0
    restarts: int = 0
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One registered table, and its state when the service last wrote it."""

    id: int
    source: TableName
    """Its current name; its last name if it no longer exists."""
    target: TableName
    mode: str
    source_column: str | None
    source_value: str | None
    copy: bool
    adopt: bool
    """Whether a lake table that we did not create may become the target."""
    options: dict[str, Any]
    """Its columns, masks and row filter, as in the file."""
    enabled: bool
    settings: Settings
    created_by_file: bool
    removed: bool
    """To be removed from the stream, then deleted with `delete_removed`, before anything is added."""
    drop_target: bool
    resync_requested: int
    retry_requested: int
    state_since: datetime
    observed: TableObservation

    @property
    def table_mode(self) -> TableMode:
        return TableMode(self.mode, self.source_column, self.source_value)

    def is_of(self, oid: int, source: str, target: TableName, mode: TableMode) -> bool:
        """Whether the row refers to this table, by its identity or by its name."""
        return self.is_about(oid, source) and (self.target, self.table_mode) == (target, mode)

    def is_about(self, oid: int, source: str) -> bool:
        """Whether the row refers to that source table, even after a rename."""
        return self.observed.source_oid == oid or self.source.qualified == source

    @property
    def resync_wanted(self) -> bool:
        """Whether a new copy was requested that has not started."""
        return self.resync_requested > self.observed.resync_done

    @property
    def retry_wanted(self) -> bool:
        """Whether a retry was requested after a repair."""
        return self.retry_requested > self.observed.retry_done


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One registered group with its tables."""

    id: int
    name: str
    publication: str
    slot_name: str
    capture: str
    lake: str | None
    """Data path of the lake that it fills; `None` until a service claims it."""
    enabled: bool
    settings: Settings
    created_by_file: bool
    removed: bool
    """Slot and publication are to be dropped, then the row deleted with `delete_removed`."""
    observed: GroupObservation
    tables: tuple[TableRow, ...]
    problem: str | None = None
    """Which of its rows, or its tables' rows, is malformed; the group then has no tables."""


def read_desired(conn: Connection, lake: str | None = None) -> tuple[GroupRow, ...]:
    """
    All groups with their tables; with `lake` only those that fill it or are unclaimed.

    0.1 s for 1000 tables: called after a notice and every few seconds, not all the time.
    """
    with registry_errors("read the registry", conn):
        rows = conn.execute(_READ, {"lake": lake}).fetchall()
    return tuple(_read_group(*row) for row in rows)


def _read_group(identity: dict[str, Any], values: str, tables: str) -> GroupRow:
    """
    Read one group. People may write into these tables: a malformed row affects only its group.

    `values` and `tables` are JSON as text, because Python cannot read all of it: it limits the nesting and the
    digits of a number.
    """
    try:
        return _group_row(json.loads(values), tuple(map(_table_row, json.loads(tables))))
    except (ValueError, RecursionError) as exc:
        problem = str(exc) if isinstance(exc, _MalformedError) else "a value that no service writes"
        unread = asdict(GroupObservation(id=identity["id"])) | {"effective": {}}
        return replace(_group_row({**identity, **unread}, ()), problem=problem)


def write_observed(conn: Connection, updates: Sequence[TableObservation]) -> int:
    """
    Write the tables' observed state, and return how many rows really changed.

    Locked rows are skipped instead of waited for: pass all tables each time.
    """
    return _write(conn, _WRITE_TABLES, updates)


def write_group_observed(conn: Connection, updates: Sequence[GroupObservation]) -> int:
    """Write the groups' observed state, in the same way."""
    return _write(conn, _WRITE_GROUPS, updates)


def claim_group(conn: Connection, name: str, lake: str) -> bool:
    """Claim a group for a lake; `False` if it fills another one, or no longer exists."""
    with change(f"claim the group {name}", conn):
        conn.execute(
            "update aqueduck.sync_groups set lake = %(lake)s where name = %(name)s and lake is null",
            {"name": name, "lake": lake},
        )
        query = "select from aqueduck.sync_groups where name = %s and lake = %s and removed_at is null"
        return conn.execute(query, (name, lake)).fetchone() is not None


def lake_of(conn: Connection, name: str) -> str | None:
    """The lake that a group fills; None if no service has claimed it, or if no registry is readable."""
    with registry_errors(f"look for the group {name}", conn):
        if not may_use_groups(conn, "select"):
            return None
        row = conn.execute("select lake from aqueduck.sync_groups where name = %s", (name,)).fetchone()
    return None if row is None else row[0]


def delete_removed(conn: Connection, *, tables: Sequence[int] = (), groups: Sequence[int] = ()) -> set[str]:
    """
    Delete tables and groups that are marked as removed, after they were taken down.

    Returns the names of the deleted groups. A group that was re-created meanwhile is not among them, and
    starts anew.
    """
    with change("delete what was removed", conn):
        conn.execute(
            "delete from aqueduck.table_mappings where removed_at is not null "
            "and (id = any (%s) or group_id = any (%s))",
            (list(tables), list(groups)),
        )
        cursor = conn.execute(
            "delete from aqueduck.sync_groups g where id = any (%s) and removed_at is not null and not exists "
            "(select from aqueduck.table_mappings m where m.group_id = g.id) returning name",
            (list(groups),),
        )
        return {name for (name,) in cursor.fetchall()}


# -- From rows to values and back

_TABLE_TYPES = {
    "id": "bigint", "state": "text", "source_oid": "bigint", "active_group_id": "bigint",
    "resync_done": "int", "retry_done": "int", "snapshot_lsn": "pg_lsn", "applied_lsn": "pg_lsn",
    "error_code": "text", "error_class": "text", "error_message": "text", "retry_at": "timestamptz",
    "consecutive_failures": "int", "rows_synced": "bigint", "queued_changes": "bigint",
    "queued_bytes": "bigint", "last_sync_at": "timestamptz", "lag_bytes": "bigint", "lag_seconds": "float8",
    "copy_rows": "bigint", "copy_bytes": "bigint", "copy_bytes_total": "bigint",
    "copy_started_at": "timestamptz", "copy_finished_at": "timestamptz", "parked_rows": "bigint",
    "parked_bytes": "bigint", "parked_since": "timestamptz",
    "verdict": "text", "verified_at": "timestamptz", "identical_at": "timestamptz", "differences": "bigint",
    "verify_note": "text",
}  # fmt: skip
_GROUP_TYPES = {
    "id": "bigint", "confirmed_flush_lsn": "pg_lsn", "last_sync_at": "timestamptz", "paused": "boolean",
    "staged_bytes": "bigint", "restarts": "int", "error_code": "text", "error_message": "text",
}  # fmt: skip
_READERS: dict[str, Callable[[Any], Any]] = {
    "pg_lsn": parse_lsn,
    "timestamptz": datetime.fromisoformat,
}


def _write(conn: Connection, statement: str, updates: Sequence[TableObservation | GroupObservation]) -> int:
    if not updates:
        return 0
    rows = json.dumps([_written(update) for update in updates])
    with registry_errors("write to the registry", conn):
        return conn.execute(statement.encode(), (rows,)).rowcount


def _written(update: TableObservation | GroupObservation) -> dict[str, Any]:
    types = _TABLE_TYPES if isinstance(update, TableObservation) else _GROUP_TYPES
    return {name: _write_value(types[name], getattr(update, name)) for name in types}


def _write_value(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "pg_lsn":
        return lsn_text(value)
    return value.isoformat() if kind == "timestamptz" else value


def _read_values(types: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for name, kind in types.items():
        value, reader = row[name], _READERS.get(kind)
        values[name] = value if value is None or reader is None else reader(value)
    return values


class _MalformedError(ValueError):
    """A column's value does not have the expected form."""


def _settings(values: Any) -> Settings:
    """Read the known settings; a newer registry may have more."""
    if not isinstance(values, dict):
        raise _MalformedError("settings")
    for name, default in asdict(Settings()).items():
        if name in values and type(values[name]) is not type(default):
            raise _MalformedError(f"the setting {name}")
    return Settings(**{field.name: values[field.name] for field in fields(Settings) if field.name in values})


def _table_row(row: dict[str, Any]) -> TableRow:
    seen = _read_values(_TABLE_TYPES, row)
    seen["state"] = SyncState(seen["state"])
    seen["error_class"] = seen["error_class"] and ErrorClass(seen["error_class"])
    return TableRow(
        id=row["id"],
        source=TableName(row["source_schema"], row["source_table"]),
        target=TableName(row["target_schema"], row["target_table"]),
        mode=row["mode"],
        source_column=row["source_column"],
        source_value=row["source_value"],
        copy=row["copy"],
        adopt=row["adopt"],
        options=row["options"],
        enabled=row["enabled"],
        settings=_settings(row["effective"]),
        created_by_file=row["created_by_file"],
        removed=row["removed_at"] is not None,
        drop_target=row["drop_target"],
        resync_requested=row["resync_requested"],
        retry_requested=row["retry_requested"],
        state_since=datetime.fromisoformat(row["state_since"]),
        observed=TableObservation(**seen),
    )


def _group_row(row: dict[str, Any], tables: tuple[TableRow, ...]) -> GroupRow:
    return GroupRow(
        id=row["id"],
        name=row["name"],
        publication=row["publication"],
        slot_name=row["slot_name"],
        capture=row["capture"],
        lake=row["lake"],
        enabled=row["enabled"],
        settings=_settings(row["effective"]),
        created_by_file=row["created_by_file"],
        removed=row["removed_at"] is not None,
        observed=GroupObservation(**_read_values(_GROUP_TYPES, row)),
        tables=tables,
    )


_READ = """
    select json_build_object('id', g.id, 'name', g.name, 'publication', g.publication, 'slot_name', g.slot_name,
                             'capture', g.capture, 'lake', g.lake, 'enabled', g.enabled,
                             'created_by_file', g.created_by_file, 'removed_at', g.removed_at),
           to_json(g)::text, coalesce((
        select json_agg(m order by m.removed_at is null, m.id)::text from (
            -- Of the names, which are there twice, the last counts: what the table is called now.
            select m.*, coalesce(n.nspname, m.source_schema) as source_schema,
                   coalesce(c.relname, m.source_table) as source_table, g.effective || m.settings as effective
            from aqueduck.table_mappings m
            left join pg_class c on c.oid = m.source_oid::oid
            left join pg_namespace n on n.oid = c.relnamespace
            where m.group_id = g.id
        ) m
    ), '[]')
    from (
        select g.*, d.settings || g.settings as effective
        from aqueduck.sync_groups g cross join (select aqueduck._global_settings() as settings) d
    ) g
    where %(lake)s::text is null or g.lake is null or g.lake = %(lake)s
    order by g.name
"""


_KEPT = ("source_oid", "confirmed_flush_lsn", "last_sync_at")


def _write_statement(table: str, types: dict[str, str], extra: str = "") -> str:
    names = [name for name in types if name != "id"]
    new = {name: f"coalesce(n.{name}, m.{name})" if name in _KEPT else f"n.{name}" for name in names}
    return f"""
        with n as materialized (
            select * from json_to_recordset(%s::json) n ({", ".join(f"{name} {kind}" for name, kind in types.items())})
        ), free as materialized (
            select m.id from aqueduck.{table} m join n on n.id = m.id
            where ({", ".join(f"m.{name}" for name in names)}) is distinct from ({", ".join(new.values())})
            for no key update of m skip locked
        )
        update aqueduck.{table} m set {extra}{", ".join(f"{name} = {new[name]}" for name in names)}
        from free join n on n.id = free.id where m.id = n.id
    """


_STATE_SINCE = "state_since = case when m.state = n.state then m.state_since else now() end, "
_WRITE_TABLES = _write_statement("table_mappings", _TABLE_TYPES, _STATE_SINCE)
_WRITE_GROUPS = _write_statement("sync_groups", _GROUP_TYPES)
