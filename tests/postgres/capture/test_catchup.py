"""`capture: auto` between bulk reads and the stream: decisions, switches during operation, and what keeps it from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.postgres.capture import catchup, polling
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.catchup import Backlog, BulkRead, Catchup, Step
from aqueduck.postgres.capture.readers import Readers
from aqueduck.postgres.session.wire import _SocketStream
from tests.fix_events import Watched
from tests.fix_postgres import Database, wait_until

MIB = 1 << 20
AUTO: dict[str, Any] = {"capture": "auto", "catchup_bytes": MIB, "poll_step_bytes": MIB}


def step(**changes: Any) -> Step:
    usual = {
        "full": True,
        "left_bytes": 900 * MIB,
        "frame_bytes": 50 * MIB,
        "open_bytes": 0,
        "again_bytes": 0,
    }
    return Step(**{**usual, **changes})


def bulk_read() -> BulkRead:
    return BulkRead(step_bytes=64 * MIB)


def test_a_bulk_reader_goes_on_while_a_backlog_of_small_transactions_waits() -> None:
    """Also with a transaction that has not ended, as long as it is a small part of what arrives."""
    read = bulk_read()
    assert not read.has_ended(step(left_bytes=2 * MIB))
    assert not read.has_ended(step(open_bytes=10 * MIB))
    assert not read.has_ended(step(frame_bytes=0))
    assert not read.has_ended(step())
    assert not read.has_ended(step(frame_bytes=0))


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (step(left_bytes=MIB // 2), "caught_up"),
        (step(open_bytes=20 * MIB), "large"),
        (step(again_bytes=2048 * MIB), "far"),
    ],
)
def test_a_bulk_reader_says_why_it_ends(last: Step, end: str) -> None:
    """At the server's end, at a large transaction, and where most of its work would be decoded again."""
    read = bulk_read()
    assert read.has_ended(last)
    assert read.end == end
    assert read.kept_bytes == last.frame_bytes - last.open_bytes


def test_a_bulk_reader_ends_when_steps_bring_nothing() -> None:
    """The server may be in a large transaction that it cannot send before its end."""
    read = bulk_read()
    assert not read.has_ended(step(frame_bytes=0))
    assert read.has_ended(step(frame_bytes=0))
    assert read.end == "empty"


def test_steps_grow_with_what_each_decodes_again_within_limits() -> None:
    """Otherwise a busy server would decode everything since its last checkpoint for each of many small steps."""
    read = bulk_read()
    assert read.step_bytes(16 * MIB, 0) == 16 * MIB
    assert read.step_bytes(16 * MIB, 200 * MIB) == 100 * MIB
    assert read.step_bytes(16 * MIB, 4096 * MIB) == 256 * MIB


def test_a_switch_must_be_worth_what_is_decoded_again() -> None:
    """Both readers begin to decode where the slot does."""
    policy = Catchup(catchup_bytes=64 * MIB)
    assert policy.is_due(Backlog(65 * MIB, 0))
    assert not policy.is_due(Backlog(63 * MIB, 0))
    assert not policy.is_due(Backlog(65 * MIB, 600 * MIB))
    assert policy.is_due(Backlog(300 * MIB, 600 * MIB))


def test_a_stream_is_looked_at_once_a_second_and_only_while_it_is_what_delays() -> None:
    """An idle stream, a full stage and an unfinished large transaction are no reason to ask the server."""
    policy = Catchup(catchup_bytes=64 * MIB)
    received = 0

    def busy(now: float, *, more: int = 10 * MIB, **changes: Any) -> bool:
        nonlocal received
        received += more
        usual = {"committed": received, "paused": False, "unfinished": False}
        return policy.is_busy(now, received=received, **{**usual, **changes})

    policy.began_stream()
    assert not busy(1.0), "nothing to compare with"
    assert not busy(1.5), "too early"
    assert busy(2.1)
    assert not busy(2.2, more=0)
    assert not busy(3.2, more=0)
    assert not busy(4.3, paused=True)
    assert busy(5.4)
    assert not busy(6.5, unfinished=True)
    assert not busy(7.6, committed=0), "one transaction, which would be sent again"


def test_a_bulk_reader_that_was_of_little_use_is_not_tried_soon() -> None:
    """A backlog of large transactions costs a share of the time at most."""
    policy = Catchup(catchup_bytes=64 * MIB)
    read = bulk_read()
    read.end, read.kept_bytes = "large", 48 * MIB
    policy.bulk_ended(100.0, 99.0, read)
    assert not policy.may_read(109.0)
    assert policy.may_read(110.0)
    read.kept_bytes = 640 * MIB
    policy.bulk_ended(200.0, 199.0, read)
    assert policy.may_read(200.0)
    policy.bulk_failed(300.0, "no slot is free")
    assert policy.trouble == "no slot is free"
    assert not policy.may_read(899.0)
    assert policy.may_read(900.0)


# -- with a server


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of readers that captures open, in order."""
    kinds: list[str] = []
    really = Readers.open

    def noted(self: Readers, *arguments: Any, **keywords: Any) -> Any:
        stream = really(self, *arguments, **keywords)
        kinds.append(self.kind)
        return stream

    monkeypatch.setattr(Readers, "open", noted)
    return kinds


@pytest.fixture
def table(db: Database) -> Database:
    db.execute("create table t (id int, v text); alter table t replica identity full")
    return db


def hold(watched: Watched, on: bool) -> None:
    path = watched.settings.capture.hold_path
    path.touch() if on else path.unlink()
    active = "select active from pg_replication_slots where slot_name = 's'"
    wait_until(lambda: watched.db.value(active) is not on, "the slot changes hands")


def copies(db: Database) -> int:
    return int(
        db.value("select count(*) from pg_replication_slots where temporary and database = %s", [db.name])
    )


def fill(db: Database, *ids: int, rows: int = 1000) -> None:
    for n in ids:
        db.execute(f"insert into t select {n}, repeat('x', 300) from generate_series(1, {rows})")


def ids_of(watched: Watched) -> list[int]:
    return [event["id"] for event in watched.events("flat")]


def test_a_stream_that_falls_behind_is_replaced_until_it_is_not(
    table: Database, watch: Callable[..., Watched], opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 1: during operation, back to bulk reads and then to the stream: no gap, nothing twice, no slot left."""
    monkeypatch.setattr(catchup, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(catchup, "BUSY_BYTES", 1)
    really = _SocketStream.read_into

    def slowly(self: Any, buf: Any, at: int, timeout: float) -> int:
        return really(self, buf[: at + 4_000], at, timeout)

    monkeypatch.setattr(_SocketStream, "read_into", slowly)
    watched = watch(table, settings=AUTO)
    written = 0
    for _ in range(3):
        wait_until(lambda: opened[-1:] == ["stream"], "it streams")
        before, most = len(opened), written + 10_000
        while "bulk" not in opened[before:] and written < most:
            fill(table, *range(written, written + 20), rows=20)
            written += 20
        assert "bulk" in opened[before:]
    assert ids_of(watched) == [n for n in range(written) for _ in range(20)]
    wait_until(lambda: opened[-1] == "stream", "it streams again")
    wait_until(lambda: not copies(table), "no copy of the slot is left")


@pytest.mark.parametrize("in_progress", [True, False], ids=["streamed", "whole"])
def test_a_large_transaction_in_a_backlog_is_left_to_the_stream(
    table: Database,
    watch: Callable[..., Watched],
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
    in_progress: bool,
) -> None:
    """What comes before it is read in bulk; it and everything else arrives once, in order."""
    ends: list[str] = []
    really = Catchup.bulk_ended

    def noted(self: Catchup, now: float, began: float, read: BulkRead) -> None:
        ends.append(read.end)
        really(self, now, began, read)

    monkeypatch.setattr(Catchup, "bulk_ended", noted)
    monkeypatch.setattr("aqueduck.postgres.capture.polling.FIRST_STEP_BYTES", MIB)
    table.execute(f"alter database \"{table.name}\" set logical_decoding_work_mem = '256kB'")
    watched = watch(table, settings={**AUTO, "stream_in_progress": in_progress})
    wait_until(lambda: opened == ["stream"], "it streams")
    hold(watched, True)
    fill(table, *range(10))
    fill(table, 10, rows=30_000)
    fill(table, 11)
    hold(watched, False)
    assert ids_of(watched) == [*(n for n in range(10) for _ in range(1000)), *[10] * 30_000, *[11] * 1000]
    assert opened[1:3] == ["bulk", "stream"]
    assert ends[0] == ("large" if in_progress else "empty")


def assert_only_streams(watched: Watched, opened: list[str], words: str) -> None:
    """With a backlog that would be read in bulk."""
    fill(watched.db, 1)
    assert ids_of(watched) == [1] * 1000
    hold(watched, True)
    fill(watched.db, *range(2, 12))
    hold(watched, False)
    assert ids_of(watched) == [n for n in range(2, 12) for _ in range(1000)]
    assert opened == ["stream", "stream"]
    assert words in (watched.capture._use.readers.trouble or "")


def test_without_the_right_to_copy_a_slot_it_streams(
    table: Database, watch: Callable[..., Watched], opened: list[str]
) -> None:
    """Some managed servers take functions away: `auto` says so and goes on."""
    table.execute("create role streamer login replication")
    copying = "pg_copy_logical_replication_slot(name, name, boolean)"
    table.execute(f"revoke execute on function {copying} from public; grant select on t to streamer")
    try:
        watched = watch(table, dsn=table.dsn_for("streamer"), settings=AUTO)
        assert_only_streams(
            watched, opened, "permission denied for function pg_copy_logical_replication_slot"
        )
    finally:
        table.execute(f"grant execute on function {copying} to public")


def test_a_slot_with_failover_is_only_streamed(
    table: Database, watch: Callable[..., Watched], opened: list[str]
) -> None:
    """Only its walsender waits for the standby servers: a copy would read changes that a failover loses."""
    table.execute("select pg_create_logical_replication_slot('s', 'pgoutput', failover => true)")
    assert_only_streams(watch(table, settings=AUTO), opened, "the slot s has failover")


def test_a_pooler_is_not_left_with_a_slot(
    table: Database, watch: Callable[..., Watched], pooler: Callable[..., str], opened: list[str]
) -> None:
    """A temporary slot would stay with the pool's server connection."""
    dsn = pooler()
    watched = watch(table, settings=AUTO)
    readers = watched.capture._use.readers
    object.__setattr__(readers._settings, "dsn", dsn)
    assert readers._open_bulk(0, in_progress=True) is None
    assert "pooler" in (readers.trouble or "")
    assert not copies(table)


def test_a_bulk_reader_that_fails_is_followed_by_the_stream(
    table: Database, watch: Callable[..., Watched], opened: list[str]
) -> None:
    """In the middle of a backlog: here a limit of the server on temporary files, in which it keeps a step."""
    table.execute("create role narrow login superuser")
    table.execute("alter role narrow set temp_file_limit = '100kB'; alter role narrow set work_mem = '64kB'")
    watched = watch(table, dsn=table.dsn_for("narrow"), settings=AUTO)
    wait_until(lambda: opened == ["stream"], "it streams")
    hold(watched, True)
    fill(table, *range(10))
    hold(watched, False)
    assert ids_of(watched) == [n for n in range(10) for _ in range(1000)]
    assert opened == ["stream", "bulk", "stream"]
    assert "temp_file_limit" in (watched.capture._use.readers.trouble or "")
    assert not copies(table)


def test_a_full_stage_does_not_keep_a_step_open(
    table: Database, watch: Callable[..., Watched], opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement of the source that stays open for as long as the lake is away would hold back vacuum for so long."""
    monkeypatch.setattr(polling, "QUEUE_BYTES_MAX", 64 << 10)
    monkeypatch.setattr(polling, "STALL_SECONDS", 0.2)
    watched = watch(table, settings=AUTO, segment_bytes=64 << 10)
    watched.stage._bytes_max = 1
    wait_until(lambda: opened == ["stream"], "it streams")
    hold(watched, True)
    fill(table, *range(30))
    watched.settings.capture.hold_path.unlink()
    wait_until(lambda: watched.stage.full, "a step fills the stage")
    steps = (
        "select count(*) from pg_stat_activity where datname = %s and query like 'begin;%%pg_logical_slot_get%%'"
        " and state <> 'idle'"
    )
    wait_until(lambda: not table.value(steps, [table.name]), "no step is open")
    watched.stage._bytes_max = 1 << 30
    assert ids_of(watched) == [n for n in range(30) for _ in range(1000)]
    assert opened[:3] == ["stream", "bulk", "stream"]


@pytest.mark.slow
def test_without_a_free_slot_it_streams(
    new_server: Callable[..., Any], watch: Callable[..., Watched], opened: list[str]
) -> None:
    """The copy of the slot is only faster."""
    db = Database(new_server(settings={"max_replication_slots": "1"}), "postgres")
    db.execute("create table t (id int, v text); alter table t replica identity full")
    assert_only_streams(watch(db, settings=AUTO), opened, "all replication slots are in use")


def test_a_slot_without_wal_is_lost_to_the_bulk_reader(db: Database, tmp_path: Path) -> None:
    """The server shows no position of it, like of a new physical slot; the stream then reports the loss."""
    db.execute("select pg_create_physical_replication_slot('without_wal')")
    try:
        readers = Readers(CaptureSettings(db.dsn, "without_wal", "p", 0, str(tmp_path), capture="auto"))
        assert readers._open_bulk(0, in_progress=False) is None
        assert "[pg.slot_lost]" in (readers.trouble or "")
    finally:
        db.execute("select pg_drop_replication_slot('without_wal')")
