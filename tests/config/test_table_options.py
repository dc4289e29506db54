"""Options of tables, as file and command line write them, mean the same and are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from aqueduck.config.sections import describe_problems
from aqueduck.config.sync import TableConfig
from aqueduck.config.table_options import read_options
from aqueduck.model.columns.projection import (
    Mask,
    Projection,
    bind,
    blank_columns,
    lake_cells,
    lake_schema,
    only_needed,
    problem,
)
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import Column, TableSchema

TABLE = TableSchema(
    1,
    "public",
    "t",
    tuple(Column(name, 25, -1, number=number) for number, name in enumerate(("id", "a", "b", "c"), 1)),
    ("id",),
    "d",
)


def test_a_command_line_says_what_a_file_says() -> None:
    """P-S26: both give the same options."""
    written = read_options(
        "t", None, "x, y", ["a=b"], ["email=hash", "n=redact", "phone=constant:+00 = 1"], "id > 1"
    )
    assert written == {
        "exclude": ["x", "y"],
        "rename": {"a": "b"},
        "mask": {"email": "hash", "n": "redact", "phone": {"constant": "+00 = 1"}},
        "where": "id > 1",
    }
    assert TableConfig.model_validate({"source": "t", **written}).options == written
    assert read_options("t", None, None, (), (), None) == {}


@pytest.mark.parametrize(
    ("rename", "mask"), [(["a"], []), (["=b"], []), (["a="], []), ([], ["a"]), ([], ["a=shuffle"])]
)
def test_a_command_line_that_is_not_clear_is_refused(rename: list[str], mask: list[str]) -> None:
    """P-S26: before anything is asked of the registry."""
    with pytest.raises(ConfigError):
        read_options("t", None, None, rename, mask, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"columns": ["a"], "exclude": ["b"]}, "both columns and exclude"),
        ({"columns": ["a", "a"]}, "columns names a more than once"),
        ({"columns": ["id"], "mask": {"a": "hash"}}, "mask names a"),
        ({"exclude": ["a"], "rename": {"a": "b"}}, "rename names a"),
        ({"where": "a > 1", "mode": "append"}, "where filters rows of the mode upsert"),
        ({"mask": {"a": "shuffle"}}, "mask"),
        ({"mask": {"a": {"konstant": "1"}}}, "mask"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    """P-S26: the error uses the words of the file."""
    with pytest.raises(ValidationError) as caught:
        TableConfig.model_validate({"source": "t", **options})
    assert says in describe_problems(caught.value, {(): TableConfig})


def names(table: TableSchema) -> list[str]:
    return [c.name for c in lake_schema(table).columns]


def renamed(table: TableSchema, **after: str) -> TableSchema:
    return replace(table, columns=tuple(replace(c, name=after.get(c.name, c.name)) for c in table.columns))


def test_options_go_with_a_column_that_is_renamed() -> None:
    """P-S12: a column is identified by its number; a masked or excluded one by its name as well."""
    bound = bind(TABLE, Projection(exclude=("b",), rename=(("a", "x"),)))
    assert names(bound) == ["id", "x", "c"]
    assert names(renamed(bound, a="z", b="y")) == ["id", "x", "c"]
    assert names(renamed(bound, b="y", c="b")) == ["id", "x"]
    again = bind(renamed(TABLE, b="y"), Projection(exclude=("b",)), bound.projection)
    assert names(again) == ["id", "a", "c"]


def test_a_column_that_may_be_a_hidden_one_is_a_problem() -> None:
    """P-S12: without a number, a new name is not taken for a new column while an old one is missing."""
    bound = bind(TABLE, Projection(masks=(("b", Mask("hash")),)))
    columns = (*bound.columns[:2], replace(bound.columns[2], name="z", number=0), bound.columns[3])
    assert problem(replace(bound, columns=columns)) is not None
    assert problem(bound) is None


def test_only_what_is_needed_is_read() -> None:
    """Excluded columns are not read, redacted ones stay empty; columns that a filter needs are read."""
    wanted = Projection(
        exclude=("a", "b"),
        masks=(("c", Mask("redact")),),
        condition="f0 = 'x'",
        reads=("a",),
        where="a = 'x'",
    )
    bound = bind(TABLE, wanted)
    needed = only_needed(bound)
    assert [c.name for c in needed.columns] == ["id", "a", "c"]
    assert blank_columns(needed) == {2}
    assert [cell.index for cell in lake_cells(needed)] == [0, 2]


def test_a_table_with_a_projection_survives_json() -> None:
    """Options that pass between capture, tasks and lake stay the same, numbers included."""
    wanted = Projection(
        exclude=("a",), masks=(("c", Mask("constant", "1")),), rename=(("b", "x"),), where="b = 'x'",
        condition="f0 = 'x'", reads=("b",), salt_env="S", salt="0", publication="p", published_where="(b > 1)",
    )  # fmt: skip
    table = lake_schema(bind(TABLE, wanted))
    again = TableSchema.from_json(table.to_json())
    assert again == table
    assert again.source is not None
    assert table.source is not None
    assert again.source.projection is not None
    assert again.source.projection.numbers == table.source.projection.numbers  # type: ignore[union-attr]
    assert again.source.projection.condition == "f0 = 'x'"
    assert "projection" not in TABLE.to_json()
