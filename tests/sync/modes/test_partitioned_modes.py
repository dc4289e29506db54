"""Partitioned targets in every mode: changes, copies and columns that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.session import partition_files
from aqueduck.model.errors import AqueduckError
from aqueduck.sync.watching.target_watch import TargetWatch
from tests.fix_postgres import Database
from tests.layouts import files_of, misplaced
from tests.whole_group import WholeGroup, whole_group

MODES = {"u": "upsert", "a": "append", "h": "history", "s": "soft_delete"}


@pytest.fixture(autouse=True)
def _large_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_files, "SHARE_BYTES_MIN", 1)


def identical(group: WholeGroup) -> None:
    assert {(c.table, c.verdict) for c in group.verify()} == {
        (t.schema.qualified, "identical") for t in group.runner.tables.values()
    }


def by_partition(group: WholeGroup, *keys: str) -> None:
    """Every file has rows of one partition; there are some."""
    for table in {t.target.name for t in group.runner.tables.values()}:
        assert misplaced(group.read, "main", table, list(keys)) == [], table
        assert files_of(group.read, "main", table), table


def lay_out(group: WholeGroup, change: str) -> None:
    """Somebody alters all targets, and the service looks at them."""
    for table in {t.target.name for t in group.runner.tables.values()}:
        group.lake.execute(f"alter table lake.main.{table} {change}")
    TargetWatch().look(group.runner)


def errors(group: WholeGroup) -> dict[str, Any]:
    found = {t.schema.name: group.runner.states[oid].error for oid, t in group.runner.tables.items()}
    return {name: getattr(AqueduckError.from_text(text or ""), "code", None) for name, text in found.items()}


def test_partitioned_targets_of_every_mode_follow_their_sources(db: Database, tmp_path: Path) -> None:
    """Set while they stream, with updates between partitions, a resync, and columns that are renamed and added."""
    for name in MODES:
        db.execute(f"create table {name} (id int primary key, tenant text, v text)")
        db.execute(f"insert into {name} select i, 't' || i % 3, 'x' from generate_series(1, 60) i")
    with whole_group(db, tmp_path, {f"public.{n}": {"mode": m} for n, m in MODES.items()}) as group:
        lay_out(group, "set partitioned by (tenant)")
        for tasks in (True, False):
            for name in MODES:
                db.execute(
                    f"insert into {name} select {tasks:d} * 1000 + i, 't' || i % 4, 'y' from generate_series(101, 130) i"
                )
                db.execute(
                    f"update {name} set tenant = 'moved' where id % 5 = 0;"
                    f" update {name} set tenant = null where id % 7 = 0; delete from {name} where id % 11 = 0"
                )
            group.apply(tasks=tasks)
            identical(group)
        for oid in list(group.runner.tables):
            group.runner.resync(oid)
        group.copy()
        identical(group)
        by_partition(group, "tenant")
        for name in MODES:
            db.execute(
                f"alter table {name} rename tenant to customer; alter table {name} add column more int"
            )
            db.execute(
                f"insert into {name} select i, 't' || i % 3, 'z', i from generate_series(5001, 5060) i"
            )
        group.apply(tasks=True)
        identical(group)
        by_partition(group, "customer")


def test_a_partition_column_that_the_source_drops_is_refused_until_the_layout_is_reset(
    db: Database, tmp_path: Path
) -> None:
    """DuckLake drops no such column; where dropped columns are kept, later rows have NULL in it."""
    for name in MODES:
        db.execute(f"create table {name} (id int primary key, tenant text, v text)")
        db.execute(f"insert into {name} select i, 't' || i % 3, 'x' from generate_series(1, 30) i")
    with whole_group(db, tmp_path, {f"public.{n}": {"mode": m} for n, m in MODES.items()}) as group:
        lay_out(group, "set partitioned by (tenant)")
        for name in MODES:
            db.execute(f"alter table {name} drop column tenant")
            db.execute(f"insert into {name} select i, 'y' from generate_series(101, 130) i")
        group.apply_only(tasks=True)
        assert errors(group) == {"u": "lake.partitioned", "a": None, "h": None, "s": None}
        lay_out(group, "reset partitioned by")
        group.copy()
        identical(group)


def test_sources_that_share_a_partitioned_target_keep_their_rows(db: Database, tmp_path: Path) -> None:
    """Fan-in: the source column is a partition key like any other."""
    options = {"target": "main.shared", "source_column": "origin"}
    for name in "xy":
        db.execute(f"create table {name} (id int primary key, v text)")
        db.execute(f"insert into {name} select i, 'v' from generate_series(1, 40) i")
    with whole_group(db, tmp_path, {f"public.{n}": {**options, "source_value": n} for n in "xy"}) as group:
        lay_out(group, "set partitioned by (origin, v)")
        for name in "xy":
            db.execute(
                f"insert into {name} select i, 'w' from generate_series(101, 140) i; delete from {name} where id < 9"
            )
        group.apply(tasks=True)
        group.runner.resync(next(iter(group.runner.tables)))
        group.copy()
        identical(group)
        counts = "select origin, count(*) from lake.main.shared group by 1 order by 1"
        assert group.read(counts) == [("x", 72), ("y", 72)]
