"""`aqueduck run` for events without Spark: the same service over the local query, for processes that tests kill."""

from __future__ import annotations

import signal
import threading

from aqueduck.config.events import load_events
from aqueduck.envelopes import json_events
from aqueduck.events.service import EventsService
from aqueduck.postgres.decode import decoder


def warm_up() -> None:
    decoder.warm_up()
    json_events.warm_up()


def run(config_file: str, *, once: bool) -> None:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    config = load_events(config_file)
    assert config is not None
    service = EventsService(config, with_spark=False)
    try:
        service.prepare()
        service.start(once=once)
        (service.run_once if once else service.supervise)(stopping)
    finally:
        service.stop()
