"""
A proxy in front of PostgreSQL that spoils what a walsender says, once.

`spoil` is given the frames of the replication stream as bytes and returns them, changed or not; as soon as it has changed
something, everything passes as it is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Spoil = Callable[[bytes], bytes]


class BadWire:
    """Listens on a port of its own for the server at `port`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.spoil: Spoil | None = None
        self.spoiled = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, from_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if from_server and self.spoil is not None and (bad := self.spoil(data)) != data:
                    data, self.spoil = bad, None
                    self.spoiled += 1
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def bad_wire(port: int) -> Iterator[BadWire]:
    """A proxy for the server at `port`."""
    wire = BadWire(port)
    try:
        yield wire
    finally:
        wire.close()
