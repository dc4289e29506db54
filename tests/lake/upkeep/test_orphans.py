from __future__ import annotations

from pathlib import Path

import pytest

from aqueduck.lake.session.directories import read_directories, table_directory
from aqueduck.lake.session.files import file_name, write_files
from aqueduck.lake.target.apply import add_files, ensure_target
from aqueduck.lake.upkeep.orphans import remove_orphans
from aqueduck.model.schema import TableName
from tests.fix_lake import Lake
from tests.strategies import TABLE

TARGET = TableName("main", "things")
ROWS = "select 'b' as big, 'a' as \"Kind of\", 1::integer as n0, i::integer as id, 'x' as _ord from range(50) t(i)"


@pytest.fixture
def directory(lake: Lake) -> Path:
    with lake.session.transaction():
        ensure_target(lake.session, TARGET, TABLE)
    return Path(table_directory(lake.session, TARGET))


def put(lake: Lake, directory: Path, name: str) -> Path:
    [file] = write_files(lake.session.con, ROWS, str(directory), name)
    return Path(file.path)


def test_files_of_a_dead_batch_are_removed_and_not_adopted(lake: Lake, directory: Path) -> None:
    """Files of the group that the catalog does not know are removed; the lake's files and rows stay."""
    known = put(lake, directory, file_name("shop", "run1", 1, 0))
    dead = put(lake, directory, file_name("shop", "run1", 2, 0))
    with lake.session.transaction():
        add_files(lake.session, TARGET, [str(known)])
    assert remove_orphans(lake.session, "shop", [TARGET]) == [str(dead)]
    assert known.exists()
    assert not dead.exists()
    assert lake.read("select count(*) from lake.main.things") == [(50,)]
    assert remove_orphans(lake.session, "shop", [TARGET]) == []


def test_other_peoples_files_are_never_touched(lake: Lake, directory: Path) -> None:
    """Files of other groups, of DuckLake and of other programs stay, whatever the catalog says."""
    names = ["aqueduck-shop_2-r-1-0.parquet", "aqueduck-shop.parquet", "ducklake-dead.parquet", "notes.txt"]
    files = [put(lake, directory, name) for name in names]
    elsewhere = put(lake, lake.data_path / "elsewhere", file_name("shop", "run1", 1, 0))
    assert remove_orphans(lake.session, "shop", [TARGET]) == []
    assert all(file.exists() for file in [*files, elsewhere])


def test_files_that_older_lake_snapshots_need_stay(lake: Lake, directory: Path) -> None:
    """A file whose rows are all deleted is still part of the past."""
    file = put(lake, directory, file_name("shop", "run1", 1, 0))
    with lake.session.transaction():
        add_files(lake.session, TARGET, [str(file)])
    [[version]] = lake.read("select max(snapshot_id) from lake.snapshots()")
    lake.session.execute("delete from lake.main.things")
    assert remove_orphans(lake.session, "shop", [TARGET]) == []
    assert lake.read(f"select count(*) from lake.main.things at (version => {version})") == [(50,)]


def test_a_copy_that_is_under_way_keeps_its_files(lake: Lake, directory: Path) -> None:
    """Files of the run to keep stay although nothing knows them yet."""
    files = {run: put(lake, directory, file_name("shop", run, 1, 0)) for run in ("copying", "dead")}
    assert remove_orphans(lake.session, "shop", [TARGET], keep="copying") == [str(files["dead"])]
    assert files["copying"].exists()


def test_a_table_that_has_no_files_yet_has_no_orphans(lake: Lake) -> None:
    """A directory that does not exist is not an error."""
    with lake.session.transaction():
        ensure_target(lake.session, TARGET, TABLE)
    assert remove_orphans(lake.session, "shop", [TARGET]) == []


def test_files_of_a_copy_that_was_never_committed_are_removed(lake: Lake) -> None:
    """Files in the future directory of a table are removed, unless a copy still needs them."""
    planned = read_directories(lake.session).planned(TARGET)
    assert planned is not None
    dead = put(lake, Path(planned), file_name("shop", "run1c", 1, 0))
    journaled = put(lake, Path(planned), file_name("shop", "run1c", 1, 1))
    assert remove_orphans(lake.session, "shop", [TARGET], names={journaled.name}) == [str(dead)]
    assert journaled.exists()
