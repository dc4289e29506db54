"""P-S26, P-S28: how many rows are inlined is a setting like the others, for one table too, while the service runs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.session.catalog import METADATA
from aqueduck.lake.target.inlined import inlining
from aqueduck.model.errors import LakeError
from aqueduck.model.schema import TableName
from aqueduck.sync.control import inline_limits, open_control
from aqueduck.sync.reconcile import Reconciler
from aqueduck.sync.service import SyncService
from tests.fix_postgres import Database, wait_until
from tests.whole_group import WholeGroup, whole_group


class Followed:
    """A group, and the part of the service that follows the registry; the file sets `lake.inline_rows: 5`."""

    def __init__(self, group: WholeGroup) -> None:
        self.group = group
        self.service = SyncService(group.config)
        self.service._lake = group.lake
        control = open_control(group.config)
        [self.service.wanted["test"]] = control.wanted()
        self.service.running["test"] = group.runner
        self.reconciler = Reconciler(self.service, control)
        self.reconciler.follow()

    def set(self, value: int | None, **level: str) -> None:
        """By SQL, until the service knows it."""
        names = "".join(f", {name} => '{at}'" for name, at in level.items())
        written = "null::text" if value is None else value
        db = self.group.db
        db.execute(f"select aqueduck.set_setting('inline_rows', {written}{names})")
        wanted = int(db.value("select aqueduck.get_setting('inline_rows', source => 't')"))

        def known() -> bool:
            self.reconciler.follow()
            return self.group.lake.limits == {TableName("main", "t"): wanted}

        wait_until(known, "the service knows the limit", 5)

    def stored(self) -> tuple[int, int]:
        """Rows of the table in files and in the catalog."""
        [(files,)] = self.group.read(
            f"select coalesce(sum(record_count), 0) from {METADATA}.ducklake_data_file where end_snapshot is null"
            f" and table_id = (select table_id from {METADATA}.ducklake_table where table_name = 't')"
        )
        tables = self.group.read(
            f"select i.table_name from {METADATA}.ducklake_inlined_data_tables i"
            f" join {METADATA}.ducklake_table t using (table_id) where t.table_name = 't'"
        )
        inlined = [self.group.read(f"select count(*) from {METADATA}.{name}") for (name,) in tables]
        return int(files), sum(count for [(count,)] in inlined)

    def removals_inlined(self) -> bool:
        """Whether the catalog holds removals of rows that are in files."""
        [(number,)] = self.group.read(
            f"select table_id from {METADATA}.ducklake_table where table_name = 't' and end_snapshot is null"
        )
        with contextlib.closing(sqlite3.connect(self.group.directory / "lake.sqlite")) as conn:
            name = f"ducklake_inlined_delete_{number}"
            return bool(conn.execute("select 1 from sqlite_master where name = ?", (name,)).fetchall())


@contextlib.contextmanager
def followed(db: Database, directory: Path, **options: Any) -> Iterator[Followed]:
    db.execute("create table t (id int primary key, v text)")
    with whole_group(db, directory, {"t": options}) as group:
        found = Followed(group)
        try:
            yield found
        finally:
            found.reconciler.close()


def test_the_narrowest_limit_counts_while_the_group_runs(db: Database, tmp_path: Path) -> None:
    """A table's own limit, that of its group, and one beyond the file's; nothing is started again."""
    with followed(db, tmp_path) as flow:
        group = flow.group
        insert = (
            "insert into t select (select coalesce(max(id), 0) from t) + n, 'x' from generate_series(1, {}) n"
        )
        expected = [0, 0]
        for value, rows, place in [
            (None, 3, 1),  # the file's 5, for its group
            (0, 3, 0),
            (None, 3, 1),
            (50, 40, 1),
            (None, 6, 0),
        ]:
            flow.set(value, source="t")
            db.execute(insert.format(rows))
            group.apply()
            expected[place] += rows
            assert list(flow.stored()) == expected, (value, rows)
        flow.set(2, group_name="test")
        db.execute(insert.format(3))
        group.apply()
        expected[0] += 3
        assert list(flow.stored()) == expected
        assert not flow.removals_inlined()
        flow.set(5, group_name="test")
        db.execute("delete from t where id = 4")
        group.apply()
        assert flow.removals_inlined()
        assert group.read("select count(*), count(distinct id) from lake.t") == [(57, 57)]
        assert flow.service.running["test"] is group.runner
        assert all(compared.same for compared in group.verify())


@pytest.mark.parametrize(
    "mode",
    ["history", *(pytest.param(m, marks=pytest.mark.slow) for m in ("upsert", "soft_delete", "append"))],
)
def test_with_a_limit_of_0_the_catalog_holds_nothing(db: Database, tmp_path: Path, mode: str) -> None:
    """No inserts, ended rows, removals, events or replayed changes are inlined."""
    with followed(db, tmp_path, mode=mode) as flow:
        flow.set(0, source="t")
        group = flow.group
        db.execute("insert into t select n, 'x' from generate_series(1, 3) n")
        group.apply()
        db.execute("update t set v = 'y' where id = 1; delete from t where id = 2")
        group.apply()
        group.runner.resync(next(iter(group.runner.tables)))
        db.execute("insert into t values (4, 'x')")
        group.apply()
        db.execute("truncate t; insert into t values (9, 'x')")
        group.apply()
        assert flow.stored()[1] == 0
        assert not flow.removals_inlined()
        assert all(compared.same for compared in group.verify())


def test_a_column_with_a_name_of_ducklakes_own_keeps_its_table_out_of_the_catalog(
    db: Database, tmp_path: Path
) -> None:
    """Also a column that comes later, when rows are inlined already, for any limit."""
    with followed(db, tmp_path) as flow:
        group = flow.group
        db.execute("insert into t values (1, 'a'), (2, 'b')")
        group.apply()
        assert flow.stored() == (0, 2)
        db.execute("alter table t add column row_id int; insert into t values (3, 'c', 30)")
        group.apply()
        assert flow.stored() == (1, 2)
        db.execute("update t set row_id = id; delete from t where id = 2")
        group.apply()
        assert group.read("select id, v, row_id from lake.t order by id") == [(1, "a", 1), (3, "c", 3)]
        assert all(compared.same for compared in group.verify())


def test_of_several_sources_of_a_target_the_lowest_limit_counts(db: Database, tmp_path: Path) -> None:
    """They write to the same table of the catalog."""
    db.execute("create table a (id int primary key); create table b (id int primary key)")
    shared = {"target": "all", "source_column": "origin"}
    with whole_group(db, tmp_path, {"a": shared, "b": shared}) as group:
        control = open_control(group.config)
        with contextlib.closing(control):
            for limits, counts in [((7, 3), 3), ((2, 3), 2)]:
                for source, limit in zip("ab", limits, strict=True):
                    db.execute(f"select aqueduck.set_setting('inline_rows', {limit}, source => '{source}')")
                assert inline_limits(control.wanted()) == {TableName("main", "all"): counts}


def test_a_transaction_that_fails_leaves_no_limit_behind(db: Database, tmp_path: Path) -> None:
    """Our own tables are inlined as the file says, regardless of a table's rows."""
    with followed(db, tmp_path) as flow:
        lake = flow.group.lake
        flow.set(0, source="t")

        def fail() -> None:
            with lake.transaction(), inlining(lake, TableName("main", "t")):
                assert lake.inline_rows == 0
                lake.execute("select 1 / 'x'::int")

        with pytest.raises(LakeError):
            fail()
        with lake.transaction():
            [[limit]] = lake.execute(
                "select value from duckdb_settings() where name = 'ducklake_default_data_inlining_row_limit'"
            )
        assert (limit, lake.inline_rows) == ("5", 5)
