"""What people add to a target survives what Aqueduck does to it: views, comments, sort keys and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aqueduck.sync.maintain import maintain_sync
from tests.fix_postgres import Database
from tests.sync.watching.test_targets_by_hand import by_hand, resync
from tests.whole_group import WholeGroup, whole_group

ADDED = (
    "comment on table lake.main.t is 'for reports'",
    "comment on column lake.main.t.v is 'in words'",
    "create view lake.main.shown as select id, v from lake.main.t",
    "comment on view lake.main.shown is 'seen by others'",
    "alter table lake.main.t set sorted by (v desc, id)",
    "call lake.set_option('parquet_compression', 'snappy', schema => 'main', table_name => 't')",
)


def found(group: WholeGroup) -> dict[str, Any]:
    """The additions, and what the view shows."""
    catalog = "__ducklake_metadata_lake"
    return {
        "comments": sorted(
            group.read(
                "select comment from duckdb_tables() where comment is not null and database_name = 'lake'"
            )
            + group.read(
                "select column_name || ': ' || comment from duckdb_columns() where comment is not null"
                " and database_name = 'lake' and table_name = 't'"
            )
            + group.read(
                "select comment from duckdb_views() where comment is not null and database_name = 'lake'"
            )
        ),
        "sorted": group.read(
            f"select e.expression, e.sort_direction from {catalog}.ducklake_sort_expression e"
            f" join {catalog}.ducklake_sort_info i using (sort_id, table_id) join {catalog}.ducklake_table t using (table_id)"
            " where i.end_snapshot is null and t.end_snapshot is null and t.table_name = 't' order by e.sort_key_index"
        ),
        "options": group.read(
            "select option_name, value, scope_entry from lake.options() where scope_entry = 'main.t'"
        ),
        "view": sorted(group.read("select distinct id from lake.main.shown where id is not null")),
    }


def expected(db: Database) -> dict[str, Any]:
    return {
        "comments": [("for reports",), ("seen by others",), ("v: in words",)],
        "sorted": [("v", "DESC"), ("id", "ASC")],
        "options": [("parquet_compression", "snappy", "main.t")],
        "view": sorted(db.query("select id from t")),
    }


@pytest.mark.parametrize(
    "mode",
    [
        "upsert",
        pytest.param("append", marks=pytest.mark.slow),
        "history",
        pytest.param("soft_delete", marks=pytest.mark.slow),
    ],
)
def test_what_people_add_to_a_target_survives(db: Database, tmp_path: Path, mode: str) -> None:
    """Batches, a resync, changed columns, columns that need a new copy, a restart and maintenance."""
    db.execute("create table t (id int primary key, v text, n int, old int)")
    db.execute("insert into t select g, 'v' || g, g, g from generate_series(1, 40) g")
    tables = {"public.t": {"mode": mode}}
    with whole_group(db, tmp_path, tables) as group:
        by_hand(tmp_path, *ADDED)
        steps: dict[str, Callable[[], object]] = {
            "a batch": lambda: db.execute("insert into t values (100, 'new', 1, 1)"),
            "a large batch": lambda: db.execute(
                "insert into t select g, 'l', g, g from generate_series(200, 1500) g"
            ),
            "a new column": lambda: db.execute(
                "alter table t add w text; insert into t values (101, 'new', 1, 1, 'w')"
            ),
            "a wider column": lambda: db.execute(
                "alter table t alter n type bigint; insert into t values (102, 'x', 1, 1, 'w')"
            ),
            "a renamed column": lambda: db.execute(
                "alter table t rename w to ww; insert into t values (103, 'x', 1, 1, 'w')"
            ),
            "a dropped column": lambda: db.execute(
                "alter table t drop old; insert into t values (104, 'x', 1, 'w')"
            ),
            "a column that is copied again": lambda: db.execute(
                "alter table t alter n type text using n::text; insert into t values (105, 'x', 'one', 'w')"
            ),
        }
        for name, change in steps.items():
            change()
            group.apply(tasks=True)
            assert found(group) == expected(db), name
        resync(group, "t")
        assert found(group) == expected(db), "a resync"
        group.stop()
        maintain_sync(group.config)
        group.start(tables)
        assert found(group) == expected(db), "maintenance and a restart"
        assert [c.verdict for c in group.verify()] == ["identical"]
