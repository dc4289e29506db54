"""
Bad input of an events flow, from end to end: a typed error, nothing lost, and the next start continues.

Each part alone is tested beside that part (`postgres/capture/test_events_capture`, `envelopes/test_json_events`,
`sinks/`); what is refused before a start, in `test_events`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.bad_wire import BadWire, Spoil, bad_wire
from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until
from tests.sinks.test_http import Receiver, receiver

__all__ = ["receiver"]  # a fixture

FlowOf = Callable[..., Flow]

SHOP = (
    "create table orders (id int primary key, n int, v text); create publication faucet_pub for table orders"
)


@pytest.fixture
def wire(db: Database) -> Iterator[BadWire]:
    with bad_wire(int(str(conninfo_to_dict(db.dsn)["port"]))) as made:
        yield made


def through(db: Database, wire: BadWire) -> dict[str, Any]:
    return {"connection_url": make_conninfo(db.dsn, port=wire.port, host="127.0.0.1")}


def insert(db: Database, first: int, last: int) -> None:
    db.execute(f"insert into orders select g, 7777000 + g, 'v' || g from generate_series({first}, {last}) g")


def ids(flow: Flow) -> list[int]:
    return [event["after"]["id"] for event in flow.lines()]


def unknown_message(data: bytes) -> bytes:
    """The type of an insert message becomes one that there is not."""
    at = data.find(b"N\x00\x03t\x00\x00\x00")
    return data if at < 5 else data[: at - 5] + b"?" + data[at - 4 :]


def garbage(data: bytes) -> bytes:
    """Replaces a message with an insert by noise."""
    return bytes(b ^ 0xA5 for b in data) if b"N\x00\x03t\x00\x00\x00" in data else data


def half_a_number(data: bytes) -> bytes:
    return data.replace(b"7777005", b"77x7005")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [unknown_message, garbage])
def test_a_spoiled_stream_is_read_again(db: Database, flow_of: FlowOf, wire: BadWire, spoil: Spoil) -> None:
    """P-E05: the flow notices, restarts from the bookmark automatically, and every event is there once."""
    db.execute(SHOP)
    flow = flow_of(source=through(db, wire))
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    insert(db, 1, 3)
    wait_until(lambda: flow.count() == 3, "the first are there", 60, log=flow.log)
    wire.spoil = spoil
    insert(db, 4, 10)
    wait_until(lambda: flow.count() == 10, "all are there", 90, log=flow.log)
    process.end(signal.SIGTERM)
    assert wire.spoiled == 1
    assert "[pg." in flow.log(), "a typed error"
    assert "trying again" in flow.log()
    assert ids(flow) == list(range(1, 11))


def test_bad_text_for_a_type_stops_the_flow_without_showing_it(
    db: Database, flow_of: FlowOf, wire: BadWire
) -> None:
    """P-E05: a value that its type does not write is an error with the column's name only; the next start continues."""
    db.execute(SHOP)
    flow = flow_of(source=through(db, wire))
    assert flow.once() == 0, flow.log()
    insert(db, 1, 10)
    wire.spoil = half_a_number
    assert flow.once() == 1, flow.log()
    assert "[events.value]" in flow.log()
    assert "column n" in flow.log()
    assert "77x7005" not in flow.log()
    assert flow.once() == 0, flow.log()
    assert ids(flow) == list(range(1, 11))


@pytest.mark.parametrize(
    ("file_bytes", "code"),
    [(300_000, "sink.write"), pytest.param(40_000, "stage.full", marks=pytest.mark.slow)],
)
def test_a_full_disk_stops_the_flow_and_nothing_is_lost(
    db: Database, flow_of: FlowOf, file_bytes: int, code: str
) -> None:
    """A full disk of the sink or of the stage is a typed error; with space again, every event is there once."""
    db.execute(SHOP)
    flow = flow_of(more={"segment_bytes": "64KiB", "batch_bytes_max": "64KiB"})
    assert flow.once() == 0, flow.log()
    for first in range(1, 3000, 100):
        insert(db, first, first + 99)
    assert flow.once(file_bytes=file_bytes) == 1, flow.log()
    assert f"[{code}]" in flow.log(), flow.log()
    assert flow.count() < 3000
    assert flow.once() == 0, flow.log()
    assert ids(flow) == list(range(1, 3001))


@pytest.mark.slow
def test_a_path_that_cannot_be_written_any_more_stops_the_flow(db: Database, flow_of: FlowOf) -> None:
    """The sink's file became a directory; put back, the flow continues where it was."""
    db.execute(SHOP)
    flow = flow_of()
    assert flow.once() == 0, flow.log()
    insert(db, 1, 5)
    assert flow.once() == 0, flow.log()
    file = flow.directory / "changes.jsonl"
    file.rename(file.with_suffix(".aside"))
    file.mkdir()
    insert(db, 6, 9)
    assert flow.once() == 1
    assert "[sink.path]" in flow.log()
    file.rmdir()
    file.with_suffix(".aside").rename(file)
    assert flow.once() == 0, flow.log()
    assert ids(flow) == list(range(1, 10))


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [(400, "sink.rejected"), (503, "sink.unreachable")])
def test_a_webhook_that_does_not_take_events_stops_the_flow(
    db: Database, flow_of: FlowOf, receiver: Receiver, status: int, code: str
) -> None:
    """4xx and 5xx without end; when the receiver is well again, it gets everything, in order."""
    db.execute(SHOP)
    config = {"url": receiver.url, "batch_size": 5, "backoff": 0.01, "retries": 1}
    flow = flow_of(sink={"type": "http", "config": config})
    assert flow.once() == 0, flow.log()
    insert(db, 1, 20)
    receiver.answers = [200, 200, *[status] * 20]
    assert flow.once() == 1, flow.log()
    assert f"[{code}]" in flow.log()
    receiver.answers = []
    assert flow.once() == 0, flow.log()
    delivered = [event["after"]["id"] for event in receiver.events()]
    assert delivered[-20:] == list(range(1, 21)), "at least once: the batch comes again from its beginning"


@pytest.mark.slow
def test_kafka_that_is_down_stops_the_flow(db: Database, flow_of: FlowOf) -> None:
    """Nothing is confirmed meanwhile; when Kafka is back, it gets everything."""
    confluent_kafka = pytest.importorskip("confluent_kafka")
    db.execute(SHOP)
    sink = {"type": "kafka", "config": {"brokers": "127.0.0.1:1", "topic": "changes", "timeout": 2}}
    flow = flow_of(sink=sink)
    assert flow.once() == 0, flow.log()
    insert(db, 1, 20)
    before = flow.confirmed()
    assert flow.once() == 1, flow.log()
    assert "[sink.unreachable]" in flow.log()
    assert flow.confirmed() == before
    owner = confluent_kafka.Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    brokers = ",".join(f"{b.host}:{b.port}" for b in owner.list_topics(timeout=30).brokers.values())
    flow.sink = {"type": "kafka", "config": {"brokers": brokers, "topic": "changes", "timeout": 60}}
    assert flow.once() == 0, flow.log()
    assert flow.confirmed() > before
    owner.flush(1)
