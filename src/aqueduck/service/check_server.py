"""
The preflight of a PostgreSQL server for every flow that reads one, and the result type of all checks.

`sync.check`, `events.check` and `fanout.check` add the requirements of each flow.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec

import psycopg

from aqueduck.model.errors import AqueduckError, PrivilegeError, SourceQueryError, SourceUnreachableError
from aqueduck.postgres.session.connection import connect, is_pooled
from aqueduck.postgres.session.quoting import identifier
from aqueduck.postgres.session.server import ServerInfo, require_logical_wal

__all__ = [
    "CheckResult",
    "Connection",
    "check_pooler",
    "encryption",
    "encryption_of",
    "refused",
    "result_of",
    "server_checks",
]

OLDEST_VERSION = 14

Connection = psycopg.Connection[Any]
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One requirement: what was found, and how to fix it if it fails or could be better."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None
    error: AqueduckError | None = None


def result_of(name: str, check: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> CheckResult:
    """The finding of a check, or the error that it raised."""
    try:
        return CheckResult(name, True, check(*args, **kwargs))
    except AqueduckError as exc:
        return refused(name, exc)


def refused(name: str, exc: AqueduckError) -> CheckResult:
    """A requirement that is not met, with its fix."""
    return CheckResult(name, False, exc.message, exc.hint, exc)


def server_checks(server: ServerInfo, dsn: str, captures: Collection[str]) -> Iterator[CheckResult]:
    """The requirements of every flow, on a server that answers."""
    yield CheckResult("connection", True, f"database {server.database} as {server.role}")
    yield result_of("server version", _check_version, server)
    yield result_of("wal_level", _check_wal_level, server)
    yield result_of("replication", _check_replication, server, dsn, captures)


def _check_version(server: ServerInfo) -> str:
    version = f"{server.version_num // 10000}.{server.version_num % 10000}"
    if server.version_num < OLDEST_VERSION * 10000:
        raise SourceQueryError(
            f"PostgreSQL {version} is too old", hint=f"upgrade the server to {OLDEST_VERSION} or later"
        )
    if server.in_recovery:
        raise SourceQueryError(
            "the server is a standby, where no publication can be made",
            hint="let the connection string name the primary, or add target_session_attrs=read-write",
        )
    return f"PostgreSQL {version}"


def _check_wal_level(server: ServerInfo) -> str:
    require_logical_wal(server)
    return server.wal_level


def _check_replication(server: ServerInfo, dsn: str, captures: Collection[str]) -> str:
    if not server.has_replication:
        raise PrivilegeError(
            f"the role {server.role} may not replicate",
            hint=f"alter role {identifier(server.role)} replication",
        )
    if set(captures) == {"poll"}:
        return f"{server.role} may use slots; no replication connection is needed to poll"
    connect(dsn, replication="database").close()  # pg_hba.conf may still refuse it
    return f"{server.role} may replicate"


def encryption_of(conn: Connection) -> CheckResult:
    """
    How the connection to the server is encrypted; an unencrypted one to another machine is a note, not a
    failure.
    """
    return encryption(conn.pgconn.ssl_in_use, conn.info.hostaddr)


def encryption(encrypted: bool, address: str) -> CheckResult:
    """`address` is empty for a Unix socket."""
    if encrypted:
        return CheckResult(
            "encryption", True, "TLS; sslmode=verify-full also makes sure which server answers"
        )
    if not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return CheckResult("encryption", True, "none: the server is on this machine")
    return CheckResult(
        "encryption",
        True,
        f"NONE: rows and, depending on the server, the password cross the network to {address} in clear",
        "let the server have ssl = on, and set sslmode=verify-full and sslrootcert in the connection string",
    )


def check_pooler(conn: Connection, captures: Collection[str]) -> str:
    """Whether the connection supports what the captures need: poolers do not support everything."""
    if not is_pooled(conn):
        return "none: the connection is the server's own"
    if set(captures) != {"poll"}:
        raise SourceUnreachableError(
            "the connection goes through a pooler, which has no replication connections",
            hint="set capture: poll, or let the connection string name the server itself",
        )
    return "polls through a pooler: steps peek, and each lock and copy keeps one of its connections"
