"""
Hazard 8 in a row: one service after another is killed with SIGKILL, each at the next durable step, then all is compared.

This is the short form, on Spark, of what `test_crashes`, `test_polling`, `test_copy`, `test_fanout_crashes` and `test_events`
do with a fresh service for each step.  An upsert would hide a change that is applied twice, so a log is compared as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fanout_lakes import Fan
from tests.fix_events import Flow
from tests.fix_postgres import Database
from tests.fix_service import Sync
from tests.integration.test_fanout_crashes import HISTORY, Service, fan, service
from tests.integration.test_polling import polled

__all__ = ["fan", "polled", "service"]  # fixtures

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(600)]

CAPTURE = "capture.staged"
COMMIT = ("lake.before_commit", "lake.after_commit")
STREAM = (CAPTURE, "batch.files_written", *COMMIT, "batch.committed", "capture.before_confirm")
POLL = (CAPTURE, *COMMIT, "poll.before_advance", "poll.advanced")
COPY = ("copy.chunk_written:4", "copy.before_landing", "copy.landed")
FANOUT = (
    "fanout.before_seed",
    "fanout.after_seed",
    "fanout.read",
    "fanout.before_commit",
    "fanout.after_commit",
)
EVENTS = ("capture.staged", "events.parts_written", "sink.written", "sink.flushed", "bookmark.saved:2", "batch.committed")  # fmt: skip


def load(db: Database, first: int) -> None:
    """Enough for files of tasks in both tables, with every kind of change."""
    for table in ("t", "log"):
        db.execute(
            f"insert into {table} select g, repeat(md5(g::text), 40) from generate_series({first}, {first + 5_999}) g;"
            f"update {table} set v = v || 'u' where id % 7 = 0; delete from {table} where id % 13 = 0"
        )
    db.execute(f"update t set id = -id where id % 11 = 0 and id >= {first}")


def assert_log_is_the_history(sync: Sync, db: Database) -> None:
    """Done again change by change, the log leaves the source's rows; no change is there twice or is missing."""
    history = sync.lake("select _op, _commit_lsn, _seq, id, v from lake.main.log order by _commit_lsn, _seq")
    assert len({(lsn, seq) for _, lsn, seq, _, _ in history}) == len(history)
    rows: dict[int, str] = {}
    for op, _, _, key, value in history:
        assert (key in rows) == (op != "insert"), f"{op} of {key}"
        if op == "delete":
            del rows[key]
        else:
            rows[key] = value
    assert sorted(rows.items()) == db.query("select id, v from log order by id")


def assert_no_strays(sync: Sync) -> None:
    """The catalog knows every file in the data path."""
    known = {
        path.rsplit("/", 1)[-1]
        for (path,) in sync.lake("select path from __ducklake_metadata_lake.ducklake_data_file")
    }
    found = {path.name for path in (sync.directory / "data").rglob("aqueduck-*.parquet")}
    assert found
    assert found <= known


@pytest.mark.kills("sync", *STREAM)
def test_sync_killed_at_each_step_loses_and_doubles_nothing(
    db: Database, sync_of: Callable[..., Sync]
) -> None:
    """P-S17, promise 1: six kills in a row, each with changes of its own."""
    db.execute("create table t (id int primary key, v text); create table log (id int primary key, v text)")
    sync = sync_of("public.t", "public.log", segment_bytes="2MiB")
    sync.modes = {"public.log": "append"}
    sync.init()
    for number, point in enumerate(STREAM):
        load(db, 1 + 6_000 * number)
        sync.die(point)
    assert sync.once() == 0, sync.log()
    assert sync.differing(("public.t",)) == []
    assert_log_is_the_history(sync, db)
    assert_no_strays(sync)


@pytest.mark.kills("sync", *COPY)
def test_a_copy_killed_at_each_step_continues(db: Database, sync_of: Callable[..., Sync]) -> None:
    """Hazard 8, P-S05: the next start copies only the chunks that are missing, while rows change between the starts."""
    db.execute("create table t (id int primary key, v text, doc text)")
    db.execute("alter table t alter doc set storage external")
    db.execute("insert into t select g, 'v' || g, repeat(md5(g::text), 80) from generate_series(1, 4000) g")
    sync = sync_of("public.t", copy=True, copy_chunk_bytes="32KiB")
    for point in COPY:
        sync.die(point)
        db.execute("update t set v = v || '!' where id % 5 = 0; delete from t where id % 11 = 0")
        db.execute("update t set id = -id where id % 7 = 0; insert into t select max(id) + 1, 'new' from t")
    sync.catch_up()
    log = (sync.directory / "log.txt").read_text(encoding="utf-8", errors="replace")
    [chunks] = [int(n) for n in re.findall(r"copy started +chunks=(\d+)", log)]
    assert [int(n) for n in re.findall(r"copy continues +chunks=(\d+)", log)] == [chunks - 4, 0]
    assert_no_strays(sync)


@pytest.mark.kills("sync", *POLL)
def test_sync_that_polls_killed_at_each_step_loses_and_doubles_nothing(polled: Sync) -> None:
    """P-S17, P-E09: between stage, lake commit and advance of the slot, the lake's position decides."""
    sync, db = polled, polled.db
    assert sync.once() == 0, sync.log()
    for number, point in enumerate(POLL):
        db.execute(
            f"update t set v = v || '!' where id % 3 = 0; delete from t where id % 50 = {number};"
            f" insert into t select g, 'new' from generate_series({6001 + 1000 * number}, {7000 + 1000 * number}) g"
        )
        sync.die(point)
    sync.catch_up()


@pytest.mark.kills("fanout", *FANOUT)
@pytest.mark.parametrize("fan", ["postgres"], indirect=True)
def test_a_fanout_killed_at_each_step_loses_and_doubles_nothing(fan: Fan, service: Service) -> None:
    """P-F01, P-F05, P-F10: a worker dies in a seed or a cycle, then the driver and everything with it."""
    fan.change(*HISTORY)
    for point in FANOUT:
        service.die(point)
        fan.change(*HISTORY, "update lake.t set v = v + 1, c = 'a' where id % 5 = 0")
    assert service.start("--once").wait(timeout=240) == 0, service.log()
    assert fan.differing() == {}


@pytest.mark.kills("events", *EVENTS)
def test_events_killed_at_each_step_lose_and_double_nothing(
    db: Database, flow_of: Callable[..., Flow], tmp_path: Path
) -> None:
    """P-E03: with the bookmark in a file, a file has every event once, in order."""
    db.execute("create table t (id int primary key, v text); create publication faucet_pub for table t")
    flow = flow_of(more={"segment_bytes": "256KiB", "batch_bytes_max": "256KiB"})
    assert flow.once() == 0, flow.log()
    for number, point in enumerate(EVENTS):
        for i in range(4):
            first = number * 2000 + i * 500
            db.execute(f"insert into t select {first} + g, repeat('x', 100) from generate_series(1, 500) g")
        flow.die(point)
    assert flow.once() == 0, flow.log()
    assert [e["after"]["id"] for e in flow.lines()] == list(range(1, 2000 * len(EVENTS) + 1))
