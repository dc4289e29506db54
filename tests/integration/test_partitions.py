"""Partitioned tables, and tables that are dropped: changes that are not in the stream reach the lake too."""

from __future__ import annotations

import pytest

from tests.fix_postgres import wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark

SETUP = """
    create table p (id int, region text, v text, primary key (id, region)) partition by range (id);
    create table p_low partition of p for values from (0) to (1000);
    create table p_high partition of p for values from (1000) to (2000) partition by list (region);
    create table p_high_eu partition of p_high for values in ('eu');
    create table p_high_rest partition of p_high default partition by hash (id);
    create table p_rest_0 partition of p_high_rest for values with (modulus 2, remainder 0);
    create table p_rest_1 partition of p_high_rest for values with (modulus 2, remainder 1);
    create table p_other (v text, region text not null, gone int, id int not null, primary key (id, region));
    alter table p_other drop column gone;
    alter table p attach partition p_other for values from (2000) to (3000);
    insert into p select g, (array['eu', 'us', 'asia'])[g % 3 + 1], 'copied ' || g from generate_series(1, 2999) g;
    create table parent (id int primary key, v text);
    create table child (extra int, primary key (id)) inherits (parent);
    insert into parent values (1, 'own'); insert into child values (2, 'of the child', 3);
"""


def copies(sync: Sync, table: str) -> int:
    lines = (sync.directory / "log.txt").read_text(errors="replace").splitlines()
    return sum("copy finished" in line and f"table={table}" in line for line in lines)


@pytest.mark.slow  # it waits for several looks at the catalog
def test_partitions_of_every_kind_come_and_go(shared: Sync) -> None:
    """P-S14: range, list, hash and several levels; rows that move; attach, detach, create, drop, truncate of one."""
    sync, db = shared, shared.db
    db.execute(SETUP)
    sync.follow("public.p")
    sync.wait_same()
    with sync.one_batch():
        db.execute(
            "update p set id = id + 1000 where id between 10 and 1990 and id % 100 = 7 and region <> 'eu'"
        )
        db.execute("update p set region = 'moved' where id between 1000 and 1100")
        db.execute("delete from p where id % 50 = 3; update p set v = 'changed' where id % 40 = 1")
        db.execute("create table p_next partition of p for values from (3000) to (4000)")
        db.execute("insert into p select g, 'new', 'in a new partition' from generate_series(3000, 3050) g")
    assert copies(sync, "public.p") == 1

    with sync.one_batch():
        db.execute(
            "truncate p; insert into p values (1, 'eu', 'after the truncate'), (1500, 'x', 'too'), (2500, 'x', 'too')"
        )
    # The next look at the catalog finds every partition rewritten, and knows why.
    db.execute("create table p_quiet partition of p for values from (4000) to (5000)")
    marked = "select count(*) from lake.aqueduck.partitions where file_nodes like ?"
    node = str(db.value("select pg_relation_filenode('p_quiet')::text"))
    wait_until(
        lambda: sync.lake(marked.replace("?", f"'%{node}%'"))[0][0] == 1,
        "it was looked at",
        120,
        log=sync.log,
    )
    assert copies(sync, "public.p") == 1

    db.execute("truncate p_low")
    sync.wait_same()
    assert copies(sync, "public.p") == 2
    db.execute("alter table p detach partition p_other; insert into p_other values ('alone', 'x', 2600)")
    sync.wait_same()
    db.execute("alter table p attach partition p_other for values from (2000) to (3000)")
    sync.wait_same()
    db.execute("insert into p values (2700, 'x', 'at last')")
    sync.wait_same()
    assert copies(sync, "public.p") == 4


@pytest.mark.slow
def test_a_parent_is_synced_without_its_children(shared: Sync) -> None:
    """Inheritance without partitions: each table has its own rows, by copy and by stream."""
    sync, db = shared, shared.db
    db.execute(SETUP)
    sync.follow("public.parent")
    db.execute(
        "insert into child values (4, 'not synced', 5); insert into parent values (6, 'own'); update parent set v = v || '!'"
    )
    rows = db.query("select * from only parent order by id")
    assert rows == [(1, "own!"), (6, "own!")]
    wait_until(lambda: sync.lake_rows("main.parent") == rows, "only its own rows", 120, log=sync.log)
    sync.tables = ()


@pytest.mark.slow
def test_a_table_that_is_dropped_and_created_anew_waits_for_a_word(shared: Sync) -> None:
    """P-S13: another table with the same name replaces the lake's rows only on request; the others continue."""
    sync, db = shared, shared.db
    db.execute("create table d (id int primary key, v text); insert into d values (1, 'old')")
    db.execute("create table e (id int primary key, v text)")
    sync.follow("public.d", "public.e")
    sync.wait_same()
    db.execute("drop table d")
    sync.wait_state("ERRORED", "public.d")
    db.execute("insert into e values (1, 'continues')")
    wait_until(lambda: not sync.differing(("public.e",)), "the other table continues", 120, log=sync.log)
    db.execute("create table d (id bigint primary key, w numeric(5,2)); insert into d values (7, 1.5)")
    error = "select error_message from aqueduck.status() where source = 'public.d'"
    wait_until(
        lambda: "[pg.table_recreated]" in str(db.value(error)), "it is distinguished", 120, log=sync.log
    )
    assert sync.lake_rows("main.d") == [(1, "old")]
    db.execute("select aqueduck.resync_table('public.d')")
    sync.wait_same()
    db.execute("insert into d values (8, 2.5)")
    sync.wait_same()
    assert copies(sync, "public.d") == 2


@pytest.mark.slow
def test_adding_a_table_again_is_a_word(shared: Sync) -> None:
    """P-S13: `add_table` for a table that was created anew has it copied, right after that as well as when it already waits."""
    sync, db = shared, shared.db
    db.execute("create table d (id int primary key, v text); insert into d values (1, 'old')")
    sync.follow("public.d")
    sync.wait_same()
    add = "select aqueduck.add_table('public.d', group_name => 'shared')"
    # Before the next look at the catalog: the service still follows the old table.
    db.execute("drop table d; create table d (id int primary key, v text); insert into d values (2, 'new')")
    db.execute(add)
    sync.wait_same()
    sync.wait_state("STREAMING", "public.d")

    db.execute("drop table d; create table d (id int primary key, w text); insert into d values (3, 'newer')")
    error = "select error_message from aqueduck.status() where source = 'public.d'"
    wait_until(
        lambda: "[pg.table_recreated]" in str(db.value(error)), "it is distinguished", 120, log=sync.log
    )
    assert sync.lake_rows("main.d") == [(2, "new")]
    db.execute(add)
    sync.wait_same()
    sync.wait_state("STREAMING", "public.d")
    db.execute("insert into d values (4, 'continues')")
    sync.wait_same()
