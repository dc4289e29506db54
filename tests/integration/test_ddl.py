"""Changes of columns, in order with the rows around them; the check is always source = lake."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark


def by_name(sync: Sync, table: str) -> None:
    """Source and lake have the same columns and rows, in any order of the columns."""
    columns = [name for (name,) in sync.db.query(
        "select attname::text from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped order by 1",
        (table,),
    )]  # fmt: skip
    chosen = ", ".join(f'"{c}"' for c in columns)

    def same() -> bool:
        described = sync.lake(f"select column_name from (describe lake.main.{table}) order by 1")
        if [name for (name,) in described] != columns:
            return False
        source = sorted(sync.db.query(f"select {chosen} from {table}"), key=repr)
        return sorted(sync.lake(f"select {chosen} from lake.main.{table}"), key=repr) == source

    wait_until(same, f"{table} is the same, by name", 180, log=sync.log, pause=0.3)


def test_columns_come_go_and_change(shared: Sync) -> None:
    """P-S12, hazard 5: add (with defaults), drop, rename, wider types, several at once, interleaved with rows in one batch."""
    sync, db = shared, shared.db
    db.execute(
        "create table d (id int primary key, a text, n int, doc text); alter table d alter doc set storage external"
    )
    db.execute("insert into d select g, 'a' || g, g, repeat(md5(g::text), 100) from generate_series(1, 50) g")
    sync.follow("public.d")
    sync.wait_same()
    copies = sync.log().count("copy started")

    db.execute("alter table d add column plain text, add column fixed int default 42")
    db.execute("insert into d (id, a, plain) values (100, 'x', 'p'); update d set n = 7 where id = 1")
    by_name(sync, "d")
    with sync.held(), db.connect() as conn:
        conn.execute("update d set a = 'before' where id = 2")
        conn.execute("alter table d rename column a to b")
        conn.execute("update d set b = 'after' where id = 3")
        conn.execute("alter table d drop column plain, alter column n type bigint")
        conn.execute("insert into d (id, b, n) values (101, 'wide', 5000000000)")
        with conn.transaction():
            conn.execute("insert into d (id, b) values (102, 'same transaction')")
            conn.execute("alter table d add column late timestamptz default '2024-02-29 12:00+00'")
            conn.execute("update d set b = 'toast stays' where id = 4")
            conn.execute("insert into d (id, b, late) values (103, 'x', null)")
    by_name(sync, "d")
    db.execute("alter table d drop column b; alter table d add column b text")
    db.execute("update d set b = 'again' where id = 5")
    by_name(sync, "d")
    assert sync.log().count("copy started") == copies, "no new copy was needed"
    assert sync.lake("select count(*) from lake.main.d where n >= 5000000000") == [(1,)]

    # What cannot be applied is re-copied, while its changes are parked.
    db.execute("alter table d alter column n type text; insert into d (id, n) values (200, 'text now')")
    by_name(sync, "d")
    db.execute(
        "alter table d add column random float8 default random(); update d set doc = 'short' where id = 6"
    )
    by_name(sync, "d")
    assert sync.log().count("copy started") > copies
    db.execute("delete from d where id < 3")
    by_name(sync, "d")


@pytest.mark.slow
def test_columns_that_changed_while_the_service_was_stopped(db: Database, sync_of: Any) -> None:
    """Hazard 5, P-S12: the stream brings the versions in order; a resync re-creates a dropped target."""
    for name in ("good", "altered", "dropped"):
        db.execute(f"create table {name} (id int primary key, v int); insert into {name} values (1, 1)")
    sync = sync_of("public.good", "public.altered", "public.dropped", copy=True)
    sync.catch_up()
    db.execute("insert into altered values (2, 2); alter table altered rename column v to w")
    db.execute("insert into altered values (3, 3); alter table altered add column x text default 'd'")
    db.execute(
        "insert into altered values (4, 4, 'four'); insert into good values (2, 2); insert into dropped values (2, 2)"
    )
    sync.change_lake("drop table lake.main.dropped")
    sync.started()
    by_name(sync, "altered")
    assert not sync.differing(("public.good",))
    db.execute("select aqueduck.resync_table('public.dropped')")
    sync.wait_same()
