"""
What FastAPI does not do for an operation: strict JSON, limits on the body, plain answers and the audit.

FastAPI validates what `Operation` has read, calls the endpoint and describes both in the OpenAPI document.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json

from aqueduck.model.errors import AqueduckError, BadRequestError
from aqueduck.overview.values import to_plain
from aqueduck.web.answers import ErrorAnswer

__all__ = ["PREFIX", "Operation", "client", "operation_id", "printable"]

PREFIX = "/api/v1"
BODY_BYTES_MAX = 64 << 10

_Note = Callable[[dict[str, Any], str | None], None]
_noted: ContextVar[_Note | None] = ContextVar("noted", default=None)
"""Writes the log line of the change that this request makes: what it is about, and the code of its error."""

_VERBS = {"GET": "read", "POST": "do", "PUT": "set", "DELETE": "delete"}


class Operation(APIRoute):
    """A route whose endpoint gives a plain value; each attempt to change something is written to the log."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        self.changes = settings["methods"] != ["GET"]
        settings |= {
            "strict_content_type": False,
            "response_description": "Done",
            "responses": {"default": {"model": ErrorAnswer, "description": "An error"}},
            # An empty requirement: no token is needed where the server is bound to a loopback address.
            "openapi_extra": {"security": [{"token": []}] if self.changes else [{}, {"token": []}]},
        }
        super().__init__(path, _plain(endpoint, settings["status_code"] or 200), **settings)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if self.changes:
                _noted.set(functools.partial(self._note, request))
            return await handle(await self._read(request))

        return answer

    def _note(self, request: Request, names: dict[str, Any], error: str | None) -> None:
        shown = self.path_format.removeprefix(PREFIX)
        token = request.state.token
        request.app.state.audit.change(client(request), token, request.method, shown, names, error)

    async def _read(self, request: Request) -> Request:
        if request.query_params and not self.dependant.query_params:
            unknown = printable(next(iter(request.query_params)))
            raise BadRequestError(f"unknown parameter {unknown}", hint="this takes none")
        read = _ReadRequest(request.scope, request.receive)
        data = await read.body()
        if self.body_field is not None:
            read.parsed = _parsed(data, request.headers.get("content-type", "application/json"))
        elif data.strip() not in (b"", b"{}"):
            raise BadRequestError("this takes no body", hint=f"see {PREFIX}/openapi.json")
        return read


class _ReadRequest(Request):
    """A request whose body is bounded, and is parsed before FastAPI asks for it."""

    parsed: Any = None

    async def stream(self) -> Any:
        size = 0
        async for chunk in super().stream():
            size += len(chunk)
            if size > BODY_BYTES_MAX:
                raise BadRequestError(f"the body has more than {BODY_BYTES_MAX} bytes")
            yield chunk

    async def json(self) -> Any:
        return self.parsed


def _parsed(data: bytes, kind: str) -> dict[str, Any]:
    """The body as FastAPI takes it; `from_json` refuses lone surrogates and what nests too deep."""
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise BadRequestError("the body must be JSON", hint="send the header Content-Type: application/json")
    try:
        parsed = from_json(data, allow_inf_nan=False)
    except ValueError:
        raise BadRequestError("the body is not valid JSON", hint=f"see {PREFIX}/openapi.json") from None
    if not isinstance(parsed, dict):
        raise BadRequestError("input should be an object", hint=f"see {PREFIX}/openapi.json")
    return parsed


def _plain(endpoint: Callable[..., Any], status: int) -> Callable[..., Response]:
    """
    Answers are written as `to_plain` has them: they are our own values, so FastAPI need not validate them.

    The log line is written here, in the thread that makes the change, which ends it even if the client is gone.
    """

    @functools.wraps(endpoint)
    def answer(**given: Any) -> Response:
        error: str | None = AqueduckError.code  # unless it is one of ours, it is a bug
        try:
            found = endpoint(**given)
            error = None
        except AqueduckError as exc:
            error = exc.code
            raise
        finally:
            if note := _noted.get():
                note(_names(given), error)
        return Response(json.dumps(to_plain(found), default=str), status, media_type="application/json")

    return answer


def _names(given: dict[str, Any]) -> dict[str, Any]:
    """What a request is about, for the log."""
    found = dict(given)
    for model in given.values():
        if isinstance(model, BaseModel):
            found |= dict(model)
    return {key: found[key] for key in ("name", "source", "group") if found.get(key) is not None}


def client(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def printable(name: object) -> str:
    """A name from a request, short and printable."""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:60])


def operation_id(route: APIRoute) -> str:
    """Such as `read_tables_source`, for generators of clients."""
    (verb,) = (_VERBS[method] for method in route.methods or ())
    return "_".join((verb, *re.findall(r"\w+", route.path_format.removeprefix(PREFIX))))
