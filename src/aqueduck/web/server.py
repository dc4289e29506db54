"""
The HTTP server beside a service: uvicorn in a thread, started and stopped with it.

The socket is bound by the caller's thread, so a port that is taken is an error where the server is started.  The
server ends quickly: it ends the streams of events, and nothing else takes long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import structlog
import uvicorn

from aqueduck.config.server import ServerConfig
from aqueduck.model.errors import ServerStartError, system_reason
from aqueduck.overview.values import Actions, Overviews
from aqueduck.web.auth import Guard, make_guard
from aqueduck.web.connections import Listener, TimedProtocol
from aqueduck.web.feed import Feed

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["check_server", "serve"]

log = structlog.get_logger()

START_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 10.0


def check_server(config: ServerConfig, env: Mapping[str, str]) -> str:
    """What a start asks of the section, without listening; raises like it."""
    if not config.enabled:
        return "none is wanted"
    make_guard(config, env)
    _check_tls(config)
    return f"{config.host} port {config.port}"


@contextlib.contextmanager
def serve(
    config: ServerConfig,
    overviews: Overviews,
    actions: Actions | None,
    *,
    env: Mapping[str, str] | None = None,
    interval: float = 1.0,
) -> Iterator[str | None]:
    """Serve while the block runs; gives the address of the page, or `None` where no server is wanted."""
    if not config.enabled:
        yield None
        return
    guard = make_guard(config, os.environ if env is None else env)
    with contextlib.closing(_bind(config)) as bound:
        feed = Feed(overviews, stall_seconds=config.stall_seconds, interval=interval)
        server = _make_server(config, guard, feed, actions)
        address = _address(config, bound)
        with _running(server, bound), contextlib.ExitStack() as ending:
            ending.callback(feed.stop)  # first: streams of events end with it
            feed.start()
            log.info("serving", address=address)
            yield address


@contextlib.contextmanager
def _running(server: uvicorn.Server, bound: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=server.run, args=([bound],), name="http", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise ServerStartError("the HTTP server did not start")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS_MAX)


def _check_tls(config: ServerConfig) -> None:
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_cert, config.tls_key, password=""
        )
    except (OSError, ssl.SSLError) as exc:
        reason = (exc.strerror or exc.__class__.__name__).lower()
        raise ServerStartError(
            f"the certificate or its key cannot be used: {reason}",
            hint="check server.tls_cert and server.tls_key: PEM files, the key without a passphrase",
        ) from None


def _make_server(config: ServerConfig, guard: Guard, feed: Feed, actions: Actions | None) -> uvicorn.Server:
    _check_tls(config)
    settings = uvicorn.Config(
        _make_app(guard, feed, actions),
        http=TimedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",  # what goes wrong in a request is logged by `api`; what is no HTTP at all is noise
        access_log=False,
        proxy_headers=False,  # the address in the log is that of the connection
        server_header=False,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(settings)


def _make_app(guard: Guard, feed: Feed, actions: Actions | None) -> FastAPI:
    """
    The application; loading FastAPI takes 0.2 s of CPU time, which commands that serve nothing do not spend.

    FastAPI loads the propagators of OpenTelemetry, and a missing one would end the process; we use none.
    """
    propagators = os.environ.pop("OTEL_PROPAGATORS", None)
    try:
        from aqueduck.web.api import make_app
        from aqueduck.web.operations import Served
    finally:
        if propagators is not None:
            os.environ["OTEL_PROPAGATORS"] = propagators
    return make_app(Served(feed, actions), guard)


def _bind(config: ServerConfig) -> socket.socket:
    host = config.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = Listener(family, kind, protocol)
    except OSError as exc:
        raise _cannot_listen(config, exc) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError as exc:
        bound.close()
        raise _cannot_listen(config, exc) from None
    return bound


def _cannot_listen(config: ServerConfig, exc: OSError) -> ServerStartError:
    return ServerStartError(
        f"cannot listen on {config.host} port {config.port}: {system_reason(exc)}",
        hint="choose another server.port (0 takes a free one), or set server.enabled: false",
    )


def _address(config: ServerConfig, bound: socket.socket) -> str:
    scheme = "https" if config.tls_cert else "http"
    host = config.host.strip("[]")
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{bound.getsockname()[1]}/"
