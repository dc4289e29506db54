"""
The registry: what is to be synced and how far it is, in the schema `aqueduck` of the source.

`reconcile_file` writes a configuration file into it, `call` and `rows_of` are the SQL functions of
docs/sql-api.md for Python, `listen` and `wait_for_notice` report calls by other sessions.
Tables and functions come from `registry_install`, what the service reads and writes all the time is
in `registry_rows`, its lock in `group_lock`; all of it can be imported from here.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import psycopg
from psycopg.rows import dict_row

from aqueduck.config.sections import Section
from aqueduck.config.sync import GroupConfig, SyncConfig, TableConfig
from aqueduck.model.errors import ConfigError
from aqueduck.postgres.registry.registry_install import (
    change,
    check_registry,
    exists,
    install,
    manage_grants,
    monitor_grants,
    registry_errors,
)
from aqueduck.postgres.registry.registry_rows import (
    GroupObservation,
    GroupRow,
    Settings,
    TableObservation,
    TableRow,
    claim_group,
    delete_removed,
    lake_of,
    read_desired,
    write_group_observed,
    write_observed,
)
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.group_lock import lock_group, try_lock_group, unlock_group
from aqueduck.postgres.session.quoting import identifier

__all__ = [
    "GroupObservation",
    "GroupRow",
    "Settings",
    "TableObservation",
    "TableRow",
    "call",
    "check_registry",
    "claim_group",
    "delete_removed",
    "emit_heartbeat",
    "exists",
    "install",
    "lake_of",
    "listen",
    "lock_group",
    "manage_grants",
    "monitor_grants",
    "read_desired",
    "reconcile_file",
    "rows_of",
    "try_lock_group",
    "unlock_group",
    "wait_for_notice",
    "write_group_observed",
    "write_observed",
]

CHANNEL = "aqueduck"

Connection = psycopg.Connection[Any]


# -- The configuration file


def reconcile_file(conn: Connection, config: SyncConfig) -> bool:
    """
    Apply a configuration file to the registry; returns whether anything changed.

    Groups and tables in the file are created or updated; those that an earlier version of the file created
    and that are no longer in it are marked as removed. Entries made by SQL, and everything of other lakes,
    are left alone. A table that does not exist is accepted: its error affects only that table.
    """
    file = {"lake": config.lake.data_path, "groups": [_group(config, group) for group in config.groups]}
    _refuse_unstorable("the configuration file", file)
    with change("write the configuration file into the registry", conn):
        row = conn.execute("select aqueduck._reconcile(%s::jsonb)", (json.dumps(file),)).fetchone()
    assert row is not None
    return bool(row[0])


def _group(config: SyncConfig, group: GroupConfig) -> dict[str, Any]:
    return {
        "name": group.name,
        "publication": group.publication,
        "slot_name": group.slot_name,
        "capture": group.capture,
        "settings": {**_settings(config.lake), **_settings(group)},
        "tables": [_table(table) for table in group.tables],
    }


def _table(table: TableConfig) -> dict[str, Any]:
    source, target = table.source_table, table.target_table
    return {
        "source_schema": source.schema,
        "source_table": source.name,
        "target_schema": target.schema,
        "target_table": target.name,
        "mode": table.mode,
        "source_column": table.table_mode.source_column,
        "source_value": table.table_mode.source_value,
        "copy": table.initial_copy,
        "adopt": table.adopt,
        "options": table.options,
        "settings": _settings(table),
    }


def _settings(section: Section) -> dict[str, Any]:
    """Only the settings in the file: the others come from the levels above."""
    known = {field.name for field in fields(Settings)}
    return {name: getattr(section, name) for name in sorted(section.model_fields_set & known)}


# -- The SQL functions


def call(conn: Connection, function: str, **arguments: Any) -> Any:
    """Call one of the functions of docs/sql-api.md, such as `call(conn, "add_table", source="orders")`."""
    for name, value in arguments.items():
        _refuse_unstorable(name, value)
    named = ", ".join(f"{identifier(name)} => %({name})s" for name in arguments)
    with registry_errors(f"call aqueduck.{function}", conn):
        query = f"select aqueduck.{identifier(function)}({named})"
        row = conn.execute(query.encode(), arguments).fetchone()
    assert row is not None
    return row[0]


def _refuse_unstorable(name: str, value: Any) -> None:
    """Refuse values before PostgreSQL does, whose error names neither the argument nor the fix."""
    if name == "options":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError("options is not JSON", hint='such as {"exclude": ["notes"]}') from None
    try:
        storable = _storable(value)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None
    if not storable:
        raise ConfigError(
            f"{name} has a character or a number that PostgreSQL cannot hold",
            hint="leave out zero bytes, halves of surrogate pairs, NaN and Infinity",
        )


def _storable(value: Any) -> bool:
    if isinstance(value, str):
        return "\x00" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_storable(key) and _storable(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_storable, value))


def emit_heartbeat(conn: Connection) -> None:
    """Write a message to WAL that appears in the stream and has no effect."""
    with translate_errors("write a heartbeat", conn=conn):
        conn.execute("select pg_logical_emit_message(true, 'aqueduck', 'heartbeat')")


def rows_of(conn: Connection, function: str) -> list[dict[str, Any]]:
    """The rows of `status`, `groups`, `tables` or `list_settings`."""
    with registry_errors(f"call aqueduck.{function}", conn), conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(f"select * from aqueduck.{identifier(function)}()".encode()).fetchall()


# -- Notices


def listen(conn: Connection) -> None:
    """Subscribe this connection to changes of the desired configuration."""
    with translate_errors("listen to the registry", conn=conn):
        conn.execute(f"listen {identifier(CHANNEL)}".encode())


def wait_for_notice(conn: Connection, timeout: float) -> bool:
    """
    Wait for the next change, at most `timeout` seconds; several at once count as one.

    A pooler may swallow notices: also read without one, only less often.
    """
    with translate_errors("wait for the registry", conn=conn):
        if not list(conn.notifies(timeout=timeout, stop_after=1)):
            return False
        list(conn.notifies(timeout=0))  # further notices that are already there
    return True
