"""The service around the query of an events flow: a store that fails, a lock that is lost, a slot that cannot be read twice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from aqueduck.config.events import load_events
from aqueduck.events.status import lock_name
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.errors import (
    AqueduckError,
    LakeWriteError,
    ServiceLockedError,
    SinkRejectedError,
    SinkWriteError,
    SlotLostError,
)
from aqueduck.model.event_parts import EventPart
from aqueduck.postgres.session.group_lock import try_lock_group
from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until
from tests.integration.test_events import refused
from tests.sinks.test_http import Receiver, receiver

__all__ = ["receiver"]  # a fixture

FlowOf = Callable[..., Flow]

SHOP = "create table orders (id int primary key); create publication faucet_pub for table orders"


class Dying:
    """A query that has failed when it is looked at for the second time."""

    def __init__(self, stopping: threading.Event, failure: AqueduckError | None) -> None:
        self._stopping, self._failure = stopping, failure
        self._looks = 0

    @property
    def active(self) -> bool:
        self._looks += 1
        return self._looks < 2

    def check(self) -> None:
        if self._looks >= 2 and self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._stopping.set()


@pytest.mark.parametrize(
    ("failure", "slot_type", "raised"),
    [
        (SinkRejectedError("no"), "permanent", SinkRejectedError),
        (SinkWriteError("full"), "temporary", SlotLostError),
        (None, "temporary", SlotLostError),
    ],
)
def test_what_ended_a_query_is_not_overlooked(
    db: Database,
    flow_of: FlowOf,
    failure: AqueduckError | None,
    slot_type: str,
    raised: type[AqueduckError],
) -> None:
    """A query that ends between two looks is asked why, whenever that is; one that just ends is a failure, too."""
    db.execute(SHOP)
    service = flow_of(source={"slot_type": slot_type}).service()
    stopping = threading.Event()
    try:
        service.prepare()
        service._query = Dying(stopping, failure)  # type: ignore[assignment]
        with pytest.raises(raised):
            service.supervise(stopping)
    finally:
        service.stop()


def rotated(seconds: float) -> dict[str, object]:
    return {"type": "jsonl", "config": {"path": "./changes.jsonl", "rotate_seconds": seconds}}


def insert(db: Database, first: int, last: int) -> None:
    db.execute(f"insert into orders select generate_series({first}, {last})")


def published(flow: Flow) -> list[int]:
    return [event["after"]["id"] for event in flow.rotated()]


def test_a_store_that_is_down_when_a_file_is_due_is_tried_again(
    db: Database, flow_of: FlowOf, new_server: Callable[..., EmbeddedPostgres]
) -> None:
    """P-E10: a failure between two batches is no special case: the flow recovers automatically, every event is there once."""
    db.execute(SHOP)
    store = new_server()
    flow = flow_of(
        sink=rotated(3), state={"type": "postgres", "config": {"connection_url": store.dsn_for("postgres")}}
    )
    assert flow.once() == 0, flow.log()
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    insert(db, 1, 3)
    saved = "select (bookmark->>'events')::int from aqueduck_bookmarks"
    with psycopg.connect(store.dsn_for("postgres"), autocommit=True) as observer:
        wait_until(
            lambda: observer.execute(saved).fetchone() == (3,), "the bookmark is saved", 60, log=flow.log
        )
    store.stop("immediate")
    assert published(flow) == []
    wait_until(lambda: "trying again" in flow.log(), "the file is due", 60, log=flow.log)
    store.start()
    wait_until(lambda: len(published(flow)) == 3, "it is published", 90, log=flow.log)
    insert(db, 4, 5)
    wait_until(lambda: len(published(flow)) == 5, "it continues", 90, log=flow.log)
    assert process.end(signal.SIGTERM) == 0
    assert published(flow) == [1, 2, 3, 4, 5]


def test_a_file_is_not_published_while_its_batch_is_in_doubt(
    db: Database, flow_of: FlowOf, tmp_path: Path, arm: Callable[[str], None]
) -> None:
    """P-E03: events that no bookmark knows of are written again, so they must not be visible before that."""
    db.execute(SHOP)
    flow = flow_of(sink=rotated(0.001))
    text = tmp_path / "part"
    text.write_text("{}\n")
    service = flow.service()
    try:
        service.prepare()
        before = service.position
        arm("sink.flushed:raise")
        with pytest.raises(LakeWriteError):
            service._deliver([EventPart(0, str(text), 1, 3)], before + 8, 1)
        service._tick(final=True)
        assert flow.rotated() == []
        service._recover()
        service._tick(final=True)
        assert flow.rotated() == []
        service._deliver([EventPart(0, str(text), 1, 3)], before + 8, 1)
        service._tick(final=True)
        assert flow.rotated() == [{}]
    finally:
        service.stop()


LOCK = "from pg_stat_activity where application_name = 'aqueduck lock' and datname = current_database()"


def test_a_lost_lock_is_taken_again(db: Database, flow_of: FlowOf) -> None:
    """P-E03: a connection that was cut takes the lock with it; the flow notices, takes it again and continues from the bookmark."""
    db.execute(SHOP)
    flow = flow_of()
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    db.execute(f"select pg_terminate_backend(pid) {LOCK}")
    insert(db, 1, 3)
    wait_until(lambda: "trying again" in flow.log(), "it notices", 8, log=flow.log)
    wait_until(lambda: bool(db.query(f"select {LOCK}")), "it has the lock again", 60, log=flow.log)
    assert isinstance(refused(flow), ServiceLockedError)
    insert(db, 4, 5)
    wait_until(lambda: flow.count() == 5, "it continues", 60, log=flow.log)
    wait_until(lambda: "back again" in flow.log(), "the outage is over", 60, log=flow.log)
    assert process.end(signal.SIGTERM) == 0
    assert [event["after"]["id"] for event in flow.lines()] == [1, 2, 3, 4, 5]


def test_a_lock_that_another_service_took_ends_the_run(db: Database, flow_of: FlowOf) -> None:
    """P-E03: if two services share a slot, the service that lost the lock ends before it writes into the other's files."""
    db.execute(SHOP)
    flow = flow_of()
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    flow.write_config()
    config = load_events(flow.config_file)
    assert config is not None
    with db.connect() as other:
        db.execute(f"select pg_terminate_backend(pid) {LOCK}")
        wait_until(lambda: try_lock_group(other, lock_name(config)), "the other has the lock", 60)
        wait_until(lambda: not flow.slot_active(), "the first lets go of the slot", 8, log=flow.log)
        assert process.wait() == ServiceLockedError.exit_code, flow.log()
    assert ServiceLockedError.code in flow.log()


def test_a_run_of_a_temporary_slot_ends_with_its_first_failure(
    db: Database, flow_of: FlowOf, receiver: Receiver
) -> None:
    """P-E04: its slot is gone with the failed batch, so the run reports that instead of skipping the batch."""
    db.execute(SHOP)
    sink = {"type": "http", "config": {"url": receiver.url, "backoff": 0.01, "retries": 1}}
    flow = flow_of(sink=sink, source={"slot_type": "temporary"})
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    receiver.answers = [503] * 2
    insert(db, 1, 3)
    wait_until(lambda: "[sink.unreachable]" in flow.log(), "the receiver fails", 60, log=flow.log)
    wait_until(lambda: "[pg.slot_lost]" in flow.log(), "the run says what is lost", 30, log=flow.log)
    assert process.wait() == 1, flow.log()
    assert "delivered again" not in flow.log().split("[pg.slot_lost]")[1]
    assert receiver.events() == []
