"""Kafka, against the mock cluster that librdkafka itself brings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.events import KafkaSinkConfig
from aqueduck.model.errors import ConfigError, SinkRejectedError, SinkUnreachableError
from aqueduck.model.event_parts import EventPart
from aqueduck.sinks.kafka import KafkaSink
from aqueduck.spark.query.part_writer import PartWriter
from tests.fix_events import Flow, Watched
from tests.fix_postgres import Database

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture
def brokers() -> Iterator[str]:
    """A mock cluster; it lives as long as the client that made it."""
    owner = confluent_kafka.Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    metadata = owner.list_topics(timeout=30)
    yield ",".join(f"{b.host}:{b.port}" for b in metadata.brokers.values())
    owner.flush(1)


def messages(brokers: str, n: int, topic: str = "changes") -> list[Any]:
    """The first `n` messages of a topic."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": brokers, "group.id": "test", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    found: list[Any] = []
    deadline = time.monotonic() + 90
    while len(found) < n and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is not None and not message.error():
            found.append(message)
    consumer.close()
    return found


def stored(brokers: str, topic: str = "changes") -> int:
    """How many messages a topic has."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": brokers, "group.id": "counts"})
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    ends = [
        consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, p), timeout=30)
        for p in partitions
    ]
    consumer.close()
    return sum(last - first for first, last in ends)


def test_a_message_an_event_with_its_key_and_name(
    db: Database, flow_of: Callable[..., Flow], brokers: str
) -> None:
    """P-E10: the key is the primary key, so that a row's changes stay in order; the header names the event."""
    db.execute(
        "create table t (a int, b text, v text, primary key (a, b)); create table n (v text);"
        "alter table n replica identity full; create publication faucet_pub for table t, n"
    )
    sink = {"type": "kafka", "config": {"brokers": brokers, "topic": "changes", "timeout": 60}}
    flow = flow_of(sink=sink)
    assert flow.once() == 0, flow.log()
    db.execute(
        "insert into t values (1, 'x', 'v'); update t set v = 'w'; delete from t; insert into n values ('no key')"
    )
    db.execute("truncate t")
    assert flow.once() == 0, flow.log()
    found = messages(brokers, 5)
    # Messages with the same key are in one partition, in order; those without a key are anywhere.
    keyed = [m for m in found if m.key()]
    assert [json.loads(m.value())["op"] for m in keyed] == ["insert", "update", "delete"]
    assert {m.key() for m in keyed} == {b'{"a":1,"b":"x"}'}
    assert sorted(json.loads(m.value())["table"] for m in found if not m.key()) == ["n", "t"]
    names = [dict(m.headers())["id"].decode() for m in keyed]
    lsn = json.loads(keyed[0].value())["lsn"]
    assert names == [f"{lsn}/0", f"{lsn}/1", f"{lsn}/2"]


@pytest.mark.kills("events")
@pytest.mark.parametrize("point", ["sink.produced", "sink.flushed"])
def test_a_kill_doubles_with_the_same_names_and_loses_nothing(
    db: Database, flow_of: Callable[..., Flow], brokers: str, point: str
) -> None:
    """P-E03: at least once, whatever the brokers had before the kill; a repeated event has the same name."""
    db.execute("create table t (id int primary key); create publication faucet_pub for table t")
    sink = {"type": "kafka", "config": {"brokers": brokers, "topic": "changes", "timeout": 60}}
    flow = flow_of(sink=sink)
    assert flow.once() == 0, flow.log()
    db.execute("insert into t select generate_series(1, 300)")
    assert flow.once(fault=point) == -9, flow.log()
    assert flow.once() == 0, flow.log()
    total = stored(brokers)
    assert total == 600 if point == "sink.flushed" else 300 <= total <= 600
    found = messages(brokers, total)
    names = {dict(m.headers())["id"]: json.loads(m.value())["after"]["id"] for m in found}
    assert sorted(names.values()) == list(range(1, 301))


def test_brokers_that_are_down_are_a_typed_error(
    db: Database, watch: Callable[..., Watched], tmp_path: Path
) -> None:
    """Bad input: the batch does not count as delivered, and is delivered when Kafka is back."""
    db.execute("create table t (id int primary key)")
    watched = watch(db)
    db.execute("insert into t values (1)")
    writer = PartWriter(str(tmp_path / "parts"), "default", "x", "rows")
    parts = [writer.write(piece, 1, n) for n, piece in enumerate(watched.pieces())]
    sink = KafkaSink(KafkaSinkConfig(brokers="127.0.0.1:1", topic="t", timeout=1.5))
    with pytest.raises(SinkUnreachableError):
        sink.write(parts, 1)
    sink.close()


def test_an_event_that_is_too_large_is_refused_and_the_next_batch_is_not(
    db: Database, watch: Callable[..., Watched], brokers: str, tmp_path: Path
) -> None:
    """Bad input: only the operator can raise a limit of the producer; events given up with a batch cause no later failure."""
    db.execute("create table t (id int primary key, v text)")
    watched = watch(db)
    writer = PartWriter(str(tmp_path / "parts"), "default", "x", "rows")

    def written(statement: str, position: int) -> list[EventPart]:
        db.execute(statement)
        return [writer.write(piece, position, n) for n, piece in enumerate(watched.pieces())]

    config = KafkaSinkConfig(
        brokers=brokers, topic="changes", timeout=60, options={"message.max.bytes": 2000, "linger.ms": 500}
    )
    sink = KafkaSink(config)
    try:
        with pytest.raises(SinkRejectedError, match="MSG_SIZE_TOO_LARGE"):
            sink.write(
                written("insert into t select g, repeat('x', g * g) from generate_series(1, 60) g", 1), 1
            )
        sink.recover(None)
        sink.write(written("insert into t values (100, 'small')", 2), 2)
    finally:
        sink.close()


def test_a_setting_that_librdkafka_refuses_is_named_as_ours() -> None:
    """Bad input: no foreign exception, and no value in the message."""
    config = KafkaSinkConfig(brokers="x", topic="t", options={"sasl.passwort": "hunter2"})
    with pytest.raises(ConfigError, match="librdkafka") as error:
        KafkaSink(config)
    assert "hunter2" not in str(error.value)
