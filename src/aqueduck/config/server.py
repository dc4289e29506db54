"""The section `server` of all flows: where the page, the API and the metrics listen, and who may use them."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from aqueduck.config.object_store import VariableName
from aqueduck.config.sections import Section, Text, absolute

__all__ = ["ServerConfig", "TokenConfig", "TokenScope"]

TokenScope = Literal["read", "operate"]


class TokenConfig(Section):
    """One token of the HTTP server; it never holds the token itself."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$")]
    """The name of the token in the log."""
    scope: TokenScope = "read"
    """`operate` also permits changes."""
    token_env: VariableName | None = None
    token_file: Text | None = None

    @model_validator(mode="after")
    def _has_one_place(self) -> TokenConfig:
        if (self.token_env is None) == (self.token_file is None):
            raise ValueError("needs either token_env or token_file")
        return self


class ServerConfig(Section):
    """Where the page, the API and the metrics listen, and who may use them."""

    enabled: bool = True
    host: Text = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65535)
    token_env: VariableName | None = None
    """The name of the variable that holds the token; never the token itself."""
    token_file: Text | None = None
    """A file that holds the token instead; it is re-read when it changes."""
    tokens: tuple[TokenConfig, ...] = ()
    """More tokens, such as a read-only one for Prometheus."""
    tls_cert: Text | None = None
    tls_key: Text | None = None
    stall_seconds: int = Field(default=120, ge=1, le=86_400)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def has_token(self) -> bool:
        return bool(self.token_env or self.token_file or self.tokens)

    @model_validator(mode="after")
    def _is_whole_and_safe(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("needs both tls_cert and tls_key, or neither")
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("needs either token_env or token_file, not both")
        names = [token.name for token in self.tokens]
        if len(set(names)) < len(names):
            raise ValueError("two tokens have the same name")
        if self.enabled and not self.is_loopback and not self.has_token:
            raise ValueError("host is not a loopback address, so token_env is needed")
        return self

    def with_absolute_paths(self, base_dir: Path) -> ServerConfig:
        paths = {key: getattr(self, key) for key in ("token_file", "tls_cert", "tls_key")}
        update: dict[str, Any] = {key: absolute(path, base_dir) for key, path in paths.items() if path}
        update["tokens"] = tuple(
            token.model_copy(update={"token_file": absolute(token.token_file, base_dir)})
            if token.token_file
            else token
            for token in self.tokens
        )
        return self.model_copy(update=update)
