"""The state of an events flow: in page, probes, metrics and API, and in `aqueduck status` with and without the service."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from aqueduck.cli.commands import app
from aqueduck.config.events import load_events
from aqueduck.config.server import ServerConfig
from aqueduck.events.overview import EventsOverviews
from aqueduck.events.run import run_events
from aqueduck.events.service import EventsService
from aqueduck.model.errors import AqueduckError, ServerStartError
from aqueduck.web.server import serve
from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until

FlowOf = Callable[..., Flow]

SHOP = "create table orders (id int primary key, v text); create publication faucet_pub for table orders"


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=30) as answer:
        return str(answer.read().decode())


def group(address: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(address, "api/v1/status"))["flows"][0]["groups"][0]
    return found


def status(flow: Flow) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["status", "-c", str(flow.config_file), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def served(db: Database, flow_of: FlowOf) -> Iterator[tuple[Flow, EventsService, str]]:
    """A flow that runs in this process, and the address of its page."""
    db.execute(SHOP)
    flow = flow_of()
    service = flow.service()
    stopping = threading.Event()
    running = threading.Thread(target=service.supervise, args=(stopping,))
    try:
        service.prepare()
        with serve(ServerConfig(port=0), EventsOverviews(service), None, interval=0.1) as address:
            assert address is not None
            service.start()
            running.start()
            yield flow, service, address
            stopping.set()
            running.join(60)
    finally:
        stopping.set()
        service.stop()


def test_a_running_flow_shows_itself(db: Database, served: tuple[Flow, EventsService, str]) -> None:
    """Page, probes, metrics and API: place, events, sink, lag; the same numbers in `aqueduck status`."""
    flow, _, address = served
    db.execute("insert into orders select g, 'x' from generate_series(1, 25) g")
    wait_until(lambda: group(address)["delivery"]["events"] == 25, "the events are counted", 60)
    assert json.loads(get(address, "healthz"))["status"] == "ok"
    assert json.loads(get(address, "readyz"))["ready"] is True
    assert "<title>" in get(address, "")
    found = group(address)
    assert (found["name"], found["state"], found["batches"] > 0) == ("faucet_slot", "streaming", True)
    assert found["delivery"]["sink"] == f"jsonl {flow.directory / 'changes.jsonl'}"
    assert found["freshness_seconds"] < 60
    text = get(address, "metrics")
    assert 'aqueduck_events_delivered_total{group="faucet_slot"} 25.0' in text
    assert 'aqueduck_group_state{group="faucet_slot",state="streaming"} 1.0' in text
    assert 'aqueduck_freshness_seconds_count{group="faucet_slot"}' in text
    row = status(flow)
    assert (row["running"], row["events"], row["last_error"]) == (True, 25, None)
    assert row["bookmark"] == group(address)["position"]
    assert db.dsn not in json.dumps(row)


def test_a_failure_is_shown_until_it_is_over_and_noted_for_later(
    db: Database, served: tuple[Flow, EventsService, str], arm: Callable[[str], None]
) -> None:
    """During retries the error is shown with its code; afterwards it is the last error, and the flow is well."""
    flow, _, address = served
    arm("sink.flushed:raise")
    db.execute("insert into orders values (1, 'a')")
    wait_until(lambda: group(address)["state"] == "retrying", "the failure is shown", 60)
    error = group(address)["error"]
    assert (error["code"], error["group"]) == ("lake.write", "faucet_slot")
    wait_until(lambda: group(address)["delivery"]["events"] == 1, "it recovers automatically", 60)
    found = group(address)
    assert (found["state"], found["error"], found["restarts"]) == ("streaming", None, 1)
    assert status(flow)["last_error"].startswith("[lake.write]")
    assert 'aqueduck_errors_total{code="lake.write",flow="events",group="faucet_slot"}' in get(
        address, "metrics"
    )


def test_status_works_without_a_service(db: Database, flow_of: FlowOf) -> None:
    """Before the first start, after a run, and with a backlog: bookmark, events so far, how much waits."""
    db.execute(SHOP)
    flow = flow_of()
    flow.write_config()
    row = status(flow)
    assert (row["running"], row["bookmark"], row["slot_exists"], row["lag_bytes"]) == (
        False,
        None,
        False,
        None,
    )
    assert flow.once() == 0, flow.log()
    db.execute("insert into orders select g, 'x' from generate_series(1, 10) g")
    assert flow.once() == 0, flow.log()
    db.execute("insert into orders select g, repeat('x', 1000) from generate_series(11, 1000) g")
    row = status(flow)
    assert (row["events"], row["slot_exists"]) == (10, True)
    assert row["lag_bytes"] > 900_000
    assert row["commit_time"] is not None
    assert flow.once() == 0, flow.log()
    assert status(flow)["events"] == 1000
    shown = CliRunner().invoke(app, ["status", "-c", str(flow.config_file)])
    assert "faucet_slot" in shown.stdout
    assert "1,000" in shown.stdout


@pytest.mark.slow
def test_a_port_that_is_taken_stops_only_who_asked_for_it(
    db: Database, flow_of: FlowOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow without a server section runs although the port is taken; a server that the file names must start."""
    db.execute(SHOP)
    flow = flow_of(source={"idle_timeout": 1})

    def run() -> None:
        flow.write_config()
        config = load_events(flow.config_file)
        assert config is not None
        run_events(config, once=False, with_spark=False)

    monkeypatch.setattr("signal.signal", lambda *_: None)
    with serve(ServerConfig(port=0), _Nothing(), None) as address:
        assert address is not None
        port = int(address.rsplit(":", 1)[1].strip("/"))
        monkeypatch.setattr("aqueduck.events.run.ServerConfig", lambda: ServerConfig(port=port))
        began = time.monotonic()
        run()
        assert time.monotonic() - began >= 1, "it ran"
        flow.more["server"] = {"port": port}
        with pytest.raises(ServerStartError):
            run()
        assert status(flow)["last_error"].startswith("[http.start]")


class _Nothing:
    def overview(self) -> Any:
        raise AqueduckError("there is nothing here")
