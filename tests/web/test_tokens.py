"""Several tokens: what each permits, how one is revoked, and what the log says about their use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.routing import Route
from structlog.testing import capture_logs

from aqueduck.config.server import ServerConfig
from aqueduck.model.errors import ConfigError, ConnectionLostError
from aqueduck.web.api import FREE, make_app
from aqueduck.web.audit import Audit
from aqueduck.web.auth import make_guard
from aqueduck.web.feed import Feed
from aqueduck.web.operations import Served
from tests.web.conftest import TOKEN, Client

ServerOf = Callable[..., Client]
CHANGE = ("POST", "/api/v1/groups/shop/disable")
READING = "only-for-prometheus-to-read"
KEYS: dict[str, Any] = {
    "token_env": "TOKEN",
    "tokens": [{"name": "prometheus", "scope": "read", "token_env": "READING"}],
}
ENV = {"TOKEN": TOKEN, "READING": READING}


def test_a_token_for_reading_changes_nothing(server_of: ServerOf) -> None:
    """What Prometheus has in its files is no key to the service."""
    client = server_of(host="0.0.0.0", env=ENV, **KEYS)
    assert client.get("/metrics", token=READING).status == 200
    assert client.get("/api/v1/status", token=READING).status == 200
    answer = client.ask(*CHANGE, token=READING)
    assert (answer.status, answer.error["code"]) == (403, "http.scope")
    assert client.stage.calls == []
    assert client.ask(*CHANGE, token=TOKEN).status == 202


def test_tokens_for_reading_alone_permit_no_change(server_of: ServerOf) -> None:
    """A server whose tokens may only read is a server for reading."""
    client = server_of(env=ENV, tokens=KEYS["tokens"])
    assert client.ask(*CHANGE, token=READING).error["code"] == "http.read_only"


def test_a_token_in_a_file_is_replaced_and_revoked_without_a_restart(
    server_of: ServerOf, tmp_path: Path
) -> None:
    """The file is read again when it changes; while it is missing, or its token is weak, no token is accepted."""
    file = tmp_path / "token"
    file.write_text("the-first-token-of-all\n")
    client = server_of(token_file=str(file))
    assert client.ask(*CHANGE, token="the-first-token-of-all").status == 202
    file.write_text("another-one-instead-of-it\n")
    assert client.ask(*CHANGE, token="the-first-token-of-all").status == 401
    assert client.ask(*CHANGE, token="another-one-instead-of-it").status == 202
    file.write_text("short\n")
    assert client.ask(*CHANGE, token="short").status == 401
    file.unlink()
    assert client.ask(*CHANGE, token="another-one-instead-of-it").status == 401


@pytest.mark.parametrize("value", ["", "short", "with spaces in the token", "change-me-as-well"])
def test_weak_tokens_and_those_of_examples_are_refused(value: str, tmp_path: Path) -> None:
    """The tokens of the examples are refused; the message does not repeat the value."""
    file = tmp_path / "token"
    file.write_text(value)
    for config in (ServerConfig(token_env="T"), ServerConfig(token_file=str(file))):
        with pytest.raises(ConfigError) as caught:
            make_guard(config, {"T": value})
        assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"token_env": "A", "token_file": "b"},
        {"tokens": [{"name": "a"}]},
        {"tokens": [{"name": "a", "token_env": "A", "token_file": "b"}]},
        {"tokens": [{"name": "a", "token_env": "A"}, {"name": "a", "token_env": "B"}]},
        {"tokens": [{"name": "a", "token_env": "A", "scope": "all"}]},
        {"host": "0.0.0.0"},
    ],
)
def test_tokens_that_make_no_sense_are_refused(keys: dict[str, Any]) -> None:
    """Each token has one place, a name of its own and a known scope; an open address needs one."""
    with pytest.raises(ValidationError):
        ServerConfig(**keys)


def test_a_change_leaves_a_line_with_address_and_token(server_of: ServerOf) -> None:
    """Who changed what: the connection's address and the name of the token, never the token."""
    client = server_of(env=ENV, **KEYS)
    with capture_logs() as lines:
        client.ask(*CHANGE, token=TOKEN, headers={"X-Forwarded-For": "6.6.6.6"})
    [line] = [line for line in lines if line["event"] == "request"]
    assert (line["client"], line["token"], line["name"]) == ("127.0.0.1", "token", "shop")
    assert TOKEN not in str(lines)


def test_a_change_that_fails_leaves_a_line(server_of: ServerOf) -> None:
    """The attack: an answer that is lost with the source's connection hides a change that was made."""
    client = server_of(env=ENV, **KEYS)
    client.stage.refusal = ConnectionLostError("cannot drop the group: the connection to PostgreSQL was lost")
    with capture_logs() as lines:
        assert client.ask("DELETE", "/api/v1/groups/shop", token=TOKEN).status == 503
    [line] = [line for line in lines if line["event"] == "request"]
    assert (line["client"], line["token"], line["name"]) == ("127.0.0.1", "token", "shop")
    assert (line["method"], line["path"], line["error"]) == ("DELETE", "/groups/{name}", "pg.connection_lost")


def test_a_revoked_token_ends_its_stream(server_of: ServerOf, tmp_path: Path) -> None:
    """The attack: whoever opened the stream of events before the token was revoked read on for ever."""
    file = tmp_path / "token"
    file.write_text(READING)
    client = server_of(host="0.0.0.0", tokens=[{"name": "page", "token_file": str(file)}])
    connection = client.connection()
    with contextlib.closing(connection):
        connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {READING}"})
        response = connection.getresponse()
        assert response.readline().startswith(b"id: ")
        file.unlink()
        assert response.read().endswith(b"\n\n")
        assert response.isclosed()


def test_every_address_is_behind_the_door(server_of: ServerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack on whatever FastAPI serves: no token, and one that may only read; each try is refused and logged."""
    monkeypatch.setattr("aqueduck.web.audit.PAUSE_SECONDS", -1.0)
    client = server_of(host="0.0.0.0", env=ENV, **KEYS)
    app = make_app(Served(Feed(client.stage, stall_seconds=1), client.stage), make_guard(ServerConfig(), {}))
    assert all(isinstance(route, Route) for route in app.routes)
    asked = [(m, route.path) for route in app.routes if isinstance(route, Route) for m in route.methods or ()]
    assert {path for _, path in asked} > {
        "/metrics",
        "/api/v1/events",
        "/api/v1/openapi.json",
        "/api/v1/tables",
    }
    for method, path in asked:
        if path in FREE or path.startswith("/page/"):
            assert method in ("GET", "HEAD")
            continue
        changes = method not in ("GET", "HEAD")
        with capture_logs() as lines:
            address = re.sub(r"{(\w+)[^}]*}", r"\1", path)
            tokens = (None, READING) if changes else (None,)
            statuses = [client.ask(method, address, token=token).status for token in tokens]
        assert statuses == [401, 403][: len(tokens)], (method, path)
        refused = [(line["method"], line["path"]) for line in lines if line["event"] == "request refused"]
        assert refused == [(method, path)] * (1 + changes)
    assert client.stage.calls == []


def test_a_foreign_name_leaves_a_line(server_of: ServerOf) -> None:
    """A web page that gives its own name our address is seen in the log."""
    client = server_of()
    with capture_logs() as lines:
        client.get("/api/v1/status", headers={"Host": "evil.example"})
    [line] = [line for line in lines if line["event"] == "request refused"]
    assert (line["client"], line["code"]) == ("127.0.0.1", "http.request")


def test_a_refusal_leaves_a_line(server_of: ServerOf) -> None:
    """Guessing is logged; the guessed values are not."""
    client = server_of(env=ENV, **KEYS)
    with capture_logs() as lines:
        client.ask(*CHANGE, token="guessed-by-a-stranger")
        client.ask(*CHANGE, token="guessed-by-a-stranger")
    [line] = [line for line in lines if line["event"] == "request refused"]
    assert (line["client"], line["code"]) == ("127.0.0.1", "http.token")
    assert "guessed" not in str(lines)


def test_a_wrong_token_at_the_probe_leaves_a_line(server_of: ServerOf) -> None:
    """The attack: `/readyz` answers everybody, and says more to a right token, so tokens were guessed there without a trace."""
    client = server_of(host="0.0.0.0", env=ENV, **KEYS)
    with capture_logs() as lines:
        assert client.get("/readyz").json["errored"] == []
        assert client.get("/readyz", token="guessed-by-a-stranger").json["errored"] == []
        assert client.get("/readyz", token=READING).json["errored"] != []
    [line] = [line for line in lines if line["event"] == "request refused"]
    assert (line["client"], line["code"], line["path"]) == ("127.0.0.1", "http.token", "/readyz")
    assert "guessed" not in str(lines)


def test_many_refusals_make_few_lines() -> None:
    """One line each ten seconds for an address, with how many came between; other addresses have their own."""
    clock = [0.0]
    audit = Audit(lambda: clock[0])
    with capture_logs() as lines:
        for tenth in range(150):
            clock[0] = tenth / 10
            audit.refusal("10.0.0.1", "http.token", "GET", "/metrics")
        audit.refusal("10.0.0.2", "http.token", "GET", "/metrics")
    assert [(line["client"], line["not_shown_before"]) for line in lines] == [
        ("10.0.0.1", 0), ("10.0.0.1", 99), ("10.0.0.2", 0),
    ]  # fmt: skip
