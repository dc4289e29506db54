"""
A Kafka topic: one message per event, keyed by the row's primary key, so that a row's changes stay in order.

Delivery is at least once, by librdkafka's idempotent producer.  The header `id` names each event by the LSN of its
transaction and its index there.  The package `confluent-kafka` is optional: `pip install aqueduck[kafka]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aqueduck import faults
from aqueduck.config.events import KafkaSinkConfig
from aqueduck.model.bookmarks import Bookmark
from aqueduck.model.errors import ConfigError, SinkRejectedError, SinkUnreachableError
from aqueduck.model.event_parts import EventPart, PartFormat
from aqueduck.sinks.rows import event_id, read_rows

__all__ = ["KafkaSink"]


class KafkaSink:
    """Produces to one topic; a batch is delivered when the brokers have acknowledged all of its events."""

    part_format: PartFormat = "rows"
    batch_bytes_max: int | None = 16 << 20

    def __init__(self, config: KafkaSinkConfig) -> None:
        try:
            from confluent_kafka import KafkaException, Producer
        except ImportError as exc:
            hint = "pip install 'aqueduck[kafka]'"
            raise ConfigError("the sink kafka needs the package confluent-kafka", hint=hint) from exc
        self._config = config
        self._failure: Any = None
        self._refusal = KafkaException
        settings: dict[str, Any] = {
            "bootstrap.servers": config.brokers,
            "enable.idempotence": True,
            "linger.ms": 5,
            "compression.type": "lz4",
            "delivery.timeout.ms": int(config.timeout * 1000),
            "client.id": "aqueduck",
            **config.options,
        }
        try:
            self._producer = Producer(settings, logger=_Silent())
        except (KafkaException, ValueError, TypeError) as exc:
            # The exception names the setting; its value may be a password.
            raise ConfigError(
                "librdkafka refuses a setting of sink.config.options", hint="check their names and values"
            ) from exc

    def recover(self, bookmark: Bookmark | None) -> None:
        """Collect errors of events from a failed batch now, so that they are not attributed to the next batch."""
        self._producer.purge()
        self._producer.flush(1)

    def place(self) -> dict[str, Any]:
        return {}

    def write(self, parts: Sequence[EventPart], position: int) -> None:
        self._failure = None
        for part in parts:
            for batch in read_rows(Path(part.path)):
                columns = (batch.column(name).to_pylist() for name in ("line", "key", "lsn", "seq"))
                for line, key, lsn, seq in zip(*columns, strict=True):
                    self._produce(line[:-1], key or None, event_id(lsn, seq))
                self._check()
        faults.point("sink.produced")
        left = self._producer.flush(self._config.timeout + 5)
        self._check()
        if left:
            raise self._unreachable("no answer")

    def _produce(self, value: bytes, key: bytes | None, name: str) -> None:
        while True:
            try:
                self._producer.produce(
                    self._config.topic,
                    value,
                    key,
                    on_delivery=self._delivered,
                    headers=[("id", name.encode())],
                )
            except BufferError:  # the queue is full: wait until the brokers have taken some of it
                self._producer.poll(0.1)
                self._check()
            except (
                self._refusal
            ) as exc:  # the producer itself refuses the message, for example because it is too large
                self._failure = exc.args[0]
                self._check()
            else:
                self._producer.poll(0)
                return

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None and self._failure is None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        self._producer.purge()
        name = failure.name()
        if name in _REFUSED:
            raise SinkRejectedError(
                f"Kafka refused an event: {name}", hint="correct the topic, its limits or its rights"
            )
        raise self._unreachable(name)

    def _unreachable(self, reason: str) -> SinkUnreachableError:
        self._producer.purge()
        return SinkUnreachableError(
            f"Kafka did not accept the batch: {reason}",
            hint="check the brokers; the whole batch is then delivered again",
        )

    def tick(self, position: int, *, final: bool = False) -> bool:
        self._producer.poll(0)
        return False

    def settle(self, position: int) -> None: ...

    def close(self) -> None:
        self._producer.purge()
        self._producer.flush(1)


# Errors that a retry cannot fix.
_REFUSED = (
    "MSG_SIZE_TOO_LARGE",
    "_MSG_SIZE_TOO_LARGE",
    "TOPIC_AUTHORIZATION_FAILED",
    "TOPIC_EXCEPTION",
    "_UNKNOWN_TOPIC",
    "UNKNOWN_TOPIC_OR_PART",
    "INVALID_RECORD",
)


class _Silent:
    """Drops librdkafka's own log lines, which repeat broker names; important ones are also raised as errors."""

    def log(self, *_arguments: Any, **_keywords: Any) -> None: ...
