"""Driven from psql: tables and groups come and go while the service runs, and status tells."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark


def states(db: Database) -> dict[str, str]:
    return dict(db.query("select source, state from aqueduck.status()"))


def test_tables_and_groups_are_driven_by_sql(db: Database, sync_of: Any) -> None:
    """P-S01, P-S18, P-S19, P-S22, P-S25, P-S27: add, resync, remove, disable and enable act on a running service."""
    for name in ("a", "b", "c"):
        db.execute(f"create table {name} (id int primary key, v text)")
        db.execute(f"insert into {name} select g, 'old' from generate_series(1, 1000) g")
    sync: Sync = sync_of("public.a", copy=True)
    process = sync.started()
    sync.wait_same()
    wait_until(lambda: states(db) == {"public.a": "STREAMING"}, "status says so", 120, log=sync.log)

    db.execute("select aqueduck.add_table('public.b', group_name => 'test')")
    db.execute("insert into b values (5000, 'while it is added'); update a set v = 'touched' where id < 10")
    sync.tables = ("public.a", "public.b")
    sync.wait_same()
    wait_until(lambda: states(db).get("public.b") == "STREAMING", "b streams", 120, log=sync.log)

    sync.change_lake("delete from lake.main.b where id < 500")
    db.execute("select aqueduck.resync_table('public.b')")
    db.execute("insert into b values (6000, 'while it is copied again')")
    sync.wait_same()

    db.execute("select aqueduck.disable_group('test')")
    wait_until(lambda: not sync.slot_active(), "the slot is let go", 120, log=sync.log)
    db.execute("insert into a values (7000, 'while disabled')")
    db.execute("select aqueduck.enable_group('test')")
    sync.wait_same()

    db.execute("select aqueduck.remove_table('public.b')")
    published = "select tablename::text from pg_publication_tables where pubname = 'aqueduck_test'"
    wait_until(lambda: db.query(published) == [("a",)], "b is gone", 120, log=sync.log)
    assert list(states(db)) == ["public.a"]
    db.execute("insert into b values (8000, 'nobody looks'); insert into a values (8000, 'somebody does')")
    sync.tables = ("public.a",)
    sync.wait_same()
    assert sync.lake("select count(*) from lake.main.b where id = 8000") == [(0,)]

    second = sync.start()
    assert second.wait(timeout=60) == 1
    assert "[service.locked]" in sync.log()
    assert process.poll() is None
    sync.stop(process)


@pytest.mark.slow
def test_a_role_without_rights_to_a_schema_uses_the_file_alone(db: Database, role: str, sync_of: Any) -> None:
    """Where the registry cannot be created the service says so and goes on."""
    db.execute(
        f'create table a (id int primary key); alter table a owner to "{role}"; alter role "{role}" replication'
    )
    db.execute("create publication aqueduck_test for table only a with (publish_via_partition_root = true)")
    sync: Sync = sync_of("public.a", copy=True)
    sync.user = role
    db.execute("insert into a values (1)")
    assert sync.once() == 0, sync.log()
    sync.assert_same()
    assert "the file alone" in sync.log()
