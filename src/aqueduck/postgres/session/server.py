"""
A PostgreSQL server's properties: settings, identity, position, and the role's privileges.

`read_server` reads them once; the callers decide what follows. The stream reports positions continuously;
`flushed_position` is for code without a stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import dict_row

from aqueduck.model.errors import SourceQueryError, WalLevelError
from aqueduck.model.schema import parse_lsn
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.failures import SET_WAL_LEVEL, THEN_RESTART

__all__ = [
    "ServerInfo",
    "flush_wal",
    "flushed_position",
    "read_server",
    "require_logical_wal",
    "settled_position",
]

_FLUSH_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One reading of a server, as one role sees it."""

    version_num: int
    """180004 for 18.4."""
    wal_level: str
    system_identifier: str
    """The cluster's identity, the same on its standbys."""
    timeline: int
    max_replication_slots: int
    slots_used: int
    max_wal_senders: int
    wal_senders_used: int
    current_lsn: int
    """How far WAL has been written (replayed, on a standby)."""
    in_recovery: bool
    database: str
    role: str
    has_replication: bool
    """Whether the role may create and read slots."""
    can_create_in_db: bool
    """Whether the role may create publications."""
    restart_pending: bool = False
    """Whether another `wal_level` is set, which the server takes at its next restart."""


def read_server(conn: psycopg.Connection[Any]) -> ServerInfo:
    """Read everything in one statement, which every role may run."""
    with (
        translate_errors("read the server's settings", conn=conn),
        conn.cursor(row_factory=dict_row) as cursor,
    ):
        row = cursor.execute(_QUERY).fetchone()
        assert row is not None
        pending = row["wal_level"] != "logical" and _wal_level_is_pending(conn)
    return ServerInfo(**{**row, "current_lsn": parse_lsn(row["current_lsn"]), "restart_pending": pending})


def _wal_level_is_pending(conn: psycopg.Connection[Any]) -> bool:
    """
    Whether another wal_level is in the server's files.

    Every role sees it once the server has read its files again; before that, only a role that may read them.
    """
    pending, may_look = _row(conn, _PENDING)
    return bool(pending or (may_look and _row(conn, _WRITTEN)[0]))


def _row(conn: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return tuple(row)


def require_logical_wal(server: ServerInfo) -> None:
    """Refuse a server whose WAL lacks the information for logical decoding."""
    if server.wal_level != "logical" and server.restart_pending:
        raise WalLevelError(
            f"wal_level is {server.wal_level}; another value is set, restart pending",
            hint="restart the server",
        )
    if server.wal_level != "logical":
        raise WalLevelError(
            f"wal_level is {server.wal_level}, not logical", hint=SET_WAL_LEVEL + THEN_RESTART
        )


def flushed_position(dsn: str) -> int:
    """
    A position after every transaction that has committed by now, which the stream will reach.

    Without synchronous_commit, the WAL of a commit is flushed a moment later, and only flushed WAL is
    streamed: wait for that.
    """
    with connect(dsn) as conn, translate_errors("read the server's position", conn=conn):
        written = _lsn(conn, "pg_current_wal_insert_lsn()")
        deadline = time.monotonic() + _FLUSH_SECONDS_MAX
        while (flushed := _lsn(conn, "pg_current_wal_flush_lsn()")) < written:
            # WAL of an open transaction may stay unflushed for longer; it does not matter here.
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    return flushed


def flush_wal(dsn: str) -> None:
    """Commit a small message, so that everything written before it is flushed, and decoded soon."""
    with connect(dsn) as conn, translate_errors("write a message to WAL", conn=conn):
        _write_message(conn)


def settled_position(
    dsn: str, *, seconds: float = 600.0, given_up: Callable[[], bool] = lambda: False
) -> int:
    """A position by which every transaction that is open now has ended; raises if they do not end in time."""
    with connect(dsn) as conn, translate_errors("wait for open transactions", conn=conn):
        horizon = next_transaction(conn)
        deadline = time.monotonic() + seconds
        while not have_ended(conn, horizon):
            if time.monotonic() > deadline or given_up():
                raise SourceQueryError("transactions that were open did not end in time")
            time.sleep(0.1)
        position = _lsn(conn, "pg_current_wal_insert_lsn()")
        _write_message(conn)
    return position


def next_transaction(conn: psycopg.Connection[Any]) -> str:
    """A transaction id after all that are open now."""
    with translate_errors("look at open transactions", conn=conn):
        row = conn.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    assert row is not None
    return str(row[0])


def have_ended(conn: psycopg.Connection[Any], before: str) -> bool:
    """Whether every transaction with a lower id has ended."""
    with translate_errors("look at open transactions", conn=conn):
        row = conn.execute("select pg_snapshot_xmin(pg_current_snapshot()) >= %s::xid8", (before,)).fetchone()
    return row == (True,)


def _write_message(conn: psycopg.Connection[Any]) -> None:
    with conn.transaction():
        # Do not wait for standbys, even if the server's settings ask for it.
        conn.execute("set local synchronous_commit = local")
        conn.execute("select pg_logical_emit_message(true, 'aqueduck', 'flush')")


def _lsn(conn: psycopg.Connection[Any], function: str) -> int:
    row = conn.execute(f"select {function}::text".encode()).fetchone()
    assert row is not None
    return parse_lsn(row[0])


# Amazon RDS has a role of its own instead of the attribute REPLICATION.
_QUERY = """
    select current_setting('server_version_num')::int as version_num,
           current_setting('wal_level') as wal_level,
           (select system_identifier::text from pg_control_system()) as system_identifier,
           case when pg_is_in_recovery() then (select timeline_id from pg_control_checkpoint())
                else ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int end as timeline,
           current_setting('max_replication_slots')::int as max_replication_slots,
           (select count(*)::int from pg_replication_slots) as slots_used,
           current_setting('max_wal_senders')::int as max_wal_senders,
           (select count(*)::int from pg_stat_replication) as wal_senders_used,
           case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end::text
               as current_lsn,
           pg_is_in_recovery() as in_recovery,
           current_database()::text as database,
           current_user::text as role,
           r.rolsuper or r.rolreplication or exists (
               select from pg_roles m where m.rolname = 'rds_replication' and pg_has_role(m.oid, 'usage')
           ) as has_replication,
           has_database_privilege(current_database(), 'create') as can_create_in_db
    from pg_roles r where r.rolname = current_user
"""

_PENDING = """
    select (select pending_restart from pg_settings where name = 'wal_level'),
           has_table_privilege('pg_file_settings', 'select')
           and has_function_privilege('pg_show_all_file_settings()', 'execute')
"""

# The last value counts.
_WRITTEN = """
    select coalesce((select setting = 'logical' from pg_file_settings where name = 'wal_level'
                     order by seqno desc limit 1), false)
"""
