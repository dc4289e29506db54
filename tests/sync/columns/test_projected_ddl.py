"""The source's columns change under a table with options: columns stay chosen, masked or excluded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from aqueduck.model.errors import AqueduckError
from tests.fix_postgres import Database
from tests.whole_group import WholeGroup, whole_group

TABLE = """
    create table t (id int primary key, a text, b text, c int);
    insert into t select g, 'a' || g, 'b' || g, g from generate_series(1, 3) g
"""
TASKS = [True, pytest.param(False, marks=pytest.mark.slow)]  # as tasks fold, and as the driver does


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SALT", "salt")


def hashed(text: str) -> str:
    return hashlib.sha256(("salt" + text).encode()).hexdigest()


Case = tuple[dict[str, Any], str, list[str], int]

CASES: dict[str, Case] = {
    # options, statements with changes between, the lake's columns afterwards, copies
    "add_is_ignored_with_columns": (
        {"columns": ["id", "a"]},
        "alter table t add d int default 7; update t set a = a || 'x', d = 1",
        ["id", "a"],
        1,
    ),
    "add_comes_with_exclude": (
        {"exclude": ["b"]},
        "alter table t add d int default 7; insert into t values (10, 'a', 'b', 1, 2)",
        ["id", "a", "c", "d"],
        1,
    ),
    "drop_of_an_excluded_column_is_nothing": (
        {"exclude": ["b"]},
        "alter table t drop b; insert into t values (10, 'a', 1)",
        ["id", "a", "c"],
        1,
    ),
    "drop_of_a_chosen_column": (
        {"columns": ["id", "a", "c"], "rename": {"a": "x"}},
        "alter table t drop a; insert into t values (10, 'b', 1)",
        ["id", "c"],
        1,
    ),
    "rename_of_a_chosen_column": (
        {"columns": ["id", "a"]},
        "alter table t rename a to z; insert into t values (10, 'z', 'b', 1)",
        ["id", "z"],
        1,
    ),
    "rename_of_a_column_with_another_name": (
        {"columns": ["id", "a"], "rename": {"a": "x"}},
        "alter table t rename a to z; insert into t values (10, 'z', 'b', 1)",
        ["id", "x"],
        1,
    ),
    "rename_of_an_excluded_column": (
        {"exclude": ["b"]},
        "alter table t rename b to z; insert into t values (10, 'z', 'b', 1)",
        ["id", "a", "c"],
        1,
    ),
    "names_that_are_swapped": (
        {"exclude": ["b"]},
        "alter table t rename a to tmp; alter table t rename b to a; alter table t rename tmp to b;"
        " insert into t values (10, 'chosen', 'hidden', 1)",
        ["id", "c"],  # b is excluded by its name as well as by its number
        1,
    ),
    "drop_and_add_again_of_an_excluded_column": (
        {"exclude": ["b"]},
        "alter table t drop b; alter table t add b text; insert into t values (10, 'a', 1, 'hidden')",
        ["id", "a", "c"],
        1,
    ),
    "another_type_of_a_hashed_column": (
        {"mask": {"c": "hash"}},
        "alter table t alter c type text using c::text; insert into t values (10, 'a', 'b', 'c')",
        ["id", "a", "b", "c"],
        2,  # its text may differ, and with it the hashes of untouched rows
    ),
    "drop_and_add_again_of_a_masked_column": (
        {"mask": {"a": "hash"}},
        "alter table t drop a; alter table t add a text; insert into t values (10, 'b', 1, 'hidden')",
        ["id", "b", "c", "a"],
        1,
    ),
    "columns_in_another_order": (
        {"columns": ["id", "c"], "where": "c > 1"},
        "alter table t drop a, drop b; alter table t add b text, add a text; insert into t values (10, 5, 'b', 'a')",
        ["id", "c"],
        1,
    ),
    "another_column_for_the_filter": (
        {"columns": ["id", "c"], "where": "c > 1"},
        "alter table t drop b; alter table t add b text; alter table t drop c; alter table t add c int;"
        " insert into t values (10, 'a', 'b', 5)",
        ["id", "c"],
        2,  # untouched rows pass or do not pass by another column now
    ),
}


SHORT = {"add_is_ignored_with_columns", "names_that_are_swapped"}


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize(
    "case", [c if c in SHORT else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_options_follow_their_columns(db: Database, tmp_path: Path, case: str, tasks: bool) -> None:
    """P-S12: after a change of columns between changes of rows, source and lake agree under the options."""
    options, statements, columns, copies = CASES[case]
    db.execute(TABLE)
    with whole_group(db, tmp_path, {"t": options}, salt_env="TEST_SALT") as group:
        db.execute("update t set a = a || '!' where id = 1")
        db.execute(statements)
        db.execute("delete from t where id = 2")
        group.apply(tasks=tasks)
        assert sorted(group.columns("t")) == sorted(columns)
        assert group.copies == copies
        assert b"hidden" not in b"".join(str(r).encode() for r in group.read("from lake.main.t"))
        assert [(r.verdict, r.note) for r in group.verify()] == [("identical", None)]
        group.restart({"t": options})
        assert group.copies == copies
        db.execute("update t set id = id + 100")
        group.apply(tasks=tasks)
        assert [r.verdict for r in group.verify()] == ["identical"]


@pytest.mark.slow
def test_a_masked_column_that_was_renamed_twice_stays_masked(db: Database, tmp_path: Path) -> None:
    """P-S12: the catalog does not know the name in between; it is identified because no column was dropped."""
    db.execute(TABLE)
    with whole_group(db, tmp_path, {"t": {"mask": {"a": "hash"}}}, salt_env="TEST_SALT") as group:
        group.capture.stop()
        db.execute("alter table t rename a to z; insert into t values (10, 'hidden', 'b', 1)")
        db.execute("alter table t rename z to y; insert into t values (11, 'hidden', 'b', 1)")
        group.restart({"t": {"mask": {"a": "hash"}}})
        group.apply(tasks=True)
        assert group.columns("t") == ["id", "y", "b", "c"]
        assert group.copies == 1
        assert b"hidden" not in b"".join(str(r).encode() for r in group.read("from lake.main.t"))
        assert hashed("hidden") in {row[1] for row in group.read("from lake.main.t")}
        assert [r.verdict for r in group.verify()] == ["identical"]


@pytest.mark.slow
def test_a_filter_whose_column_is_dropped_stops_the_table_with_a_reason(db: Database, tmp_path: Path) -> None:
    """P-S12: the lake keeps what it had, the changes are parked, and the error says what is wrong."""
    db.execute(TABLE)
    with whole_group(db, tmp_path, {"t": {"where": "c > 1"}}) as group:
        db.execute("alter table t drop c; insert into t values (10, 'a', 'b')")
        with pytest.raises(AqueduckError, match="row filter"):
            group.apply()
        assert group.read("select id from lake.main.t order by id") == [(2,), (3,)]
        group.restart({"t": {}})
        assert [r.verdict for r in group.verify()] == ["identical"]
        assert len(group.read("from lake.main.t")) == 4


@pytest.mark.slow
def test_options_hold_while_a_table_is_parked(db: Database, tmp_path: Path) -> None:
    """P-S04: changes parked before and after a rename are masked when they are replayed."""
    db.execute(TABLE)
    with whole_group(
        db, tmp_path, {"t": {"mask": {"a": "hash"}, "where": "c <> 2"}}, salt_env="TEST_SALT"
    ) as group:
        park(group, True)
        db.execute("insert into t values (10, 'hidden', 'b', 1); update t set c = 3 where id = 2")
        group.apply(tasks=True)
        db.execute(
            "alter table t rename a to z; insert into t values (11, 'hidden', 'b', 2), (12, 'hidden', 'b', 3)"
        )
        group.apply(tasks=True)
        assert len(group.read("from lake.main.t")) == 2
        park(group, False)
        group.copy()
        assert group.columns("t") == ["id", "z", "b", "c"]
        assert [(r.verdict, r.lake_rows) for r in group.verify()] == [("identical", 5)]


def park(group: WholeGroup, on: bool) -> None:
    [oid] = group.runner.tables
    group.runner.set_enabled(oid, not on)
