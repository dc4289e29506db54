"""New columns with values in existing rows, which the stream does not bring: the table is re-copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.whole_group import whole_group

SETUP = "create table t (id int primary key, v int); insert into t values (1, 1), (2, 2)"
PARTITIONED = """
    create table t (id int primary key, v int) partition by range (id);
    create table t_low partition of t for values from (0) to (100);
    insert into t values (1, 1), (2, 2)
"""
# how the table is made, what is done to it, how many copies there are then
COLUMNS = {
    "generated_before": (
        "create table t (id int primary key, v int, g int generated always as (v * 2) stored);"
        " insert into t values (1, 1), (2, 2)",
        ["alter table t alter g drop expression"],
        2,
    ),
    "without_its_default_and_written_anew": (
        SETUP,
        ["alter table t add c int not null default 5", "alter table t alter c drop default", "vacuum full t"],
        2,
    ),
    "of_partitions_without_its_default": (
        PARTITIONED,
        ["alter table t add c int default 5", "alter table t alter c drop default"],
        2,
    ),
    "filled_afterwards": (
        SETUP,
        ["alter table t add c int", "update t set c = 5", "alter table t alter c set not null"],
        1,
    ),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_values_that_the_stream_does_not_bring(any_db: Database, tmp_path: Path, column: str) -> None:
    """P-S12: rows from before had NULL instead, without a word."""
    db = any_db
    made, changes, copies = COLUMNS[column]
    db.execute(made)
    with whole_group(db, tmp_path, {"t": {}}) as group:
        for change in changes:
            db.execute(change)
        db.execute("update t set v = 7 where id = 1")
        group.apply()
        [found] = group.verify()
        assert (found.verdict, found.note) == ("identical", None)
        assert group.copies == copies
