from __future__ import annotations

import pytest

from aqueduck.lake.session.directories import read_directories, table_directory
from aqueduck.lake.target.apply import ensure_target
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName
from tests.fix_lake import Lake
from tests.strategies import TABLE


@pytest.mark.parametrize("name", ["things", "Things", "of-2026", "2026", "_x"])
@pytest.mark.parametrize("schema", ["main", "new", "New-1"])
def test_a_table_gets_the_directory_that_was_planned(lake: Lake, schema: str, name: str) -> None:
    """Files lie where DuckLake looks for those of the table, before it exists: a moved data path takes them along."""
    target = TableName(schema, name)
    directories = read_directories(lake.session)
    assert directories.of(target) is None
    planned = directories.planned(target)
    with lake.session.transaction():
        ensure_target(lake.session, target, TABLE)
    assert planned == table_directory(lake.session, target) == read_directories(lake.session).of(target)


@pytest.mark.parametrize(
    "target", [TableName("main", "two words"), TableName("main", "ä"), TableName("a.b", "t")]
)
def test_odd_names_have_to_exist_first(lake: Lake, target: TableName) -> None:
    """DuckLake gives them a directory at random; a table that several sources fill must have all of their columns."""
    assert read_directories(lake.session).planned(target) is None
    assert (
        read_directories(lake.session).planned(TableName("main", "t"), TableMode(source_column="s")) is None
    )
