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
    """The family of errors about the HTTP server; never raised itself."""

    status: ClassVar[int] = 500
    """Of the answer."""


class ServerStartError(HttpError):
    """The HTTP server cannot listen where it should."""

    code = "http.start"


class BadRequestError(HttpError):
    """A request that does not make sense as it stands."""

    code = "http.request"
    status = 400


class TokenError(HttpError):
    """A request needs the server's token and has none, or a wrong one."""

    code = "http.token"
    status = 401


class ReadOnlyError(HttpError):
    """A request wants to change something, and the server has no token that would permit it."""

    code = "http.read_only"
    status = 403


class ScopeError(HttpError):
    """A request wants to change something, and its token may only read."""

    code = "http.scope"
    status = 403


class NotFoundError(HttpError):
    """There is nothing at this address."""

    code = "http.not_found"
    status = 404


class MethodError(HttpError):
    """What is at this address does not take this method."""

    code = "http.method"
    status = 405
