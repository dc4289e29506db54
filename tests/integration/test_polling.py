"""`capture: poll` and `auto` as a user runs them: a server without walsenders, a pooler between, a role without privileges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fix_pooler import run_pooler
from tests.fix_postgres import Database, wait_until
from tests.fix_service import START_SECONDS, Sync

pytestmark = pytest.mark.spark

POINTS = ("capture.staged", "lake.before_commit", "lake.after_commit", "poll.before_advance", "poll.advanced")


@pytest.fixture
def polled(new_server: Callable[..., EmbeddedPostgres], tmp_path: Path) -> Iterator[Sync]:
    """A service that can only poll."""
    db = Database(new_server(settings={"max_wal_senders": "0"}), "postgres")
    db.execute("create role poller login replication; grant create on database postgres to poller")
    db.execute("grant create on schema public to poller")
    with db.connect("poller") as conn:
        conn.execute("create table t (id int primary key, v text, doc text)")
        conn.execute("alter table t alter doc set storage external")
        conn.execute("create table u (id int primary key)")
        conn.execute(
            "insert into t select g, 'old', repeat(md5(g::text), 90) from generate_series(1, 5000) g"
        )
    with run_pooler(db, tmp_path / "pooler") as dsn:
        options = {"capture": "poll", "poll_step_bytes": "1MiB"}
        sync = Sync(db, tmp_path, ("public.t",), options, copy=True, dsn=dsn("poller"))
        yield sync
        for process in sync.processes:
            sync.kill(process)


@pytest.mark.slow
def test_sync_through_a_pooler_without_walsenders_or_a_superuser(polled: Sync) -> None:
    """P-E09, P-S24, P-S25: copy, changes, a table that comes later, the group's lock: all by SQL through pgbouncer."""
    sync, db = polled, polled.db
    sync.start()
    db.execute("update t set v = 'while it is copied' where id % 5 = 0; delete from t where id % 7 = 0")
    wait_until(lambda: (sync.directory / "lake.sqlite").exists(), "it begins", START_SECONDS, log=sync.log)
    sync.wait_same()
    db.execute("update t set id = id + 10000 where id % 11 = 0; insert into u select generate_series(1, 50)")
    with db.connect("poller") as conn:
        conn.execute("select aqueduck.add_table('public.u', group_name => 'test')")
    sync.tables = ("public.t", "public.u")
    sync.wait_same()
    assert sync.start("--once").wait(timeout=START_SECONDS) != 0, "another service has the group"
    assert "another service already runs the group" in sync.log()


@pytest.mark.slow
@pytest.mark.kills("sync")
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_step_loses_and_doubles_nothing(polled: Sync, point: str) -> None:
    """P-S17, hazard 8: between stage, lake commit and advance, the lake's position decides."""
    sync, db = polled, polled.db
    assert sync.once() == 0, sync.log()
    db.execute(
        "update t set v = v || '!' where id % 3 = 0; insert into t select g, 'new' from generate_series(6001, 7000) g"
    )
    sync.die(point)
    db.execute("delete from t where id % 2 = 0")
    sync.catch_up()


@pytest.mark.slow
@pytest.mark.kills("sync")
@pytest.mark.parametrize("point", ["capture.staged", "lake.after_commit:2", "capture.before_confirm:2"])
def test_a_kill_during_bulk_catch_up_loses_and_doubles_nothing(
    sync_of: Callable[..., Sync], point: str
) -> None:
    """Promise 1: `auto` reads a backlog on a temporary copy of the slot; the slot itself stays at the lake's position."""
    small = dict.fromkeys(("catchup_bytes", "poll_step_bytes", "segment_bytes", "batch_bytes_max"), "1MiB")
    sync = sync_of("public.t", capture="auto", **small)
    db = sync.db
    db.execute("create table t (id int primary key, v text)")
    sync.init()
    for n in range(20):
        db.execute(f"insert into t select {n}000 + g, repeat('x', 300) from generate_series(1, 1000) g")
    db.execute("update t set v = 'short' where id % 3 = 0")
    sync.die(point)
    db.execute("delete from t where id % 5 = 0")
    sync.catch_up()
    assert (
        db.value("select count(*) from pg_replication_slots where temporary and database = %s", [db.name])
        == 0
    )
