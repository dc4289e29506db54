"""Every type of a lake through the fan-out: it arrives exactly, or is refused by column and type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.values.kept_types import compared, kept, leaves
from aqueduck.model.errors import LakeTypeError
from tests.fanout_lakes import Fan
from tests.fix_postgres import Database
from tests.lake_types import KEPT, LOST, UNWRITABLE, shown

COLUMNS = {f"c{i}": kind for i, kind in enumerate(KEPT)}
DEPTH = max(map(len, KEPT.values()))
CATALOGS = ("sqlite", "duckdb", "postgres")


@pytest.fixture(params=CATALOGS)
def fan(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fan]:
    """Two destinations in catalogs of one kind, and a source that inlines nothing: it shows what was written."""
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, routing_field="tenant", inline=0)
    for name in ("source", "one", "two"):
        data = f"{tmp_path}/{name}_data/"
        if request.param == "postgres":
            db: Database = request.getfixturevalue("db")
            fan.places[name] = LakePlace(catalog=f"postgres:{db.dsn}", data_path=data, metadata_schema=name)
        elif request.param == "duckdb" and name != "source":  # the test has the source open itself
            fan.places[name] = LakePlace(catalog=f"{tmp_path}/{name}.duckdb", data_path=data)
    yield fan
    fan.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Fan]:
    """A source that inlines what it can, in the one catalog that does not make text of it."""
    fan = Fan(tmp_path, {"one": "a"}, routing_field="tenant", inline=100)
    fan.places["source"] = LakePlace(
        catalog=f"{tmp_path}/source.duckdb", data_path=f"{tmp_path}/source_data/"
    )
    yield fan
    fan.close()


def poll(fan: Fan) -> list[str | None]:
    """One cycle, while the test has the source's catalog not open: a DuckDB file is for one at a time."""
    fan.source.close()
    fan._source = None
    return [applied.error for applied in fan.poll()]


def make(fan: Fan, columns: dict[str, str]) -> None:
    cells = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    fan.change(f"create table lake.t (id int, tenant varchar, {cells})")


def insert(fan: Fan, number: int, tenant: str, cells: list[str]) -> None:
    fan.change(f"insert into lake.t values ({number}, '{tenant}', {', '.join(cells)})")


def deep(row: int) -> list[str]:
    """A row that has a value of each type, by turns; nulls where the row is negative."""
    if row < 0:
        return ["null"] * len(KEPT)
    return [f"({values[row % len(values)]})::{kind}" for kind, values in KEPT.items()]


def differing(fan: Fan, columns: dict[str, str]) -> dict[str, Any]:
    """Columns whose cells are not the source's, by an engine of the test's own."""
    found = {}
    for name, value in fan.values.items():
        for column, kind in columns.items():
            # The second is what `aqueduck verify` hashes.
            cells = f"{shown(column, kind)}, hash({compared(kind, column)})"
            query = f"select id, {cells} from lake.t {{}} order by id"
            here = fan.look(name, query.format(""))
            there = fan.look("source", query.format(f"where tenant = '{value}'"))
            if here != there:
                pairs = zip(here, there, strict=False)
                found[f"{name}.{column} {kind}"] = [pair for pair in pairs if pair[0] != pair[1]]
    return found


def test_every_type_arrives_exactly_by_seed_and_by_change(fan: Fan) -> None:
    """P-T08, P-F02: extremes and NULLs of every type of a lake are the same at a destination, seeded, inserted, updated, deleted."""
    make(fan, COLUMNS)
    for row in range(-1, DEPTH):
        insert(fan, row, "ab"[row % 2], deep(row))
    assert [a.error for a in fan.poll() if a.error] == []
    assert differing(fan, COLUMNS) == {}
    for row in range(-1, DEPTH):
        insert(fan, 100 + row, "ab"[row % 2], deep(row))
    fan.change(
        "update lake.t set tenant = case tenant when 'a' then 'b' else 'a' end where id > 3 and id < 100",
        "delete from lake.t where id in (-1, 2)",
    )
    assert [a.error for a in fan.poll() if a.error] == []
    assert differing(fan, COLUMNS) == {}
    assert fan.look("one", "select count(*) > 5 from lake.t") == [(True,)]


@pytest.mark.parametrize("kind", LOST)
def test_a_value_that_a_lake_does_not_keep_is_refused_by_column_and_type(small: Fan, kind: str) -> None:
    """P-T08, P-F02: a value that DuckLake would write as another one errors the destination with `lake.value`; nothing is written."""
    small.keys = ("v",) if kind in COLUMNS.values() and kind != "VARIANT" else ("id",)
    make(small, {"v": kind})
    insert(small, 0, "a", [f"({KEPT[kind][0]})::{kind}" if kind in KEPT else "null"])
    assert poll(small) == [None]
    cursor, before = small.cursor("one"), small.rows("one")
    for value in LOST[kind]:
        insert(small, 1, "a", [f"({value})::{kind}"])
        [error] = poll(small)
        assert error is not None
        assert error.startswith(
            f"[lake.value] the column v has a value that DuckLake does not keep exactly as {kind}"
        )
        assert (small.cursor("one"), small.rows("one")) == (cursor, before)
        small.change("delete from lake.t where id = 1")
    assert poll(small) == [None]
    assert small.rows("one") == before


def test_a_type_of_which_no_file_can_be_written_is_refused_before_anything_is_read(small: Fan) -> None:
    """P-T08, P-F02: a table with such a column is refused with `lake.type`, which names column and type."""
    for kind in UNWRITABLE:
        small.change("drop table if exists lake.t")
        make(small, {"v": kind})
        with pytest.raises(LakeTypeError) as raised:
            poll(small)
        assert f"the column v is {kind}" in str(raised.value)
    assert small.cursor("one") is None


def test_these_are_all_types_of_a_lake(small: Fan) -> None:
    """P-F02: the tests above cover every type that `create table` accepts in a lake."""
    found = small.source.execute(
        "select distinct type_name from duckdb_types() where database_name = 'system' and type_name not in"
        " ('list', 'array', 'map', 'struct', 'union', 'row', 'null')"
    ).fetchall()
    taken = set()
    for (name,) in found:
        try:
            small.change(f"create or replace table lake.t (v {name})")
        except duckdb.Error:
            continue
        [[kind]] = small.source.execute("select column_type from (describe lake.t)").fetchall()
        taken.add(kind.partition("(")[0])
    assert taken == {leaf.partition("(")[0] for kind in (*KEPT, *UNWRITABLE) for leaf in leaves(kind)}


def test_keys_of_every_type_are_found_again(small: Fan) -> None:
    """P-F02: rows are updated and deleted by keys of every type, at its extremes."""
    small.keys = ("id", *(name for name, kind in COLUMNS.items() if kind not in ("VARIANT", "GEOMETRY")))
    make(small, COLUMNS)
    for row in range(DEPTH):
        insert(small, row, "a", [cell.replace("'a' || chr(0) || 'b'", "'ab'") for cell in deep(row)])
    assert poll(small) == [None]
    small.change("update lake.t set tenant = 'b' where id in (0, 1)", "delete from lake.t where id > 3")
    assert poll(small) == [None]
    small.change("update lake.t set tenant = 'a' where id = 1")
    assert poll(small) == [None]
    assert differing(small, COLUMNS) == {}
    assert small.look("one", "select list(id order by id) from lake.t") == [([1, 2, 3],)]


@pytest.mark.parametrize("kind", ["DOUBLE", "DATE", "INTERVAL", "UUID", "TIMESTAMP_NS", "DECIMAL(38,38)"])
def test_rows_are_routed_by_values_of_many_types(tmp_path: Path, kind: str) -> None:
    """P-F02: the routing value of a destination is the text of a value, for every type."""
    values = [f"({value})::{kind}" for value in KEPT[kind][:2]]
    [texts] = duckdb.execute(f"select {', '.join(f'{value}::varchar' for value in values)}").fetchall()
    fan = Fan(tmp_path, {"zero": texts[0], "one": texts[1]}, routing_field="v")
    make(fan, {"v": kind})
    for row, value in enumerate(values):
        insert(fan, row, "a", [value])
    assert [a.error for a in fan.poll()] == [None, None]
    assert [fan.look(name, "select id from lake.t") for name in ("zero", "one")] == [[(0,)], [(1,)]]
    fan.close()


def test_a_column_of_a_nested_type_that_comes_later_is_kept(fan: Fan) -> None:
    """P-F02: rows that DuckLake would inline wrongly are written to files, even after the table was made."""
    make(fan, {"v": "INTEGER"})
    insert(fan, 1, "a", ["1"])
    assert [a.error for a in fan.poll()] == [None, None]
    fan.change("alter table lake.t add column n struct(a varchar, b double)")
    insert(fan, 2, "a", ["2", "{'a': 'a''b', 'b': 'nan'::double}"])
    assert [a.error for a in fan.poll()] == [None, None]
    assert differing(fan, {"v": "INTEGER", "n": "STRUCT(a VARCHAR, b DOUBLE)"}) == {}


def test_a_value_counts_as_kept_exactly_if_a_file_keeps_it(tmp_path: Path) -> None:
    """P-F02: the rules of `kept` are those of DuckLake, measured by writing and reading a file."""
    fan = Fan(tmp_path, {}, inline=0)
    for kind in {**LOST, **KEPT}:
        for value in [*LOST.get(kind, []), *KEPT.get(kind, [])]:
            fan.change(f"create or replace table memory.given as select ({value})::{kind} as v")
            rule = kept(kind, "v") or "true"
            [[expected]] = fan.source.execute(f"select {rule} from memory.given").fetchall()
            assert expected == _survives(fan, kind), (kind, value)
    fan.close()


def _survives(fan: Fan, kind: str) -> bool:
    try:
        fan.change("create or replace table lake.t as from memory.given")
        seen = [
            fan.source.execute(f"select {shown('v', kind)} from {t}").fetchall()
            for t in ("lake.t", "memory.given")
        ]
    except duckdb.Error:
        return False
    return bool(seen[0] == seen[1])
