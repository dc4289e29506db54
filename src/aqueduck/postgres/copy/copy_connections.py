"""
Idle connections of finished readers, for the next readers of the same process.

A new connection costs the server as much as reading some megabytes, and a Spark worker runs several tasks of
a copy in a row. Kept connections are in no transaction, so they hold nothing back; after a short time without
use they are closed.
"""

from __future__ import annotations

import threading

from aqueduck.postgres.session.wire import CopyOutStream, connect_wire

__all__ = ["CopyConnections", "copy_connections"]

IDLE_SECONDS = 2.0


class CopyConnections:
    """Streams by the server that they are connected to; shared by all threads of a process."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._kept: dict[str, dict[CopyOutStream, threading.Timer]] = {}

    def take(self, dsn: str) -> CopyOutStream:
        """A kept stream, or a new one."""
        while (stream := self._pop(dsn)) is not None:
            if stream.is_idle():
                return stream
            stream.close()  # the server closed it meanwhile
        return CopyOutStream(connect_wire(dsn))

    def keep(self, dsn: str, stream: CopyOutStream) -> None:
        """Return a stream after use; it is closed if it is in the middle of something."""
        if not stream.is_idle():
            stream.close()
            return
        timer = threading.Timer(self._idle_seconds, self._close, (dsn, stream))
        timer.daemon = True
        with self._lock:
            self._kept.setdefault(dsn, {})[stream] = timer
        timer.start()

    def _pop(self, dsn: str) -> CopyOutStream | None:
        with self._lock:
            if not self._kept.get(dsn):
                return None
            stream, timer = self._kept[dsn].popitem()
        timer.cancel()
        return stream

    def _close(self, dsn: str, stream: CopyOutStream) -> None:
        with self._lock:
            left = self._kept[dsn].pop(stream, None) is not None  # otherwise another reader just took it
        if left:
            stream.close()


copy_connections = CopyConnections()
