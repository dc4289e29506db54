"""What a fan-out serves: probes that follow progress, a status for each destination, nothing to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from aqueduck.config.server import ServerConfig
from aqueduck.web.server import serve
from tests.fix_postgres import wait_until
from tests.web.conftest import TOKEN, Client
from tests.web.made_up import FAILED, START, Stage, destination, fanout, overview


def test_a_destination_says_how_far_it_is(server_of: Callable[..., Client]) -> None:
    """P-F18: cursor, lag in lake snapshots and seconds, rows, the last error and the next try."""
    failing = destination(
        "bolt", "errored", position=80, lag_snapshots=10, lag_seconds=12.5, rows_replicated=7,
        error=replace(FAILED, destination="bolt"), failures=3, retry_at=START,
    )  # fmt: skip
    client = server_of(Stage(overview(fanout(destination("acme", position=90), failing))))
    found = client.get("/api/v1/destinations/bolt").json
    assert (found["position"], found["lag_snapshots"], found["lag_seconds"]) == (80, 10, 12.5)
    assert (found["rows_replicated"], found["error"]["code"], found["failures"]) == (7, "lake.value", 3)
    assert found["retry_at"] == START.isoformat()
    assert client.get("/api/v1/destinations/nobody").status == 404
    assert client.get("/readyz").json["errored"] == ["bolt"]


def test_health_is_red_when_a_fan_out_stops_to_turn(server_of: Callable[..., Client]) -> None:
    """P-F13: green while it moves, however little there is to do; red when it has not for long."""
    stage = Stage(overview(fanout(destination("a"), moved_at=datetime.now(UTC))))
    client = server_of(stage, stall_seconds=30)
    assert client.get("/healthz").status == 200
    late = datetime.now(UTC) - timedelta(seconds=31)
    stage.now = overview(fanout(destination("a"), moved_at=late))
    wait_until(lambda: client.get("/healthz").status == 503, "the probe is red", 30)
    assert client.get("/healthz").json["stuck"] == ["tenants"]


def test_a_fan_out_is_changed_in_its_file() -> None:
    """Requests that would change groups and tables are refused with the way to go."""
    stage = Stage(overview(fanout(destination("a"))))
    config = ServerConfig(port=0, token_env="TOKEN")
    with serve(config, stage, None, env={"TOKEN": TOKEN}, interval=0.1) as address:
        assert address is not None
        client = Client(address, stage)
        answer = client.ask("POST", "/api/v1/tables", {"source": "public.a"}, token=TOKEN)
        assert answer.status == 404
        assert "SIGHUP" in answer.json["error"]["hint"]
        assert client.get("/api/v1/settings").status == 404
