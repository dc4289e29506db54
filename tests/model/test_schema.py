"""Schemas, names and positions survive being written down."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.model.changes import SegmentRef
from aqueduck.model.schema import Column, TableName, TableSchema, lsn_text, parse_lsn, parse_table_name

names = st.text(st.characters(exclude_characters="\x00", codec="utf-8"), min_size=1, max_size=63)
columns = st.builds(
    Column,
    name=names,
    type_oid=st.integers(0, 2**32 - 1),
    typmod=st.integers(-1, 2**31 - 1),
    type_name=st.text(),
    not_null=st.booleans(),
)
schemas = st.builds(
    TableSchema,
    oid=st.integers(1, 2**32 - 1),
    schema=names,
    name=names,
    columns=st.lists(columns).map(tuple),
    key=st.lists(names).map(tuple),
    identity=st.sampled_from("difn"),
)
references = st.builds(SegmentRef, kind=st.sampled_from(["rows", "truncate"]))


@given(schemas)
def test_a_schema_comes_back_from_json(schema: TableSchema) -> None:
    """Segments carry their schema as JSON, and nothing is lost in it."""
    assert TableSchema.from_json(schema.to_json()) == schema


def test_the_key_is_found_by_its_place_among_the_columns() -> None:
    """The key's order is its own, not that of the columns."""
    table = TableSchema(1, "s", "t", tuple(Column(name, 23, -1) for name in "abc"), ("c", "a"), "d")
    assert table.key_indexes == (2, 0)
    assert table.qualified == "s.t"


@given(st.integers(0, 2**64 - 1))
def test_a_position_comes_back_from_text(position: int) -> None:
    """Text and number are the same position, over all 64 bits."""
    assert parse_lsn(lsn_text(position)) == position


def test_a_position_is_written_as_postgresql_writes_it() -> None:
    """People can paste a position into psql."""
    assert lsn_text(0x1_016A4F88) == "1/16A4F88"
    assert parse_lsn("0/16a4f88") == 0x16A4F88


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "0/123456789", "g/0", "0/0 ", "-1/0", "0/0\n"])
def test_text_that_is_no_position_is_refused(text: str) -> None:
    """A position is never guessed."""
    with pytest.raises(ValueError, match="0/16A4F88"):
        parse_lsn(text)


@pytest.mark.parametrize("position", [-1, 2**64])
def test_a_number_that_is_no_position_is_refused(position: int) -> None:
    """A position has 64 bits and no sign."""
    with pytest.raises(ValueError, match="64 bits"):
        lsn_text(position)


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("orders", "public", "orders"),
        ("Shop.Orders", "shop", "orders"),
        ('"Shop".orders', "Shop", "orders"),
        ('"a.b"."c ""d"""', "a.b", 'c "d"'),
        (' shop . "T" ', "shop", "T"),
        ("größe.straße", "größe", "straße"),
        ("a$1._b2", "a$1", "_b2"),
    ],
)
def test_a_table_name_is_read_as_sql_reads_it(text: str, schema: str, name: str) -> None:
    """Quotes keep case and any character; without them a name is lowercase."""
    assert parse_table_name(text, default_schema="public") == TableName(schema, name)


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".a", "a.b.c", "a b", '"a', '""', "1a", "a;b", 'a"b"', "a..b"]
)
def test_text_that_is_no_table_name_is_refused(text: str) -> None:
    """Nothing but a name passes, so nothing else can reach a statement."""
    with pytest.raises(ValueError, match="must be a table name"):
        parse_table_name(text, default_schema="public")


@given(names, names, st.booleans())
def test_a_table_name_comes_back_from_its_text(schema: str, name: str, fold_case: bool) -> None:
    """Text is quoted wherever it would be read differently."""
    table = TableName(schema, name)
    assert parse_table_name(str(table), default_schema="x", fold_case=fold_case) == table


@given(references)
def test_a_segment_reference_comes_back_from_its_values(reference: SegmentRef) -> None:
    """References cross Spark as plain values and as pickles."""
    assert SegmentRef.from_dict(reference.to_dict()) == reference
    assert pickle.loads(pickle.dumps(reference)) == reference


@given(references)
def test_a_segment_reference_refuses_what_it_does_not_know(reference: SegmentRef) -> None:
    """Values of another version are an error, not a default."""
    with pytest.raises(TypeError, match="colour"):
        SegmentRef.from_dict({**reference.to_dict(), "colour": 1})
    with pytest.raises(TypeError, match="rows"):
        SegmentRef.from_dict({key: value for key, value in reference.to_dict().items() if key != "rows"})
