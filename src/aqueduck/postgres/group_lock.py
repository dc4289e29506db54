"""
One service for a group at a time: an advisory lock that lives as long as its connection.

It needs no registry, only the source database.  A service that dies lets go of it: its
connection ends, and where its machine has vanished the server notices within 30 s (`links`).  A pooler gives sessions to
others between transactions: there each lock lives in a transaction that stays open, idle and without a snapshot.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Any, LiteralString

import psycopg

from aqueduck.errors import AqueduckError, ServiceLockedError
from aqueduck.postgres.connection import connect, is_pooled, translate_errors
from aqueduck.postgres.quoting import identifier

__all__ = [
    "GroupLocks",
    "group_runs",
    "lock_group",
    "lock_key",
    "try_lock_group",
    "unlock_group",
]

Connection = psycopg.Connection[Any]

PATIENCE_SECONDS = 2.0


def lock_key(name: str) -> int:
    """The lock's number, the same on every machine; as `aqueduck._lock_key` has it."""
    return int.from_bytes(hashlib.sha256(f"aqueduck.group:{name}".encode()).digest()[:8], "big", signed=True)


def try_lock_group(conn: Connection, name: str) -> bool:
    """Take the group for as long as `conn` lives; `False` if another connection has it."""
    return _try(conn, name, "pg_try_advisory_lock")


def _try(conn: Connection, name: str, function: LiteralString) -> bool:
    with translate_errors(f"lock the group {name}", conn=conn):
        row = conn.execute(f"select {function}(%s)", (lock_key(name),)).fetchone()
    assert row is not None
    return bool(row[0])


class GroupLocks:
    """The groups that one service has."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._names: set[str] = set()
        self._shared = connect(dsn, application_name="aqueduck lock")
        self._pooled = is_pooled(self._shared)
        self._own: dict[str, Connection] = {}

    def take(self, name: str) -> None:
        """Raises `ServiceLockedError` if another service has the group; one that we have is fine."""
        if name in self._names:
            return
        if self._pooled:
            self._own[name] = self._open(name)
        else:
            lock_group(self._shared, name)
        self._names.add(name)

    def _open(self, name: str) -> Connection:
        conn = connect(self._dsn, application_name="aqueduck lock", autocommit=False)
        try:
            with translate_errors(f"lock the group {name}", conn=conn):
                conn.execute("set local idle_in_transaction_session_timeout = 0")
            if not _within_patience(lambda: _try(conn, name, "pg_try_advisory_xact_lock")):
                raise _locked(conn, name)
        except BaseException:
            conn.close()
            raise
        return conn

    def has(self, name: str) -> bool:
        """Whether the group is ours, as far as we know."""
        return name in self._names

    def release(self, name: str) -> None:
        if name in self._names:
            self._names.discard(name)
            if self._pooled:
                _end(self._own.pop(name))
            else:
                unlock_group(self._shared, name)

    def check(self) -> None:
        """Raise if a connection was lost, and locks with it: another service may have had them since."""
        with translate_errors("keep the groups' locks"):
            for conn in (self._shared, *self._own.values()):
                conn.execute("select 1")

    def keep(self) -> None:
        """Locks went with a lost connection: take them again, unless another service was faster."""
        try:
            self.check()
        except AqueduckError:
            self._disconnect()
            self._shared = connect(self._dsn, application_name="aqueduck lock")
            names, self._names = self._names, set()
            try:
                for name in names:
                    self.take(name)
            except BaseException:
                self._names = names  # whoever asks again tries them again
                self._disconnect()
                raise

    def close(self) -> None:
        self._disconnect()
        self._names.clear()

    def _disconnect(self) -> None:
        for conn in (self._shared, *self._own.values()):
            _end(conn)
        self._own.clear()


def _end(conn: Connection) -> None:
    with contextlib.suppress(psycopg.Error):
        conn.execute("rollback")
    conn.close()


def lock_group(conn: Connection, name: str) -> None:
    """Take the group, or raise `ServiceLockedError` that says who has it."""
    if not _within_patience(lambda: try_lock_group(conn, name)):
        raise _locked(conn, name)


def _within_patience(taken: Callable[[], bool]) -> bool:
    """A service that has just ended leaves its locks when the server notices, which takes a moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not taken():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _locked(conn: Connection, name: str) -> ServiceLockedError:
    with translate_errors(f"look who runs the group {name}", conn=conn):
        row = conn.execute(_HOLDER, {"key": lock_key(name)}).fetchone()
    where = f" (process {row[0]} of the server, role {row[2]}, from {row[1]})" if row else ""
    if row is not None and not row[3]:  # anybody who may connect can take an advisory lock
        return ServiceLockedError(
            f"the role {row[2]}, which may not replicate and so is no service, holds the lock of the group {name}{where}",
            hint=f"select pg_terminate_backend({row[0]}); then keep that role out of the database:"
            f" revoke connect on database {identifier(conn.info.dbname)} from {identifier(str(row[2]))}",
        )
    return ServiceLockedError(
        f"another service already runs the group {name}{where}",
        hint="stop that service, or leave out the group here; the lock goes with the service that has it",
    )


def group_runs(conn: Connection, name: str) -> bool:
    """Whether any service has the group."""
    with translate_errors(f"look who runs the group {name}", conn=conn):
        return conn.execute(_HOLDER, {"key": lock_key(name)}).fetchone() is not None


def unlock_group(conn: Connection, name: str) -> None:
    """Let go of the group; one that is not held is fine."""
    with translate_errors(f"unlock the group {name}", conn=conn):
        conn.execute(
            "select pg_advisory_unlock(%(key)s) where exists (select from pg_locks "
            "where locktype = 'advisory' and pid = pg_backend_pid() and objsubid = 1 and granted "
            "and (classid::int8 << 32 | objid::int8) = %(key)s)",
            {"key": lock_key(name)},
        )


_HOLDER = """
    select l.pid, coalesce(host(a.client_addr), 'the same machine'), a.usename::text,
        coalesce(r.rolsuper or r.rolreplication or exists (
            select from pg_roles m where m.rolname = 'rds_replication' and pg_has_role(r.oid, m.oid, 'usage')), true)
    from pg_locks l left join pg_stat_activity a on a.pid = l.pid left join pg_roles r on r.oid = a.usesysid
    where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
        and l.database = (select oid from pg_database where datname = current_database())
        and (l.classid::int8 << 32 | l.objid::int8) = %(key)s
"""
