"""
The HTTP application: routes, checks, errors as JSON, the stream of events, the files of the page.

What the operations under `/api/v1` do is in `operations`, who may call them in `auth`.  Every answer that is
not a page file or metrics is JSON; an error is `{"error": {"code", "message", "hint"}}`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

import structlog
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aqueduck import __version__, metrics
from aqueduck.errors import (
    AqueduckError,
    BadRequestError,
    HttpError,
    MethodError,
    NotFoundError,
    ReadOnlyError,
    ScopeError,
    TokenError,
    own_error,
)
from aqueduck.overview import to_plain
from aqueduck.web import answers
from aqueduck.web.audit import Audit
from aqueduck.web.auth import Guard
from aqueduck.web.openapi import openapi_document
from aqueduck.web.operations import OPERATIONS, PREFIX, Operation, Served, readiness

__all__ = ["make_app"]

log = structlog.get_logger()

BODY_BYTES_MAX = 64 << 10
EVENT_BYTES_PER_SECOND = 250_000
"""To one listener; where thousands of rows change all the time, updates are larger and fewer."""
STATUSES = {
    "config.invalid": 422,
    "pg.no_key": 422,
    "pg.table_missing": 404,
    "pg.privilege": 403,
    "pg.unreachable": 503,
    "pg.connection_lost": 503,
}
"""Of answers to requests that the registry refused; errors of HTTP itself know theirs."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(served: Served, guard: Guard) -> Starlette:
    """The application for one service."""
    by_path: dict[str, dict[str, Endpoint]] = defaultdict(dict)
    audit = Audit()
    for operation in OPERATIONS:
        by_path[PREFIX + operation.path.replace("{source}", "{source:path}")][operation.method] = _endpoint(
            operation, served, audit
        )
    document = openapi_document(__version__)
    by_path[f"{PREFIX}/openapi.json"]["GET"] = lambda _: _done(JSONResponse(document))
    by_path[f"{PREFIX}/events"]["GET"] = lambda request: _done(_events(served, guard, request))
    by_path["/metrics"]["GET"] = lambda request: run_in_threadpool(_metrics, served, request)
    # A longer address first: the name of a table may hold slashes.
    paths = sorted(by_path, key=lambda path: (-path.count("/"), path))
    routes = [_route(path, by_path[path], guard, audit) for path in paths]
    free: dict[str, Endpoint] = {
        "/healthz": lambda _: _done(_healthz(served)),
        "/readyz": lambda request: _done(_readyz(served, guard, request)),
        **_page(),
    }
    routes += [_route(path, {"GET": endpoint}, guard, audit, free=True) for path, endpoint in free.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_routed})
    app.router.redirect_slashes = False
    return app


def _route(
    path: str, methods: dict[str, Endpoint], guard: Guard, audit: Audit, *, free: bool = False
) -> Route:
    """All methods of one address, with what every answer has; `free` ones need no token."""
    allowed = sorted({*methods, "HEAD"} if "GET" in methods else methods)

    async def answer(request: Request) -> Response:
        try:
            guard.check_host(request.headers.get("host", ""))
            method = "GET" if request.method == "HEAD" else request.method
            if method not in methods:
                raise MethodError(f"{request.method} is not possible here", hint=f"use {', '.join(allowed)}")
            if not free:
                request.state.token = guard.check(
                    request.headers.get("authorization"), changes=method != "GET"
                )
            response = await methods[method](request)
        except ClientDisconnect:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the answer is JSON and holds no foreign text
            error = own_error(exc)
            response = _error(error)
            if isinstance(error, TokenError | ScopeError | ReadOnlyError):
                audit.refusal(_client(request), error.code, request.method, path)
            if response.status_code == 405:
                response.headers["allow"] = ", ".join(allowed)
        response.headers.update(HEADERS)
        return response

    methods_of_http = [
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "QUERY",
    ]
    return Route(path, answer, methods=methods_of_http)


async def _done(response: Response) -> Response:
    return response


# -- operations


def _endpoint(operation: Operation, served: Served, audit: Audit) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        params = _params(operation, request)
        body = await _body(operation, request)
        result = await run_in_threadpool(operation.run, served, params, body)
        if operation.changes:
            audit.change(
                _client(request), request.state.token, operation.method, operation.path, _names(params, body)
            )
        return Response(
            json.dumps(to_plain(result), default=str), operation.status, media_type="application/json"
        )

    return endpoint


def _client(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _names(*models: Any) -> dict[str, Any]:
    """What a request is about, for the log."""
    found = {key: value for model in models if model is not None for key, value in model if value is not None}
    return {key: found[key] for key in ("name", "source", "group") if key in found}


def _params(operation: Operation, request: Request) -> Any:
    given = {**request.query_params, **request.path_params}
    if operation.params is None:
        if given:
            raise BadRequestError(f"unknown parameter {_shown(next(iter(given)))}", hint="this takes none")
        return None
    try:
        return operation.params.model_validate(given)
    except ValidationError as exc:
        raise _bad(exc, "parameter") from None


async def _body(operation: Operation, request: Request) -> Any:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_BYTES_MAX:
            raise BadRequestError(f"the body has more than {BODY_BYTES_MAX} bytes")
    if operation.body is None:
        if data.strip() not in (b"", b"{}"):
            raise BadRequestError("this takes no body", hint=f"see {PREFIX}/openapi.json")
        return None
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequestError("the body must be JSON", hint="send the header Content-Type: application/json")
    try:
        return operation.body.model_validate_json(data)
    except ValidationError as exc:
        raise _bad(exc, "field") from None


def _bad(exc: ValidationError, what: str) -> BadRequestError:
    problems = [_problem(p, what) for p in exc.errors(include_url=False, include_input=False)]
    return BadRequestError("; ".join(problems[:5]), hint=f"see {PREFIX}/openapi.json")


def _problem(problem: ErrorDetails, what: str) -> str:
    place = _shown(problem["loc"][0]) if problem["loc"] else ""
    match problem["type"]:
        case "json_invalid":
            return "the body is not valid JSON"
        case "missing":
            return f"the {what} {place} is missing"
        case "extra_forbidden":
            return f"unknown {what} {place}"
    text = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{place}: {text}" if place else text


def _shown(name: object) -> str:
    """A name that somebody sent, short and printable."""
    return "".join(c if c.isprintable() else "?" for c in str(name)[:60])


# -- errors


def _error(error: AqueduckError) -> JSONResponse:
    status = error.status if isinstance(error, HttpError) else STATUSES.get(error.code, 500)
    if status >= 500:
        log.warning("request failed", error=str(error))
    body = answers.ErrorBody(code=error.code, message=error.message, hint=error.hint)
    response = JSONResponse(to_plain(answers.ErrorAnswer(error=body)), status)
    if status == 401:
        response.headers["www-authenticate"] = 'Bearer realm="aqueduck"'
    return response


async def _not_routed(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        response = _error(MethodError("this method is not known"))
    else:
        response = _error(
            NotFoundError("there is nothing at this address", hint=f"see {PREFIX}/openapi.json")
        )
    response.headers.update(HEADERS)
    return response


# -- probes, metrics, events, the page


def _healthz(served: Served) -> Response:
    """Red when a flow has stopped to turn; what it is about is in the log, and names are no secret."""
    stuck = served.feed.stuck()
    health = answers.Health(status="stuck" if stuck else "ok", version=__version__, stuck=stuck)
    return JSONResponse(to_plain(health), 503 if stuck else 200)


def _readyz(served: Served, guard: Guard, request: Request) -> Response:
    """Green or red for everybody; what is stalled only for those who may read."""
    found = to_plain(readiness(served))
    authorization = request.headers.get("authorization")
    if not guard.is_loopback and not guard.accepts(authorization):
        found = {"ready": found["ready"], "stalled": [], "errored": []}
    return JSONResponse(found, 200 if found["ready"] else 503)


def _metrics(served: Served, request: Request) -> Response:
    ready = not served.feed.stalled()
    content, kind = metrics.scrape(served.overview, ready=ready, accept=request.headers.get("accept", ""))
    return Response(content, headers={"content-type": kind})


def _events(served: Served, guard: Guard, request: Request) -> Response:
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return StreamingResponse(_follow(served, guard.can_change), media_type="text/event-stream")


async def _follow(served: Served, may_change: bool) -> AsyncIterator[str]:
    """Everything at first, then what changes; a comment now and then, so that a dead line is noticed."""
    feed, seq, sent, pause = served.feed, 0, 0.0, 0.0
    while not feed.stopping:
        if feed.seq > seq and time.monotonic() >= sent + pause:
            update = {"may_change": may_change, **await run_in_threadpool(feed.since, seq)}
            text = json.dumps(update, separators=(",", ":"))
            seq, sent, pause = update["seq"], time.monotonic(), len(text) / EVENT_BYTES_PER_SECOND
            yield f"id: {seq}\nevent: update\ndata: {text}\n\n"
        elif time.monotonic() - sent > 5:
            sent = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(min(0.2, feed.interval / 2))


def _page() -> dict[str, Endpoint]:
    """The files of the page, read once; they hold no data and need no token."""
    found: dict[str, Endpoint] = {}
    for file in resources.files("aqueduck.web").joinpath("page").iterdir():
        kind = PAGE_TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            address = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[address] = _file(content, kind)
    return found


def _file(content: bytes, kind: str) -> Endpoint:
    return lambda _: _done(Response(content, headers={"content-type": kind}))
