"""The initial copy: beside the stream, under load, nothing lost or doubled around the cut."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until

pytestmark = pytest.mark.spark

TEXTS = r"""
    (1, E'a,"b"\n\\N\t\\'), (2, ''), (3, null), (4, '\N'), (5, 'ünïcødé 🦆'), (6, repeat('x', 2000000)), (7, E'\b\f\r\v\\.')
"""


def test_rows_that_were_there_before_are_copied(db: Database, sync_of: Any) -> None:
    """P-S04, P-S06: a table with rows is copied, text survives, and streaming goes on from there."""
    db.execute("create table t (id int primary key, v text)")
    db.execute(f"insert into t values {TEXTS}")
    db.execute("insert into t select g, 'row ' || g from generate_series(100, 60000) g")
    db.execute("create table empty (id int primary key)")
    sync = sync_of("public.t", "public.empty", copy=True)
    sync.catch_up()
    db.execute(
        "update t set v = v || '!' where id % 10 = 0; delete from t where id % 7 = 0; insert into empty values (1)"
    )
    sync.catch_up()


def test_a_transaction_open_while_the_copy_starts_is_not_lost(db: Database, sync_of: Any) -> None:
    """Hazard 1, P-S05: rows of a transaction that is open when the copy takes its snapshot arrive exactly once."""
    db.execute(
        "create table t (id int primary key, v text); insert into t select g, 'old' from generate_series(1, 1000) g"
    )
    sync = sync_of("public.t", copy=True)
    sync.init()
    with db.connect() as before:
        before.execute("begin")
        before.execute("insert into t select g, 'open' from generate_series(2001, 2100) g")
        before.execute("update t set v = 'changed while open' where id <= 10")
        process = sync.start()
        # Creating the copy's slot waits for the open transaction; other traffic goes on meanwhile.
        wait_until(
            lambda: (
                process.poll() is not None
                or db.query(
                    "select from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%%' and state = 'active'"
                )
            ),
            "the copy waits",
            120,
            log=sync.log,
        )
        db.execute("insert into t values (3000, 'meanwhile')")
        before.execute("commit")
    sync.wait_same()
    sync.stop(process)


def test_copies_under_load_lose_and_double_nothing(db: Database, sync_of: Any) -> None:
    """P-S04, P-S05: four tables are copied while all of them are being changed."""
    tables = [f"t{i}" for i in range(4)]
    for table in tables:
        db.execute(f"create table {table} (id int primary key, v text, n int default 0)")
        db.execute(f"insert into {table} select g, md5(g::text) from generate_series(1, 30000) g")
    sync = sync_of(*(f"public.{t}" for t in tables), copy=True)
    stop = threading.Event()

    def load() -> None:
        with db.connect() as conn:
            number = 0
            while not stop.is_set():
                number += 1
                for table in tables:
                    conn.execute(f"update {table} set n = n + 1 where id = %s", (number * 17 % 30000 + 1,))
                    conn.execute(f"insert into {table} values (%s, 'new')", (100000 + number,))
                    conn.execute(f"delete from {table} where id = %s", (number * 3 + 7,))
                    conn.execute(f"update {table} set id = -id where id = %s", (30000 - number,))

    worker = threading.Thread(target=load)
    worker.start()
    try:
        process = sync.started()
        wait_until(lambda: sync.log().count("copy finished") == 4, "the copies are in", 120, log=sync.log)
    finally:
        stop.set()
        worker.join()
    sync.wait_same()
    assert sync.lake("select count(*) from lake.aqueduck.parked") == [(0,)]
    sync.stop(process)


def test_a_table_that_fails_does_not_hold_up_the_others(db: Database, sync_of: Any) -> None:
    """Promise 5, P-S12, P-S22: a broken table is parked and replayed after its repair; a changed one is copied again."""
    db.execute("create table good (id int primary key, v int); create table bad (id int primary key, v int)")
    db.execute("create table altered (id int primary key, v int)")
    sync = sync_of("public.good", "public.bad", "public.altered", copy=True)
    process = sync.started()
    db.execute(
        "insert into good values (1, 1); insert into bad values (1, 1); insert into altered values (1, 1)"
    )
    sync.wait_same()
    sync.change_lake("alter table lake.main.bad rename to elsewhere")
    db.execute(
        "insert into bad values (2, 2); update bad set v = 7 where id = 1; insert into good values (2, 2)"
    )
    db.execute("alter table altered add column w text default 'new'; insert into altered values (2, 2, 'x')")
    db.execute("insert into good values (3, 3); insert into bad values (3, 3)")
    wait_until(lambda: not sync.differing(("public.good",)), "good goes on", 120, log=sync.log)
    errored = "select source, error_code from aqueduck.status() where state = 'ERRORED' order by 1"
    wait_until(lambda: len(db.query(errored)) == 2, "both are errored", 120, log=sync.log)
    assert db.query(errored)[0] == ("public.altered", "lake.schema_change")
    assert sync.lake("select count(*) from lake.aqueduck.parked") != [(0,)]

    sync.change_lake("alter table lake.main.elsewhere rename to bad")
    db.execute("select aqueduck.retry_table('public.bad')")
    db.execute("select aqueduck.resync_table('public.altered')")
    sync.wait_same()
    assert sync.lake("select count(*) from lake.aqueduck.parked") == [(0,)]
    db.execute("insert into altered values (3, 3, 'y'); delete from bad where id = 1; update good set v = 0")
    sync.wait_same()
    sync.stop(process)


@pytest.mark.slow
def test_a_table_that_changed_while_the_service_was_stopped_waits_for_a_new_copy(
    db: Database, sync_of: Any
) -> None:
    """Hazard 5, P-S12: DDL while stopped, and a target that somebody dropped, stop only their table; a resync heals both."""
    for name in ("good", "altered", "dropped"):
        db.execute(f"create table {name} (id int primary key, v int); insert into {name} values (1, 1)")
    sync = sync_of("public.good", "public.altered", "public.dropped", copy=True)
    sync.catch_up()
    db.execute(
        "insert into altered values (2, 2); alter table altered drop column v; alter table altered add column v text"
    )
    db.execute(
        "insert into altered values (3, 'three'); insert into dropped values (2, 2); insert into good values (2, 2)"
    )
    sync.change_lake("drop table lake.main.dropped")
    process = sync.started()
    wait_until(lambda: not sync.differing(("public.good",)), "good goes on", 120, log=sync.log)
    db.execute(
        "select aqueduck.resync_table('public.altered'); select aqueduck.resync_table('public.dropped')"
    )
    wait_until(lambda: sync.log().count("copy finished") == 5, "both are copied again", 120, log=sync.log)
    sync.wait_same()
    sync.stop(process)
