"""All modes in a running service: copies, batches of all sizes, columns that change, kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.fix_postgres import Database, wait_until
from tests.fix_service import Sync

pytestmark = pytest.mark.spark

MODES = ("append", "history", "soft_delete")


def verified(sync: Sync, tables: list[str]) -> bool:
    """Whether `aqueduck verify` finds them identical."""
    chosen = [word for table in tables for word in ("--table", table)]
    command = [
        sys.executable,
        "-m",
        "aqueduck.cli",
        "verify",
        "-c",
        str(sync.config_file),
        "--no-spark",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, *chosen], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout, done.stderr
    verdicts = {row["table"]: row["verdict"] for row in json.loads(done.stdout)}
    return verdicts == dict.fromkeys(tables, "identical")


def make(db: Database, name: str) -> None:
    db.execute(f"create table {name} (id int primary key, v text, n int, doc text)")
    db.execute(f"alter table {name} alter doc set storage external; alter table {name} replica identity full")


def load(db: Database, name: str, rows: int) -> None:
    """Enough for tasks and files, with every kind of change."""
    db.execute(
        f"insert into {name} select g, repeat(md5(g::text), 4), g, repeat('d', 3000 * (g % 50 = 0)::int)"
        f" from generate_series(1, {rows}) g on conflict do nothing"
    )
    db.execute(f"update {name} set v = v || 'u' where id % 3 = 0; delete from {name} where id % 13 = 0")
    db.execute(f"update {name} set id = id + 1000000 where id % 11 = 0 and id < 1000000")


def no_change_twice(sync: Sync, table: str) -> bool:
    return sync.lake(
        f"select count(*) from (select 1 from lake.main.{table} where _op not in ('copy', 'resync')"
        " group by _commit_lsn, _seq having count(*) > 1)"
    ) == [(0,)]


def test_every_mode_from_copy_to_column_changes(shared: Sync) -> None:
    """P-S12, P-S15, P-S16: copied, streamed in small and large batches, altered, resynced; source and lake stay equal."""
    sync, db = shared, shared.db
    tables = [f"public.m_{mode}" for mode in MODES]
    for mode in MODES:
        make(db, f"m_{mode}")
        db.execute(f"insert into m_{mode} select g, 'copied', g, 'd' from generate_series(1, 100) g")
        db.execute("select aqueduck.add_table(%s, group_name => 'shared', mode => %s)", (f"m_{mode}", mode))
    for part in ("one", "two"):
        make(db, f"part_{part}")
        db.execute(f"insert into part_{part} values (1, '{part}', 1, null)")
        call = "select aqueduck.add_table(%s, target => 'parts', group_name => 'shared', source_column => 'part', source_value => %s)"
        db.execute(call, (f"part_{part}", part))
        tables.append(f"public.part_{part}")
    sync.wait_state("STREAMING", *tables)
    for table in tables:
        load(db, table, 12_000)
    wait_until(lambda: verified(sync, tables), "all are identical", 180, log=sync.log, pause=1)
    assert no_change_twice(sync, "m_append")
    for table in tables:
        db.execute(
            f"alter table {table} add column extra int default 7; update {table} set n = -1 where id = 1"
        )
        db.execute(f"alter table {table} rename column v to w; alter table {table} drop column n")
        db.execute(
            f"update {table} set w = 'after', extra = 8 where id = 2; insert into {table} (id, w) values (500000, 'new')"
        )
    wait_until(lambda: verified(sync, tables), "all follow their columns", 180, log=sync.log, pause=1)
    dropped = "select count(*) from lake.main.m_history where id = 1 and n = -1 and _valid_to is null"
    assert sync.lake(dropped) == [(1,)], "a history keeps the values of a column that was dropped"
    assert sync.lake("select count(distinct part) from lake.main.parts where extra = 7") == [(2,)]
    before = dict(sync.lake("select _op, count(*) from lake.main.m_append group by 1"))
    assert before["copy"] == 100
    for table in tables:
        db.execute("select aqueduck.resync_table(%s)", (table,))
    wait_until(
        lambda: sync.log().count("copy finished") >= 2 * len(tables),
        "all are re-copied",
        180,
        log=sync.log,
    )
    db.execute("truncate part_one; insert into part_one (id) values (1)")
    wait_until(lambda: verified(sync, tables), "all are identical again", 180, log=sync.log, pause=1)
    assert no_change_twice(sync, "m_append")
    after = dict(sync.lake("select _op, count(*) from lake.main.m_append group by 1"))
    assert after["resync"] == 1
    assert {op: after[op] for op in ("update", "delete")} == {op: before[op] for op in ("update", "delete")}


@pytest.mark.slow
@pytest.mark.kills("sync")
@pytest.mark.parametrize(
    "point",
    [
        "batch.files_written",
        "lake.before_commit",
        "lake.after_commit",
        "batch.committed",
        "copy.chunk_written",
    ],
)
def test_a_kill_neither_loses_nor_doubles_a_change(db: Database, sync_of: Any, point: str) -> None:
    """P-S16, P-S17: SIGKILL at a durable step; the log has every change once, the others their rows."""
    for mode in MODES:
        make(db, mode)
        db.execute(f"insert into {mode} select g, 'copied', g, 'd' from generate_series(1, 5000) g")
    tables = [f"public.{mode}" for mode in MODES]
    sync: Sync = sync_of(*tables, copy=True, segment_bytes="2MiB", copy_chunk_bytes=65536)
    sync.modes = dict(zip(tables, MODES, strict=True))
    if not point.startswith("copy."):
        assert sync.once() == 0, sync.log()
        for mode in MODES:
            load(db, mode, 20_000)
    sync.die(point)
    for mode in MODES:
        db.execute(f"update {mode} set v = 'after the crash' where id = 1")
    assert sync.once() == 0, sync.log()
    assert verified(sync, tables)
    assert no_change_twice(sync, "append")
    changed = sync.lake("select count(*) from lake.main.append where v = 'after the crash'")
    assert changed == [(1,)]
