"""
Refuse to maintain a lake whose catalog names files outside its data path.

Anyone who can write the catalog of a destination can add such names.  A merge would read the files with the rights of the
service and write their rows into this lake, and the removal of old files would remove them.
"""

from __future__ import annotations

from aqueduck.lake.session.storage import is_below, join
from aqueduck.lake.upkeep.table_upkeep import Lake
from aqueduck.model.errors import ForeignPathError

__all__ = ["refuse_foreign_files"]


def refuse_foreign_files(lake: Lake, data_path: str) -> None:
    """Raise if a data file, a delete file or a file to be removed is not below the data path."""
    m = lake.metadata
    rows = lake.execute(
        f"with places as (select table_id, {_path('s')}, {_path('t')} from {m}.ducklake_table t"
        f" join {m}.ducklake_schema s using (schema_id)),"
        f" files as (select table_id, {_path('f')} from {m}.ducklake_data_file f"
        f" union all select table_id, {_path('f')} from {m}.ducklake_delete_file f)"
        " select distinct s_path, s_relative, t_path, t_relative, f_path, f_relative from files left join places using (table_id)"
        f" union all select '', true, '', true, path, path_is_relative from {m}.ducklake_files_scheduled_for_deletion",
        doing="looking at the paths of files",
    )
    for row in rows:
        path = data_path
        for part, relative in zip(row[::2], row[1::2], strict=True):
            path = join(path, part or "") if relative in (True, None) else part or ""  # None: of no table
        if not is_below(data_path, path):
            raise ForeignPathError(
                "the lake's catalog names a file outside its data path, so its files are not merged or removed",
                hint="find out who wrote it; the path is in ducklake_data_file, ducklake_delete_file or"
                " ducklake_files_scheduled_for_deletion of the catalog",
            )


def _path(alias: str) -> str:
    return f"{alias}.path as {alias}_path, {alias}.path_is_relative as {alias}_relative"
