"""Slots that are read by SQL: the same changes as the stream brings, with a pooler between, and through trouble."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.changes import SegmentRef
from aqueduck.model.schema import parse_lsn
from aqueduck.postgres.capture.polling import PolledStream, pgoutput_step
from aqueduck.postgres.publications.slots import create_slot
from tests import restless
from tests.fix_events import Watched
from tests.fix_postgres import Database, wait_until

SMALL_STEP = 64 << 10

READERS: dict[str, dict[str, Any]] = {
    "poll": {"capture": "poll", "poll_step_bytes": SMALL_STEP},
    "pooled": {"capture": "poll", "poll_step_bytes": 4 * SMALL_STEP},
    "auto": restless.SETTINGS,
}


def make_tables(db: Database) -> None:
    db.execute(
        "create table t (id int primary key, v text, doc text, n numeric, at timestamptz, b bytea);"
        "alter table t alter doc set storage external; create table u (a text, b int, primary key (a, b));"
        "create table f (id int, v text); alter table f replica identity full; create table quiet (id int)"
    )


def change(db: Database, dice: random.Random) -> None:
    """A transaction of a few random changes; now and then the columns change."""
    some, other = dice.randint(1, 60), dice.randint(61, 120)
    word = dice.choice(["plain", "it''s", "", "ünïcödé", "a\\b", "line\nbreak"])
    choices = [
        f"insert into t values ({some}, '{word}', repeat(md5('{some}'), 90), {some}.5, now(), '\\x00ff') on conflict do nothing",
        f"update t set v = '{word}' where id = {some}",
        f"update t set id = {other} where id = {some} and not exists (select from t where id = {other})",
        f"delete from t where id = {other}",
        f"insert into u values ('{word}', {some}) on conflict do nothing",
        f"delete from u where b = {some}",
        f"insert into f values ({some}, null), ({some}, '{word}')",
        f"update f set v = v || '!' where id = {some}",
        f"insert into quiet select generate_series(1, {some * 20})",
        f"insert into t select g, 'many', null, g, now(), null from generate_series({other}00, {other}40) g on conflict do nothing",
        "truncate u, f" if dice.random() < 0.2 else "select 1",
    ]
    statements = dice.choices(choices, k=dice.randint(1, 4))
    if dice.random() < 0.1:
        name = f"c{dice.randint(1, 2)}"
        statements.append(f"alter table t drop if exists {name}; alter table t add {name} int default {some}")
    db.execute(f"begin; {'; '.join(statements)}; commit")


SEEDS = [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))]


def compare(
    db: Database, watch: Callable[..., Watched], reader: str, seed: int, dsn: str | None = None
) -> None:
    """A random history, read by two readers; the durable position moves at random."""
    make_tables(db)
    streamed = watch(db, slot="streamed")
    polled = watch(db, slot="polled", dsn=dsn, settings=READERS[reader])
    dice = random.Random(seed)
    expected: list[str] = []
    found: list[str] = []
    for _ in range(40):
        change(db, dice)
        if dice.random() < 0.3:
            time.sleep(0.05)  # so that steps end at different places
        if dice.random() < 0.1:
            expected += streamed.texts()
            found += polled.texts()
            polled.stage.release(polled._after)
    expected += streamed.texts()
    assert len(expected) > 100
    assert found + polled.texts() == expected


@pytest.mark.parametrize("reader", ["poll", "auto"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_sql_brings_is_what_the_stream_brings(
    any_db: Database, watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, reader: str, seed: int
) -> None:
    """P-E09, P-S17: event by event, value by value, in many small steps; `auto` changes readers all the time."""
    restless.make_restless(monkeypatch)
    compare(any_db, watch, reader, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_comes_through_a_pooler_is_what_the_stream_brings(
    db: Database, watch: Callable[..., Watched], pooler: Callable[..., str], seed: int
) -> None:
    """P-E09: the same with peeks, each on another server connection."""
    compare(db, watch, "pooled", seed, pooler())


def segments(watched: Watched) -> list[SegmentRef]:
    """What is staged of everything committed until now."""
    end = parse_lsn(watched.db.value("select pg_current_wal_insert_lsn()::text"))
    watched.db.execute("select pg_logical_emit_message(true, 'x', 'y')")

    def seen() -> bool:
        watched.capture.check()
        return watched.capture.seen >= end

    wait_until(seen, "the capture has seen it")
    watched.stage.cut()
    return [s for cut in watched.stage.between(0, 1 << 62) for s in cut.segments]


def test_steps_do_not_make_versions_of_columns_and_ddl_between_them_does(
    db: Database, watch: Callable[..., Watched]
) -> None:
    """P-S12: each step describes all relations anew; that matters only if the table changed, even if it looks the same."""
    make_tables(db)
    watched = watch(db, settings=READERS["poll"])
    for n in range(6):  # the first ones may count, until the catalog was looked at
        db.execute(f"insert into u values ('x', {n})")
        segments(watched)
    settled = {s.version for s in segments(watched)}
    for n in range(6, 12):
        db.execute(f"insert into u values ('x', {n})")
        segments(watched)
    assert {s.version for s in segments(watched)} == settled
    db.execute("alter table u add c int")
    db.execute("alter table u drop c; alter table u add c int; insert into u values ('y', 1, 5)")
    first = max(s.version for s in segments(watched))
    assert first not in settled
    db.execute("insert into u values ('y', 2, 6)")
    segments(watched)
    db.execute("alter table u drop c; alter table u add c int")  # the description is the same as before
    db.execute("insert into u values ('y', 3, 7)")
    assert max(s.version for s in segments(watched)) > first


def have_seen(end: int, *watched: Watched) -> bool:
    return min(one.capture.seen for one in watched) >= end


def test_a_transaction_larger_than_a_step_comes_whole_and_once(
    db: Database, watch: Callable[..., Watched], pooler: Callable[..., str]
) -> None:
    """P-E08, P-E09: steps are bounded in WAL; a larger transaction is one piece, and short ones around it are not lost."""
    make_tables(db)
    own = watch(db, slot="own", settings=READERS["poll"])
    pooled = watch(db, slot="pooled", dsn=pooler(), settings=READERS["pooled"])
    with db.connect() as large:
        large.execute("begin")
        for part in range(5):
            large.execute(
                f"insert into f select g, repeat('x', 500) from generate_series({part}0000, {part}0999) g"
            )
            db.execute(f"insert into u values ('short', {part})")
            end = parse_lsn(db.value("select pg_current_wal_flush_lsn()::text"))
            wait_until(functools.partial(have_seen, end, own, pooled), "a step ends within it")
        large.execute("commit")
    db.execute("insert into u values ('last', 9)")
    for watched in (own, pooled):
        events = watched.events("flat")
        assert [e["b"] for e in events if e["_table"] == "u"] == [0, 1, 2, 3, 4, 9]
        assert len([e for e in events if e["_table"] == "f"]) == 5000


def confirmed(db: Database, slot: str) -> int:
    return parse_lsn(
        db.value("select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [slot])
    )


@pytest.mark.parametrize("reader", ["poll", "pooled"])
def test_the_slot_moves_only_with_what_is_durable(
    db: Database, watch: Callable[..., Watched], pooler: Callable[..., str], reader: str
) -> None:
    """P-E02, P-E09: peeked, delivered, then advanced; with nothing pending the slot follows the server."""
    make_tables(db)
    dsn = pooler() if reader == "pooled" else db.dsn
    watched = watch(db, slot="polled", dsn=dsn, settings=READERS[reader])
    begin = confirmed(db, "polled")
    db.execute("insert into f select g, 'x' from generate_series(1, 100) g")
    staged = segments(watched)
    db.execute("insert into quiet select generate_series(1, 1000)")
    segments(watched)
    time.sleep(1.5)  # nothing may happen meanwhile: longer than between two attempts to move it
    assert confirmed(db, "polled") < staged[0].last_lsn
    assert confirmed(db, "polled") >= begin
    watched.stage.release(watched.stage.furthest(0, 1 << 40))
    end = parse_lsn(db.value("select pg_current_wal_flush_lsn()::text"))
    wait_until(lambda: confirmed(db, "polled") >= end, "the slot follows")


def test_a_slot_that_cannot_be_moved_all_the_way_is_moved_again(db: Database) -> None:
    """`pg_replication_slot_advance` stops at the server's flushed end; its answer is used."""
    make_tables(db)
    db.execute("create publication p for all tables")
    with db.connect() as conn:
        position = create_slot(conn, "s")
    stream = PolledStream(db.dsn, "s", pgoutput_step("p"), position, interval_seconds=0.05)
    try:
        db.execute("insert into quiet values (1)")
        db.execute("select pg_switch_wal()")  # which flushes it
        beyond = parse_lsn(db.value("select pg_current_wal_insert_lsn()::text")) + (1 << 30)
        stream.send_status(received=beyond, confirmed=beyond)
        wait_until(lambda: stream._confirmed > position, "it was moved")
        assert stream._confirmed == confirmed(db, "s") < beyond
        before = stream._confirmed
        db.execute("insert into quiet select generate_series(1, 100)")
        db.execute("select pg_switch_wal()")  # which flushes it
        wait_until(lambda: stream._confirmed > before, "it was moved further")
    finally:
        stream.close()


def test_a_lost_connection_is_made_again(
    db: Database, watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-E09: an SQL reader waits briefly and continues where it was; no change is missing or doubled."""
    monkeypatch.setattr("aqueduck.postgres.capture.capture.POLL_RETRY_SECONDS", 0.2)
    make_tables(db)
    watched = watch(db, slot="polled", settings=READERS["poll"])
    for n in range(4):
        db.execute(f"insert into u values ('x', {n})")
        if n % 2:
            db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                " and application_name = 'aqueduck'"
            )
    assert [e["b"] for e in watched.events("flat")] == [0, 1, 2, 3]
    wait_until(
        lambda: db.value("select count(*) from pg_replication_slots where database = %s and temporary", [db.name]) == 1,
        "the copies of lost connections are gone",
    )  # fmt: skip


@pytest.mark.slow
def test_nothing_needs_a_replication_connection_or_a_superuser(
    new_server: Callable[..., EmbeddedPostgres], watch: Callable[..., Watched]
) -> None:
    """P-E09: a server without walsenders, and a role with nothing but the attribute REPLICATION."""
    server = new_server(settings={"max_wal_senders": "0"})
    db = Database(server, "postgres")
    make_tables(db)
    db.execute("create role poller login replication")
    watched = watch(db, slot="polled", dsn=db.dsn_for("poller"), settings=READERS["poll"])
    db.execute("insert into u values ('x', 1)")
    [event] = watched.events("flat")
    assert event["b"] == 1
    watched.stage.release(watched.stage.furthest(0, 1 << 40))
    end = parse_lsn(db.value("select pg_current_wal_flush_lsn()::text"))
    wait_until(lambda: confirmed(db, "polled") >= end, "the slot follows")


@pytest.mark.slow
def test_without_a_free_slot_for_a_copy_it_peeks(
    new_server: Callable[..., EmbeddedPostgres], watch: Callable[..., Watched]
) -> None:
    """The temporary copy of the slot only saves work."""
    server = new_server(settings={"max_replication_slots": "1"})
    db = Database(server, "postgres")
    make_tables(db)
    watched = watch(db, slot="polled", settings=READERS["poll"])
    for n in range(3):
        db.execute(f"insert into u values ('x', {n})")
        assert [e["b"] for e in watched.events("flat")] == [n]


def test_a_backlog_is_read_in_bulk_and_then_streamed(
    db: Database, watch: Callable[..., Watched], tmp_path: Path
) -> None:
    """Promise 1: `auto` reads what waits by SQL, then switches to the stream: no gap, nothing twice."""
    make_tables(db)
    settings = {"capture": "auto", "catchup_bytes": 1 << 20, "poll_step_bytes": 1 << 20}
    watched = watch(db, slot="polled", settings=settings)
    hold = watched.settings.capture.hold_path

    def active() -> Any:
        return db.value("select active from pg_replication_slots where slot_name = 'polled'")

    wait_until(active, "a small backlog is streamed at once")
    hold.touch()
    wait_until(lambda: not active(), "it lets go")
    for n in range(20):
        db.execute(f"insert into f select {n}, repeat('x', 300) from generate_series(1, 1000)")
    hold.unlink()
    wait_until(lambda: watched.capture._received_bytes > 3 << 20, "the backlog is read")
    db.execute("insert into f values (20, 'after')")
    ids = [e["id"] for e in watched.events("flat")]
    assert ids == [n for n in range(20) for _ in range(1000)] + [20]
    wait_until(active, "it streams")
