"""Driven from psql: tables and groups come and go while the service runs, and status shows it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import psycopg
import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fix_postgres import Database, _new_database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark


def test_tables_and_groups_are_driven_by_sql(shared: Sync) -> None:
    """P-S01, P-S13, P-S18, P-S19, P-S22, P-S25, P-S27: add, resync, remove, disable and enable act on a running service."""
    sync, db = shared, shared.db
    for name in ("a", "b"):
        db.execute(f"create table {name} (id int primary key, v text)")
        db.execute(f"insert into {name} select g, 'old' from generate_series(1, 1000) g")
    sync.follow("public.a")
    sync.wait_same()
    db.execute("select aqueduck.add_table('public.b', group_name => %s)", (sync.group,))
    db.execute("insert into b values (5000, 'while it is added'); update a set v = 'touched' where id < 10")
    sync.tables = ("public.a", "public.b")
    sync.wait_same()
    sync.wait_state("STREAMING", "public.a", "public.b")

    sync.change_lake("delete from lake.main.b where id < 500")
    db.execute("select aqueduck.resync_table('public.b')")
    db.execute("insert into b values (6000, 'while it is re-copied')")
    sync.wait_same()

    db.execute("select aqueduck.disable_table('public.b')")
    wait_until(lambda: not enabled(db, "public.b"), "status says so")
    wait_until(lambda: sync.states()["public.b"] == "PENDING", "b is parked", log=sync.log)
    db.execute(
        "insert into b values (6500, 'parked'); update b set v = 'parked' where id = 600; insert into a values (6500, 'not')"
    )
    wait_until(lambda: not sync.differing(("public.a",)), "a continues", log=sync.log)
    parked = "select parked_rows from aqueduck.status() where source = 'public.b'"
    wait_until(lambda: db.value(parked) == 2, "b's changes wait in the lake", log=sync.log)
    db.execute("select aqueduck.enable_table('public.b')")
    sync.wait_same()

    db.execute("create schema elsewhere; alter table b set schema elsewhere")
    db.execute("insert into elsewhere.b values (6550, 'in its new schema')")
    db.execute("alter table elsewhere.b rename to renamed")
    db.execute("insert into elsewhere.renamed values (6600, 'under its new name')")
    wait_until(lambda: "elsewhere.renamed" in sync.states(), "P-S13: the name is followed")
    db.execute("insert into elsewhere.renamed values (6700, 'and after it')")
    rows = sync.source_rows("elsewhere.renamed")
    wait_until(lambda: sync.lake_rows("main.b") == rows, "the target keeps its name", log=sync.log)
    wait_until(lambda: "table renamed" in sync.log(), "the service knows", log=sync.log)
    assert sync.log().count("copy started") == 3, "a, b and b again"
    sync.tables = ("public.a",)

    db.execute("select aqueduck.disable_group(%s)", (sync.group,))
    wait_until(lambda: not sync.slot_active(), "the slot is let go", log=sync.log)
    db.execute("insert into a values (7000, 'while disabled')")
    db.execute("select aqueduck.enable_group(%s)", (sync.group,))
    sync.wait_same()

    db.execute("select aqueduck.remove_table('elsewhere.renamed')")
    published = f"select tablename::text from pg_publication_tables where pubname = 'aqueduck_{sync.group}' order by 1"
    wait_until(lambda: db.query(published) == [("a",), ("anchor",)], "b is gone", log=sync.log)
    assert "elsewhere.renamed" not in sync.states()
    db.execute(
        "insert into elsewhere.renamed values (8000, 'nobody looks'); insert into a values (8000, 'somebody does')"
    )
    sync.tables = ("public.a",)
    sync.wait_same()
    assert sync.lake("select count(*) from lake.main.b where id = 8000") == [(0,)]

    process = sync.processes[-1]
    sync.tables = ()
    second = sync.start()
    assert second.wait(timeout=120) == 1
    sync.processes.remove(second)
    assert "[service.locked]" in sync.log()
    assert "public.a" in sync.states(), "a service that is refused changes nothing"
    assert process.poll() is None


def enabled(db: Database, source: str) -> bool:
    return bool(db.value("select enabled from aqueduck.status() where source = %s", (source,)))


def test_a_table_that_is_removed_with_its_target_and_added_at_once(shared: Sync) -> None:
    """P-S22: the service sees both calls together; the target was dropped, and the table continued without one."""
    sync, db = shared, shared.db
    db.execute("create table a (id int primary key); insert into a select generate_series(1, 10)")
    sync.follow("public.a")
    sync.wait_same()
    with db.connect() as conn, conn.transaction():
        conn.execute("select aqueduck.remove_table('public.a', drop_target => true)")
        conn.execute("select aqueduck.add_table('public.a', group_name => %s)", (sync.group,))
    wait_until(lambda: sync.log().count("copy finished") == 2, "it is copied anew", log=sync.log)
    db.execute("insert into a values (11)")
    sync.wait_same()


def test_a_group_that_loses_its_slot_stops_alone(shared: Sync) -> None:
    """P-S19, P-S30: the group says what it needs, and continues when it has that; the other group is not affected."""
    sync, db = shared, shared.db
    db.execute("create table a (id int primary key); create table b (id int primary key)")
    sync.follow("public.a")
    db.execute("select aqueduck.create_group('broken')")
    db.execute("select aqueduck.add_table('public.b', group_name => 'broken')")
    sync.tables = ("public.a", "public.b")
    sync.wait_state("STREAMING", *sync.tables)
    wait_until(lambda: _dropped(db, "aqueduck_broken"), "the slot is dropped between two connections", 60)
    db.execute("insert into a values (1); insert into b values (1)")
    sync.wait_state("ERRORED", "public.b")
    wait_until(lambda: not sync.differing(("public.a",)), "a continues", log=sync.log)
    found = "select name, running, error_code from aqueduck.groups() where name <> 'default' order by name"
    assert db.query(found) == [("broken", True, "pg.slot_lost"), ("shared", True, None)]
    assert sync.states()["public.a"] == "STREAMING"
    assert sync.lake_rows("main.b") == []

    db.execute("select aqueduck.set_setting('on_slot_loss', 'resync', group_name => 'broken')")
    sync.wait_same()
    sync.wait_state("STREAMING", *sync.tables)
    db.execute("select aqueduck.drop_group('broken', with_tables => true)")
    gone = "select count(*) from pg_replication_slots where slot_name = 'aqueduck_broken'"
    wait_until(lambda: db.value(gone) == 0, "the group is taken down", 60, log=sync.log)


def _dropped(db: Database, slot: str) -> bool:
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        db.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active",
            (slot,),
        )
        db.execute("select pg_drop_replication_slot(%s)", (slot,))
        return True
    return False


def test_a_table_moves_between_groups_without_a_new_copy(shared: Sync) -> None:
    """P-S19: the new group continues where the old one is, under load, and nothing is lost or doubled."""
    sync, db = shared, shared.db
    db.execute(
        "create table moving (id int primary key, v int); create table stays (id int primary key, v int)"
    )
    db.execute("insert into moving select g, 0 from generate_series(1, 2000) g")
    sync.follow("public.moving", "public.stays")
    db.execute("select aqueduck.create_group('second')")
    wait_until(lambda: "group=second" in sync.log(), "the second group runs", 120, log=sync.log)
    copies = sync.log().count("copy started")
    stop = threading.Event()

    def load() -> None:
        with db.connect() as conn:
            number = 0
            while not stop.wait(0.01):
                number += 1
                conn.execute("update moving set v = v + 1 where id = %s", (number % 2000 + 1,))
                conn.execute("insert into moving values (%s, 0)", (10000 + number,))
                conn.execute("insert into stays values (%s, 0)", (number,))

    worker = threading.Thread(target=load)
    worker.start()
    try:
        db.execute("select aqueduck.move_table('public.moving', 'second')")
        wait_until(lambda: "table moved" in sync.log(), "it is handed over", 120, log=sync.log)
        wait_until(
            lambda: sync.states().get("public.moving") == "STREAMING", "it streams there", log=sync.log
        )
        seen = db.value("select max(id) from stays")
        wait_until(lambda: db.value("select max(id) from stays") > seen + 50, "changes continue for a while")
    finally:
        stop.set()
        worker.join()
    sync.wait_same()
    assert sync.log().count("copy started") == copies
    groups = dict(db.query("select source, group_name from aqueduck.status()"))
    assert (groups["public.moving"], groups["public.stays"]) == ("second", sync.group)
    db.execute("select aqueduck.move_table('public.moving', %s)", (sync.group,))
    wait_until(lambda: sync.log().count("table moved") == 2, "and back", 120, log=sync.log)
    db.execute("update moving set v = -1 where id < 10")
    sync.wait_same()
    db.execute("select aqueduck.drop_group('second')")
    slots = "select from pg_replication_slots where slot_name = 'aqueduck_second'"
    wait_until(lambda: not db.query(slots), "the group's slot is gone", 120, log=sync.log)


@pytest.mark.slow
def test_a_role_without_rights_to_a_schema_uses_the_file_alone(db: Database, role: str, sync_of: Any) -> None:
    """If the registry cannot be created, the service says so and continues."""
    db.execute(
        f'create table a (id int primary key); alter table a owner to "{role}"; alter role "{role}" replication'
    )
    db.execute("create publication aqueduck_test for table only a with (publish_via_partition_root = true)")
    sync: Sync = sync_of("public.a", copy=True)
    sync.user = role
    db.execute("insert into a values (1)")
    assert sync.once() == 0, sync.log()
    sync.assert_same()
    assert "only the file is used" in sync.log()


@pytest.mark.slow
def test_a_heartbeat_lets_the_slot_follow_a_busy_neighbour(shared: Sync, pg: EmbeddedPostgres) -> None:
    """P-S18, hazard 4: all traffic is in another database; the slot follows, WAL stays bounded, and the idle lake is not written."""
    sync, db = shared, shared.db
    heard = """select count(*) from pg_logical_slot_peek_binary_changes('heartbeats', null, null, 'proto_version', '1',
        'publication_names', 'aqueduck_shared', 'messages', 'true') where position('heartbeat'::bytea in data) > 0"""
    set_interval = "select aqueduck.set_setting('heartbeat_interval_ms', %s, group_name => 'shared')"
    neighbour = _new_database(pg)
    db.execute("select pg_create_logical_replication_slot('heartbeats', 'pgoutput')")
    try:
        db.execute(set_interval, (200,))
        wait_until(lambda: db.value(heard) >= 3, "heartbeats are written", 120, log=sync.log)
        before = sync.lake("select max(snapshot_id) from lake.snapshots()")
        neighbour.execute("create table busy (v text)")
        for _ in range(4):
            neighbour.execute("insert into busy select repeat('x', 1000) from generate_series(1, 5000)")
            neighbour.execute("checkpoint")
            reached = db.value("select (pg_current_wal_lsn() - '0/0'::pg_lsn)::int8")
            wait_until(lambda: sync.confirmed() >= reached, "the slot follows", 60, log=sync.log)  # noqa: B023 - used at once
        retained = "select retained_bytes from aqueduck.groups() where name = 'shared'"
        wait_until(lambda: db.value(retained) < 10 << 20, "less is kept than was written", 60, log=sync.log)
        assert sync.lake("select max(snapshot_id) from lake.snapshots()") == before
    finally:
        db.execute("select pg_drop_replication_slot('heartbeats')")
        db.execute(set_interval, (None,))
        neighbour.drop()
