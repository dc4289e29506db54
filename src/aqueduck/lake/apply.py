"""
What is done to one target table inside an open lake transaction.

Small pieces, in the order in which `commit` calls them: make the target, empty it, fetch cells
that only it has, delete keys, insert rows or add files.
"""

from __future__ import annotations

from collections.abc import Sequence

from aqueduck.lake.catalog import METADATA, LakeSession
from aqueduck.lake.fold import Fold, patch_columns
from aqueduck.lake.sql import LAKE, ident, lake_table, literal
from aqueduck.lake.storage import join
from aqueduck.schema import TableName, TableSchema
from aqueduck.typemap import lake_type

__all__ = [
    "add_files",
    "apply_fold",
    "delete_keys",
    "ensure_target",
    "insert_patches",
    "table_directory",
    "truncate_target",
]


def ensure_target(session: LakeSession, target: TableName, schema: TableSchema) -> None:
    """The target with the source's columns, unless it exists."""
    columns = ", ".join(f"{ident(c.name)} {lake_type(c)}" for c in schema.columns)
    session.execute(
        f"create schema if not exists {ident(LAKE)}.{ident(target.schema)}", doing="making the target"
    )
    session.execute(f"create table if not exists {lake_table(target)} ({columns})", doing="making the target")


def table_directory(session: LakeSession, target: TableName) -> str:
    """Where DuckLake keeps the target's files."""
    rows, _ = session.query(
        f"select s.path, s.path_is_relative, t.path, t.path_is_relative from {METADATA}.ducklake_table t"
        f" join {METADATA}.ducklake_schema s using (schema_id)"
        " where s.schema_name = ? and t.table_name = ? and t.end_snapshot is null and s.end_snapshot is null",
        [target.schema, target.name],
    )
    schema_path, schema_relative, path, relative = rows[0]
    base = join(session.config.data_path, schema_path) if schema_relative else schema_path
    return (join(base, path) if relative else path).rstrip("/")


def truncate_target(session: LakeSession, target: TableName) -> None:
    session.execute(f"delete from {lake_table(target)}", doing="emptying the target")


def apply_fold(session: LakeSession, target: TableName, schema: TableSchema, fold: Fold) -> None:
    """The net effect of a run that was folded on this session's connection."""
    patches = None if fold.patches is None else f"({fold.patches})"
    _apply(
        session, target, schema, [f"({fold.deletes})"] if fold.deletes else [], patches, f"({fold.upserts})"
    )


def _apply(
    session: LakeSession,
    target: TableName,
    schema: TableSchema,
    deletes: Sequence[str],
    patches: str | None,
    upserts: str | None,
) -> None:
    if patches is not None:
        fetch_patches(session, target, schema, patches)
    for keys in deletes:
        delete_keys(session, target, schema, keys)
    if upserts is not None:
        session.execute(
            f"insert into {lake_table(target)} from {upserts}", doing=f"inserting into {target.qualified}"
        )
    if patches is not None:
        insert_patches(session, target)


def fetch_patches(session: LakeSession, target: TableName, schema: TableSchema, patches: str) -> None:
    """Rows whose missing cells are read from the target, kept aside until the old rows are gone."""
    assert patch_columns(schema)
    cells = ", ".join(
        f"case when p.u{i} then t.{ident(c.name)} else p.v{i} end as {ident(c.name)}"
        for i, c in enumerate(schema.columns)
    )
    match = " and ".join(f"t.{ident(name)} = p.t{i}" for i, name in enumerate(schema.key))
    session.execute(
        f"create or replace temp table aqueduck_patched as select {cells} from {patches} p"
        f" left join {lake_table(target)} t on {match}",
        doing=f"reading {target.qualified}",
    )


def insert_patches(session: LakeSession, target: TableName) -> None:
    session.execute(
        f"insert into {lake_table(target)} from aqueduck_patched", doing=f"inserting into {target.qualified}"
    )
    session.execute("drop table aqueduck_patched")


def delete_keys(session: LakeSession, target: TableName, schema: TableSchema, keys: str) -> None:
    """Remove the rows whose key is in `keys` (columns k0, k1, …)."""
    match = " and ".join(f"k.k{i} = t.{ident(name)}" for i, name in enumerate(schema.key))
    session.execute(
        f"delete from {lake_table(target)} t where exists (select 1 from {keys} k where {match})",
        doing=f"deleting from {target.qualified}",
    )


def apply_files(
    session: LakeSession,
    target: TableName,
    schema: TableSchema,
    *,
    data: Sequence[str],
    deletes: Sequence[str],
    patches: Sequence[str],
) -> None:
    """The net effect of a run that Spark tasks folded into files."""
    keys = [f"read_parquet([{', '.join(map(literal, deletes))}])"] if deletes else []
    rows = f"read_parquet([{', '.join(map(literal, patches))}])" if patches else None
    _apply(session, target, schema, keys, rows, None)
    add_files(session, target, data)


def add_files(session: LakeSession, target: TableName, files: Sequence[str]) -> None:
    for file in files:
        session.execute(
            f"call ducklake_add_data_files({literal(LAKE)}, {literal(target.name)}, {literal(file)},"
            f" schema => {literal(target.schema)})",
            doing=f"adding files to {target.qualified}",
        )
