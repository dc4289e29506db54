"""Changes inside nested columns of a source: destinations and the change feed have the values that the lake shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.lake.source.feed import Feed, read_part
from aqueduck.model.routing import SourceColumn, SourceTable, evolution
from tests.fanout_lakes import Fan, T

NESTED = (
    "create table lake.t (id int, c varchar, st struct(a int, b varchar), l struct(a int, b int)[],"
    " m map(varchar, struct(a int)), two struct(x struct(p int, q int)))"
)
VALUES = "{'a': 1, 'b': 'x'}, [{'a': 1, 'b': 2}, null], map {'k': {'a': 1}}, {'x': {'p': 1, 'q': 2}}"
NULLS = "null, null, null, null"


@pytest.fixture(params=[0, 10], ids=["files", "inlined"])
def fan(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, inline=request.param)
    yield fan
    fan.close()


CHANGES = {
    "added and replaced": [
        "alter table lake.t add column st.c int default 5",
        "alter table lake.t drop column st.b",
        "alter table lake.t add column st.b varchar",
    ],
    "all renamed or dropped": [
        "alter table lake.t rename column st.a to aa",
        "alter table lake.t drop column st.b",
    ],
    "in a list, a map and a struct": [
        "alter table lake.t rename column l.element.a to z",
        "alter table lake.t rename column l.element.b to a",
        "alter table lake.t rename column m.value.a to aa",
        "alter table lake.t add column m.value.z int",
        "alter table lake.t rename column two.x.p to pp",
        "alter table lake.t add column two.x.r int default 7",
        "alter table lake.t alter st set data type struct(a bigint, d int)",
    ],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_change_inside_a_nested_column_arrives(fan: Fan, changes: list[str]) -> None:
    """P-F16: added, dropped, renamed and replaced fields, with rows on both sides of the change in one cycle."""
    fan.change(NESTED, f"insert into lake.t values (1, 'a', {VALUES}), (2, 'b', {NULLS})")
    fan.poll()
    fan.change(f"insert into lake.t values (3, 'a', {VALUES}), (4, 'a', {NULLS})")
    fan.change(
        "update lake.t set c = 'b' where id = 1", *changes, "insert into lake.t (id, c) values (5, 'a')"
    )
    fan.change("delete from lake.t where id = 2")
    applied = fan.poll()
    assert [a.error for a in applied] == [None] * len(applied)
    assert fan.differing() == {}


def test_a_nested_column_that_comes_and_changes_in_one_cycle_arrives(fan: Fan) -> None:
    """P-F16: the column did not exist at the cursor, and had other fields in the middle of the range."""
    fan.change("create table lake.t (id int, c varchar)", "insert into lake.t values (1, 'a'), (2, 'b')")
    fan.poll()
    fan.change("alter table lake.t add column st struct(a int, b varchar)")
    fan.change(
        "insert into lake.t values (3, 'a', {'a': 1, 'b': 'x'})", "alter table lake.t add column st.c int"
    )
    fan.change("insert into lake.t values (4, 'b', {'a': 1, 'b': 'x', 'c': 2})")
    fan.change("alter table lake.t drop column st.b", "alter table lake.t rename column st.a to aa")
    fan.change("insert into lake.t values (5, 'a', {'aa': 9, 'c': 8})", "delete from lake.t where id = 1")
    assert [a.error for a in fan.poll()] == [None, None]
    assert fan.differing() == {}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_change_feed_shows_old_rows_with_the_fields_of_now(fan: Fan, changes: list[str]) -> None:
    """What a range inserted under other fields has the values that the table shows at the end of the range."""
    fan.change(NESTED, f"insert into lake.t values (1, 'a', {VALUES}), (2, 'b', {NULLS})", *changes)
    fan.change("insert into lake.t (id, c) values (3, 'a')")
    with fan.pool.use(fan.place("source"), read_only=True) as lake:
        source = Feed(lake, T)
        parts = source.changes(source.first(), source.source.latest(), ["id", "st", "l", "m", "two"], 2)
    found: list[dict[str, Any]] = []
    for part in parts:
        for batch in read_part(fan.pool, fan.place("source"), part):
            found += batch.to_pylist()
    shown = (
        fan.source.execute("select id, st, l, m, two from lake.t order by id").to_arrow_table().to_pylist()
    )
    rows = sorted(
        ({k: v for k, v in row.items() if k[0] != "_"} for row in found), key=lambda r: int(r["id"])
    )
    assert rows == shown


def test_a_state_without_fields_is_that_of_the_same_column() -> None:
    """A state of an earlier version lacks the fields of a column; it leads to no new table."""
    stored = SourceColumn(1, "st", "STRUCT(a INTEGER)", None, (SourceColumn(2, "a", "int32"),))
    assert evolution([SourceColumn(1, "st", "STRUCT(a INTEGER)")], [stored]) == []
    replaced = SourceColumn(1, "st", "STRUCT(a INTEGER)", None, (SourceColumn(3, "a", "int32"),))
    assert evolution([stored], [replaced]) is None


def test_a_state_stores_fields_and_reads_them_back() -> None:
    """Fields survive the text of the state, those of an earlier version included."""
    text = '{"uuid": "u", "columns": [{"id": 1, "name": "l", "type": "INTEGER[]", "default": null}]}'
    assert SourceTable.from_json(text).columns == (SourceColumn(1, "l", "INTEGER[]"),)
    text = text.replace(
        '"default": null', '"default": null, "fields": [{"id": 2, "name": "element", "type": "int32"}]'
    )
    assert SourceTable.from_json(text).columns[0].fields == (SourceColumn(2, "element", "int32"),)
