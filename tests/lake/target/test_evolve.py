"""Changing a target's columns: which steps, in which order, and what only a new copy can do."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduck.lake.target.apply import ensure_target
from aqueduck.lake.target.evolve import ColumnChange, evolve, plan_changes, same_columns, widen, wider_columns
from aqueduck.lake.target.places import known_layout, notice_changes
from aqueduck.model.columns.column_numbers import UNCLEAR
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.errors import LakeError, ResyncNeededError
from aqueduck.model.schema import Column, TableName, TableSchema
from tests.fix_lake import Lake

INT2, INT4, INT8, TEXT, NUMERIC, FLOAT4, FLOAT8 = 21, 23, 20, 25, 1700, 700, 701
TARGET = TableName("main", "t")


def schema(*columns: Column) -> TableSchema:
    return TableSchema(1, "public", "t", columns, ("id",), "d")


def col(name: str, kind: int = TEXT, number: int = 0, **more: object) -> Column:
    return Column(name, kind, -1, number=number, **more)  # type: ignore[arg-type]


ID = col("id", INT4, 1)


def steps(old: TableSchema, new: TableSchema) -> list[str]:
    return [f"{s.kind} {s.before + '→' if s.before else ''}{s.column.name}" for s in plan_changes(old, new)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([ID, col("a", number=2)], [ID, col("a", number=2), col("b", number=3)], ["add b"]),
        ([ID, col("a", number=2), col("b", number=3)], [ID, col("b", number=3)], ["drop a"]),
        ([ID, col("a", number=2)], [ID, col("b", number=2)], ["rename a→b"]),
        ([ID, col("a", number=2)], [ID, col("b", number=3)], ["drop a", "add b"]),
        ([ID, col("a", number=2)], [ID, col("a", number=3)], ["drop a", "add a"]),
        # The catalog no longer knows the name: the order of the columns identifies it.
        ([ID, col("a", number=2), col("c", number=3)], [ID, col("b"), col("c", number=3)], ["rename a→b"]),
        (
            [ID, col("a", number=2), col("c", number=3)],
            [ID, col("c", number=3), col("b")],
            ["drop a", "add b"],
        ),
        # Names that are swapped, and one that moves on to another's name.
        (
            [ID, col("a", number=2), col("b", number=3)],
            [ID, col("b", number=2), col("a", number=3)],
            ["rename b→a_aqueduck", "rename a→b", "rename a_aqueduck→a"],
        ),
        (
            [ID, col("a", number=2), col("b", number=3)],
            [ID, col("b", number=2), col("c", number=3)],
            ["rename b→c", "rename a→b"],
        ),
        ([ID, col("a", INT4, 2)], [ID, col("a", INT8, 2)], ["widen a→a"]),
        ([ID, col("a", INT2, 2)], [ID, col("b", INT4, 2)], ["rename a→b", "widen a→b"]),
        ([ID, col("a", number=2)], [ID, col("a", number=2)], []),
        # Another order, and numbers that are not known, change nothing.
        ([ID, col("a", number=2), col("b", number=3)], [ID, col("b"), col("a")], []),
    ],
)
def test_steps(old: list[Column], new: list[Column], expected: list[str]) -> None:
    """P-S12: add, drop, rename, wider types, in an order in which every name is free when it is needed."""
    assert steps(schema(*old), schema(*new)) == expected
    assert same_columns(schema(*old), schema(*new)) == (not expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (col("a", INT8, 2), col("a", INT4, 2)),
        (col("a", INT4, 2), col("a", TEXT, 2)),
        (col("a", FLOAT8, 2), col("a", FLOAT4, 2)),
    ],
)
def test_what_is_not_wider_needs_a_new_copy(old: Column, new: Column) -> None:
    """P-S12: the error says what changed, and nothing is guessed."""
    with pytest.raises(ResyncNeededError, match="the type of a changed"):
        plan_changes(schema(ID, old), schema(ID, new))


def test_values_that_the_stream_does_not_bring_need_a_new_copy() -> None:
    """A volatile default gives every old row a value of its own."""
    with pytest.raises(ResyncNeededError, match="new column b"):
        plan_changes(schema(ID), schema(ID, col("b", number=2, computed=True)))


def test_versions_are_numbered_by_the_one_before_and_the_catalog() -> None:
    """The catalog gives a column's number and the value of older rows; without it, names are used."""
    before = schema(ID, col("a", number=2))
    version = schema(col("id", INT4), col("a"))
    again = schema(ID, col("a", number=3, missing="x"))
    assert [c.number for c in version.numbered(before, again, [2]).columns] == [UNCLEAR, UNCLEAR]
    with pytest.raises(ResyncNeededError, match="no longer known"):
        plan_changes(before, version.numbered(before, again, [2]))
    assert [c.number for c in version.numbered(before, None).columns] == [1, 2]
    more = schema(col("id", INT4), col("a"), col("b"))
    found = more.numbered(before, schema(ID, col("a", number=2), col("b", number=4, missing="x")))
    assert [(c.number, c.missing) for c in found.columns] == [(1, None), (2, None), (4, "x")]
    assert found.newest == 4


def test_a_bucket_of_a_column_keeps_it_from_a_type_with_other_hashes(lake: Lake) -> None:
    """Rows of old files would be in the wrong bucket, where no query looks; other types are wider with the same hash."""
    session = lake.session
    session.execute("create table lake.main.t (id int, n decimal(9, 2))")
    session.execute("alter table lake.main.t set partitioned by (bucket(4, n))")
    old = schema(ID, Column("n", NUMERIC, (9 << 16 | 2) + 4, number=2))
    for digits, refused in ((18, False), (19, True)):
        wider = schema(ID, Column("n", NUMERIC, (digits << 16 | 2) + 4, number=2))
        with pytest.raises(LakeError, match="hash") if refused else contextlib.nullcontext():
            widen(session, TARGET, old, wider)
    session.execute("alter table lake.main.t reset partitioned by")
    widen(session, TARGET, old, wider)
    assert ("n", "DECIMAL(19,2)") in lake.read("select column_name, column_type from (describe lake.main.t)")


def test_a_dropped_column_leaves_the_sort_keys(lake: Lake) -> None:
    """DuckLake refuses to drop it otherwise; the other keys stay, and the rest of the change in the same transaction."""
    session = lake.session
    old = schema(ID, col("a", number=2), col("b", number=3))
    with session.transaction():
        ensure_target(session, TARGET, old)
    session.execute("alter table lake.main.t set sorted by (a desc, b)")
    session.execute("insert into lake.main.t select i, 'a' || i % 3, 'b' || 9 - i % 7 from range(20) r (i)")
    for new, keys in (
        (schema(ID, col("c", number=3), col("a", number=4)), ["c"]),
        (schema(ID, col("a", number=4)), []),
    ):
        notice_changes(session)
        with session.transaction():
            evolve(session, TARGET, plan_changes(old, new))
            session.execute("insert into lake.main.t by name select 100 as id, 'x' as a")
        notice_changes(session)
        assert [key.column for key in known_layout(session, TARGET).sort] == keys
        old = new
    assert lake.read("select count(*), count(a) from lake.main.t") == [(22, 2)]


def test_a_target_follows(lake: Lake, tmp_path: Path) -> None:
    """All steps on a real lake: rows from before get the default, later ones are found by any filter."""
    old = schema(ID, col("a", number=2), col("gone", number=3), col("n", INT4, 4))
    new = schema(
        ID, col("b", number=2), col("n", INT8, 4), col("c", INT4, 5, missing="7"), col("gone", number=6)
    )
    session = lake.session
    with session.transaction():
        ensure_target(session, TARGET, old)
    session.execute("insert into lake.main.t select i, 'a' || i, 'g', i from range(100) r (i)")
    session.execute("insert into lake.main.t values (1000, 'inlined', 'g', 1000)")
    wider, _ = wider_columns(old, [new])
    with session.transaction():
        widen(session, TARGET, old, wider)
    with session.transaction():
        session.execute("delete from lake.main.t where id = 5")
        evolve(session, TARGET, plan_changes(wider, new))
        session.execute(
            "insert into lake.main.t by name select 7000 as id, 'new' as b, 5000000000 as n, 8 as c"
        )
    session.execute("insert into lake.main.t by name select 3 as id, 'later' as b, 1 as n, 9 as c")
    columns = lake.read("select column_name, column_type from (describe lake.main.t)")
    assert sorted(columns) == [
        ("b", "VARCHAR"),
        ("c", "INTEGER"),
        ("gone", "VARCHAR"),
        ("id", "INTEGER"),
        ("n", "BIGINT"),
    ]
    assert lake.read("select id, b, n, c, gone from lake.main.t where id >= 1000 order by id") == [
        (1000, "inlined", 1000, 7, None),
        (7000, "new", 5_000_000_000, 8, None),
    ]
    assert lake.read("select count(*), count(*) filter (c = 7) from lake.main.t") == [(102, 100)]
    assert lake.read("select count(*) from lake.main.t where n >= 99") == [(3,)]


def test_a_column_is_not_dropped_where_it_was_added(lake: Lake) -> None:
    """Its id would be that of the next new column, which would show its values; so the table is re-copied."""
    session = lake.session
    with session.transaction():
        ensure_target(session, TARGET, schema(ID))
    add = ColumnChange("add", col("a", INT4, 2))
    rename = ColumnChange("rename", col("b", INT4, 2), "a")
    for made, last in (([add], "a"), ([add, rename], "b")):
        with session.transaction():
            evolve(session, TARGET, made)
            with pytest.raises(ResyncNeededError, match="added and dropped again"):
                evolve(session, TARGET, [ColumnChange("drop", col(last, INT4, 2))])
            session.execute("rollback; begin")
    assert lake.read("select count(*) from lake.main.t") == [(0,)]
    with session.transaction():
        evolve(session, TARGET, [add])
    with session.transaction():
        evolve(
            session,
            TARGET,
            [ColumnChange("drop", col("a", INT4, 2)), ColumnChange("add", col("c", INT4, 3, missing="9"))],
        )
    session.execute("insert into lake.main.t by name select 1 as id, 8 as c")
    assert lake.read("from lake.main.t") == [(1, 8)]


def test_columns_that_become_wider_on_the_way_are_found_by_their_first_name() -> None:
    """Several versions in one batch: a column that is wider in the end is widened first, under its first name."""
    first = schema(ID, col("a", INT2, 2))
    versions = [schema(ID, col("b", INT4, 2)), schema(ID, col("c", INT8, 2))]
    start, between = wider_columns(first, versions)
    assert start.columns == (ID, col("a", INT8, 2))
    assert [v.columns[1].type_oid for v in between] == [INT8, INT8]
    assert wider_columns(first, [first]) == (first, [first])


def test_a_wider_type_may_be_a_domain() -> None:
    """P-S12: such a column was taken for text, which the lake refused permanently."""
    plain, domain = col("a", INT4, 2), col("a", 90_001, 2, base_oid=INT8)
    for was, now in ((plain, domain), (replace(domain, base_oid=INT4), col("a", INT8, 2))):
        start, [version] = wider_columns(schema(ID, was), [schema(ID, now)])
        assert [lake_type(c) for c in start.columns] == ["INTEGER", "BIGINT"]
        assert same_columns(start, version)
