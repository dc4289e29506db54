"""The initial copy: beside the stream, under load, nothing lost or doubled around the cut."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import psycopg
import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark

TEXTS = r"""
    (1, E'a,"b"\n\\N\t\\'), (2, ''), (3, null), (4, '\N'), (5, 'ünïcødé 🦆'), (6, repeat('x', 2000000)), (7, E'\b\f\r\v\\.')
"""


def test_rows_that_were_there_before_are_copied(shared: Sync) -> None:
    """P-S04, P-S06: a table with rows is copied, text survives, and streaming continues from there."""
    sync, db = shared, shared.db
    db.execute("create table t (id int primary key, v text)")
    db.execute(f"insert into t values {TEXTS}")
    db.execute("insert into t select g, 'row ' || g from generate_series(100, 60000) g")
    db.execute("create table empty (id int primary key)")
    db.execute("create table dead (id int primary key, v text)")
    db.execute("insert into dead select g, repeat('d', 500) from generate_series(1, 20000) g")
    db.execute("delete from dead where id <> 17")  # pages without rows
    sync.follow("public.t", "public.empty", "public.dead")
    sync.wait_same()
    db.execute(
        "update t set v = v || '!' where id % 10 = 0; delete from t where id % 7 = 0; insert into empty values (1)"
    )
    sync.wait_same()
    [[share, seconds, rows]] = db.query(
        "select copy_share, copy_seconds, copy_rows from aqueduck.status() where source = 'public.t'"
    )
    assert (share, rows) == (1.0, 59908)
    assert seconds > 0


def test_a_transaction_open_while_the_copy_starts_is_not_lost(shared: Sync) -> None:
    """Hazard 1, P-S05: rows of a transaction that is open when the copy takes its snapshot arrive exactly once."""
    sync, db = shared, shared.db
    db.execute(
        "create table t (id int primary key, v text); insert into t select g, 'old' from generate_series(1, 1000) g"
    )
    with db.connect() as before:
        before.execute("begin")
        before.execute("insert into t select g, 'open' from generate_series(2001, 2100) g")
        before.execute("update t set v = 'changed while open' where id <= 10")
        db.execute("select aqueduck.add_table('public.t', group_name => %s)", (sync.group,))
        # Creating the copy's slot waits for the open transaction; other traffic continues meanwhile.
        waiting = (
            "select from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%%' and state = 'active'"
        )
        wait_until(lambda: db.query(waiting), "the copy waits", 120, log=sync.log)
        db.execute("insert into t values (3000, 'meanwhile')")
        before.execute("commit")
    sync.tables = ("public.t",)
    sync.wait_same()


@pytest.mark.slow
def test_twenty_tables_are_added_while_all_are_under_load(shared: Sync) -> None:
    """P-S01, P-S04, P-S05: they are copied beside the stream, nothing is lost or doubled, the query is not restarted."""
    sync, db = shared, shared.db
    tables = [f"t{i}" for i in range(20)]
    for number, table in enumerate(tables):
        db.execute(f"create table {table} (id int primary key, v text, n int default 0)")
        rows = 30000 if number < 2 else 500
        db.execute(f"insert into {table} select g, md5(g::text) from generate_series(1, {rows}) g")
    stop = threading.Event()

    def load() -> None:
        with db.connect() as conn:
            number = 0
            while not stop.is_set():
                number += 1
                for table in tables:
                    conn.execute(f"update {table} set n = n + 1 where id = %s", (number * 17 % 500 + 1,))
                    conn.execute(f"insert into {table} values (%s, 'new')", (100000 + number,))
                    conn.execute(f"delete from {table} where id = %s", (number * 3 + 7,))
                    conn.execute(f"update {table} set id = -id where id = %s", (500 - number,))
                stop.wait(0.05)

    worker = threading.Thread(target=load)
    worker.start()
    try:
        sync.follow(*(f"public.{t}" for t in tables))
    finally:
        stop.set()
        worker.join()
    sync.wait_same()
    assert "group started" not in sync.log()
    assert sync.lake("select count(*) from lake.aqueduck.parked") == [(0,)]


def test_a_table_that_fails_does_not_hold_up_the_others(shared: Sync) -> None:
    """Promise 5, P-S12, P-S22, P-S27: a broken table is parked, the others keep their pace, and it is replayed when repaired."""
    sync, db = shared, shared.db
    others = [f"good{i}" for i in range(5)]
    for name in (*others, "bad"):
        db.execute(f"create table {name} (id int primary key, v int)")
    sync.follow(*(f"public.{name}" for name in (*others, "bad")))

    def seconds(value: int) -> float:
        """How long a change of every good table takes to the lake."""
        began = time.monotonic()
        for name in others:
            db.execute(f"insert into {name} values ({value}, {value})")
        count = " union all ".join(f"select count(*) from lake.main.{n} where id = {value}" for n in others)
        wait_until(lambda: sync.lake(count) == [(1,)] * 5, "the good tables continue", 120, log=sync.log)
        return time.monotonic() - began

    db.execute("insert into bad values (1, 1)")
    sync.wait_same()
    before = min(seconds(value) for value in (1, 2, 3))
    sync.change_lake("alter table lake.main.bad rename to elsewhere")
    db.execute("insert into bad values (2, 2); update bad set v = 7 where id = 1")
    sync.wait_state("ERRORED", "public.bad")
    db.execute("insert into bad values (3, 3)")
    after = min(seconds(value) for value in (4, 5, 6))
    assert after < 3 * before + 1.0, "their lag is what it was"
    status = (
        "select error_class, consecutive_failures >= 1, error_message is not null, parked_rows, parked_bytes > 0,"
        " parked_since < now(), retry_at is null from aqueduck.status() where source = 'public.bad'"
    )
    wait_until(
        lambda: db.query(status) == [("configuration", True, True, 3, True, True, True)],
        "status shows it",
        log=sync.log,
    )
    sync.change_lake("alter table lake.main.elsewhere rename to bad")
    db.execute("select aqueduck.retry_table('public.bad')")
    sync.wait_same()
    sync.wait_state("STREAMING", "public.bad")
    assert sync.lake("select count(*) from lake.aqueduck.parked") == [(0,)]
    db.execute("delete from bad where id = 1; update good0 set v = 0")
    sync.wait_same()


@pytest.mark.slow
def test_many_small_tables_start_and_stream(shared: Sync) -> None:
    """Small tables share snapshots, jobs and transactions; a thousand of them are in `make test-long`."""
    _many_tables(shared, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_small_tables_start_and_stream(sync_of: Any, db: Database) -> None:
    """1 000 small tables in one group are copied, and stream; the catalog is PostgreSQL, as for any large lake."""
    sync = sync_of("public.t0", copy=True)
    db.execute(f"create database {db.name}_lake")
    sync.catalog = f"postgres:{db.server.dsn_for(f'{db.name}_lake')}"
    db.execute("create table t0 (id int primary key)")
    process = sync.started()
    _many_tables(sync, 1000)
    sync.stop(process)


def _many_tables(sync: Sync, number: int) -> None:
    db = sync.db
    names = [f"many{i}" for i in range(number)]
    for name in names:
        db.execute(
            f"create table {name} (id int primary key, v text); insert into {name} values (1, '{name}')"
        )
    added = (
        f"select aqueduck.add_table('public.' || t, group_name => '{sync.group}') from unnest(%s::text[]) t"
    )
    db.execute(added, (names,))
    streaming = (
        "select count(*) from aqueduck.status() where state = 'STREAMING' and source like 'public.many%%'"
    )
    wait_until(lambda: db.value(streaming) == number, "all of them stream", 900, log=sync.log)
    with db.connect() as conn, conn.transaction():
        for name in names:
            conn.execute(
                f"insert into {name} values (2, 'streamed'); update {name} set v = v || '!' where id = 1".encode()
            )
    sync.tables = tuple(f"public.{name}" for name in (names if number < 100 else names[::50]))
    sync.wait_same()


@pytest.mark.slow
@pytest.mark.kills("sync")
@pytest.mark.parametrize("point", ["copy.chunk_written:4", "copy.before_landing", "copy.landed"])
def test_a_copy_killed_at_a_durable_step_continues_after_a_restart(
    db: Database, sync_of: Any, point: str
) -> None:
    """Hazard 8, P-S05: kill -9 of everything during a copy; the next start copies only what is missing, exactly once."""
    db.execute("create table t (id int primary key, v text, doc text)")
    db.execute("alter table t alter doc set storage external")
    db.execute("insert into t select g, 'v' || g, repeat(md5(g::text), 80) from generate_series(1, 4000) g")
    sync = sync_of("public.t", copy=True, copy_chunk_bytes="32KiB")
    sync.die(point)
    chunks = [int(n) for n in re.findall(r"copy started +chunks=(\d+)", sync.log())]
    db.execute("update t set v = v || '!' where id % 5 = 0; delete from t where id % 11 = 0")
    db.execute(
        "update t set id = -id where id % 7 = 0; insert into t values (9999, 'new', repeat('n', 9000))"
    )
    process = sync.started()
    sync.wait_same()
    left = [int(n) for n in re.findall(r"copy continues +chunks=(\d+)", sync.log())]
    missing = {"copy.chunk_written:4": [chunks[0] - 4], "copy.before_landing": [0], "copy.landed": []}
    assert left == missing[point]
    assert sync.log().count("copy started") == 1
    assert not list((sync.directory / "state" / "test" / "copies").iterdir())
    assert {f.name for f in (sync.directory / "data").rglob("aqueduck-*")} == {
        path.rsplit("/", 1)[-1]
        for (path,) in sync.lake(
            "select path from __ducklake_metadata_lake.ducklake_data_file where path like '%aqueduck-%'"
        )
    }
    sync.stop(process)


@pytest.mark.slow  # without Spark in tests/sync/test_wanted_meanwhile.py
def test_a_service_that_is_stopped_does_not_wait_for_a_copy(db: Database, sync_of: Any) -> None:
    """Its job is cancelled, and continues with the missing chunks at the next start; nothing is lost or doubled."""
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select g, repeat(md5(g::text), 20) from generate_series(1, 600000) g")
    sync = sync_of("public.t", copy=True, copy_chunk_bytes="1MiB")
    process = sync.start()
    notes = sync.directory / "state" / "test" / "copies"
    wait_until(lambda: len(list(notes.glob("*/chunk-*"))) > 3, "some chunks are done", 180, log=sync.log)
    assert sync.stop(process) < 20
    assert process.returncode == 0, sync.log()
    assert "copy finished" not in sync.log()
    assert len(list(notes.glob("*/chunk-*"))) > 20
    db.execute("delete from t where id % 3 = 0; update t set v = 'x' where id % 5 = 0")
    process = sync.started()
    sync.wait_state("STREAMING", "public.t")
    assert "copy continues" in sync.log()
    sync.wait_same()
    sync.stop(process)


@pytest.mark.slow  # without Spark in tests/sync/test_prepare.py
def test_a_lost_slot_leads_to_a_new_copy_where_that_is_the_policy(db: Database, sync_of: Any) -> None:
    """Hazard 10, P-S30: by default the service stops before it writes anything; with `resync` it copies all tables again."""
    db.execute("create table t (id int primary key, v text); insert into t values (1, 'a'), (2, 'b')")
    sync = sync_of("public.t", copy=True)
    assert sync.once() == 0, sync.log()
    db.execute("select pg_drop_replication_slot('aqueduck_test'); delete from t where id = 1")
    before = sync.lake("select max(snapshot_id) from lake.snapshots()")
    assert sync.once() == 1
    assert "[pg.slot_lost]" in sync.log()
    assert sync.lake("select max(snapshot_id) from lake.snapshots()") == before
    sync.group_options["on_slot_loss"] = "resync"
    process = sync.started()
    sync.wait_same()
    db.execute("insert into t values (3, 'c')")
    sync.wait_same()
    # And once more while it runs.
    db.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = 'aqueduck_test'"
    )
    wait_until(lambda: _drop_slot(db), "the slot is dropped between two connections", 60, log=sync.log)
    db.execute("delete from t where id = 2; insert into t values (4, 'd')")
    sync.wait_same()
    sync.stop(process)


def _drop_slot(db: Database) -> bool:
    try:
        db.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
        db.execute("select pg_drop_replication_slot('aqueduck_test')")
    except psycopg.Error:
        return False
    return True
