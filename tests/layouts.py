"""What an observer finds of a table's layout: its files, and whether each has only rows of its partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Read = Callable[[str], list[tuple[Any, ...]]]
CATALOG = "__ducklake_metadata_lake"


def files_of(read: Read, schema: str, table: str) -> dict[str, tuple[int, tuple[str | None, ...]]]:
    """The table's current files: rows and partition values in the order of the keys, by path."""
    rows = read(
        f"select f.path, f.record_count, v.partition_key_index, v.partition_value"
        f" from {CATALOG}.ducklake_data_file f join {CATALOG}.ducklake_table t using (table_id)"
        f" join {CATALOG}.ducklake_schema s using (schema_id)"
        f" left join {CATALOG}.ducklake_file_partition_value v using (data_file_id)"
        f" where t.table_name = '{table}' and s.schema_name = '{schema}' and f.end_snapshot is null"
        " and t.end_snapshot is null order by f.data_file_id, v.partition_key_index"
    )
    found: dict[str, tuple[int, tuple[str | None, ...]]] = {}
    for path, count, index, value in rows:
        found[path] = (count, (*found.get(path, (0, ()))[1], *(() if index is None else (value,))))
    return found


def misplaced(read: Read, schema: str, table: str, keys: list[str]) -> list[Any]:
    """Files whose rows have other partition values than the catalog says; `keys` are SQL.  Files from before have none."""
    stored = {path.rsplit("/", 1)[-1]: values for path, (_, values) in files_of(read, schema, table).items()}
    texts = ", ".join(f"cast({key} as varchar)" for key in keys)
    rows = read(
        f"select distinct parse_filename(filename), {texts} from lake.{schema}.{table}"
        " where filename like '%.parquet'"
    )
    return [
        (name, values, stored[name])
        for name, *values in rows
        if stored[name] and tuple(values) != stored[name]
    ]


def unsorted(read: Read, schema: str, table: str, key: str) -> list[str]:
    """Files whose rows are not in ascending order of a column, NULL last."""
    rows = read(
        f"select distinct parse_filename(filename) from (select filename, {key} as now, lead({key}) over"
        f" (partition by filename order by file_row_number) as next, lead(true) over"
        f" (partition by filename order by file_row_number) as more from lake.{schema}.{table}"
        " where filename like '%.parquet') where more and (now > next or (now is null and next is not null))"
    )
    return [name for (name,) in rows]
