"""Rows that DuckLake writes itself, because the lake is encrypted."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.storage import sync_file
from aqueduck.lake.target import inserts
from aqueduck.model.schema import TableName
from tests.fanout_lakes import connect


def test_the_file_is_on_disk_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on disk before the slot is confirmed, even if the same transaction creates the table."""
    synced: list[str] = []

    def syncing(path: str) -> None:
        sync_file(path)
        synced.append(path)

    monkeypatch.setattr(inserts, "sync_file", syncing)
    config = LakeConfig(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data")
    connect(LakePlace(catalog=config.catalog, data_path=f"{tmp_path}/data/"), "encrypted").close()
    with open_lake(config) as lake:
        with lake.transaction():
            lake.execute("create table lake.main.t (id int)")
            inserts.insert_and_sync(
                lake, TableName("main", "t"), "(select i::int as id from range(3000) r(i))"
            )
            assert len(synced) == 1
        with lake.transaction():
            inserts.insert_and_sync(
                lake, TableName("main", "t"), "(select i::int as id from range(3000) r(i))"
            )
            inserts.insert_and_sync(lake, TableName("main", "t"), "(select 1 as id)")
        assert lake.memory.inlined_rows == {TableName("main", "t"): 1}
        assert lake.query("select count(*) from lake.main.t")[0] == [(6001,)]
    assert sorted(synced) == sorted(str(path) for path in tmp_path.rglob("*.parquet"))
