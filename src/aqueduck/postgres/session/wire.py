"""
The replication connection: libpq's handshake, then bulk reads of the stream.

`ReplicationStream` starts replication and hands out bytes; it knows nothing of what is in
them.  Without TLS it takes over the socket after libpq has authenticated and reads
megabytes at a time.  With TLS the bytes have to come through libpq, one message a call,
and are framed again so that both look the same to the decoder.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from typing import Protocol

import numpy as np
from psycopg import OperationalError, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from aqueduck.model.connections import CLIENT_END, GUARDS, end_options, guard_session, login_demands
from aqueduck.model.errors import AqueduckError, ConnectionLostError, ProtocolError
from aqueduck.model.schema import lsn_text
from aqueduck.postgres.decode.pgoutput import PG_EPOCH_US, Bytes
from aqueduck.postgres.session.connection import options_of, refuse_gss_encryption
from aqueduck.postgres.session.failures import classify_connect_failure, classify_server_error
from aqueduck.postgres.session.quoting import identifier

__all__ = [
    "OUTPUT_OPTIONS",
    "READ_BYTES",
    "SET_LOCAL_OUTPUT",
    "CopyOutStream",
    "ReplicationStream",
    "connect_replication",
    "connect_wire",
    "error_of",
    "other_message_error",
    "raise_failed",
    "refuse_garbage",
    "server_error",
    "start_stream",
]

_COPY = "copy rows"
READ_BYTES = 4 << 20
COPY_READ_BYTES = 1 << 20  # a good piece to decode: small enough for the cache
MESSAGE_BYTES_MAX = (1 << 30) + (1 << 20)  # a row has less than 1 GiB
OTHER_BYTES_MAX = 64 << 20

#: how the server writes values: as the same text for all of its defaults; and which functions it finds
_OUTPUT = {
    **GUARDS,
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "timezone": "UTC",
    "bytea_output": "hex",
}
OUTPUT_OPTIONS = " ".join(f"-c {name}={value}" for name, value in _OUTPUT.items())
#: the same for one transaction: a pooler refuses options, and shares what a session sets with others
SET_LOCAL_OUTPUT = "; ".join(f"set local {name} = '{value}'" for name, value in _OUTPUT.items())


class ReplicationStream(Protocol):
    """A started replication stream, or a reader with the same interface (`polling`)."""

    ended: bool
    """Whether it is exhausted, and another stream continues from there."""
    answers: bool
    """Whether the server replies soon to a status that requests it."""

    def read_into(self, buf: Bytes, at: int, timeout: float) -> int:
        """
        Read available bytes into ``buf[at:]``; waits at most `timeout` seconds; returns the number of bytes
        read.
        """
        ...

    def send_status(self, *, received: int, confirmed: int, ask_reply: bool = False) -> None: ...

    def close(self) -> None: ...


def connect_replication(dsn: str) -> pq.abc.PGconn:
    """A connection that speaks the replication protocol, and writes values in our format."""
    given = options_of(conninfo_to_dict(dsn)).strip()
    options = " ".join((given, *end_options(given), OUTPUT_OPTIONS)).strip()
    return _connect(dsn, replication="database", options=options)


def connect_wire(dsn: str, **keywords: str) -> pq.abc.PGconn:
    """A connection to be read in bulk; callers that need values in our format use `SET_LOCAL_OUTPUT`."""
    pgconn = _connect(dsn, **keywords)
    try:
        guard = guard_session(pgconn.backend_pid, options_of(conninfo_to_dict(dsn)))
        raise_failed(pgconn.exec_(guard.encode()), pq.ExecStatus.TUPLES_OK, "set up the connection")
    except BaseException:
        pgconn.finish()
        raise
    return pgconn


def _connect(dsn: str, **keywords: str) -> pq.abc.PGconn:
    given = conninfo_to_dict(dsn)
    refuse_gss_encryption(given)
    defaults: dict[str, str | int] = {"application_name": "aqueduck", **CLIENT_END, **login_demands(given)}
    conninfo = make_conninfo(
        dsn, gssencmode="disable", client_encoding="UTF8",
        **{name: value for name, value in defaults.items() if name not in given}, **keywords,
    )  # fmt: skip
    return _connected(conninfo, float(given.get("connect_timeout") or CLIENT_END["connect_timeout"]))


def _connected(conninfo: str, seconds: float) -> pq.abc.PGconn:
    """Connect without blocking the process's other threads, as libpq's own blocking call would."""
    pgconn = pq.PGconn.connect_start(conninfo.encode())
    deadline = time.monotonic() + seconds
    while pgconn.status != pq.ConnStatus.BAD:
        status = pgconn.connect_poll()
        if status == pq.PollingStatus.OK:
            return pgconn
        if status == pq.PollingStatus.FAILED:
            break
        ready: tuple[list[int], list[int]] = ([], [])
        ready[status == pq.PollingStatus.WRITING].append(pgconn.socket)
        left = deadline - time.monotonic()
        if left <= 0 or not any(select.select(*ready, [], left)):
            pgconn.finish()
            raise classify_connect_failure("timeout expired")
    error = classify_connect_failure(pgconn.get_error_message())
    pgconn.finish()
    raise error


def start_stream(
    dsn: str,
    slot: str,
    publication: str,
    position: int,
    *,
    in_progress: bool = False,
    before: str | None = None,
) -> ReplicationStream:
    """
    Start streaming the slot after `position`; `before` is run first, for example to create a temporary slot.

    With `in_progress`, large transactions are sent before they end, if the server supports that (14 and
    later).
    """
    pgconn = connect_replication(dsn)
    protocol = "proto_version '1'"
    if in_progress and pgconn.server_version >= 140000:
        protocol = "proto_version '2', streaming 'on'"
    # The protocol's own syntax: quotes in a text are doubled; no other character is special.
    names = identifier(publication).replace("'", "''")
    command = (
        f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {lsn_text(position)} "
        f"({protocol}, publication_names '{names}')"
    )
    try:
        if before is not None:
            raise_failed(pgconn.exec_(before.encode()), pq.ExecStatus.TUPLES_OK)
        if pgconn.ssl_in_use:
            return _LibpqStream(pgconn, command)
        return _SocketStream(pgconn, command)
    except BaseException:
        pgconn.finish()
        raise


def server_error(sqlstate: str, message: str, what: str = "read the slot") -> AqueduckError:
    """An ErrorResponse on such a connection as one of ours."""
    return classify_server_error(sqlstate or "08006", message or "no reason given", what=what)


def _status_message(received: int, confirmed: int, ask_reply: bool) -> bytes:
    now = int(time.time() * 1e6) - PG_EPOCH_US
    return struct.pack("!cQQQqB", b"r", received, confirmed, confirmed, now, int(ask_reply))


def error_of(body: bytes, what: str = "read the slot") -> AqueduckError:
    """The body of an ErrorResponse as one of our errors."""
    return server_error(*_error_fields(body), what)


def _error_fields(body: bytes) -> tuple[str, str]:
    fields = {f[:1]: f[1:] for f in body.split(b"\0") if f}
    return fields.get(b"C", b"").decode("ascii", "replace"), fields.get(b"M", b"").decode("utf-8", "replace")


class _SocketStream:
    """Reads the socket directly: one system call for megabytes of small messages."""

    ended = False
    answers = True

    def __init__(self, pgconn: pq.abc.PGconn, command: str) -> None:
        self._pgconn = pgconn  # owns the descriptor
        self._socket = socket.socket(fileno=pgconn.socket)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # a smaller buffer is only slower
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        query = command.encode() + b"\0"
        try:
            self._send(b"Q" + struct.pack("!I", len(query) + 4) + query)
            self._rest = self._await_copy_both()
        except BaseException:
            self._socket.detach()  # libpq closes the descriptor
            raise

    def _await_copy_both(self) -> bytes:
        """Wait for CopyBothResponse; returns the bytes of the stream that came with it."""
        raw = b""
        while True:
            while len(raw) >= 5:
                length = int.from_bytes(raw[1:5], "big")
                if len(raw) < 1 + length:
                    break
                kind, body, raw = raw[:1], raw[5 : 1 + length], raw[1 + length :]
                if kind == b"W":
                    return raw
                if kind == b"E":
                    raise server_error(*_error_fields(body))
            self._wait_readable(30.0)
            raw += self._recv_bytes()

    def _recv_bytes(self) -> bytes:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return b""
        except OSError as exc:
            raise ConnectionLostError("the replication connection broke") from exc
        if not data:
            raise ConnectionLostError("the server closed the replication connection")
        return data

    def _wait_readable(self, timeout: float) -> bool:
        return bool(select.select([self._socket], [], [], timeout)[0])

    def read_into(self, buf: Bytes, at: int, timeout: float) -> int:
        if self._rest:
            n = min(len(self._rest), buf.size - at)
            buf[at : at + n] = np.frombuffer(self._rest[:n], np.uint8)
            self._rest = self._rest[n:]
            return n
        try:
            n = self._socket.recv_into(memoryview(buf)[at:])  # type: ignore[arg-type]
        except BlockingIOError:
            if timeout <= 0 or not self._wait_readable(timeout):
                return 0
            return self.read_into(buf, at, 0)
        except OSError as exc:
            raise ConnectionLostError("the replication connection broke") from exc
        if n == 0:
            raise ConnectionLostError("the server closed the replication connection")
        return n

    def send_status(self, *, received: int, confirmed: int, ask_reply: bool = False) -> None:
        body = _status_message(received, confirmed, ask_reply)
        self._send(b"d" + struct.pack("!I", len(body) + 4) + body)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    select.select([], [self._socket], [], 1.0)
        except OSError as exc:
            raise ConnectionLostError("the replication connection broke") from exc

    def close(self) -> None:
        self._socket.detach()
        self._pgconn.finish()


class _LibpqStream:
    """Reads through libpq, for connections that it encrypts."""

    ended = False
    answers = True

    def __init__(self, pgconn: pq.abc.PGconn, command: str) -> None:
        self._pgconn = pgconn
        result = pgconn.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            message = (
                result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"the stream did not start"
            ).decode()
            raise server_error(sqlstate, message)
        self._rest = b""

    def read_into(self, buf: Bytes, at: int, timeout: float) -> int:
        start = at
        if self._rest:
            at = self._put(buf, at, self._rest)
        while not self._rest and at < buf.size:
            n, data = self._pgconn.get_copy_data(1)
            if n > 0:
                at = self._put(buf, at, b"d" + struct.pack("!I", n + 4) + bytes(data))
            elif n == 0:
                if at > start or not self._wait(timeout):
                    break
            else:
                self._raise_end()
        return at - start

    def _put(self, buf: Bytes, at: int, data: bytes) -> int:
        n = min(len(data), buf.size - at)
        buf[at : at + n] = np.frombuffer(data[:n], np.uint8)
        self._rest = data[n:]
        return at + n

    def _wait(self, timeout: float) -> bool:
        readable = bool(select.select([self._pgconn.socket], [], [], timeout)[0])
        if readable:
            try:
                self._pgconn.consume_input()
            except OperationalError as exc:
                raise ConnectionLostError("the replication connection broke") from exc
        return readable

    def _raise_end(self) -> None:
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(
                "utf-8", "replace"
            )
            raise server_error(sqlstate, message)
        raise ConnectionLostError("the server ended the stream")

    def send_status(self, *, received: int, confirmed: int, ask_reply: bool = False) -> None:
        try:
            self._pgconn.put_copy_data(_status_message(received, confirmed, ask_reply))
            self._pgconn.flush()
        except OperationalError as exc:
            raise ConnectionLostError("the replication connection broke") from exc

    def close(self) -> None:
        self._pgconn.finish()


class CopyOutStream:
    """`COPY … TO STDOUT` in bulk, one after the other, on a connection of its own."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn
        self._socket: socket.socket | None = None
        self._rest = b""
        self._ended = False

    def execute(self, sql: str) -> None:
        """Run statements before or after a copy."""
        raise_failed(self._pgconn.exec_(sql.encode()), pq.ExecStatus.COMMAND_OK, _COPY)

    def start(self, sql: str) -> None:
        if self._pgconn.ssl_in_use:
            self._ended = False
            raise_failed(self._pgconn.exec_(sql.encode()), pq.ExecStatus.COPY_OUT, _COPY)
            return
        if self._socket is None:
            self._socket = socket.socket(fileno=self._pgconn.socket)
            self._socket.setblocking(True)
        query = sql.encode() + b"\0"
        self._socket.sendall(b"Q" + struct.pack("!I", len(query) + 4) + query)

    def read_into(self, buf: Bytes, at: int) -> int:
        """Wait for bytes; what libpq hands out message by message is framed again."""
        if self._socket is None:
            return self._read_libpq(buf, at)
        place = memoryview(buf)[at:]  # type: ignore[arg-type]
        try:
            fill = n = self._socket.recv_into(place)
            pauses = 0
            while n and fill < min(COPY_READ_BYTES, len(place)) and pauses < 3:
                try:
                    n = self._socket.recv_into(place[fill:], 0, socket.MSG_DONTWAIT)
                    fill += n
                except BlockingIOError:
                    # Let the server get ahead: many small reads cost more than they gain.
                    pauses += 1
                    time.sleep(0.001)
        except OSError as exc:
            raise ConnectionLostError("the connection of the copy broke") from exc
        if n == 0:
            raise ConnectionLostError("the server closed the connection of the copy")
        return fill

    def _read_libpq(self, buf: Bytes, at: int) -> int:
        """Read a piece of good size to decode, or all that is left: not one row at a time."""
        room = buf.size - at
        parts, size = [self._rest], len(self._rest)
        while size < min(COPY_READ_BYTES, room) and not self._ended:
            n, data = self._pgconn.get_copy_data(1)
            if n == 0:
                self._wait_libpq()
                continue
            if n == -1:
                raise_failed(self._pgconn.get_result(), pq.ExecStatus.COMMAND_OK, _COPY)
                self._ended = True
                parts.append(b"Z" + struct.pack("!I", 5) + b"T")
            else:
                parts.append(b"d" + struct.pack("!I", n + 4) + bytes(data))
            size += len(parts[-1])
        whole = b"".join(parts)
        n = min(len(whole), room)
        buf[at : at + n] = np.frombuffer(whole[:n], np.uint8)
        self._rest = whole[n:]
        return n

    def _wait_libpq(self) -> None:
        """Wait for more data. Does not use libpq's own wait, which would also block the thread that writes."""
        try:
            select.select([self._pgconn.socket], [], [])
            self._pgconn.consume_input()
        except OperationalError as exc:
            raise ConnectionLostError("the connection of the copy broke") from exc

    @staticmethod
    def message_length(buf: Bytes, at: int, fill: int) -> int | None:
        """The length of the message at `at` if it is complete."""
        if fill - at < 5:
            return None
        length = 1 + int.from_bytes(bytes(buf[at + 1 : at + 5]), "big")
        return length if at + length <= fill else None

    @staticmethod
    def handle(buf: Bytes, at: int, length: int) -> bool:
        """Process a message that is not a row; returns whether the copy has ended. Errors are raised."""
        kind = chr(buf[at])
        if kind == "E":
            raise error_of(bytes(buf[at + 5 : at + length]), _COPY)
        return kind == "Z"

    def is_idle(self) -> bool:
        """
        Whether it can be reused: it is in no transaction, and the server has sent nothing since, such as a
        shutdown notice.
        """
        if self._pgconn.transaction_status != pq.TransactionStatus.IDLE:
            return False
        return not any(select.select([self._pgconn.socket], [], [], 0))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.detach()
        self._pgconn.finish()


def raise_failed(result: pq.abc.PGresult | None, wanted: pq.ExecStatus, what: str = "read the slot") -> None:
    if result is None or result.status == wanted:
        return
    sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
    raise server_error(sqlstate, message, what)


def refuse_garbage(buf: Bytes, end: int) -> None:
    """Raise if ``buf`` does not begin like a message: otherwise we would wait for its end forever."""
    if end < 5:
        return
    kind, length = chr(buf[0]), int.from_bytes(bytes(buf[1:5]), "big")
    known = kind in "dNSAEcCZ"
    if not known or length < 4 or length > (MESSAGE_BYTES_MAX if kind == "d" else OTHER_BYTES_MAX):
        raise ProtocolError("the stream holds bytes that are no message of PostgreSQL", offset=0)
    if kind == "d" and end > 5 and chr(buf[5]) not in "wk":
        raise ProtocolError("the stream holds data that is neither changes nor a keepalive", offset=5)


def other_message_error(buf: Bytes, end: int) -> AqueduckError | None:
    """The error in a message that is not CopyData (``buf[0]`` is its type), or None when it is harmless or incomplete."""
    if end < 5:
        return None
    length = int.from_bytes(bytes(buf[1:5]), "big")
    if end < 1 + length:
        return None
    kind = chr(buf[0])
    if kind == "E":
        sqlstate, message = _error_fields(bytes(buf[5 : 1 + length]))
        return server_error(sqlstate, message)
    if kind in "cCZ":
        return ConnectionLostError("the server ended the stream")
    return None
