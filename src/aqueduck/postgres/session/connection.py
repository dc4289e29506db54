"""
Connections to PostgreSQL, and the one boundary where its errors become ours.

`connect` opens SQL connections from any libpq string, `translate_errors` goes around what is
done with them.  What an error means is decided by `failures`.  The replication protocol is
in `wire`.
Each has the guards of `model.connections`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from aqueduck.model.connections import CLIENT_END, SET_LOCAL_GUARDS, guard_session, login_demands
from aqueduck.model.errors import AqueduckError, ConfigError, ConnectionLostError
from aqueduck.postgres.session.failures import classify_connect_failure, classify_server_error, may_show

__all__ = [
    "classify_connect_failure",
    "connect",
    "connection_parameters",
    "is_pooled",
    "options_of",
    "refuse_gss_encryption",
    "translate_errors",
]

_CONNECT_FAILURES = ("connection failed", "connection is bad", "connection timeout", "failed to resolve")


def connect(
    dsn: str, *, application_name: str = "aqueduck", autocommit: bool = True, **keywords: Any
) -> psycopg.Connection[Any]:
    """
    Connect with a libpq string of either form, keywords or URI.

    What the string says wins over our defaults, but for the encoding: what we read is UTF-8.
    Statements are not prepared behind the scenes, so that poolers which share server connections work.  Both ends
    notice a peer that vanished (`model.connections`), the server's end only where the session is ours.
    """
    given = connection_parameters(dsn)
    refuse_gss_encryption(given)
    defaults = {
        **CLIENT_END,
        **login_demands(given),
        "application_name": application_name,
        "prepare_threshold": None,
    }
    missing = {name: value for name, value in defaults.items() if name not in given}
    try:
        conn = _Guarded.connect(dsn, autocommit=True, client_encoding="UTF8", **{**missing, **keywords})
    except psycopg.Error as exc:
        # Not as a cause: it repeats the host, which in a mistyped URI is a part of the password.
        raise classify_connect_failure(str(exc), role=given.get("user")) from None
    try:
        conn.guard(options_of(given))
        conn.autocommit = autocommit
    except BaseException:
        conn.close()
        raise
    return conn


class _GuardedCursor(psycopg.Cursor[Any]):
    """
    A cursor that sets the guards at the start of each transaction through a pooler; elsewhere the session has
    them.
    """

    def execute(self, query: Any, params: Any = None, **keywords: Any) -> _GuardedCursor:
        conn = cast("_Guarded", self.connection)
        if not conn.is_shared or conn.info.transaction_status != TransactionStatus.IDLE:
            return super().execute(query, params, **keywords)
        if not conn.autocommit:
            super().execute(SET_LOCAL_GUARDS.encode())
            return super().execute(query, params, **keywords)
        with conn.transaction():
            return super().execute(query, params, **keywords)


class _Guarded(psycopg.Connection[Any]):
    """A connection on which no statement of ours runs without the guards."""

    is_shared = False
    """Whether a pooler may give each transaction another server connection."""

    def guard(self, options: str) -> None:
        with translate_errors("set up the connection", conn=self):
            guarded = self.execute(guard_session(self.info.backend_pid, options).encode()).fetchone()
        if guarded is None:
            self.is_shared = True
            self.cursor_factory = _GuardedCursor

    @contextlib.contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if self.is_shared:
                self.execute(SET_LOCAL_GUARDS.encode())
            yield transaction


def refuse_gss_encryption(given: Mapping[str, Any]) -> None:
    """Refuse GSSAPI encryption: bulk readers take over the socket, so their data would be sent unencrypted."""
    if (given.get("gssencmode") or os.environ.get("PGGSSENCMODE")) == "require":
        raise ConfigError(
            "gssencmode=require is not supported: the connection would not be encrypted",
            hint="encrypt with TLS: take gssencmode out of the connection string and the environment, and set"
            " sslmode=verify-full",
        )


def options_of(given: Mapping[str, Any]) -> str:
    """The server options that the connection's keywords, or else the environment, set."""
    return str(given.get("options") or os.environ.get("PGOPTIONS", ""))


def is_pooled(conn: psycopg.Connection[Any]) -> bool:
    """
    Whether a pooler is between us and the server, which may give each transaction another server connection.

    A pooler returns a process number of its own when we connect.
    """
    return isinstance(conn, _Guarded) and conn.is_shared


@contextlib.contextmanager
def translate_errors(
    what: str,
    table: str | None = None,
    *,
    conn: psycopg.Connection[Any] | None = None,
    fix: str | None = None,
) -> Iterator[None]:
    """
    Turn psycopg's errors into ours; `what` follows "cannot", such as "create the slot s".

    `conn` names the role in the statement that would grant a missing right; `fix` is that
    statement where the caller knows better.  Misuse of psycopg is a bug and passes through.
    """
    try:
        yield
    except psycopg.Error as exc:
        role = _role(conn)
        error = _translated(exc, what, table, role, fix)
        if error is None:
            raise
        # A cause is printed with its DETAIL, which quotes rows.
        raise error from (exc if may_show(exc.sqlstate, exc.diag.message_detail) else None)


def _translated(
    exc: psycopg.Error, what: str, table: str | None, role: str | None, fix: str | None
) -> AqueduckError | None:
    if exc.sqlstate is not None:
        message = exc.diag.message_primary or ""
        hint = exc.diag.message_hint if may_show(exc.sqlstate, exc.diag.message_detail) else None
        return classify_server_error(
            exc.sqlstate, message, what=what, table=table, role=role, fix=fix, hint=hint
        )
    if str(exc).startswith(_CONNECT_FAILURES):
        return classify_connect_failure(str(exc), role=role)
    if isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError):
        return ConnectionLostError(f"cannot {what}: the connection to PostgreSQL was lost", table=table)
    return None


def _role(conn: psycopg.Connection[Any] | None) -> str | None:
    if conn is None or conn.closed:
        return None
    return conn.info.user


def connection_parameters(dsn: str) -> dict[str, Any]:
    """The keywords of a connection string of either form."""
    try:
        return conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq quotes the part that it cannot parse, which may be the password.
        raise ConfigError(
            "the connection string is not valid",
            hint="write host=… port=… dbname=… user=… or postgresql://user@host:port/dbname; "
            "in a URI, special characters of the password are written as %40 and so on",
        ) from None
