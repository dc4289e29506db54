"""Hazard 8: kill -9 at every durable step, start again, compare everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark

POINTS = (
    "lake.after_commit",
    # The commit itself is killed on every catalog in tests/lake/commit/test_commit.py; all of them, in a row, in test_kills.py.
    pytest.param("capture.staged", marks=pytest.mark.slow),
    pytest.param("batch.files_written", marks=pytest.mark.slow),
    pytest.param("lake.before_commit", marks=pytest.mark.slow),
    pytest.param("batch.committed", marks=pytest.mark.slow),
    pytest.param("capture.before_confirm", marks=pytest.mark.slow),
)


def load(db: Database) -> None:
    """Large enough for files, mixed enough to double or lose something."""
    db.execute(
        "insert into t select g, repeat(md5(g::text), 4) from generate_series(1, 40000) g on conflict do nothing"
    )
    db.execute("update t set v = v || 'u' where id % 3 = 0")
    db.execute("update t set id = id + 1000000 where id % 11 = 0 and id + 1000000 not in (select id from t)")
    db.execute("delete from t where id % 13 = 0")
    db.execute("insert into s select coalesce(max(id), 0) + 1, 'one row' from s")


@pytest.fixture
def sync(db: Database, sync_of: Any) -> Sync:
    db.execute("create table t (id int primary key, v text); create table s (id int primary key, v text)")
    sync: Sync = sync_of("public.t", "public.s", segment_bytes="2MiB")
    return sync


@pytest.mark.kills("sync")
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_loses_and_doubles_nothing(db: Database, sync: Sync, point: str) -> None:
    """P-S17, promise 1: SIGKILL at a named durable step; after a restart source and lake are equal, no file is left over."""
    sync.init()
    load(db)
    sync.die(point)
    db.execute("insert into s select max(id) + 1, 'after the crash' from s")
    sync.catch_up()
    registered = {p for (p,) in sync.lake("select data_file from ducklake_list_files('lake', 't')")}
    on_disk = {str(p) for p in (sync.directory / "data").rglob("aqueduck-test-*.parquet")}
    assert on_disk
    assert on_disk <= registered | _ended(sync), "files that a dead batch left behind are removed"


def _ended(sync: Sync) -> set[str]:
    """Files of older lake snapshots: not current any more, but the catalog knows them."""
    rows = sync.lake("select path from __ducklake_metadata_lake.ducklake_data_file")
    return {str(p) for p in (sync.directory / "data").rglob("*.parquet") if any(p.name in r for (r,) in rows)}


@pytest.mark.slow
def test_a_deleted_checkpoint_costs_nothing(db: Database, sync: Sync) -> None:
    """The truth about progress is the lake: without Spark's checkpoint and the stage, the service continues where it was."""
    import shutil

    sync.init()
    load(db)
    sync.catch_up()
    for name in ("checkpoint", "stage"):
        shutil.rmtree(sync.directory / "state" / "test" / name, ignore_errors=True)
    load(db)
    sync.catch_up()


@pytest.mark.slow
def test_a_flush_that_fails_once_is_repeated(db: Database, sync: Sync) -> None:
    """Hazard 3: a transient failure of the lake neither drops nor doubles the batch; the service recovers automatically."""
    sync.init()
    load(db)
    process = sync.start(fault="lake.before_commit:raise")
    sync.wait_same()
    assert process.poll() is None
    assert "lake.write" in sync.log()
    sync.stop(process)


@pytest.mark.slow  # on every catalog, without Spark, in tests/lake/commit/test_commit.py
def test_a_commit_whose_answer_is_lost_is_not_repeated(db: Database, sync: Sync) -> None:
    """Hazard 3: when the commit happened but its answer did not come, the batch is not applied twice."""
    sync.init()
    load(db)
    process = sync.start(fault="lake.after_commit:raise")
    sync.wait_same()
    assert process.poll() is None
    sync.stop(process)


@pytest.mark.slow
def test_a_postgres_restart_in_the_middle_is_survived(
    new_server: Callable[..., EmbeddedPostgres], sync_of: Any
) -> None:
    """The service reconnects automatically after the server was killed and started again."""
    from tests.fix_postgres import _new_database

    server = new_server(durable=True)
    database = _new_database(server)
    database.execute(
        "create table t (id int primary key, v text); create table s (id int primary key, v text)"
    )
    sync: Sync = sync_of("public.t", "public.s", database=database)
    process = sync.start()
    wait_until(lambda: sync.streams() or process.poll() is not None, "the service streams", 120, log=sync.log)
    load(database)
    server.stop(mode="immediate")
    server.start()
    database.__post_init__()
    load(database)
    sync.wait_same(90)
    assert process.poll() is None, sync.log()
    sync.stop(process)
