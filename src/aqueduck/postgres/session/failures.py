"""
What PostgreSQL's errors mean: pure functions from SQLSTATE and message to our errors.

A server's primary message names tables, roles and settings and is shown; DETAIL, and primary
messages of the classes that quote data, are not.  libpq gives no SQLSTATE for a connection
that failed, so the text of the message distinguishes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from aqueduck.model.connections import LET_SCRAM
from aqueduck.model.errors import (
    AqueduckError,
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    PrivilegeError,
    PublicationError,
    RowSecurityError,
    SlotActiveError,
    SlotConflictError,
    SlotLimitError,
    SlotLostError,
    SourceQueryError,
    SourceUnreachableError,
    TableMissingError,
    WalLevelError,
)
from aqueduck.model.schema import parse_table_name
from aqueduck.postgres.session.quoting import identifier, table_identifier

__all__ = [
    "RAISE_SLOTS",
    "RAISE_WALSENDERS",
    "SET_WAL_LEVEL",
    "THEN_RESTART",
    "classify_connect_failure",
    "classify_server_error",
    "may_show",
    "privilege_fix",
]

SET_WAL_LEVEL = "alter system set wal_level = 'logical'"
RAISE_SLOTS = "alter system set max_replication_slots = {}"
RAISE_WALSENDERS = "alter system set max_wal_senders = {}"
THEN_RESTART = "; -- then restart the server"

_RIGHTS = {"schema": "usage", "database": "create", "function": "execute"}
_QUOTES_DATA = ("22", "P0")  # classes whose primary message holds values: data exceptions, raise
_LOST = ("08", "57P01", "57P02", "57P03", "57P04", "57P05")

_PLACE = re.compile(r'connection to server at "([\w.:%-]+)".{0,60}?, port (\d+) failed')
_HOST = re.compile(r"""(?:resolve host|host name) ['"]([\w.-]+)['"]""")
_SOCKET = re.compile(r'connection to server on socket "([^"]+)" failed')
_SEVERITY = re.compile(r"^[^\W\d_]+:\s+")


def may_show(sqlstate: str | None, detail: str | None) -> bool:
    """Whether an error's own text contains no data, so that it may be printed as a cause."""
    return not detail and not (sqlstate or "").startswith(_QUOTES_DATA)


def classify_connect_failure(message: str, *, role: str | None = None) -> AqueduckError:
    """Translate libpq's error about a failed connection attempt."""
    reason, place = _reason(message), _place(message)
    for words, make in _CONNECT_RULES:
        if words.search(message):
            return make(reason, place, identifier(role) if role else "<role>")
    return SourceUnreachableError(
        f"cannot reach the PostgreSQL server{place}: {reason}",
        hint="check host and port of the connection string, and that the server is running",
    )


def classify_server_error(
    sqlstate: str,
    message: str,
    *,
    what: str,
    table: str | None = None,
    role: str | None = None,
    fix: str | None = None,
    hint: str | None = None,
) -> AqueduckError:
    """A server's ErrorResponse as one of ours; `message` is its primary message, `hint` its HINT where we have no better one."""
    text = f"cannot {what}: {message}"
    if sqlstate.startswith(_LOST):
        return ConnectionLostError(text, table=table)
    match sqlstate:
        case "42501" if "row-level security" in message:
            hint = f"alter role {identifier(role) if role else '<role>'} bypassrls"
            return RowSecurityError(text, hint=hint, table=table)
        case "42501":
            hint = fix or privilege_fix(message, role, table) or "grant the role this right"
            return PrivilegeError(text, hint=hint, table=table)
        case "42P01" | "3F000":
            return TableMissingError(text, hint="correct the name under tables, or create it", table=table)
        case "55006":
            hint = "stop the other reader of the slot, or wait until it has let go"
            return SlotActiveError(text, hint=hint, table=table)
        case "53400":
            return SlotLimitError(text, hint=RAISE_SLOTS.format("<more>") + THEN_RESTART, table=table)
        case "28000" | "28P01":
            return AuthenticationError(text, hint=_CHECK_LOGIN, table=table)
        case "53300":
            return SourceUnreachableError(text, hint=_MORE_CONNECTIONS, table=table)
        case "55000" if "wal_level" in message:
            return WalLevelError(text, hint=SET_WAL_LEVEL + THEN_RESTART, table=table)
    return _about_objects(sqlstate, message, text, table) or _query_error(
        sqlstate, message, what, table, hint
    )


def privilege_fix(message: str, role: str | None, table: str | None = None) -> str | None:
    """The statement that grants the right which a "permission denied" or "must be owner" error names."""
    to = identifier(role) if role else "<role>"
    if re.search(r"replication slots|WAL sender|replication role", message):
        return f"alter role {to} replication"
    if found := re.match(r"must be owner of (table|relation|publication) (.+)", message):
        kind = "publication" if found[1] == "publication" else "table"
        name = _quoted_table(table) if table and kind == "table" else identifier(found[2])
        return f"alter {kind} {name} owner to {to}"
    if found := re.match(r"permission denied for (table|schema|database|function) (.+)", message):
        if found[1] == "table":
            return f"grant select on {_quoted_table(table or found[2])} to {to}"
        return f"grant {_RIGHTS[found[1]]} on {found[1]} {identifier(found[2])} to {to}"
    return None


def _about_objects(sqlstate: str, message: str, text: str, table: str | None) -> AqueduckError | None:
    """Errors that differ by the kind of object they name."""
    if sqlstate in ("42704", "55000") and "replication slot" in message:
        hint = "run: aqueduck check; the tables need a new copy, as changes since then are gone"
        return SlotLostError(text, hint=hint, table=table)
    if sqlstate in ("42704", "22023", "55000") and "snapshot" in message:
        # An exported snapshot cannot be dropped: it ends with the connection that exported it.
        return ConnectionLostError(text, table=table)
    if sqlstate == "42710" and "replication slot" in message:
        return SlotConflictError(text, hint="choose another slot_name, or drop that slot", table=table)
    if sqlstate in ("42704", "42710", "55000", "22023") and "publication" in message:
        hint = "run: aqueduck init; only ordinary and partitioned, logged tables can be published"
        return PublicationError(text, hint=hint, table=table)
    return None


def _query_error(
    sqlstate: str, message: str, what: str, table: str | None, hint: str | None
) -> SourceQueryError:
    said = "" if sqlstate.startswith(_QUOTES_DATA) else f"{message} "
    return SourceQueryError(f"cannot {what}: {said}(SQLSTATE {sqlstate})", table=table, hint=hint)


def _quoted_table(table: str) -> str:
    try:
        return table_identifier(parse_table_name(table, default_schema="public", fold_case=False))
    except ValueError:  # a name for people, whose parts would need quotes
        return identifier(*table.split(".", 1))


# -- Connections that could not be made: the words, and what they mean

_CHECK_LOGIN = "check user and password of the connection string, and pg_hba.conf on the server"
_MORE_CONNECTIONS = "close other connections or raise max_connections on the server"


def _not_valid(reason: str, place: str, role: str) -> AqueduckError:
    # Without the reason: libpq quotes the text that it cannot parse, which may be part of a password.
    hint = "check its numbers, such as port and connect_timeout, and words such as sslmode"
    return ConfigError("a value in the connection string is not valid", hint=hint)


def _no_option(reason: str, place: str, role: str) -> AqueduckError:
    return ConfigError(
        f"the PostgreSQL server{place} does not take the connection string: {reason}",
        hint="correct options in the connection string",
    )


def _no_service(reason: str, place: str, role: str) -> AqueduckError:
    return ConfigError(
        reason, hint="correct service in the connection string, or the file PGSERVICEFILE names"
    )


def _other_kind(reason: str, place: str, role: str) -> AqueduckError:
    return SourceUnreachableError(
        f"the PostgreSQL server{place} is not what target_session_attrs asks for: {reason}",
        hint="name the primary among the hosts, and set target_session_attrs=read-write",
    )


def _no_tls(reason: str, place: str, role: str) -> AqueduckError:
    return ConfigError(
        f"no TLS with the PostgreSQL server{place}: {reason}",
        hint="set sslmode, and for verify-ca or verify-full sslrootcert, as the server requires it",
    )


def _no_database(reason: str, place: str, role: str) -> AqueduckError:
    return ConfigError(f"{reason} on the server{place}", hint="correct dbname in the connection string")


def _no_walsender(reason: str, place: str, role: str) -> AqueduckError:
    return SlotLimitError(reason, hint=RAISE_WALSENDERS.format("<more>") + THEN_RESTART)


def _no_connection(reason: str, place: str, role: str) -> AqueduckError:
    return SourceUnreachableError(f"the PostgreSQL server{place} is full: {reason}", hint=_MORE_CONNECTIONS)


def _no_replication(reason: str, place: str, role: str) -> AqueduckError:
    return PrivilegeError(reason, hint=f"alter role {role} replication")


def _no_login(reason: str, place: str, role: str) -> AqueduckError:
    return AuthenticationError(f"the PostgreSQL server{place} refused the login: {reason}", hint=_CHECK_LOGIN)


def _no_proof(reason: str, place: str, role: str) -> AqueduckError:
    return AuthenticationError(f"the PostgreSQL server{place} got no password: {reason}", hint=LET_SCRAM)


_LOGIN_REFUSED = (
    r"authentication failed|no password supplied|pg_hba\.conf|not permitted to log in"
    r'|role "[^"]*" does not exist|valid client certificate|SASL|SCRAM'
)
_CONNECT_RULES: tuple[tuple[re.Pattern[str], Callable[[str, str, str], AqueduckError]], ...] = (
    (re.compile(r'unrecognized configuration parameter|invalid value for parameter "'), _no_option),
    (
        re.compile(r"invalid \S+ value|invalid (integer|port)|bad value for|Servname not supported"),
        _not_valid,
    ),
    (re.compile(r"definition of service|service file"), _no_service),
    (re.compile(r"in hot standby mode|session is (not )?read-only"), _other_kind),
    (re.compile("authentication method requirement"), _no_proof),
    (re.compile(_LOGIN_REFUSED), _no_login),
    (re.compile(r"does not support SSL|certificate|signature failure|sslmode|tlsv1\S* alert"), _no_tls),
    (re.compile(r'database "[^"]*" does not exist'), _no_database),
    (re.compile(r"max_wal_senders"), _no_walsender),
    (re.compile(r"too many (clients|connections)|remaining connection slots"), _no_connection),
    (re.compile(r"start WAL sender|replication role"), _no_replication),
)


def _reason(message: str) -> str:
    """The first cause in libpq's message, without its preamble and without DETAIL."""
    line = (message.strip().splitlines() or ["no reason given"])[0]
    line = re.split(r"\bfailed: |connection is bad: |\[Errno -?\d+\] | to address: ", line)[-1]
    return _SEVERITY.sub("", line).strip() or "no reason given"


def _place(message: str) -> str:
    if found := _PLACE.search(message):
        return f" at {found[1]}:{found[2]}"
    if found := _SOCKET.search(message):
        return f" at {found[1]}"
    # An unescaped "@" in the password of a URI makes the rest of it a part of the host: not shown.
    return f" at {found[1]}" if (found := _HOST.search(message)) else ""
