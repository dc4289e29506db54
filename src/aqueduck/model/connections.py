"""
What every connection of ours to PostgreSQL has, whatever the connection string, the role or the database say.

*Keepalives.*  Without them a system waits two hours before it asks whether the other side is still there, and a quarter of
an hour for an answer.  A connection string that names one of them wins.  Silence of a peer whose system still answers
is noticed by `postgres.capture.capture`, because the server says something when it is asked.

*Passwords.*  A server gets a password of ours only when it proves by SCRAM that it knows the password already.  Left alone,
libpq sends it in clear, or as an MD5 hash, to any server that asks.  A connection string or variable that names
`require_auth` wins, and so does `sslmode=verify-full`, with which the server has proved its name.

*Guards.*  A session sees the schema `pg_catalog` alone, so that no function or operator in another schema runs with our
rights.  It reads a table whole or not at all: with `row_security` off, PostgreSQL refuses a query that a policy would
restrict (ADR 62).
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
    "guard_session",
    "login_demands",
    "server_end",
    "with_search_path",
]

#: our end, as keywords of libpq: an idle peer is asked after 10 s and given up after 22
CLIENT_END: Mapping[str, int] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

#: the server's end, as its settings: with the connection go its locks, slots and transactions
SERVER_END: Mapping[str, str] = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "client_connection_check_interval": "5000",
}


def server_end(options: str) -> dict[str, str]:
    """What is set for a connection whose own `options` may name some of it."""
    return {name: value for name, value in SERVER_END.items() if name not in options}


LET_SCRAM = (
    "let the server ask for scram-sha-256 (in pg_hba.conf, with a password that was set with that encryption), or set"
    " sslmode=verify-full; require_auth in the connection string says otherwise (docs/security.md)"
)
"""The hint of an error about it."""


def login_demands(given: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Libpq's `require_auth` for a connection with these settings, if it has a password."""

    def setting(name: str, variable: str) -> str:
        return str(given.get(name) or env.get(variable, ""))

    has_password = setting("password", "PGPASSWORD")
    # A service of libpq's service file may have any setting, its own `require_auth` too.
    decided = setting("require_auth", "PGREQUIREAUTH") or setting("service", "PGSERVICE")
    if not has_password or decided or setting("sslmode", "PGSSLMODE") == "verify-full":
        return {}
    hosts = setting("hostaddr", "PGHOSTADDR") or setting("host", "PGHOST")
    # A server of this machine may need no password at all, as many on people's own machines do.
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
"""For one transaction: through a pooler, the next one may be in another session."""

_SET = ", ".join(f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in GUARDS.items())


def guard_session(backend_pid: int, options: str = "") -> str:
    """
    The statement that gives a session its guards, and has a row if it did. The server's keepalives are set as well.

    It has none where a pooler answers: whoever gets that server connection next would find them there.  All of it is
    qualified, because the session has no guards yet.
    """
    ends = "".join(f", {_set_end(name, value)}" for name, value in server_end(options).items())
    return f"select {_SET}{ends} where pg_catalog.pg_backend_pid() operator(pg_catalog.=) {backend_pid}"


def _set_end(name: str, value: str) -> str:
    """Only some systems can look for a client while a statement runs, and Linux is the one that always can."""
    statement = f"pg_catalog.set_config('{name}', '{value}', false)"
    if name != "client_connection_check_interval":
        return statement
    return f"case when pg_catalog.version() operator(pg_catalog.~~) '%linux%' then {statement} end"


def with_search_path(options: object = None) -> str:
    """Libpq's `options` with the search path behind what they say already, for DuckDB, which connects by itself."""
    return f"{options or ''} -c search_path={GUARDS['search_path']}".strip()
