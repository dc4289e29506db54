"""
Another user of the host, who speaks Spark's transport protocol: asks a port for blocks, with no secret.

A frame is its length, the kind of message, the message.  A block manager answers a request to open blocks with a stream,
whose chunks are then fetched; where it authenticates, the first answer is a failure.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import psutil

__all__ = ["RefusedError", "SilentError", "fetch_block", "listening_ports", "process_texts"]

_FETCH, _FETCHED, _REQUEST, _ANSWER = 0, 1, 3, 4


class RefusedError(Exception):
    """The port does not give blocks to strangers."""


class SilentError(RefusedError):
    """The port speaks another protocol, and waits for more."""


def process_texts(process: psutil.Process) -> Iterator[str]:
    """The command line of a process, which everybody sees, and the environment, which its user sees."""
    with contextlib.suppress(psutil.Error):  # a worker may just have ended
        yield " ".join(process.cmdline())
        yield " ".join(f"{key}={value}" for key, value in process.environ().items())


def listening_ports(root: int) -> set[int]:
    """TCP ports on which a process and its children listen."""
    family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    ports = set()
    for process in family:
        with contextlib.suppress(psutil.Error):  # a worker may just have ended
            found = process.net_connections(kind="tcp")
            ports |= {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    return ports


def fetch_block(port: int, block: str) -> bytes:
    """The first chunk of a block."""
    with socket.create_connection(("127.0.0.1", port), timeout=3) as conn:
        body = b"\0" + _text("x") + _text("1") + struct.pack(">i", 1) + _text(block)
        _send(conn, struct.pack(">bqi", _REQUEST, 1, len(body)) + body)
        kind, answer = _receive(conn)
        if kind != _ANSWER:
            raise RefusedError(answer.decode(errors="replace"))
        stream, _ = struct.unpack(">qi", answer[13:25])  # after the request's number, a length and a kind
        _send(conn, struct.pack(">bqi", _FETCH, stream, 0))
        kind, chunk = _receive(conn)
        if kind != _FETCHED:
            raise RefusedError(chunk.decode(errors="replace"))
        return chunk[12:]


def _text(text: str) -> bytes:
    return struct.pack(">i", len(text)) + text.encode()


def _send(conn: socket.socket, message: bytes) -> None:
    conn.sendall(struct.pack(">q", len(message) + 8) + message)


def _receive(conn: socket.socket) -> tuple[int, bytes]:
    received = bytearray()
    for piece in _pieces(conn):
        received += piece
        if len(received) >= 8 and len(received) >= struct.unpack(">q", received[:8])[0]:
            return received[8], bytes(received[9:])
    raise RefusedError("the connection was closed")


def _pieces(conn: socket.socket) -> Iterator[bytes]:
    try:
        while piece := conn.recv(1 << 16):
            yield piece
    except TimeoutError as exc:
        raise SilentError from exc
    except OSError as exc:
        raise RefusedError(type(exc).__name__) from exc
