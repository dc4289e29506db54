"""Columns that get another type while their table is followed: wider ones arrive in order, and what may change values is copied again."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.app import group_commits
from aqueduck.errors import LakeBusyError, LakeWriteError
from aqueduck.lake.commit import BatchPlan, TableFailed, commit_batch
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group


def identical(group: WholeGroup) -> bool:
    found = group.verify()
    assert {(c.verdict, c.note) for c in found} == {("identical", None)}, found
    return True


@pytest.mark.parametrize("tasks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_batch_that_fails_after_its_wider_types(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: bool
) -> None:
    """P-S12, P-S16: its rows from before the change come again, and are no narrower type that calls for a copy."""
    db.execute("create table t (id int primary key, v int); insert into t values (1, 1), (2, 2)")
    tables = {"t": {"mode": "append"}}
    with whole_group(db, tmp_path, tables) as group:
        db.execute("insert into t values (3, 3)")
        db.execute("alter table t alter v type bigint; insert into t values (4, 3000000000)")

        def fail(*_: object) -> None:
            raise LakeBusyError("not now")

        monkeypatch.setattr(group_commits, "commit_batch", fail)
        with pytest.raises(LakeBusyError):
            group.apply_only(tasks=tasks)
        monkeypatch.undo()
        group.restart(tables)
        group.apply(tasks=tasks)
        assert identical(group)
        assert group.copies == 1
        assert group.read("select typeof(v) from lake.main.t limit 1") == [("BIGINT",)]


def test_wider_types_beside_a_table_that_fails(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S12: the batch is made again without the table that fails; the one with the wider type is not copied for it."""
    db.execute("create table t (id int primary key, v int); create table other (id int primary key)")
    with whole_group(db, tmp_path, {"t": {}, "other": {}}) as group:
        db.execute("insert into t values (1, 1); insert into other values (1)")
        db.execute("alter table t alter v type bigint; insert into t values (2, 3000000000)")
        [failing] = (oid for oid, table in group.runner.tables.items() if table.schema.name == "other")

        def commit(session: object, plan: BatchPlan) -> bool:
            if any(table.oid == failing for table in plan.tables):
                raise TableFailed(failing, LakeWriteError("not this one"))
            return commit_batch(session, plan)  # type: ignore[arg-type]

        monkeypatch.setattr(group_commits, "commit_batch", commit)
        group.apply_only()
        monkeypatch.undo()
        group.runner.copier.retry_now(failing)
        group.copy()
        assert identical(group)
        assert group.copies == 1, "both tables, once"


def test_a_domain_of_a_wider_type(db: Database, tmp_path: Path) -> None:
    """P-S12: the table failed for good, as the column was taken for text on its way."""
    db.execute(
        "create domain d as bigint; create table t (id int primary key, v int); insert into t values (1, 1)"
    )
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute("alter table t alter v type d; insert into t values (3, 3000000000)")
        group.apply()
        assert identical(group)
        assert group.copies == 1
