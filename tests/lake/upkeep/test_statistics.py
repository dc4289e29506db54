"""Readers who filter find every row, for any files of a table's first transaction: DuckLake's statistics stay right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.session.sql import literal
from aqueduck.lake.writes.table_write import commit_parts, write_part
from aqueduck.lake.writes.write_target import WriteOrder, open_target
from aqueduck.model.schema import TableName
from tests.fanout_lakes import Fan, T, connect
from tests.fix_postgres import Database
from tests.whole_group import whole_group

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("w", pa.string())])


@contextlib.contextmanager
def reader(place: LakePlace) -> Iterator[duckdb.DuckDBPyConnection]:
    """Anybody's DuckDB, which believes what the catalog says."""
    con = connect(place, "read_only")
    try:
        yield con
    finally:
        con.close()


def missed(con: duckdb.DuckDBPyConnection, table: str) -> list[tuple[str, Any]]:
    """Columns and values for which a filter does not find the rows that are there."""
    cursor = con.execute(f"from lake.{table}")
    names = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchall()
    wrong = []
    for i, name in enumerate(names):
        for value in {row[i] for row in rows if row[i] is not None}:
            condition = f"{name} = {literal(value)}"
            [[found]] = con.execute(f"select count(*) from lake.{table} where {condition}").fetchall()
            if found != sum(row[i] == value for row in rows):
                wrong.append((name, value))
    return wrong


@pytest.mark.parametrize("late", ["settled", "dead"])
def test_filters_find_rows_of_a_copy_whose_first_part_is_null(
    db: Database, tmp_path: Path, late: str
) -> None:
    """P-F01: even if the process died between the copy commit and its work on the statistics."""
    db.execute("create table t (id int primary key, v int, w text)")
    db.execute(
        "insert into t select i, case when i > 500 then i % 3 + 7 end, repeat('x', 40) from generate_series(1, 600) i"
    )
    group_options = {"copy_chunk_bytes": 8192}
    with whole_group(db, tmp_path, {"t": {}}, group=group_options) as group:
        if late == "dead":
            group.lake.memory.settled.clear()
            put_back_unknown(group.lake)
        place = LakePlace(catalog=group.config.lake.catalog, data_path=group.config.lake.data_path)
        db.execute("insert into t values (5000, 1, 'y')")
        group.apply()
        with reader(place) as con:
            assert con.execute("select count(*) from lake.main.t").fetchall() == [(601,)]
            assert missed(con, "main.t") == []


def put_back_unknown(lake: Any) -> None:
    """What DuckLake wrote when the copy was committed."""
    [[number, column]] = lake.execute(
        f"select table_id, column_id from {lake.metadata}.ducklake_column where column_name = 'v' and end_snapshot is null"
    )
    lake.execute(
        f"insert into {lake.metadata}.ducklake_table_column_stats (table_id, column_id, contains_null)"
        f" values ({number}, {column}, true)"
    )


def test_filters_find_rows_of_a_write_whose_first_part_is_null(tmp_path: Path) -> None:
    """P-F01: the Spark writer adds the files of all tasks in one transaction."""
    place = LakePlace(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data/")
    pool = LakePool(max_open=4, threads=1)
    order = WriteOrder(TableName("main", "t"), "append")
    nothing: list[Any] = [None] * 3000
    parts = [
        pa.table([range(3000), nothing, ["a"] * 3000], schema=SCHEMA),
        pa.table([range(3000), [7] * 3000, nothing], schema=SCHEMA),
    ]
    try:
        for tasks in (parts, [pa.table([[1], [1], ["b"]], schema=SCHEMA)]):
            target = open_target(pool, place, order, SCHEMA)
            written = [write_part(place, target, iter(t.to_batches()), None) for t in tasks]
            assert commit_parts(pool, place, order, target, [p for p in written if p], None)
        with reader(place) as con:
            assert missed(con, "main.t") == []
    finally:
        pool.close()


def test_a_source_with_wrong_statistics_reaches_its_destinations_whole(tmp_path: Path) -> None:
    """P-T04: our sessions, a seed and a cycle find every row of a source whose statistics are wrong; others are misled."""
    fan = Fan(tmp_path, {"one": "quack"}, inline=0)
    try:
        fan.change("create table lake.t (id int, c varchar)")
        fan.change(
            "begin; insert into lake.t values (1, null); insert into lake.t values (2, 'quack'); commit"
        )
        fan.change("insert into lake.t values (3, 'teal')")
        assert fan.source.execute("from lake.t where c = 'quack'").fetchall() == []
        with fan.pool.use(fan.place("source"), read_only=True) as lake:
            assert lake.execute(f"from {lake.table(T)} where c = 'quack'") == [(2, "quack")]
        fan.poll()
        assert fan.rows("one") == [(2, "quack")]
        fan.change("update lake.t set id = 4 where concat(c, '') = 'quack'")
        fan.poll()
        assert fan.rows("one") == [(4, "quack")]
    finally:
        fan.close()
