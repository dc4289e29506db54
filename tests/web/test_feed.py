"""The stream of events: everything at first, then what changes, and nothing that did not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from aqueduck.config.server import ServerConfig
from aqueduck.model.errors import LakeWriteError
from aqueduck.model.lifecycle import SyncState
from aqueduck.overview.values import DeliveryOverview
from aqueduck.web.feed import Feed
from aqueduck.web.server import serve
from tests.fix_postgres import wait_until
from tests.web.conftest import Client
from tests.web.made_up import FULL, START, Stage, events_flow, group, many_destinations, overview, sync, table


def feed_of(stage: Stage, stall_seconds: float = 60) -> Feed:
    feed = Feed(stage, stall_seconds=stall_seconds)
    feed.look()
    return feed


def events(client: Client, **keywords: Any) -> Iterator[dict[str, Any]]:
    connection = client.connection()
    connection.request("GET", "/api/v1/events", headers=keywords.get("headers", {}))
    response = connection.getresponse()
    assert response.getheader("content-type", "").startswith("text/event-stream")
    try:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_the_first_event_is_everything() -> None:
    """Who connects gets all parts: head, lake, errors, every table, every destination."""
    first = feed_of(Stage()).since(0)
    assert first["full"]
    assert set(first["set"]) == {
        "head", "lake", "errors", "table:shop/public.orders", "table:shop/public.items", "table:shop/public.prices",
        "destination:tenants/acme", "destination:tenants/bolt",
    }  # fmt: skip
    assert set(first["points"]) == {"group:shop", "flow:tenants", "group:faucet_slot"}


def test_only_what_changed_is_sent_again() -> None:
    """A table that is still costs nothing, however many there are."""
    stage = Stage(overview(sync(group(table("a.x"), table("a.y")))))
    feed = feed_of(stage)
    stage.now = overview(sync(group(table("a.x", inserts=10), table("a.y"))))
    before = feed.seq
    feed.look()
    update = feed.since(before)
    assert set(update["set"]) == {"head", "table:shop/a.x"}
    assert update["set"]["table:shop/a.x"]["rate"] > 0
    assert len(update["points"]["group:shop"]) == 1


def test_a_rate_falls_back_to_zero() -> None:
    """Rates are over five seconds; a table that stops is sent until its rate is zero, and then no more."""
    stage = Stage(overview(sync(group(table("a.x", inserts=100)))), clock=START)
    feed = feed_of(stage)
    stage.now = overview(sync(group(table("a.x", inserts=110))))
    rates: list[float | None] = []
    for second in range(1, 10):
        stage.clock = START + timedelta(seconds=second)
        seq = feed.seq
        feed.look()
        rates.append(feed.since(seq)["set"].get("table:shop/a.x", {}).get("rate"))
    assert rates == [10.0, 5.0, 3.3, 2.5, 2.0, 0.0, None, None, None]


def test_events_have_a_rate_of_their_own() -> None:
    """A slot whose changes become events has no tables: its chart shows the events that were delivered."""
    stage = Stage(clock=START)
    feed = feed_of(stage)
    for second, count in enumerate((1200, 1260, 1260), start=1):
        stage.now = overview(events_flow(delivery=DeliveryOverview(sink="stdout", events=count)))
        stage.clock = START + timedelta(seconds=second)
        feed.look()
    assert [point[3] for point in feed.since(0)["points"]["group:faucet_slot"]][-2:] == [60.0, 30.0]


def test_counts_that_start_anew_are_no_negative_rate() -> None:
    """A service that was started again counts from zero."""
    stage = Stage(overview(sync(group(table("a.x", inserts=100)))), clock=START)
    feed = feed_of(stage)
    for second, inserts in enumerate((150, 0, 10), start=1):
        stage.now = overview(sync(group(table("a.x", inserts=inserts))))
        stage.clock = START + timedelta(seconds=second)
        feed.look()
        assert feed.since(0)["set"]["table:shop/a.x"]["rate"] == (50.0, 0.0, 10.0)[second - 1]


def test_a_table_that_is_gone_is_announced_and_may_come_back() -> None:
    """The page forgets what is no longer there."""
    stage = Stage(overview(sync(group(table("a.x"), table("a.y")))))
    feed = feed_of(stage)
    seq = feed.seq
    stage.now = overview(sync(group(table("a.y"))))
    feed.look()
    assert feed.since(seq)["gone"] == ["table:shop/a.x"]
    assert "table:shop/a.x" not in feed.since(0)["set"]
    stage.now = overview(sync(group(table("a.x"), table("a.y"))))
    feed.look()
    assert feed.since(seq)["gone"] == []
    assert "table:shop/a.x" in feed.since(seq)["set"]


def test_two_thousand_destinations_cost_only_the_busy_ones() -> None:
    """One event after another stays small for a large fan-out."""
    stage = Stage(overview(many_destinations(2000)))
    feed = feed_of(stage)
    assert len(feed.since(0)["set"]) == 2003
    busy = many_destinations(2000)
    rows = tuple(
        replace(d, rows_replicated=d.rows_replicated + 1) if i < 5 else d
        for i, d in enumerate(busy.destinations)
    )
    stage.now = overview(replace(busy, destinations=rows))
    seq = feed.seq
    feed.look()
    assert len(feed.since(seq)["set"]) == 6


def test_a_service_that_cannot_report_its_state_turns_red() -> None:
    """Without an overview for long the server is alive and not ready, and says why in our own words."""
    stage = Stage()
    feed = feed_of(stage, stall_seconds=0)
    stage.blind = LakeWriteError("the session with the lake is closed")
    feed.look()
    assert "[lake.write]" in feed.stalled()[-1].reason
    assert feed.overview.version == FULL.version
    stage.blind = None
    feed = feed_of(stage)
    assert feed.stalled() == ()


def test_events_follow_the_service(client: Client) -> None:
    """A change of the service reaches a listener over HTTP."""
    stream = events(client)
    first = next(stream)
    assert first["set"]["table:shop/public.items"]["state"] == "SNAPSHOT"
    client.stage.now = overview(sync(group(table("public.items", SyncState.STREAMING))))
    for update in stream:
        if update["set"].get("table:shop/public.items", {}).get("state") == "STREAMING":
            break
    assert "table:shop/public.prices" in update["gone"]


def test_a_listener_is_sent_no_more_than_it_can_read(
    server_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything changes all the time, updates come less often, and skip nothing."""
    monkeypatch.setattr("aqueduck.web.api.EVENT_BYTES_PER_SECOND", 3000)
    stage = Stage(overview(sync(group(table("a.x")))))
    stream = events(server_of(stage))
    first = next(stream)
    stage.now = overview(sync(group(table("a.x", inserts=10))))
    second = next(stream)
    assert second["seq"] - first["seq"] > 1
    assert second["set"]["table:shop/a.x"]["inserts"] == 10


def test_readyz_turns_red_and_green_again(server_of: Callable[..., Client]) -> None:
    """P-F13: 503 with the group, its tables and the reason while a group with work makes no progress."""
    stage = Stage(overview(sync(group(table(queued_changes=3), lag_bytes=9))))
    client = server_of(stage, stall_seconds=1)
    wait_until(lambda: client.get("/readyz").status == 503, "readyz turns red", 30)
    (found,) = client.get("/readyz").json["stalled"]
    assert (found["group"], found["tables"]) == ("shop", ["public.orders"])
    assert "do not reach the lake" in found["reason"]
    assert client.get("/healthz").status == 200
    assert b"aqueduck_ready 0.0" in client.get("/metrics").body
    stage.now = overview(sync(group(table(), batches=1)))
    wait_until(lambda: client.get("/readyz").status == 200, "readyz turns green", 30)


def test_a_server_ends_quietly_while_a_client_listens(capfd: pytest.CaptureFixture[str]) -> None:
    """An open page holds nothing up: its stream ends, and nothing is printed about it."""
    stage = Stage()
    began = 0.0
    with serve(ServerConfig(port=0), stage, stage, interval=0.1) as address:
        assert address is not None
        stream = events(Client(address, stage))
        next(stream)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert list(stream) is not None
    assert "Traceback" not in capfd.readouterr().err
