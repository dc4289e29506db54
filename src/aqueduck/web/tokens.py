"""
The tokens that a server accepts, and what each of them permits.

A token comes from a variable, read once, or from a file, which is read again when it changes: so a token is revoked or replaced
without a restart.  Tokens are compared in constant time and never shown; they are known by their names.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aqueduck.config.server import ServerConfig, TokenConfig, TokenScope
from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["Token", "find_token", "read_tokens"]

LENGTH_MIN = 16
SAMPLES = ("change-me", "changeme", "a-token-of", "your-token")
"""Beginnings of values in examples; these are refused as tokens."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token, known by its name."""

    name: str
    scope: TokenScope
    value: Callable[[], str | None] = field(repr=False)
    """None while there is none, because its file is away or wrong."""


def read_tokens(server: ServerConfig, env: Mapping[str, str]) -> tuple[Token, ...]:
    """The tokens of a server; raises if one of them is missing or weak."""
    tokens = list(server.tokens)
    if server.token_env is not None or server.token_file is not None:
        tokens.append(
            TokenConfig(
                name="token", scope="operate", token_env=server.token_env, token_file=server.token_file
            )
        )
    return tuple(_token(token, env) for token in tokens)


def find_token(tokens: tuple[Token, ...], authorization: str | None) -> Token | None:
    """The token that a header holds; all are compared, so that the time reveals nothing."""
    scheme, _, given = (authorization or "").partition(" ")
    sent = given.strip().encode("utf-8", "replace")
    found = None
    for token in tokens:
        expected = (token.value() or "").encode()
        if hmac.compare_digest(sent, expected) and expected and scheme.lower() == "bearer":
            found = token
    return found


def _token(config: TokenConfig, env: Mapping[str, str]) -> Token:
    if config.token_file is not None:
        file = _TokenFile(Path(config.token_file))
        refuse_weak(file.read(), f"the file {config.token_file}")
        return Token(config.name, config.scope, file.value)
    assert config.token_env is not None
    value = env.get(config.token_env, "")
    refuse_weak(value, f"the variable {config.token_env}", f"export {config.token_env}=")
    return Token(config.name, config.scope, lambda: value)


def refuse_weak(value: str, where: str, assign: str = "") -> None:
    """Raise if a value cannot be a token: too short, with spaces, or copied from an example."""
    hint = f"{assign}$(openssl rand -hex 32)" if assign else "openssl rand -hex 32 writes a good one"
    if len(value) < LENGTH_MIN or not value.isascii() or any(c.isspace() for c in value):
        raise ConfigError(
            f"{where} must hold a token of at least {LENGTH_MIN} characters, without spaces", hint=hint
        )
    if value.lower().startswith(SAMPLES):
        raise ConfigError(f"{where} holds a token from an example", hint=hint)


class _TokenFile:
    """A file with one token, which is read again only after the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._value: str | None = None

    def read(self) -> str:
        try:
            return self._path.read_text(encoding="ascii").strip()
        except UnicodeDecodeError:
            return ""
        except OSError as exc:
            raise ConfigError(f"the token file {self._path} cannot be read: {system_reason(exc)}") from None

    def value(self) -> str | None:
        """The token now; none if the file is away or holds no usable one."""
        try:
            status = self._path.stat()
        except OSError:
            self._seen = None
            return None
        now = (status.st_mtime_ns, status.st_size, status.st_ino)
        if now != self._seen:
            self._seen, self._value = now, None
            with contextlib.suppress(ConfigError):
                value = self.read()
                refuse_weak(value, "the file")
                self._value = value
        return self._value
