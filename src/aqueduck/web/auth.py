"""
Who may ask for what: the token, and the names under which the server answers.

Changing anything needs the token, and without one nothing can be changed.  Reading needs it too unless the server is
bound to a loopback address; there, only requests for a loopback name are answered, so that a web page
elsewhere cannot read along through a name of its own that points here.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from aqueduck.config import ServerConfig
from aqueduck.errors import BadRequestError, ConfigError, ReadOnlyError, TokenError

__all__ = ["Guard", "make_guard"]

TOKEN_LENGTH_MIN = 16
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server."""

    token: str | None = field(repr=False)
    variable: str | None
    is_loopback: bool
    host: str = "127.0.0.1"

    def check_host(self, host: str) -> None:
        """Refuse names that are not ours, where we know which ones are."""
        if self.is_loopback and _without_port(host) not in {*_LOOPBACK_NAMES, self.host.strip("[]").lower()}:
            raise BadRequestError(
                "this server answers under a loopback name only",
                hint="ask http://127.0.0.1 or http://localhost",
            )

    def check(self, authorization: str | None, *, changes: bool) -> None:
        """Refuse what the sender may not do; a token that is sent has to be right in any case."""
        if self.token is None:
            if changes:
                raise ReadOnlyError(
                    "nothing can be changed over HTTP, because the server has no token",
                    hint="set server.token_env and restart, or use SQL or the command line",
                )
            return
        if authorization is None and self.is_loopback and not changes:
            return
        if not self.accepts(authorization):
            what = "a wrong token" if authorization else "no token"
            raise TokenError(
                f"the request has {what}",
                hint=f"send the header Authorization: Bearer, with the value of {self.variable}",
            )

    def accepts(self, authorization: str | None) -> bool:
        """Whether the header holds the token; takes the same time whatever is wrong with it."""
        scheme, _, given = (authorization or "").partition(" ")
        expected = (self.token or "").encode()
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), expected)
        return same and bool(expected) and scheme.lower() == "bearer"


def make_guard(server: ServerConfig, env: Mapping[str, str]) -> Guard:
    """The rules that the configuration asks for; the token comes from the environment."""
    token = None
    if server.token_env is not None:
        token = env.get(server.token_env, "")
        if len(token) < TOKEN_LENGTH_MIN or not token.isascii() or any(c.isspace() for c in token):
            raise ConfigError(
                f"server.token_env: the variable {server.token_env} must hold at least {TOKEN_LENGTH_MIN} "
                "characters, without spaces",
                hint=f"export {server.token_env}=$(openssl rand -hex 32)",
            )
    return Guard(token, server.token_env, server.is_loopback, server.host)


def _without_port(host: str) -> str:
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
