"""Files and lake snapshots are reported as they exist."""

from __future__ import annotations

from aqueduck.lake.upkeep.health import read_health
from tests.fix_lake import Lake


def test_files_sizes_and_lake_snapshots_are_counted(lake: Lake) -> None:
    """Data files, delete files and versions of each table, without our own tables."""
    before = read_health(lake.session)
    lake.session.execute("create schema lake.shop")
    lake.session.execute("create table lake.shop.t (i int)")
    lake.session.execute("insert into lake.shop.t from range(100000)")
    lake.session.execute("delete from lake.shop.t where i < 50000")
    found = read_health(lake.session)
    (table,) = [t for t in found.tables if t.name == "shop.t"]
    assert (table.files, table.delete_files) == (1, 1)
    assert table.bytes > 1000
    assert found.snapshots is not None
    assert before.snapshots is not None
    assert found.snapshots - before.snapshots == 4
    assert found.oldest_snapshot_at is not None
    assert not [t for t in found.tables if t.name.startswith("aqueduck.")]
