"""
Read the layout of tables: their partition keys and sort keys, which people may set and change at any time.

`places` asks for it only if a table has a layout, and again only after DuckLake counted a change of tables.

If a table is partitioned by several parts of one column, such as its year and its month, `ducklake_add_data_files` of
DuckLake 1.5.5 stores all of them as the last key.  Readers do not look at these, they find files by their statistics; but a
merge brings together files of the same values.  `mend_partition_values` corrects them right after the commit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import replace

from aqueduck.lake.session.sql import literal
from aqueduck.lake.upkeep.table_upkeep import Lake, table_id
from aqueduck.model.errors import LakeError
from aqueduck.model.layout import IDENTITY, PartitionKey, SortKey, TableLayout, path_value
from aqueduck.model.schema import TableName

__all__ = ["mend_partition_values", "read_layouts"]

_BUCKET = re.compile(r"bucket\((\d+)\)")


def read_layouts(lake: Lake, tables: Collection[int]) -> dict[int, TableLayout]:
    """The current layouts of these tables, by DuckLake's id of the table."""
    if not tables:
        return {}
    m, listed = lake.metadata, ", ".join(map(str, tables))
    columns: dict[int, dict[int, tuple[str, str]]] = {}
    for table, column, name, kind in lake.execute(
        f"select table_id, column_id, column_name, column_type from {m}.ducklake_column"
        f" where end_snapshot is null and parent_column is null and table_id in ({listed})",
        doing="reading layouts",
    ):
        columns.setdefault(table, {})[column] = (name, kind)
    partition = lake.execute(
        f"select i.table_id, c.column_id, c.transform from {m}.ducklake_partition_info i"
        f" join {m}.ducklake_partition_column c on c.partition_id = i.partition_id and c.table_id = i.table_id"
        f" where i.end_snapshot is null and i.table_id in ({listed}) order by c.partition_key_index",
        doing="reading layouts",
    )
    sort = lake.execute(
        f"select i.table_id, e.expression, e.sort_direction, e.null_order from {m}.ducklake_sort_info i"
        f" join {m}.ducklake_sort_expression e on e.sort_id = i.sort_id and e.table_id = i.table_id"
        f" where i.end_snapshot is null and i.table_id in ({listed}) order by e.sort_key_index",
        doing="reading layouts",
    )
    flat = _without_directories(lake, tables)
    found = {}
    for table, own in columns.items():
        layout = TableLayout(
            tuple(
                _partition_key(*own.get(c, ("", "")), transform)
                for t, c, transform in partition
                if t == table
            ),
            tuple(_sort_key(own.values(), *key) for t, *key in sort if t == table),
        )
        in_paths = layout.can_be_in_paths([name for name, _ in own.values()])
        found[table] = replace(layout, in_paths=in_paths, names_directories=table not in flat)
    return found


def _without_directories(lake: Lake, tables: Collection[int]) -> set[int]:
    """The tables whose files DuckLake does not put into directories of partitions: an option of the table, its schema or the lake."""
    options = lake.execute(
        f"select scope, scope_id, lower(value) from {lake.metadata}.ducklake_metadata where key = 'hive_file_pattern'",
        doing="reading options",
    )
    if not options:
        return set()
    known = {(scope, number): value for scope, number, value in options}
    schemas = lake.execute(
        f"select table_id, schema_id from {lake.metadata}.ducklake_table"
        f" where end_snapshot is null and table_id in ({', '.join(map(str, tables))})",
        doing="reading options",
    )
    default = known.get((None, None), "true")
    return {
        table
        for table, schema in schemas
        if known.get(("table", table), known.get(("schema", schema), default)) == "false"
    }


def mend_partition_values(lake: Lake, misfiled: set[TableName]) -> None:
    """Correct the partition values of these tables' files, outside a transaction; mended tables leave the set."""
    for table in sorted(misfiled, key=str):
        number = table_id(lake, table)
        if number is not None:
            _mend(lake, number)
        misfiled.discard(table)


def _mend(lake: Lake, table: int) -> None:
    m = lake.metadata
    keys = read_layouts(lake, [table])[table].path_names
    files = lake.execute(
        f"select data_file_id, path from {m}.ducklake_data_file where data_file_id in"
        f" (select data_file_id from {m}.ducklake_file_partition_value where table_id = {table}"
        " group by data_file_id having count(distinct partition_key_index) < count(*))",
        doing="reading partition values",
    )
    values = []
    for number, path in files:
        known = dict(part.split("=", 1) for part in path.split("/")[:-1] if "=" in part)
        if known.keys() >= set(keys):  # otherwise the keys have changed since
            values += [(number, table, n, path_value(known[key])) for n, key in enumerate(keys)]
    if not values:
        return
    numbers = ", ".join(map(str, {row[0] for row in values}))
    rows = ", ".join(f"({n}, {t}, {k}, {literal(value)})" for n, t, k, value in values)
    lake.execute("begin", doing="correcting partition values")
    try:
        lake.execute(
            f"delete from {m}.ducklake_file_partition_value where table_id = {table} and data_file_id in ({numbers})",
            doing="correcting partition values",
        )
        lake.execute(
            f"insert into {m}.ducklake_file_partition_value"
            f" (data_file_id, table_id, partition_key_index, partition_value) values {rows}",
            doing="correcting partition values",
        )
        lake.execute("commit", doing="correcting partition values")
    except BaseException:
        with contextlib.suppress(LakeError):
            lake.execute("rollback")
        raise


def _partition_key(column: str, kind: str, transform: str) -> PartitionKey:
    bucket = _BUCKET.fullmatch(transform)
    if bucket is not None:
        return PartitionKey(column, "bucket", int(bucket[1]), kind)
    # A key without a column, for example within a nested one, is as unknown as an unknown transform.
    return PartitionKey(column, transform if column else transform or IDENTITY, 0, kind)


def _sort_key(
    columns: Collection[tuple[str, str]], expression: str, direction: str, null_order: str
) -> SortKey:
    text = expression[1:-1].replace('""', '"') if expression.startswith('"') else expression
    column = next((name for name, _ in columns if name.lower() == text.lower()), None)
    return SortKey(expression, direction == "DESC", null_order == "NULLS_FIRST", column)
