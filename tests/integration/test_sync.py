"""PostgreSQL → Spark → DuckLake, as a user runs it; the check is always source = lake."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark

SHOP = """
create table customers (id int primary key, name text, credit numeric(10, 2), since timestamptz default now());
create table orders (id bigint primary key, customer int, note text, paid boolean, placed date, key uuid default gen_random_uuid());
create table secrets (id int primary key);
"""


def test_every_kind_of_change_arrives(shared: Sync) -> None:
    """P-S08, P-S11: inserts, updates, key changes, deletes and truncates, in transactions that span tables."""
    sync, db = shared, shared.db
    db.execute(SHOP)
    sync.follow("public.customers", "public.orders", copy=False)
    db.execute("insert into customers select g, 'n' || g, g * 1.25 from generate_series(1, 500) g")
    db.execute(
        "insert into orders select g, g % 500 + 1, repeat('x', g % 50), g % 2 = 0 from generate_series(1, 2000) g"
    )
    sync.wait_same()
    with sync.one_batch(), db.connect() as conn, conn.transaction():
        conn.execute("update customers set credit = -1 where id <= 100")
        conn.execute("update orders set id = id + 100000 where id <= 50")
        conn.execute("delete from orders where id between 60 and 90")
        conn.execute("insert into secrets values (1)")
        conn.execute("update customers set credit = 7, name = null where id <= 10")
        conn.execute("insert into customers values (1000, 'short-lived', 0)")
        conn.execute("delete from customers where id = 1000")
        conn.execute("insert into customers values (1000, 'again', 1)")
    with sync.one_batch(), db.connect() as conn, conn.transaction():
        conn.execute("insert into orders values (-1, 1, 'before', true, null)")
        conn.execute("truncate orders")
        conn.execute("insert into orders values (-2, 1, 'after', true, null)")
    with sync.one_batch():
        db.execute("truncate customers")  # P-S11: as a table's only event of a batch
    assert sync.lake("select count(*) from lake.main.customers") == [(0,)]


@pytest.mark.slow
def test_a_running_service_follows_and_stops_on_sigterm(db: Database, sync_of: Any) -> None:
    """P-S21: a service that runs applies changes within seconds, writes no files for small ones, and ends on SIGTERM."""
    db.execute(SHOP)
    sync = sync_of("public.customers", "public.orders")
    process = sync.started()
    for i in range(200):
        db.execute(f"insert into customers values ({i}, 'n', {i}); insert into orders values ({i}, {i})")
    sync.wait_same()
    db.execute("insert into secrets select generate_series(1, 10000)")
    behind = int(db.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))
    wait_until(lambda: sync.confirmed() >= behind, "the slot follows a table that is not ours", 15)
    files = list((sync.directory / "data").rglob("*.parquet"))
    assert len(files) < 10, "P-S21: 200 one-row transactions make far fewer than 200 files"
    seconds = sync.stop(process)
    assert process.returncode == 0, sync.log()
    assert seconds < 15
    sync.assert_same()


def test_unchanged_toast_keeps_the_stored_value(shared: Sync) -> None:
    """P-S10, hazard 11: under DEFAULT, USING INDEX and FULL, within a batch, across batches, with a key change."""
    sync, db = shared, shared.db
    for name, identity in (("d", "default"), ("i", "using index i_key"), ("f", "full")):
        db.execute(f"create table toast_{name} (id int primary key, k int not null, doc text, note text)")
        db.execute(f"alter table toast_{name} alter doc set storage external")
        if name == "i":
            db.execute("create unique index i_key on toast_i (k)")
        db.execute(f"alter table toast_{name} replica identity {identity}")
    tables = ("toast_d", "toast_i", "toast_f")
    sync.follow(*(f"public.{t}" for t in tables), copy=False)
    for table in tables:
        db.execute(
            f"insert into {table} select g, g, repeat(md5(g::text), 500), 'n' from generate_series(1, 6) g"
        )
    sync.wait_same()
    with sync.one_batch():
        change_toasted_rows(db, tables)
    db.execute("update toast_d set note = 'once more'; update toast_i set note = 'once more'")
    db.execute("update toast_f set id = -id; update toast_d set id = -id where id < 100")
    sync.wait_same()
    assert sync.lake("select count(*) from lake.main.toast_d where length(doc) > 5000") == [(6,)]


def change_toasted_rows(db: Database, tables: tuple[str, ...]) -> None:
    for table in tables:
        db.execute(f"update {table} set note = 'touched' where id = 1")  # across batches
        db.execute(f"update {table} set id = 102, k = 102 where id = 2")  # key change and toast only
        db.execute(f"insert into {table} values (7, 7, repeat('y', 9000), 'n')")
        db.execute(f"update {table} set note = 'same batch' where id = 7")
        db.execute(f"update {table} set id = 103, k = 103 where id = 3")
        db.execute(f"update {table} set id = 203, k = 203 where id = 103")
        db.execute(f"update {table} set note = 'after two key changes' where id = 203")
        db.execute(f"update {table} set doc = null where id = 4")
        db.execute(f"update {table} set note = 'null stays' where id = 4")


def test_everyday_types_arrive_as_themselves(shared: Sync) -> None:
    """Booleans, numbers, text, bytes, times, uuid and json map to native lake types, value for value."""
    sync, db = shared, shared.db
    db.execute(
        """
        create table kinds (id int primary key, b boolean, i2 smallint, i4 int, i8 bigint, f4 real, f8 float8,
            n numeric(20, 5), t text, v varchar(20), c char(5), y bytea, d date, tm time, ts timestamp, tz timestamptz,
            u uuid, x text, m inet)
        """
    )
    sync.follow("public.kinds", copy=False)
    db.execute(
        """
        insert into kinds values
        (1, true, -32768, 2147483647, -9223372036854775808, 1.5, 2.25, 12345.67891, E'a,"b"\\n\\\\N\\t', '', 'ab', '\\x00ff27',
         '2024-02-29', '23:59:59.999999', '2024-02-29 12:34:56.789', '2024-02-29 12:34:56.789+05', gen_random_uuid(), 'ünïcødé 🦆',
         '10.0.0.1'),
        (2, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null),
        (3, false, 0, 0, 0, 'NaN', '-Infinity', -0.00001, '', 'x', '', '', '1970-01-01', '00:00', '1970-01-01', '1970-01-01+00',
         '00000000-0000-0000-0000-000000000000', '\\N', '::1')
        """
    )
    wait_until(
        lambda: sync.lake("select count(*) from lake.main.kinds") == [(3,)], "three rows", log=sync.log
    )
    columns = "id, b, i2, i4, i8, f8::text, n, t, v, c, y, d, tm, ts, tz, u, x, m::text"
    source = db.query(f"select {columns.replace('m::text', 'host(m)')} from kinds order by id")
    lake = sync.lake(f"select {columns} from lake.main.kinds order by id")
    assert [r[:5] + r[6:] for r in lake] == [r[:5] + r[6:] for r in source]
    types = dict(
        sync.lake(
            "select column_name, data_type from duckdb_columns() where database_name = 'lake' and table_name = 'kinds'"
        )
    )
    assert (types["n"], types["tz"], types["u"], types["y"]) == (
        "DECIMAL(20,5)",
        "TIMESTAMP WITH TIME ZONE",
        "UUID",
        "BLOB",
    )


def test_a_large_batch_goes_through_tasks_and_files(shared: Sync) -> None:
    """Batches beyond the direct limit are folded by Spark tasks; the result is the same."""
    sync, db = shared, shared.db
    db.execute("create table big (id int primary key, v text)")
    sync.follow("public.big", copy=False)
    with sync.one_batch():
        db.execute("insert into big select g, repeat(md5(g::text), 4) from generate_series(1, 60000) g")
    assert list((sync.directory / "data").rglob("aqueduck-shared-*.parquet"))
    with sync.one_batch(), db.connect() as conn, conn.transaction():
        conn.execute("update big set v = 'u' || id || repeat('z', 100) where id % 2 = 0")
        conn.execute("update big set id = -id where id % 5 = 0")
        conn.execute("delete from big where id % 7 = 0")
        conn.execute(
            "insert into big select g, repeat(md5(g::text), 3) from generate_series(100000, 120000) g"
        )
    stage = sync.directory / "state" / sync.group / "stage"
    wait_until(lambda: not list(stage.iterdir()), "the stage is empty once the lake has everything")


def test_lake_snapshots_are_states_the_source_had(shared: Sync) -> None:
    """Promise 2: at every lake snapshot, tables that are changed together are equal to each other."""
    sync, db = shared, shared.db
    db.execute("create table a (id int primary key, v int); create table b (id int primary key, v int)")
    sync.follow("public.a", "public.b", copy=False)
    [[began]] = sync.lake("select max(snapshot_id) from lake.snapshots()")
    db.execute("insert into a values (-1, -1); insert into b values (-1, -1)")
    sync.wait_same()

    def batches() -> list[int]:
        made = f"select snapshot_id from lake.snapshots() where author = 'aqueduck' and snapshot_id > {began}"
        return [version for (version,) in sync.lake(made)]

    with db.connect() as conn:
        for i in itertools.count():
            with conn.transaction():
                conn.execute("insert into a values (%s, %s)", (i, i))
                conn.execute("insert into b values (%s, %s)", (i, i))
                conn.execute("update a set v = v + 1; update b set v = v + 1")
            if i % 20 == 0 and len(versions := batches()) > 10:
                break
    sync.wait_same()
    state = "(select count(*)::varchar || ' ' || coalesce(sum(v), 0) from lake.main.{} at (version => {}))"
    each = (f"select {v}, {state.format('a', v)}, {state.format('b', v)}" for v in versions)
    mixed = [v for v, a, b in sync.lake(" union all ".join(each)) if a != b]
    assert mixed == [], "lake snapshots that mix two states"
