"""
An SQL connection for readers: small statements, and COPY in bulk, without blocking inside libpq.

It leaves nothing in the session: settings are made per transaction, so that a pooler may give every
transaction another server connection. The replication connection is in `wire`.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np
from psycopg import Error as PsycopgError
from psycopg import OperationalError, pq

from aqueduck.model.connections import SET_LOCAL_GUARDS, guard_session
from aqueduck.model.errors import AqueduckError, ConnectionLostError
from aqueduck.postgres.decode.pgoutput import Bytes
from aqueduck.postgres.session.connection import connect, connection_parameters, options_of
from aqueduck.postgres.session.wire import connect_wire, raise_failed

__all__ = ["SqlConnection", "Stopped"]

COPY_BYTES = 1 << 20
_END = b"Z" + struct.pack("!I", 5) + b"I"


class Stopped(Exception):  # noqa: N818 - no error: it ends the wait
    """The wait for the server was interrupted by a stop request."""


class SqlConnection:
    """One connection; `stopping` is called twice a second while we wait."""

    def __init__(self, dsn: str, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping
        self._deadline = self._silence_seconds = math.inf
        self._dsn = dsn
        self._pgconn = connect_wire(dsn)
        self._pgconn.nonblocking = 1
        self._socket: socket.socket | None = None
        if not self._pgconn.ssl_in_use:
            self._socket = socket.socket(fileno=self._pgconn.socket)
            self._socket.setblocking(False)
            with contextlib.suppress(OSError):  # a smaller buffer is only slower
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.is_pooled = False
        """Whether a pooler is between us and the server, which may switch the server connection."""
        guard = guard_session(self._pgconn.backend_pid, options_of(connection_parameters(dsn)))
        self.is_pooled = not self.query(guard)

    def query(self, sql: str, seconds: float = math.inf) -> list[tuple[str | None, ...]]:
        """
        The rows of the last statement, as text; several statements are one transaction. Fails if the server
        does not answer within `seconds`.
        """
        self._deadline = time.monotonic() + seconds
        try:
            return self._query(sql)
        finally:
            self._deadline = math.inf

    def _query(self, sql: str) -> list[tuple[str | None, ...]]:
        if self.is_pooled:
            sql = f"{SET_LOCAL_GUARDS}; {sql}"
        with _lost_where_broken():
            self._pgconn.send_query(sql.encode())
            rows: list[tuple[str | None, ...]] = []
            failed = None
            while (result := self._result()) is not None:  # to the end, even after an error
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    failed = result
                elif result.status == pq.ExecStatus.TUPLES_OK:
                    rows = [
                        tuple(_text(result.get_value(r, c)) for c in range(result.nfields))
                        for r in range(result.ntuples)
                    ]
        raise_failed(failed, pq.ExecStatus.COMMAND_OK)
        return rows

    def _result(self) -> pq.abc.PGresult | None:
        while self._pgconn.flush():
            self._wait(write=True)
        while self._pgconn.is_busy():
            self._wait()
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _wait(self, *, write: bool = False) -> None:
        heard_at = time.monotonic()
        while True:
            if time.monotonic() - heard_at > self._silence_seconds:
                self._ask_elsewhere()
                heard_at = time.monotonic()
            if self._stopping():
                raise Stopped
            if time.monotonic() > self._deadline:
                raise ConnectionLostError("the server does not answer")
            fd = [self._pgconn.socket]
            if any(select.select([] if write else fd, fd if write else [], [], 0.5)):
                return

    def _ask_elsewhere(self) -> None:
        """A statement may take its time, but its server process must be there: asked on another connection."""
        sql = "select from pg_stat_activity where pid = %s"
        try:
            with connect(self._dsn) as conn:
                works = self.is_pooled or conn.execute(sql, [self._pgconn.backend_pid]).fetchone() is not None
        except (AqueduckError, PsycopgError) as exc:
            raise ConnectionLostError("the server does not answer") from exc
        if not works:
            raise ConnectionLostError("the server does not run our statement any more")

    def copy(self, sql: str, silence_seconds: float = math.inf) -> Iterator[Bytes]:
        """
        Run statements that include one COPY; yields the server's messages in pieces, to be read up to ReadyForQuery.
        After so many seconds without a message, another connection must find the server at work.
        """
        self._silence_seconds = silence_seconds
        try:
            with _lost_where_broken():
                if self._socket is None:
                    yield from self._copy_libpq(sql)
                else:
                    yield from self._copy_socket(self._socket, sql)
        finally:
            self._silence_seconds = math.inf

    def _copy_socket(self, sock: socket.socket, sql: str) -> Iterator[Bytes]:
        query = sql.encode() + b"\0"
        rest = memoryview(b"Q" + struct.pack("!I", len(query) + 4) + query)
        while rest:
            self._wait(write=True)
            rest = rest[sock.send(rest) :]
        while True:  # the reader of the messages detects the last one
            self._wait()
            piece = np.empty(COPY_BYTES, np.uint8)
            n = sock.recv_into(memoryview(piece))  # type: ignore[arg-type]
            if n == 0:
                raise ConnectionLostError("the server closed the connection")
            yield piece[:n]

    def _copy_libpq(self, sql: str) -> Iterator[Bytes]:
        """The same messages, through libpq's decryption; framed again."""
        self._pgconn.send_query(sql.encode())
        while (result := self._result()) is not None:
            if result.status != pq.ExecStatus.COPY_OUT:
                if result.status != pq.ExecStatus.TUPLES_OK:
                    raise_failed(result, pq.ExecStatus.COMMAND_OK)
                continue
            yield from self._copy_data()
        yield np.frombuffer(_END, np.uint8)

    def _copy_data(self) -> Iterator[Bytes]:
        parts: list[bytes] = []
        size = 0
        while True:
            n, data = self._pgconn.get_copy_data(1)
            if n > 0:
                parts += (b"d" + struct.pack("!I", n + 4), bytes(data))
                size += n
            if parts and (n <= 0 or size > COPY_BYTES):
                yield np.frombuffer(b"".join(parts), np.uint8)
                parts, size = [], 0
            if n == 0:
                self._wait()
                self._pgconn.consume_input()
            elif n < 0:
                return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.detach()  # libpq closes the descriptor
            self._socket = None
        self._pgconn.finish()


@contextlib.contextmanager
def _lost_where_broken() -> Iterator[None]:
    try:
        yield
    except (OSError, OperationalError) as exc:
        raise ConnectionLostError("the connection to PostgreSQL broke") from exc


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
