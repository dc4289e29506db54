"""A server with a made-up service behind it, and a client that hides nothing."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from aqueduck.config.server import ServerConfig
from aqueduck.web.server import serve
from tests.web.made_up import Stage

TOKEN = "a-token-that-nobody-guesses"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/json"
        found = self.json
        assert set(found) == {"error"}
        assert set(found["error"]) == {"code", "message", "hint"}
        return found["error"]  # type: ignore[no-any-return]


@dataclass
class Client:
    """Requests to one server, each on a connection of its own."""

    address: str
    stage: Stage

    def connection(self) -> http.client.HTTPConnection:
        place = urlsplit(self.address)
        assert place.hostname
        if place.scheme == "https":
            trusting = ssl._create_unverified_context()
            return http.client.HTTPSConnection(place.hostname, place.port, timeout=30, context=trusting)
        return http.client.HTTPConnection(place.hostname, place.port, timeout=30)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = self.connection()
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **keywords: Any) -> Answer:
        return self.ask("GET", path, **keywords)


@pytest.fixture
def server_of() -> Iterator[Callable[..., Client]]:
    """Starts servers for one test; takes the keys of `server`, and a free port by default."""
    with ExitStack() as stack:

        def make(stage: Stage | None = None, *, env: dict[str, str] | None = None, **keys: Any) -> Client:
            made = stage or Stage()
            config = ServerConfig(**{"port": 0, **keys})
            address = stack.enter_context(
                serve(
                    config,
                    made,
                    made.actions or made,
                    env={"TOKEN": TOKEN} if env is None else env,
                    interval=0.1,
                )
            )
            assert address is not None
            return Client(address, made)

        yield make


@pytest.fixture(scope="session")
def shared_client() -> Iterator[Client]:
    stage = Stage()
    config = ServerConfig(port=0, token_env="TOKEN")
    with serve(config, stage, stage, env={"TOKEN": TOKEN}, interval=0.1) as address:
        assert address is not None
        yield Client(address, stage)


@pytest.fixture
def client(shared_client: Client) -> Client:
    """A server on loopback with a token; what earlier tests did to its stage is forgotten."""
    fresh = Stage()
    vars(shared_client.stage).update(vars(fresh))
    return shared_client
