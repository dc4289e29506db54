"""Clients that hold connections open, or send slowly, take nothing from the service."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from aqueduck.web import connections
from tests.fix_postgres import wait_until
from tests.web.conftest import Client

Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(client: Client) -> Iterator[Connect]:
    """Opens connections to the server; all are closed after the test."""
    place = urlsplit(client.address)
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))


def is_closed(one: socket.socket) -> bool:
    one.settimeout(10)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_open_connections_beyond_the_limit_are_closed(
    client: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: connections that send nothing used up the descriptors of the process, and ended the service."""
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 20)
    held = [connect() for _ in range(20)]
    assert all(is_closed(connect()) for _ in range(50))
    for one in held:
        one.close()
    wait_until(lambda: answers(client), "the server answers again", 10)


def test_a_process_without_descriptors_serves_again_when_it_has_some(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: one refused `accept` (EMFILE) ended the server, and the whole service with it."""
    accept = socket.socket.accept
    refused: list[socket.socket] = []

    def refuse_twice(listener: socket.socket) -> tuple[socket.socket, Any]:
        if len(refused) < 2:
            refused.append(listener)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", refuse_twice)
    assert client.get("/healthz").status == 200
    assert len(refused) == 2


def answers(client: Client) -> bool:
    try:
        return client.get("/healthz").status == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    "start",
    [b"", b"GET / HT", b"POST /api/v1/groups HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"],
    ids=["nothing", "half-a-head", "half-a-body"],
)
def test_a_request_that_trickles_is_ended(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """The attack: a byte now and then kept a connection open for ever."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS_MAX", 0.4)
    one = connect()
    began = time.monotonic()
    one.sendall(start)
    one.settimeout(0.05)
    ended = False
    while not ended and time.monotonic() - began < 10:
        try:
            if start:
                one.send(b"x")
            ended = one.recv(1000) == b""
        except TimeoutError:
            continue
        except OSError:
            ended = True
    assert ended, "the connection is still open"


def test_a_connection_serves_several_requests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is one of a request, not of a connection."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS_MAX", 0.4)
    connection = client.connection()
    began, answers = time.monotonic(), 0
    while answers < 2 or time.monotonic() - began < 1.0:
        connection.request("GET", "/api/v1/status")
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        answers += 1
    connection.close()


def test_a_stream_of_events_outlives_the_deadline(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only requests have to arrive in time; an answer may last."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS_MAX", 0.3)
    connection = client.connection()
    connection.request("GET", "/api/v1/events")
    answer = connection.getresponse()
    began = time.monotonic()
    while time.monotonic() - began < 1.0:
        assert answer.readline(), "the stream has ended"
    connection.close()
