"""
Give an emptied target other columns, for a copy, and keep what people added to it.

Comments, options and sort keys belong to the table, so the table is altered.  It has to be created anew only if no
column would remain or if it is partitioned by a column that goes.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import ident
from aqueduck.lake.target.evolve import alter, stored_columns
from aqueduck.lake.upkeep.table_upkeep import table_id
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.schema import TableName, TableSchema

__all__ = ["reshape"]

log = structlog.get_logger()


def reshape(session: LakeSession, target: TableName, schema: TableSchema) -> bool:
    """Inside a transaction that emptied the target: returns False, and changes nothing, if it has to be created anew."""
    stored = stored_columns(session, target)
    wanted = {c.name.lower(): c for c in schema.columns}
    gone = {n for n, kind in stored.items() if n not in wanted or lake_type(wanted[n]) != kind}
    number = table_id(session, target)
    if number is None or len(gone) == len(stored) or not gone.isdisjoint(_partitioned_by(session, number)):
        return False
    keys = _sort_keys(session, number)
    if gone and keys:  # DuckLake does not drop a column of a sort key
        alter(session, target, "reset sorted by")
    for name in gone:
        alter(session, target, f"drop column {ident(name)}")
    for name, column in wanted.items():
        if name in gone or name not in stored:
            alter(session, target, f"add column {ident(column.name)} {lake_type(column)}")
    if gone and keys:
        _sort_again(session, target, keys, wanted)
    session.memory.targets.pop(target, None)
    return True


def _partitioned_by(session: LakeSession, number: int) -> set[str]:
    m = session.metadata
    rows = session.execute(
        f"select lower(c.column_name) from {m}.ducklake_partition_info i join {m}.ducklake_partition_column p"
        f" using (partition_id, table_id) join {m}.ducklake_column c using (table_id, column_id)"
        f" where i.table_id = {number} and i.end_snapshot is null and c.end_snapshot is null",
        doing="reading the partitions",
    )
    return {name for (name,) in rows}


def _sort_keys(session: LakeSession, number: int) -> list[tuple[str, str, str]]:
    """Expression, direction and place of NULLs of each sort key."""
    m = session.metadata
    rows = session.execute(
        f"select e.expression, e.sort_direction, e.null_order from {m}.ducklake_sort_info i"
        f" join {m}.ducklake_sort_expression e using (sort_id, table_id)"
        f" where i.table_id = {number} and i.end_snapshot is null order by e.sort_key_index",
        doing="reading the sort keys",
    )
    return [(str(expression), str(direction), str(nulls)) for expression, direction, nulls in rows]


def _sort_again(
    session: LakeSession, target: TableName, keys: list[tuple[str, str, str]], columns: Collection[str]
) -> None:
    if any(expression.strip('"').replace('""', '"').lower() not in columns for expression, _, _ in keys):
        log.warning("the sort key of a table was removed with its column", table=target.qualified)
        return
    listed = ", ".join(f"{e} {direction} {nulls.replace('_', ' ')}" for e, direction, nulls in keys)
    alter(session, target, f"set sorted by ({listed})")
