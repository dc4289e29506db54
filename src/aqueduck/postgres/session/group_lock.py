"""
One service per group: an advisory lock that lives as long as its connection.

It needs no registry, only the source database. A service that ends releases it: its connection closes, and if
its machine disappears the server notices within 30 s (`model.connections`). A pooler reuses sessions between
transactions: there each lock is held by a transaction that stays open, idle and without a snapshot.

Every role that may connect can take an advisory lock, so only locks of roles that could run a service count
(ADR 67). The upper half of a lock's number identifies the group. If a foreign role holds the group's own
number, the service takes another number with that upper half, and then checks whether another service holds
one.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import structlog
from psycopg.rows import class_row

from aqueduck.model.errors import AqueduckError, ServiceLockedError
from aqueduck.postgres.session.connection import connect, is_pooled, translate_errors

__all__ = [
    "GroupLocks",
    "group_runs",
    "lock_group",
    "lock_key",
    "try_lock_group",
    "unlock_group",
]

log = structlog.get_logger()

Connection = psycopg.Connection[Any]

PATIENCE_SECONDS = 2.0


def lock_key(name: str) -> int:
    """The lock's number, the same on every machine; equals `aqueduck._lock_key`."""
    return int.from_bytes(hashlib.sha256(f"aqueduck.group:{name}".encode()).digest()[:8], "big", signed=True)


@dataclass(frozen=True, slots=True)
class _Holder:
    """Another holder of a lock of the group."""

    pid: int | None
    """`None` for a prepared transaction."""
    role: str | None
    address: str | None
    """`None` if we may not see it."""
    is_service: bool

    def __str__(self) -> str:
        if self.pid is None:
            return "a prepared transaction"
        come = "" if self.address is None else f", from {self.address}"
        return f"process {self.pid} of the server, role {self.role}{come}"


def try_lock_group(conn: Connection, name: str) -> bool:
    """Lock the group for the lifetime of `conn`; `False` if another service holds it."""
    if _claim(conn, name, "pg_try_advisory_lock"):
        return True
    unlock_group(conn, name)
    return False


def _claim(conn: Connection, name: str, function: LiteralString) -> bool:
    """
    Take a lock, then check: of two services that do so at once, at least the later one sees the other.

    A refused service must release the lock that it took.
    """
    key = lock_key(name)
    with translate_errors(f"lock the group {name}", conn=conn):
        taken = _try(conn, key, function)
        others = _holders(conn, name)
        if not taken and not _services(others):
            taken = _try(conn, _other_key(key), function)
            strangers, others = others, _holders(conn, name)
            if taken and not _services(others):
                _warn(name, strangers)
    return taken and not _services(others)


def _try(conn: Connection, key: int, function: LiteralString) -> bool:
    row = conn.execute(f"select {function}(%s)", (key,)).fetchone()
    assert row is not None
    return bool(row[0])


def _other_key(key: int) -> int:
    """A random number of the same group that cannot have been taken in advance: there are 2^32."""
    return key >> 32 << 32 | secrets.randbits(32)


def _holders(conn: Connection, name: str) -> list[_Holder]:
    """All others that hold a lock of the group."""
    # Without this, the transaction would reuse the list of sessions from its first query.
    conn.execute("select pg_stat_clear_snapshot()")
    with conn.cursor(row_factory=class_row(_Holder)) as cursor:
        return cursor.execute(_HOLDERS, {"key": lock_key(name)}).fetchall()


def _services(holders: Sequence[_Holder]) -> list[_Holder]:
    return [holder for holder in holders if holder.is_service]


def _warn(name: str, strangers: Sequence[_Holder]) -> None:
    pids = sorted({holder.pid for holder in strangers if holder.pid is not None})
    log.warning(
        "the group's lock is held by a role that may not replicate and so is no service; it is disregarded",
        group=name,
        holders=sorted({str(holder) for holder in strangers}),
        hint="; ".join(f"select pg_terminate_backend({pid})" for pid in pids),
    )


class GroupLocks:
    """The groups that one service holds."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._names: set[str] = set()
        self._shared = connect(dsn, application_name="aqueduck lock")
        self._pooled = is_pooled(self._shared)
        self._own: dict[str, Connection] = {}

    def take(self, name: str) -> None:
        """
        Lock a group; raises `ServiceLockedError` if another service holds it. A group that we hold is
        accepted.
        """
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
            if not _within_patience(lambda: _claim_in_transaction(conn, name)):
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
        """Raise if a connection was lost, and its locks with it: another service may have held them since."""
        with translate_errors("keep the groups' locks"):
            for conn in (self._shared, *self._own.values()):
                conn.execute("select 1")

    def keep(self) -> None:
        """Retake locks that were lost with a connection, unless another service was faster."""
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
                self._names = names  # a later call tries them again
                self._disconnect()
                raise

    def close(self) -> None:
        self._disconnect()
        self._names.clear()

    def _disconnect(self) -> None:
        for conn in (self._shared, *self._own.values()):
            _end(conn)
        self._own.clear()


def _claim_in_transaction(conn: Connection, name: str) -> bool:
    with translate_errors(f"lock the group {name}", conn=conn):
        conn.execute("set local idle_in_transaction_session_timeout = 0")
    if _claim(conn, name, "pg_try_advisory_xact_lock"):
        return True
    conn.rollback()
    return False


def _end(conn: Connection) -> None:
    with contextlib.suppress(psycopg.Error):
        conn.execute("rollback")
    conn.close()


def lock_group(conn: Connection, name: str) -> None:
    """Lock the group, or raise `ServiceLockedError` that names the holder."""
    if not _within_patience(lambda: try_lock_group(conn, name)):
        raise _locked(conn, name)


def _within_patience(taken: Callable[[], bool]) -> bool:
    """Retry for a moment: the server needs time to notice that a service has ended and to release its locks."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not taken():
        if time.monotonic() > deadline:
            return False
        time.sleep(
            random.uniform(0.02, 0.08)
        )  # jitter, so that two services do not refuse each other in lockstep
    return True


def _locked(conn: Connection, name: str) -> ServiceLockedError:
    with translate_errors(f"look who runs the group {name}", conn=conn):
        services = _services(_holders(conn, name))
    return ServiceLockedError(
        f"another service already runs the group {name}" + "".join(f" ({holder})" for holder in services[:1]),
        hint="stop that service, or leave out the group here; the lock goes with the service that has it",
    )


def group_runs(conn: Connection, name: str) -> bool:
    """Whether any service holds the group."""
    with translate_errors(f"look who runs the group {name}", conn=conn):
        return bool(_services(_holders(conn, name)))


def unlock_group(conn: Connection, name: str) -> None:
    """Release the group; does nothing if it is not held."""
    with translate_errors(f"unlock the group {name}", conn=conn):
        conn.execute(_UNLOCK, {"key": lock_key(name)})


_OF_THE_GROUP: LiteralString = """
    l.locktype = 'advisory' and l.objsubid = 1 and l.granted
        and l.database = (select oid from pg_database where datname = current_database())
        and l.classid::int8 = (%(key)s::int8 >> 32 & 4294967295)
"""
# Our own role counts as a role that runs services, even if it lacks a privilege that the server requires.
_HOLDERS: LiteralString = f"""
    select l.pid, a.usename::text as role,
        case when a.backend_start is not null then coalesce(host(a.client_addr), 'the same machine') end as address,
        coalesce(r.rolname = session_user or r.rolsuper or r.rolreplication or exists (
            select from pg_roles m where m.rolname = 'rds_replication' and pg_has_role(r.oid, m.oid, 'usage')), false)
            as is_service
    from pg_locks l left join pg_stat_activity a on a.pid = l.pid left join pg_roles r on r.oid = a.usesysid
    where l.pid is distinct from pg_backend_pid() and {_OF_THE_GROUP}
"""
_UNLOCK: LiteralString = f"""
    select pg_advisory_unlock(l.classid::int8 << 32 | l.objid::int8) from pg_locks l
    where l.pid = pg_backend_pid() and {_OF_THE_GROUP}
"""
