"""
Authorization: the tokens, and the host names that the server answers to.

Every change needs a token with the scope `operate`; without such a token nothing can be changed. Reading also
needs a token unless the server is bound to a loopback address; there, only requests for a loopback name are
answered, so that another web page cannot read the data through its own DNS name for this address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aqueduck.config.server import ServerConfig
from aqueduck.model.errors import BadRequestError, ReadOnlyError, ScopeError, TokenError
from aqueduck.web.tokens import Token, find_token, read_tokens

__all__ = ["Guard", "make_guard"]

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Guard:
    """The access rules of one server."""

    tokens: tuple[Token, ...] = field(repr=False)
    is_loopback: bool
    host: str = "127.0.0.1"

    @property
    def can_change(self) -> bool:
        """Whether any token permits changes."""
        return any(token.scope == "operate" for token in self.tokens)

    def check_host(self, host: str) -> None:
        """Refuse host names that are not ours, if ours are known."""
        if self.is_loopback and _without_port(host) not in {*_LOOPBACK_NAMES, self.host.strip("[]").lower()}:
            raise BadRequestError(
                "this server answers under a loopback name only",
                hint="ask http://127.0.0.1 or http://localhost",
            )

    def check(self, authorization: str | None, *, changes: bool) -> str | None:
        """
        Refuse what the sender may not do; returns the name of the token. A token that is sent must be valid
        in any case.
        """
        if changes and not self.can_change:
            raise ReadOnlyError(
                "nothing can be changed over HTTP, because the server has no token that permits it",
                hint="set server.token_env and restart, or use SQL or the command line",
            )
        if not self.tokens or (authorization is None and self.is_loopback and not changes):
            return None
        token = find_token(self.tokens, authorization)
        if token is None:
            what = "a wrong token" if authorization else "no token"
            raise TokenError(
                f"the request has {what}",
                hint="send the header Authorization: Bearer, with a token of the section server",
            )
        if changes and token.scope != "operate":
            raise ScopeError(
                f"the token {token.name} may only read",
                hint="send a token whose scope is operate",
            )
        return token.name

    def may_read(self, authorization: str | None) -> bool:
        """Whether `check` still permits reading; a token in a file may have been revoked since."""
        try:
            self.check(authorization, changes=False)
        except TokenError:
            return False
        return True

    def accepts(self, authorization: str | None) -> bool:
        """Whether the header contains one of the tokens."""
        return find_token(self.tokens, authorization) is not None


def make_guard(server: ServerConfig, env: Mapping[str, str]) -> Guard:
    """The rules from the configuration; raises if a token is missing or weak."""
    return Guard(read_tokens(server, env), server.is_loopback, server.host)


def _without_port(host: str) -> str:
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
