"""The events flow as a user runs it: on Spark once, and without it for everything that does not need it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.events import load_events
from aqueduck.config.sync import LakeConfig
from aqueduck.events.check import run_event_checks
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import (
    AqueduckError,
    BookmarkError,
    ConfigError,
    PublicationError,
    ServiceLockedError,
    SlotActiveError,
    SlotConflictError,
    SlotLostError,
    TransactionTooLargeError,
)
from aqueduck.model.schema import parse_lsn
from tests.fix_events import Flow
from tests.fix_postgres import Database, wait_until

FlowOf = Callable[..., Flow]

SHOP = """
create table orders (id int primary key, v text);
create table users (id int primary key, v text);
create publication faucet_pub for table orders, users;
"""


@pytest.mark.spark
def test_the_reference_file_runs_on_spark(db: Database, flow_of: FlowOf) -> None:
    """P-E01, P-E07, P-E10: `aqueduck run -c faucet.yaml`: follows, spills what is large, stops on ctrl-C, continues where it was."""
    db.execute(SHOP)
    flow = flow_of(
        source={"create_slot_if_missing": True, "idle_timeout": 120}, more={"segment_bytes": "1MiB"}
    )
    process = flow.start()
    wait_until(lambda: flow.streams() or process.poll() is not None, "it streams", 120, log=flow.log)
    db.execute("insert into orders values (1, 'a'); update orders set v = 'b'; delete from orders")
    wait_until(lambda: flow.count() == 3, "the events are there", 120, log=flow.log)
    with db.connect() as conn, conn.transaction():
        conn.execute("insert into orders select g, repeat(md5(g::text), 4) from generate_series(1, 40000) g")
        conn.execute("insert into users select g, 'u' from generate_series(1, 1000) g")
        conn.execute("truncate users")
        conn.execute("update orders set v = 'late' where id <= 10")
    wait_until(lambda: flow.count() == 3 + 41011, "a large transaction is there", 120, log=flow.log)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the JVM hears it too
    assert process.wait(timeout=60) == 0, flow.log()
    assert "Traceback" not in flow.log()
    events = flow.lines()[3:]
    assert [e["after"]["id"] for e in events[:41000]] == [*range(1, 40001), *range(1, 1001)]
    assert [e["op"] for e in events[41000:]] == ["truncate", *["update"] * 10]
    assert "PERMANENT SLOT CREATED" in flow.log()
    flow.wait_free()
    db.execute("insert into orders values (-1, 'while it was down')")
    assert flow.once() == 0, flow.log()
    assert [e["after"]["id"] for e in flow.lines()[41014:]] == [-1]
    marks = json.loads((flow.directory / "state" / "faucet_slot.json").read_text())
    assert parse_lsn(marks["position"]) > parse_lsn(flow.lines()[-1]["lsn"]), "the end of the commit"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.kills("events")
@pytest.mark.parametrize("point", ["events.parts_written", "sink.flushed", "bookmark.saved:2"])
def test_a_kill_of_the_whole_family_on_spark(db: Database, flow_of: FlowOf, point: str) -> None:
    """P-E03 with Spark: driver, JVM and workers are gone; every event is there once. The other points run without Spark."""
    db.execute(SHOP)
    flow = flow_of(more={"segment_bytes": "256KiB", "batch_bytes_max": "256KiB"})
    assert flow.once() == 0, flow.log()
    for i in range(20):
        db.execute(
            f"insert into orders select {i} * 500 + g, repeat('x', 100) from generate_series(1, 500) g"
        )
    flow.die(point)
    assert flow.start("--once").wait(timeout=180) == 0, flow.log()
    assert [e["after"]["id"] for e in flow.lines()] == list(range(1, 10001))


@pytest.mark.spark
@pytest.mark.slow
def test_a_lake_sink_on_spark_is_exact_and_shows_itself(db: Database, flow_of: FlowOf) -> None:
    """P-E03 with Spark and a lake that keeps the bookmark; the page is beside it, and gone with it."""
    db.execute(SHOP)
    lake = {"catalog": "sqlite:./lake.sqlite", "data_path": "./lake", "table": "events"}
    flow = flow_of(
        sink={"type": "ducklake", "config": lake},
        more={"segment_bytes": "256KiB", "batch_bytes_max": "256KiB", "server": {"port": 0}},
    )
    assert flow.once() == 0, flow.log()
    for i in range(20):
        db.execute(
            f"insert into orders select {i} * 500 + g, repeat('x', 100) from generate_series(1, 500) g"
        )
    flow.die("bookmark.saved:3")
    process = flow.start()
    wait_until(lambda: flow.log().count("serving") == 2, "it serves", 180, log=flow.log)
    [*_, address] = re.findall(r"http://127.0.0.1:\d+/", flow.log())

    def delivered() -> int:
        with urllib.request.urlopen(f"{address}api/v1/status", timeout=30) as answer:
            [group] = json.load(answer)["flows"][0]["groups"]
        return int(group["delivery"]["events_total"])

    wait_until(lambda: delivered() == 10_000, "all are delivered", 180, log=flow.log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, flow.log()
    place = LakeConfig(
        catalog=f"sqlite:{flow.directory / 'lake.sqlite'}", data_path=str(flow.directory / "lake")
    )
    with open_lake(place, read_only=True) as observer:
        query = "select (event::json -> 'after' ->> 'id')::int from lake.main.events order by commit_lsn, seq"
        assert [i for (i,) in observer.query(query)[0]] == list(range(1, 10_001))


def test_a_run_ends_after_max_messages_at_a_commit(db: Database, flow_of: FlowOf) -> None:
    """P-E04: the cap is checked after each commit, and the next run continues after the last event."""
    db.execute(SHOP)
    flow = flow_of(source={"max_messages": 25})
    assert flow.once() == 0, flow.log()
    for i in range(8):
        db.execute(f"insert into orders select {i * 10} + g from generate_series(1, 10) g")
    assert flow.once() == 0, flow.log()
    assert len(flow.lines()) == 30
    assert flow.fork().wait() == 0, flow.log()
    assert len(flow.lines()) == 60, "also without --once the run ends"
    assert flow.once() == 0
    assert [e["after"]["id"] for e in flow.lines()] == list(range(1, 81))


def test_a_run_ends_when_nothing_happens_for_idle_timeout(db: Database, flow_of: FlowOf) -> None:
    """P-E04: changes prolong it, here to twice as long; then it ends with success."""
    db.execute(SHOP)
    flow = flow_of(source={"idle_timeout": 2})
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    began, rows = time.monotonic(), 0
    while time.monotonic() - began < 4.0:
        rows += 1
        db.execute(f"insert into orders values ({rows})")
        wait_until(lambda rows=rows: flow.count() == rows, "the change is delivered", log=flow.log)  # type: ignore[misc]
    assert process.wait() == 0, flow.log()
    assert len(flow.lines()) == rows


def test_a_transaction_beyond_max_staged_records_is_a_typed_error(db: Database, flow_of: FlowOf) -> None:
    """P-E08: the limit applies only if it is set; without it, the same transaction passes."""
    db.execute(SHOP)
    flow = flow_of(source={"max_staged_records": 100})
    assert flow.once() == 0, flow.log()
    db.execute("insert into orders select generate_series(1, 100)")
    assert flow.once() == 0, flow.log()
    db.execute("insert into orders select generate_series(101, 201)")
    assert flow.once() == 1
    assert TransactionTooLargeError.code in flow.log()
    assert len(flow.lines()) == 100, "nothing of it was delivered"
    flow.source = {}
    assert flow.once() == 0, flow.log()
    assert len(flow.lines()) == 201


def test_start_lsn_counts_until_there_is_a_bookmark(db: Database, flow_of: FlowOf) -> None:
    """P-E04: a one-time override."""
    db.execute(SHOP)
    db.execute("select pg_create_logical_replication_slot('faucet_slot', 'pgoutput')")
    db.execute("insert into orders values (1)")
    here = db.value("select pg_current_wal_flush_lsn()::text")
    db.execute("insert into orders values (2)")
    flow = flow_of(source={"start_lsn": here})
    assert flow.once() == 0, flow.log()
    assert [e["after"]["id"] for e in flow.lines()] == [2]
    flow.source = {"start_lsn": "FFFF/0"}
    db.execute("insert into orders values (3)")
    assert flow.once() == 0, flow.log()
    assert [e["after"]["id"] for e in flow.lines()] == [2, 3]


def test_a_temporary_slot_leaves_nothing_behind(db: Database, flow_of: FlowOf) -> None:
    """P-E04: it begins when the run does, and is gone with it."""
    db.execute(SHOP)
    db.execute("insert into orders values (1)")
    flow = flow_of(source={"slot_type": "temporary"})
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    assert db.value("select temporary from pg_replication_slots where slot_name = 'faucet_slot'")
    db.execute("insert into orders values (2)")
    wait_until(lambda: len(flow.lines()) == 1, "the event is there", 60, log=flow.log)
    assert process.end(signal.SIGTERM) == 0
    assert not db.query("select from pg_replication_slots where slot_name = 'faucet_slot'")
    assert "PERMANENT" not in flow.log()


def test_the_slot_follows_the_bookmark_and_idle_traffic(db: Database, flow_of: FlowOf) -> None:
    """P-E02: confirmed after the bookmark is saved, and beyond it when nothing is pending; then a restart is fine."""
    db.execute(SHOP + "create table other (id int)")
    flow = flow_of()
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    db.execute("insert into orders values (1)")
    wait_until(lambda: len(flow.lines()) == 1, "the event is there", 60, log=flow.log)
    db.execute("insert into other select generate_series(1, 10000)")
    here = parse_lsn(db.value("select pg_current_wal_flush_lsn()::text"))
    wait_until(lambda: flow.confirmed() >= here, "the slot follows", 60)
    process.end(signal.SIGKILL)
    flow.wait_free()
    assert flow.once() == 0, flow.log()
    assert len(flow.lines()) == 1


def test_the_bookmarks_own_table_makes_no_events(db: Database, flow_of: FlowOf) -> None:
    """
    A publication for all tables does not feed on the state that its events write.

    A role that may not make the table is told the statement that helps, by `check` and by a run.
    """
    db.execute("create table t (id int primary key); create publication faucet_pub for all tables")
    flow = flow_of(state={"type": "postgres", "config": {}})
    flow.write_config()
    config = load_events(flow.config_file)
    assert config is not None
    [found] = [result for result in run_event_checks(config) if not result.ok]
    grant = f'grant create on schema "public" to "{db.service_role()}"'
    assert (found.name, found.fix) == ("state", grant)
    assert flow.once() != 0
    assert grant in flow.log()
    db.execute(grant)
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    db.execute(
        "insert into t values (1); create table later (id int primary key); insert into later values (2)"
    )
    wait_until(lambda: len(flow.lines()) == 2, "the events are there", 60, log=flow.log)
    updated = "select updated_at from aqueduck_bookmarks"
    before = None
    for _ in range(2):
        here = parse_lsn(db.value("select pg_current_wal_flush_lsn()::text"))
        wait_until(lambda: flow.confirmed() >= here, "it is idle", 60)  # noqa: B023 - used at once
        before, last = db.value(updated), before
        db.execute("select pg_logical_emit_message(true, 'x', 'y')")
    assert last == before
    assert [e["table"] for e in flow.lines()] == ["t", "later"]
    process.end(signal.SIGTERM)


# -- bad input


def refused(flow: Flow) -> AqueduckError:
    """The error with which the flow does not start."""
    service = flow.service()
    try:
        with pytest.raises(AqueduckError) as error:
            service.prepare()
    finally:
        service.stop()
    return error.value


def test_what_cannot_work_is_refused_before_anything_is_written(db: Database, flow_of: FlowOf) -> None:
    """P-E06 and bad input: missing slot with creation off, no publication, an empty one, a slot of another plugin."""
    flow = flow_of(source={"create_slot_if_missing": False})
    assert isinstance(refused(flow), PublicationError)
    db.execute("create table orders (id int primary key); create publication faucet_pub")
    assert "has no tables" in str(refused(flow))
    db.execute("alter publication faucet_pub add table orders")
    error = refused(flow)
    assert isinstance(error, SlotLostError)
    assert "pg_create_logical_replication_slot" in str(error)
    db.execute("select pg_create_physical_replication_slot('faucet_slot')")
    assert isinstance(refused(flow), SlotConflictError)
    assert flow.lines() == []
    assert not (flow.directory / "state" / "faucet_slot.json").exists()


def test_a_slot_that_lost_something_is_refused(db: Database, flow_of: FlowOf) -> None:
    """P-S30 for events: a slot that was dropped or re-created by others, and a bookmark of another cluster."""
    db.execute(SHOP)
    flow = flow_of()
    assert flow.once() == 0, flow.log()
    db.execute("select pg_drop_replication_slot('faucet_slot')")
    assert "does not exist, but the bookmark is at" in str(refused(flow))
    db.execute("insert into orders values (1)")
    db.execute("select pg_create_logical_replication_slot('faucet_slot', 'pgoutput')")
    assert "re-created or moved" in str(refused(flow))
    file = flow.directory / "state" / "faucet_slot.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "system_identifier": "another"}))
    assert isinstance(refused(flow), BookmarkError)
    file.unlink()
    db.execute("insert into orders values (2)")
    assert flow.once() == 0, flow.log()
    assert [e["after"]["id"] for e in flow.lines()] == [2]


def test_one_flow_a_slot_at_a_time(db: Database, flow_of: FlowOf) -> None:
    """A second service learns who has the lock; a slot that another program reads is a typed error after some tries."""
    db.execute(SHOP)
    flow = flow_of(source={"slot_acquire_retries": 0})
    process = flow.fork()
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    assert isinstance(refused(flow), ServiceLockedError)
    process.end(signal.SIGTERM)
    flow.wait_free()
    with subprocess.Popen(
        [str(db.server.bin("pg_recvlogical")), "-d", db.dsn, "--slot", "faucet_slot", "--start", "-f", "/dev/null",
         "-o", "proto_version=1", "-o", "publication_names=faucet_pub"], stderr=subprocess.DEVNULL,
    ) as reader:  # fmt: skip
        wait_until(flow.slot_active, "the other reads it", 60)
        db.execute("insert into orders values (1)")
        service = flow.service()
        try:
            service.prepare()
            service.start(once=True)
            wait_until(lambda: service._query is not None and not service._query.active, "it gives up", 60)
            with pytest.raises(SlotActiveError):
                service.check()
        finally:
            service.stop()
            reader.terminate()


def test_a_sink_that_fails_for_a_while_is_tried_again(db: Database, flow_of: FlowOf) -> None:
    """Bad input: a failure in the middle of a batch; the flow recovers automatically, every event is there once."""
    db.execute(SHOP)
    flow = flow_of()
    process = flow.fork(fault="sink.written:raise")
    wait_until(flow.streams, "it streams", 60, log=flow.log)
    db.execute("insert into orders select generate_series(1, 50)")
    wait_until(lambda: "trying again" in flow.log(), "it failed", 60, log=flow.log)
    wait_until(lambda: len(flow.lines()) == 50, "the events are there", 60, log=flow.log)
    process.end(signal.SIGTERM)
    assert [e["after"]["id"] for e in flow.lines()] == list(range(1, 51))


def test_check_probes_without_touching_the_stream(db: Database, flow_of: FlowOf) -> None:
    """P-E07: every requirement with its fix; nothing is created, no secret is shown."""
    flow = flow_of(sink={"type": "jsonl", "config": {"path": "./none/changes.jsonl"}})

    def checks() -> dict[str, Any]:
        flow.write_config()
        config = load_events(flow.config_file)
        assert config is not None
        return {r.name: r for r in run_event_checks(config)}

    before = checks()
    assert not before["publication faucet_pub"].ok
    assert "create publication" in before["publication faucet_pub"].fix
    assert before["slot faucet_slot"].detail == "will be created"
    db.execute(SHOP)
    assert all(r.ok for r in checks().values())
    assert not db.query("select from pg_replication_slots where slot_name = 'faucet_slot'")
    assert [p.name for p in flow.directory.iterdir()] == ["faucet.yaml"]
    flow.source = {"connection_url": "postgres://u:hunter2@127.0.0.1:1/x"}
    [failed] = [r for r in checks().values() if not r.ok]
    assert "hunter2" not in str(failed)


def test_a_bad_connection_string_is_hidden(db: Database, flow_of: FlowOf) -> None:
    """P-E07: URLs are redacted, including malformed ones."""
    flow = flow_of(source={"connection_url": "postgres://u:hun@ter2@h:port/x"})
    flow.write_config()
    config = load_events(flow.config_file)
    assert config is not None
    command = [sys.executable, "-m", "aqueduck.cli", "run", "-c", str(flow.config_file), "--once"]
    done = subprocess.run(
        command, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == ConfigError.exit_code
    assert "ter2" not in done.stdout + done.stderr


def test_a_state_that_cannot_be_written_stops_the_flow(db: Database, flow_of: FlowOf) -> None:
    """Bad input: the path of the state is a file."""
    db.execute(SHOP)
    flow = flow_of(
        state={"type": "file", "config": {"path": "./blocked/state"}}, more={"state_dir": "./work"}
    )
    (flow.directory / "blocked").write_text("")
    assert refused(flow).code == "sink.path"


def test_settings_of_a_run_are_for_us_alone(db: Database, flow_of: FlowOf, tmp_path: Path) -> None:
    """The file that carries the connection string to the planner is readable by its owner only."""
    db.execute(SHOP)
    flow = flow_of()
    service = flow.service()
    try:
        service.prepare()
        service.start()
        file = service.directory / "capture-settings.json"
        assert file.stat().st_mode & 0o077 == 0
    finally:
        service.stop()
    assert not file.exists()
