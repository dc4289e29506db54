"""
Limits for clients: the number of open connections, and the time in which a request must arrive.

`Listener` limits a server's connections, including TLS handshakes, so that strangers cannot exhaust the file
descriptors of the process; `TimedProtocol` closes a connection whose request does not arrive in time.
"""

from __future__ import annotations

import asyncio
import socket
import time
import weakref
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["CONNECTIONS_MAX", "Listener", "TimedProtocol"]

log = structlog.get_logger()

CONNECTIONS_MAX = 256
REQUEST_SECONDS_MAX = 15.0
"""From the start of the wait for the first byte to the last byte of the body."""
WARNING_SECONDS = 60.0
SILENT_SECONDS = (10, 5, 4)
"""
TCP probes a silent client after the first number of seconds, repeats at the second, and gives up after the
third number of probes.
"""


class Listener(socket.socket):
    """A listening socket that closes connections beyond `CONNECTIONS_MAX` as soon as it accepts them."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._warned_at = float("-inf")

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; asyncio ignores `ConnectionAbortedError` and waits for the next one."""
        accepted, address = super().accept()
        if sum(one.fileno() >= 0 for one in self._accepted) >= CONNECTIONS_MAX:
            accepted.close()
            self._warn()
            raise ConnectionAbortedError
        idle, interval, count = SILENT_SECONDS
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", count)):
            if hasattr(socket, option):
                accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._accepted.add(accepted)
        return accepted, address

    def _warn(self) -> None:
        if time.monotonic() - self._warned_at > WARNING_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("connections refused, too many are open", open_max=CONNECTIONS_MAX)


class TimedProtocol(H11Protocol):
    """A uvicorn connection that closes when a request takes too long to arrive."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """One deadline for head and body: slow bytes do not extend it."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._rest()
        elif self._late is None:
            self._late = self.loop.call_later(REQUEST_SECONDS_MAX, self.transport.abort)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
