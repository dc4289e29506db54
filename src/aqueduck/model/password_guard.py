"""
What a PostgreSQL server has to do before it gets a password of ours: prove by SCRAM that it knows the password already.

Left alone, libpq sends a password in clear, or as an MD5 hash, to any server that asks for it so.  A connection string
or variable that names `require_auth` wins, and so does `sslmode=verify-full`, with which the server has proved its name.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["LET_SCRAM", "login_demands"]

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
