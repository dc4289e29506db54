"""
The HTTP application: access, errors as JSON, probes, metrics, the stream of events, the files of the page.

`operations` implements `/api/v1`, `auth` decides who may call it. Every answer except page files and metrics
is JSON; an error is `{"error": {"code", "message", "hint"}}`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aqueduck import __version__
from aqueduck.model.errors import (
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
from aqueduck.overview import metrics
from aqueduck.overview.values import to_plain
from aqueduck.web import answers
from aqueduck.web.audit import Audit
from aqueduck.web.auth import Guard
from aqueduck.web.operations import Now, Served, readiness, router
from aqueduck.web.routes import PREFIX, client, operation_id, printable

__all__ = ["make_app"]

log = structlog.get_logger()

EVENT_BYTES_PER_SECOND = 250_000
"""
Interval between updates to one listener; if thousands of rows change all the time, updates are larger and
fewer.
"""
STATUSES = {
    "config.invalid": 422,
    "pg.no_key": 422,
    "pg.table_missing": 404,
    "pg.privilege": 403,
    "pg.unreachable": 503,
    "pg.connection_lost": 503,
}
"""Status codes of requests that the registry refused; HTTP errors have their own."""
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

FREE = frozenset({"/", "/healthz", "/readyz"})
"""Addresses that need no token, besides the files of the page."""
DESCRIPTION = (
    "Status and control of a running service. Beside what is described here there are /metrics "
    "(Prometheus) and /api/v1/events (server-sent events for the page)."
)

probes = APIRouter(generate_unique_id_function=operation_id)


def make_app(served: Served, guard: Guard) -> FastAPI:
    """The application for one service."""
    app = FastAPI(
        title="Aqueduck",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=None,
        redirect_slashes=False,
        # FastAPI would send addresses and exception texts to a tracer in the process.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.exception_handlers.clear()  # `Door` answers exceptions
    app.state.served, app.state.guard, app.state.audit = served, guard, Audit()
    # Longer addresses first: a table name may contain slashes.
    routes = sorted(_routes(), key=lambda route: (-route.path.count("/"), route.path))
    app.router.routes += routes
    app.add_middleware(Door, routes=routes, guard=guard, audit=app.state.audit)
    return app


class Door:
    """
    Checks every request before FastAPI sees it, and answers every error in JSON.

    The first matching address decides, regardless of the method: DELETE of `/tables/x/retry` does not address
    a table `x/retry`.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route], guard: Guard, audit: Audit) -> None:
        self._app, self._guard, self._audit = app, guard, audit
        self._routes = routes
        self._methods: dict[str, set[str]] = defaultdict(set)
        for route in routes:
            self._methods[route.path] |= route.methods or set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        path = ""
        try:
            path = next((r.path for r in self._routes if r.path_regex.match(scope["path"])), "")
            await self._app(self._admitted(path, scope), receive, answer)
        except ClientDisconnect:
            raise
        except Exception as exc:
            if started:
                raise
            await self._refusal(exc, path, Request(scope))(scope, receive, answer)

    def _admitted(self, path: str, scope: Scope) -> Scope:
        """The request as FastAPI receives it; raises if it is not permitted."""
        if not path:
            raise NotFoundError("there is nothing at this address", hint=f"see {PREFIX}/openapi.json")
        request, method = Request(scope), scope["method"]
        try:
            self._guard.check_host(request.headers.get("host", ""))
        except BadRequestError as exc:
            self._audit.refusal(client(request), exc.code, method, path)
            raise
        if method not in self._allowed(path):
            hint = f"use {', '.join(self._allowed(path))}"
            raise MethodError(f"{printable(method)} is not possible here", hint=hint)
        if path not in FREE and not path.startswith("/page/"):
            changes = method not in ("GET", "HEAD")
            request.state.token = self._guard.check(request.headers.get("authorization"), changes=changes)
        # FastAPI's routes do not handle HEAD; the server omits the body of the answer.
        return {**scope, "method": "GET"} if method not in self._methods[path] else scope

    def _allowed(self, path: str) -> list[str]:
        methods = self._methods[path]
        return sorted({*methods, "HEAD"} if "GET" in methods else methods)

    def _refusal(self, exc: Exception, path: str, request: Request) -> Response:
        error = _bad(exc) if isinstance(exc, RequestValidationError) else own_error(exc)
        if isinstance(error, TokenError | ScopeError | ReadOnlyError):
            self._audit.refusal(client(request), error.code, request.method, path)
        response = _error(error)
        if isinstance(error, MethodError):
            response.headers["allow"] = ", ".join(self._allowed(path))
        return response


# -- errors


def _bad(exc: RequestValidationError) -> BadRequestError:
    # A missing parameter is None internally, but no client can send None.
    problems = [_problem(problem) for problem in exc.errors() if problem["type"] != "none_required"]
    return BadRequestError("; ".join(problems[:5]), hint=f"see {PREFIX}/openapi.json")


def _problem(problem: dict[str, Any]) -> str:
    part, place = problem["loc"][0], printable(problem["loc"][1])
    what = "field" if part == "body" else "parameter"
    match problem["type"]:
        case "missing":
            return f"the {what} {place} is missing"
        case "extra_forbidden":
            return f"unknown {what} {place}"
    return f"{place}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _error(error: AqueduckError) -> JSONResponse:
    status = error.status if isinstance(error, HttpError) else STATUSES.get(error.code, 500)
    if status >= 500:
        log.warning("request failed", error=str(error))
    body = answers.ErrorBody(code=error.code, message=error.message, hint=error.hint)
    response = JSONResponse(to_plain(answers.ErrorAnswer(error=body)), status)
    if status == 401:
        response.headers["www-authenticate"] = 'Bearer realm="aqueduck"'
    return response


# -- probes


def _probe(model: type) -> dict[str, Any]:
    red = {"model": model, "description": "Red"}
    return {"response_model": model, "response_description": "Green", "responses": {503: red}}


@probes.get("/healthz", summary="Whether the process is alive and its flows turn", **_probe(answers.Health))
async def healthz(served: Now) -> Response:
    # Fails when a flow has stopped polling. The cause is in the log; names are not secret.
    stuck = served.feed.stuck()
    health = answers.Health(status="stuck" if stuck else "ok", version=__version__, stuck=stuck)
    return JSONResponse(to_plain(health), 503 if stuck else 200)


@probes.get("/readyz", summary="Whether everything that has work moves", **_probe(answers.Readiness))
async def readyz(request: Request, served: Now) -> Response:
    # The status is public; what is stalled is only for those who may read.
    state, authorization = request.app.state, request.headers.get("authorization")
    found = readiness(served)
    if not state.guard.is_loopback and not state.guard.accepts(authorization):
        found = answers.Readiness(ready=found.ready, stalled=(), errored=())
        if authorization is not None:
            state.audit.refusal(client(request), TokenError.code, request.method, request.url.path)
    return JSONResponse(to_plain(found), 200 if found.ready else 503)


# -- what the document omits: itself, metrics, events, the page


def _routes() -> list[Route]:
    described = [route for route in (*router.routes, *probes.routes) if isinstance(route, Route)]
    return [
        *described,
        Route(f"{PREFIX}/openapi.json", _openapi),
        Route(f"{PREFIX}/events", _events),
        Route("/metrics", _metrics),
        *_page(),
    ]


def _openapi(request: Request) -> Response:
    document = request.app.openapi()
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return JSONResponse(document)


def _metrics(request: Request) -> Response:
    served = request.app.state.served
    ready = not served.feed.stalled()
    content, kind = metrics.scrape(served.overview, ready=ready, accept=request.headers.get("accept", ""))
    return Response(content, headers={"content-type": kind})


async def _events(request: Request) -> Response:
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    state = request.app.state
    events = _follow(state.served, state.guard, request.headers.get("authorization"))
    return StreamingResponse(events, media_type="text/event-stream")


async def _follow(served: Served, guard: Guard, authorization: str | None) -> AsyncIterator[str]:
    """
    Send everything first, then changes, with an occasional comment so that a dead connection is noticed.

    The stream ends when its token is revoked.
    """
    feed, seq, sent, pause = served.feed, 0, 0.0, 0.0
    while not feed.stopping and guard.may_read(authorization):
        if feed.seq > seq and time.monotonic() >= sent + pause:
            update = {"may_change": guard.can_change, **await run_in_threadpool(feed.since, seq)}
            text = json.dumps(update, separators=(",", ":"))
            seq, sent, pause = update["seq"], time.monotonic(), len(text) / EVENT_BYTES_PER_SECOND
            yield f"id: {seq}\nevent: update\ndata: {text}\n\n"
        elif time.monotonic() - sent > 5:
            sent = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(min(0.2, feed.interval / 2))


def _page() -> list[Route]:
    """The files of the page, read once; they contain no data and need no token."""
    found = []
    for file in resources.files("aqueduck.web").joinpath("page").iterdir():
        kind = PAGE_TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            address = "/" if file.name == "index.html" else f"/page/{file.name}"
            found.append(_file(address, file.read_bytes(), kind))
    return found


def _file(address: str, content: bytes, kind: str) -> Route:
    async def answer(_: Request) -> Response:
        return Response(content, headers={"content-type": kind})

    return Route(address, answer)
