"""Columns whose type changes while their table is followed: wider types arrive in order; other changes lead to a new copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.lake.commit.commit import BatchPlan, TableFailed, commit_batch
from aqueduck.model.errors import LakeBusyError, LakeWriteError
from aqueduck.sync.groups import group_commits
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
    """P-S12: the batch is repeated without the failed table; the table with the wider type is not re-copied."""
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
    """P-S12: the table failed permanently, because the column was taken for text."""
    db.execute(
        "create domain d as bigint; create table t (id int primary key, v int); insert into t values (1, 1)"
    )
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute("alter table t alter v type d; insert into t values (3, 3000000000)")
        group.apply()
        assert identical(group)
        assert group.copies == 1


OTHER_VALUES = {
    "spaces": ("char(5)", "ab", "char(10)"),
    "no_spaces": ("char(5)", "ab", "text"),
    "rounded": ("timestamp", "2020-01-01 00:00:00.6", "timestamp(0)"),
    "cut_off": ("varchar(10)", "abcde", "varchar(2) using v::varchar(2)"),
    "written_otherwise": ("json", '{"b":  1, "a": 2}', "jsonb"),
    "fewer_digits": ("numeric", "1.256", "numeric(50,1)"),
    "other_elements": ("text[]", "{01,02}", "int[] using v::int[]"),
}


@pytest.mark.parametrize(
    "how", [h if h == "spaces" else pytest.param(h, marks=pytest.mark.slow) for h in OTHER_VALUES]
)
def test_another_type_that_is_the_same_in_the_lake(db: Database, tmp_path: Path, how: str) -> None:
    """P-S12: rows that PostgreSQL rewrote are not in the stream; they silently kept their old values."""
    before, value, after = OTHER_VALUES[how]
    db.execute(f"create table t (id int primary key, v {before}, w int)")
    db.execute(f"insert into t values (1, '{value}'), (2, '{value}')")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute(f"alter table t alter v type {after}; update t set w = 1 where id = 1")
        group.apply()
        assert identical(group)
        assert group.copies == 2
        db.execute("update t set w = 2")
        group.apply()
        assert identical(group)
        assert group.copies == 2


def test_a_key_that_is_padded_otherwise(db: Database, tmp_path: Path) -> None:
    """P-S08: rows were not found by the key that they have now, and stayed beside their later versions."""
    db.execute("create table t (id char(5) primary key, v int); insert into t values ('a', 1), ('b', 2)")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute(
            "alter table t alter id type char(10); update t set v = 3 where id = 'a'; delete from t where id = 'b'"
        )
        group.apply()
        assert group.read("from lake.main.t") == [("a         ", 3)]


def test_a_higher_bound_takes_no_copy(db: Database, tmp_path: Path) -> None:
    """P-S12: longer texts, more digits of a second, and a domain for its own type leave the rows as they are."""
    db.execute(
        "create domain d as text; create table t (id int primary key, a varchar(5), b varchar(5), c time(0), e text)"
    )
    db.execute("insert into t values (1, 'a', 'b', '10:00', 'e'), (2, 'a', 'b', '10:00', 'e')")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        db.execute(
            "alter table t alter a type text, alter b type varchar(9), alter c type time(3), alter e type d;"
            " insert into t values (3, 'longer', 'longer', '10:00:00.5', 'e')"
        )
        group.apply()
        assert identical(group)
        assert group.copies == 1
