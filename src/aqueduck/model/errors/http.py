"""Errors of the HTTP server and its API; each knows the status of its answer."""

from __future__ import annotations

from typing import ClassVar

from aqueduck.model.errors.base import AqueduckError

__all__ = [
    "BadRequestError",
    "HttpError",
    "MethodError",
    "NotFoundError",
    "ReadOnlyError",
    "ScopeError",
    "ServerStartError",
    "TokenError",
]


class HttpError(AqueduckError):
    """The family of errors about the HTTP server; never raised directly."""

    status: ClassVar[int] = 500
    """The status of the answer."""


class ServerStartError(HttpError):
    """The HTTP server cannot listen on its address."""

    code = "http.start"


class BadRequestError(HttpError):
    """A request is malformed."""

    code = "http.request"
    status = 400


class TokenError(HttpError):
    """A request needs the server's token and has none, or an invalid one."""

    code = "http.token"
    status = 401


class ReadOnlyError(HttpError):
    """A request would change something, and the server has no token that permits it."""

    code = "http.read_only"
    status = 403


class ScopeError(HttpError):
    """A request would change something, and its token is read-only."""

    code = "http.scope"
    status = 403


class NotFoundError(HttpError):
    """The address does not exist."""

    code = "http.not_found"
    status = 404


class MethodError(HttpError):
    """The address does not support the method."""

    code = "http.method"
    status = 405
