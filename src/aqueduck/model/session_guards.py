"""
What every session of ours with PostgreSQL has, whatever the connection string, the role or the database say.

It sees the schema `pg_catalog` alone, so that nobody's function or operator in another schema runs as us; and it reads
a table whole or not at all: with `row_security` off, PostgreSQL refuses a query that a policy would thin (ADR 62).
"""

from __future__ import annotations

from aqueduck.model.keepalive import server_end

__all__ = ["GUARDS", "SET_LOCAL_GUARDS", "guard_session", "with_search_path"]

GUARDS = {"search_path": "pg_catalog", "row_security": "off"}

SET_LOCAL_GUARDS = "; ".join(f"set local {name} = {value}" for name, value in GUARDS.items())
"""For one transaction: through a pooler, the next one may be in another session."""

_SET = ", ".join(f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in GUARDS.items())


def guard_session(backend_pid: int, options: str = "") -> str:
    """
    The statement that gives a session its guards, and has a row if it did; the server then also notices when we vanish (`links`).

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
