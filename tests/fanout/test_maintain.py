"""Maintenance of destinations whose catalogs others may write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.config.sync import MaintenanceConfig
from aqueduck.fanout.maintain import maintain_destination
from aqueduck.model.upkeep import MaintenanceReport
from tests.fanout_lakes import Fan, T


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    """Two destinations with ten small files each."""
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, inline=0)
    fan.change("create table lake.t (id int, c varchar)")
    for n in range(10):
        rows = f"from range({n * 3000}, {n * 3000 + 3000}) r(i)"
        fan.change(f"insert into lake.t select i, case when i % 2 = 0 then 'a' else 'b' end {rows}")
        fan.poll()
    yield fan
    fan.close()


def maintained(fan: Fan, name: str) -> MaintenanceReport:
    config = MaintenanceConfig(retention_hours=1e-7, grace_hours=0)
    places = [fan.place(each) for each in ("source", "one", "two")]
    return maintain_destination(fan.pool, (name, fan.place(name), T), config, places)


@pytest.mark.parametrize(
    "attack",
    [
        "update ducklake_data_file set path = '{file}', path_is_relative = 0 where data_file_id = 3",
        "update ducklake_table set path = '{directory}/', path_is_relative = 0 where table_name = 't'",
        "update ducklake_table set path = '../../one_data/main/t/' where table_name = 't'",
        "insert into ducklake_data_file (data_file_id, table_id, begin_snapshot, end_snapshot, path, path_is_relative)"
        " values (900, 77, 1, 2, '{file}', 0)",
        "update ducklake_schema set path = '../one_data/main/'",
        "insert into ducklake_files_scheduled_for_deletion values (900, '{file}', 0, '2020-01-01 00:00:00+00')",
        "insert into ducklake_files_scheduled_for_deletion values (900, '../one_data/main/t/{name}', 1, '2020-01-01 00:00:00+00')",
    ],
)
def test_files_of_others_are_neither_merged_nor_removed(fan: Fan, attack: str) -> None:
    """A tenant who may write the catalog of one destination cannot read or remove the files of another one."""
    theirs = sorted((fan.directory / "one_data").rglob("*.parquet"))
    before = fan.rows("one")
    assert len(theirs) >= 10
    with sqlite3.connect(fan.directory / "two.sqlite") as con:
        con.execute(attack.format(file=theirs[0], name=theirs[0].name, directory=theirs[0].parent))
    con.close()
    report = maintained(fan, "two")
    assert "[lake.foreign_path]" in (report.error or "")
    assert all(file.exists() for file in theirs)
    assert fan.rows("one") == before
    assert maintained(fan, "one").error is None
    assert fan.rows("one") == before
