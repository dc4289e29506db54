"""
Settings of every connection that we make to PostgreSQL, regardless of the connection string, the role or the
database.

*Keepalives.* Without them a system waits two hours before it probes an idle peer, and a quarter of an hour
for an answer. A connection string that sets one of them takes precedence. A hung peer whose system still
answers is detected by `postgres.capture.capture`, because a live server replies when asked.

*Passwords.* A server receives a password of ours only after it proves by SCRAM that it knows the password
already. By default, libpq sends it in clear, or as an MD5 hash, to any server that asks. A connection string
or variable that sets `require_auth` takes precedence, and so does `sslmode=verify-full`, which verifies the
server's name.

*Guards.* A session's search path is the schema `pg_catalog` alone, so that no function or operator of another
schema runs with our rights. It reads a table completely or not at all: with `row_security` off, PostgreSQL
refuses a query that a policy would restrict (ADR 62).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CLIENT_END",
    "GUARDS",
    "LET_SCRAM",
    "SERVER_END",
    "SET_LOCAL_GUARDS",
    "end_options",
    "guard_session",
    "login_demands",
    "server_end",
    "with_search_path",
]

# : our end, as libpq keywords: an idle peer is probed after 10 s and given up after 22
CLIENT_END: Mapping[str, int] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

# : the server's end, as server settings: its locks, slots and transactions end with the connection
SERVER_END: Mapping[str, str] = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "client_connection_check_interval": "5000",
}


def server_end(options: str) -> dict[str, str]:
    """Keepalive settings for the server's end, except those that the connection's own `options` set."""
    return {name: value for name, value in SERVER_END.items() if name not in options}


def end_options(options: str) -> list[str]:
    """
    The same as `options` of a connection's start.

    Not every system can check for a client during a statement, and a server that cannot would refuse the connection.
    """
    ends = server_end(options).items()
    return [f"-c {name}={value}" for name, value in ends if name != "client_connection_check_interval"]


LET_SCRAM = (
    "let the server ask for scram-sha-256 (in pg_hba.conf, with a password that was set with that encryption), or set"
    " sslmode=verify-full; require_auth in the connection string says otherwise (docs/security.md)"
)
"""The hint of an authentication error."""


def login_demands(given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Libpq's `require_auth` for a connection with these settings, if it has a password."""

    def setting(name: str, variable: str) -> str:
        return str(given.get(name) or env.get(variable, ""))

    has_password = setting("password", "PGPASSWORD")
    # A libpq service file may set anything, including `require_auth`.
    decided = setting("require_auth", "PGREQUIREAUTH") or setting("service", "PGSERVICE")
    if not has_password or decided or setting("sslmode", "PGSSLMODE") == "verify-full":
        return {}
    hosts = setting("hostaddr", "PGHOSTADDR") or setting("host", "PGHOST")
    # A local server may need no password, as many development machines do.
    here = all(map(_is_here, hosts.split(",")))
    return {"require_auth": "scram-sha-256,none" if here else "scram-sha-256"}


def _is_here(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


GUARDS = {"search_path": "pg_catalog", "row_security": "off"}

SET_LOCAL_GUARDS = "; ".join(f"set local {name} = {value}" for name, value in GUARDS.items())
"""Settings for one transaction: through a pooler, the next transaction may use another session."""

_SET = ", ".join(f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in GUARDS.items())


def guard_session(backend_pid: int, options: str = "") -> str:
    """
    The statement that sets a session's guards and the server's keepalives; it returns a row if it did.

    It returns none behind a pooler: the next client of that server connection would inherit the settings. All
    names are qualified, because the session has no guards yet.
    """
    ends = "".join(f", {_set_end(name, value)}" for name, value in server_end(options).items())
    return f"select {_SET}{ends} where pg_catalog.pg_backend_pid() operator(pg_catalog.=) {backend_pid}"


def _set_end(name: str, value: str) -> str:
    """Check for a disconnected client during a statement only on systems that can; Linux always can."""
    statement = f"pg_catalog.set_config('{name}', '{value}', false)"
    if name != "client_connection_check_interval":
        return statement
    return f"case when pg_catalog.version() operator(pg_catalog.~~) '%linux%' then {statement} end"


def with_search_path(options: object = None, *, ends: bool = True) -> str:
    """
    Libpq's `options` with the search path appended, for DuckDB, which opens its own connections; with `ends`,
    keepalives of the server's end too.
    """
    given = str(options or "")
    kept = end_options(given) if ends else []
    return " ".join((given, *kept, f"-c search_path={GUARDS['search_path']}")).strip()
