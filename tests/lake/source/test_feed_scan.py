"""A lake table, or its changes, read in several parts: together they are complete, for every kind of file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source import feed
from aqueduck.lake.source.feed import Feed, FeedPart, read_part
from aqueduck.model.errors import ReservedColumnError
from aqueduck.model.schema import TableName

TABLE = TableName("main", "t")


@pytest.fixture
def place(tmp_path: Path) -> LakePlace:
    return LakePlace(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[LakePool]:
    monkeypatch.setattr(feed, "SCAN_BYTES", 1)
    found = LakePool(max_open=2, threads=2)
    yield found
    found.close()


def change(pool: LakePool, place: LakePlace, *statements: str) -> int:
    with pool.use(place) as lake:
        for statement in statements:
            lake.execute(statement.replace("lake.", f"{lake.alias}."))
        return Feed(lake, TABLE).source.latest()


def parts_at(pool: LakePool, place: LakePlace, at: int, names: list[str], parts: int = 3) -> list[FeedPart]:
    with pool.use(place, read_only=True) as lake:
        return Feed(lake, TABLE).scan(at, names, parts)


def rows(pool: LakePool, place: LakePlace, parts: list[FeedPart]) -> list[list[tuple[Any, ...]]]:
    return [
        [tuple(row.values()) for batch in read_part(pool, place, part) for row in batch.to_pylist()]
        for part in parts
    ]


def test_parts_of_a_table_are_all_of_it(pool: LakePool, place: LakePlace) -> None:
    """Files, deleted rows, inlined rows and inlined deletes: every row is in exactly one part."""
    change(pool, place, "create table lake.t (id int, v varchar)")
    for n in range(5):
        change(
            pool, place, f"insert into lake.t select i, 'x' from range({n * 2000}, {n * 2000 + 2000}) r(i)"
        )
    before = change(pool, place, "insert into lake.t values (99999, 'inlined')")
    now = change(pool, place, "delete from lake.t where id < 1000", "delete from lake.t where id = 5000")
    parts = parts_at(pool, place, now, ["id"])
    found = rows(pool, place, parts)
    assert len([part for part in found if part]) == 4, "three of files, one of what is inlined"
    together = sorted(row for part in found for row in part)
    assert together == [(i,) for i in range(1000, 10000) if i != 5000] + [(99999,)]
    earlier = rows(pool, place, parts_at(pool, place, before, ["v", "id"]))
    assert sum(map(len, earlier)) == 10001, "at another lake snapshot the table has other rows"


def test_a_column_called_filename_is_the_users_own(pool: LakePool, place: LakePlace) -> None:
    """DuckLake's own column of that name cannot be asked then: the table is one part."""
    change(pool, place, "create table lake.t (filename varchar)")
    for n in range(2):
        now = change(pool, place, f"insert into lake.t select 'f{n}' from range(2000)")
    parts = parts_at(pool, place, now, ["filename"])
    assert len(parts) == 1
    assert sorted({row for part in rows(pool, place, parts) for row in part}) == [("f0",), ("f1",)]


def test_changes_are_read_by_the_names_of_their_time(pool: LakePool, place: LakePlace) -> None:
    """P-F16: a range in which a column was added and renamed can be shared out to tasks."""
    change(pool, place, "create table lake.t (id int, v int)")
    inserts = [f"insert into lake.t (id) values ({n})" for n in range(6)]
    change(pool, place, *inserts[:2], "alter table lake.t add column w int default 5", *inserts[2:4])
    now = change(pool, place, "alter table lake.t rename column v to x", *inserts[4:])
    with pool.use(place, read_only=True) as lake:
        parts = Feed(lake, TABLE).changes(1, now, ["id", "x", "w"], 2)
    assert len(parts) > 3
    found = sorted(row[:3] for part in rows(pool, place, parts) for row in part)
    assert found == [(n, None, 5) for n in range(6)]


def test_changes_of_a_table_with_a_column_called_filename(pool: LakePool, place: LakePlace) -> None:
    """P-F15: inserts can be read; updates and deletes are refused by name, because DuckLake's own column is hidden."""
    change(pool, place, "create table lake.t (id int, filename int)")
    now = change(pool, place, "insert into lake.t values (1, 7), (2, 7)")
    with pool.use(place, read_only=True) as lake:
        parts = Feed(lake, TABLE).changes(1, now, ["id", "filename"], 1)
    assert [row[:2] for part in rows(pool, place, parts) for row in part] == [(1, 7), (2, 7)]
    now = change(pool, place, "update lake.t set filename = 8 where id = 1")
    with pool.use(place, read_only=True) as lake, pytest.raises(ReservedColumnError, match="filename"):
        Feed(lake, TABLE).changes(1, now, ["id"], 1)
