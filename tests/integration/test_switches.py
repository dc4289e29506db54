"""Hazard 8: kill -9 while `capture: auto` changes from the stream to bulk reads and back, in each flow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until
from tests.fix_service import START_SECONDS, Sync, passing
from tests.spark.formats import test_exactly_once as jobs

POINTS = ("switch.bulk", "switch.stream", "switch.behind")
SMALL = {"capture": "auto", **dict.fromkeys(("catchup_bytes", "poll_step_bytes"), "1MiB")}


def backlog(db: Database, first: int, transactions: int = 20) -> None:
    """Some megabytes of WAL."""
    db.execute(
        f"""
        do $$ begin
          for i in {first} .. {first + transactions - 1} loop
            insert into t select 1000 * i + g, repeat('x', 300) from generate_series(0, 999) g; commit;
          end loop;
        end $$
        """
    )


def write_until(done: Callable[[], bool], db: Database, first: int) -> int:
    """Write faster than a stream reads, until that is so; the number of the next transaction."""
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        backlog(db, first, 200)
        first += 200
    return first


def assert_no_copy_is_left(db: Database) -> None:
    copies = "select count(*) = 0 from pg_replication_slots where temporary and database = %s"
    wait_until(lambda: bool(db.value(copies, [db.name])), "no copy of the slot is left")


@pytest.mark.faults
@pytest.mark.spark
@pytest.mark.kills("sync", *POINTS)
def test_a_kill_at_a_switch_of_a_sync_loses_and_doubles_nothing(sync_of: Callable[..., Sync]) -> None:
    """Promise 1: bulk reads and the stream continue where the lake is, whichever read last."""
    sync = sync_of("public.t", **SMALL)
    db = sync.db
    db.execute("create table t (id int primary key, v text)")
    sync.init()
    backlog(db, 0)
    sync.die("switch.bulk")
    db.execute("update t set v = 'short' where id % 3 = 0")
    sync.die("switch.stream")
    db.execute("delete from t where id % 5 = 0")
    passed = passing(sync.directory / "log.txt", "switch.behind")
    process = sync.start(fault="switch.behind")
    wait_until(sync.streams, "it streams", START_SECONDS, log=sync.log)
    write_until(passed, db, 20)
    sync.kill(process)
    assert passed(), sync.log()
    sync.catch_up()
    assert_no_copy_is_left(db)


@pytest.mark.faults
@pytest.mark.kills("events", *POINTS)
def test_a_kill_at_a_switch_of_events_loses_and_doubles_nothing(
    db: Database, flow_of: Callable[..., Flow]
) -> None:
    """P-E03: every event once, in order."""
    db.execute("create table t (id int primary key, v text); create publication faucet_pub for table t")
    flow = flow_of(source=SMALL)
    assert flow.once() == 0, flow.log()
    backlog(db, 0)
    for point in ("switch.bulk", "switch.stream"):
        assert flow.once(fault=point) == -9, flow.log()
    passed = passing(flow.log_file, "switch.behind")
    process = flow.fork(fault="switch.behind")
    wait_until(flow.streams, "it streams", START_SECONDS, log=flow.log)
    last = write_until(passed, db, 20)
    assert process.wait() == -9, flow.log()
    flow.wait_free()
    assert flow.once() == 0, flow.log()
    assert [line["after"]["id"] for line in flow.lines()] == list(range(1000 * last))
    assert_no_copy_is_left(db)


@pytest.mark.faults
@pytest.mark.kills("jobs", "switch.bulk", "switch.stream")
def test_a_kill_at_a_switch_of_a_job_loses_and_doubles_nothing(db: Database, tmp_path: Path) -> None:
    """Guarantee 10: `postgres_cdc` continues from Spark's checkpoint."""
    jobs.check(db, tmp_path, ("switch.bulk", "switch.stream"), "auto", rows=4000, passes=1)
