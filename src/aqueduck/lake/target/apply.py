"""
Write to one target table inside an open lake transaction.

The functions are in the order in which `commit` calls them: create or check the target, empty it, fetch
cells that only it has, delete keys, insert rows or add files.  A few rows are inlined in the catalog.
Many rows go into a file with a name of ours, so that `orphans` finds it after a crash.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import structlog

from aqueduck.lake.fold.fold import Fold
from aqueduck.lake.fold.keyless import delete_rows
from aqueduck.lake.fold.projected import lost_value
from aqueduck.lake.ledger.own_targets import record_target, refuse_foreign_target
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.directories import table_directory
from aqueduck.lake.session.encryption import parquet_rows
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.files import file_name, file_prefix, write_files
from aqueduck.lake.session.sql import LAKE, equal, ident, lake_table, literal, string_list
from aqueduck.lake.session.storage import no_glob
from aqueduck.lake.target.evolve import holds, stored_columns
from aqueduck.lake.target.inlined import inlining
from aqueduck.lake.target.inserts import insert_and_sync
from aqueduck.lake.target.layout_rows import insert_by_layout
from aqueduck.lake.target.mode_rows import current_rows, end_rows, own_rows, source_tag
from aqueduck.lake.target.places import known_layout
from aqueduck.lake.target.reshape import reshape
from aqueduck.lake.target.set_layouts import lay_out
from aqueduck.model.columns.projection import filters_rows
from aqueduck.model.columns.typemap import lake_type
from aqueduck.model.errors import SchemaChangeError
from aqueduck.model.layout import PLAIN, TableLayout
from aqueduck.model.modes import MODES, UPSERT, TableMode
from aqueduck.model.schema import Column, TableName, TableSchema

__all__ = [
    "add_files",
    "apply_files",
    "apply_fold",
    "check_target",
    "delete_keys",
    "empty_target",
    "ensure_target",
    "make_target",
    "refuse_names",
]


log = structlog.get_logger()


def ensure_target(
    session: LakeSession, target: TableName, schema: TableSchema, mode: TableMode = UPSERT
) -> None:
    """Create the target if it is missing; refuse one with other columns."""
    make_target(session, target, schema, mode)
    check_target(session, target, schema, mode)


def make_target(
    session: LakeSession,
    target: TableName,
    schema: TableSchema,
    mode: TableMode = UPSERT,
    before: TableLayout = PLAIN,
) -> None:
    """Create the target if it is missing, by default with the layout `before`; refuse a table that Aqueduck did not create."""
    refuse_names(target, schema, mode)
    if refuse_foreign_target(session, target):
        return
    wanted = [*((c.name, lake_type(c)) for c in schema.columns), *mode.columns]
    columns = ", ".join(f"{ident(name)} {kind}" for name, kind in wanted)
    doing = "making the target"
    session.execute(f"create schema if not exists {ident(LAKE)}.{ident(target.schema)}", doing=doing)
    with inlining(session, target, schema):
        session.execute(
            f"create table if not exists {lake_table(target)} ({columns})",
            doing=doing,
            table=target.qualified,
        )
        lay_out(session, target, schema, mode, before)
    record_target(session, target)


def check_target(
    session: LakeSession, target: TableName, schema: TableSchema, mode: TableMode = UPSERT
) -> None:
    """
    Raise if the target lacks columns of the source or the mode; checked once per session and schema.

    A column may be wider than in the source, because types are widened before the batch that needs it.  The target
    may have more columns if its mode keeps dropped ones or if several sources fill it.
    """
    if session.memory.targets.get(target) == (schema, mode):
        return
    stored = stored_columns(session, target)
    expected = _expected(schema, mode)
    differing = [n for n in expected if n not in stored or not holds(stored[n], expected[n])]
    if mode.plain:
        differing = sorted([*differing, *(stored.keys() - expected.keys())])
    if differing:
        raise SchemaChangeError(
            f"the columns of {schema.qualified} do not fit the lake table: {', '.join(differing)}",
            hint=f"undo the change in the lake, or rename or drop {target.qualified} there; then:"
            f" aqueduck tables resync -c FILE {TableName(schema.schema, schema.name)}",
            table=target.qualified,
        )
    session.memory.targets[target] = (schema, mode)


def _expected(schema: TableSchema, mode: TableMode) -> dict[str, str]:
    """Types that the target's columns should have, by name in lower case."""
    own = {name.lower(): kind for name, kind in mode.columns}
    return {c.name.lower(): lake_type(c) for c in schema.columns} | own


def refuse_names(target: TableName, schema: TableSchema, mode: TableMode = UPSERT) -> None:
    """Raise if a column has a name that the target cannot have."""
    _refuse_names_that_differ_by_case(target, schema)
    _refuse_names_of_the_mode(target, schema, mode)


def _refuse_names_of_the_mode(target: TableName, schema: TableSchema, mode: TableMode) -> None:
    own = {name.lower() for name, _ in mode.columns}
    for column in schema.columns:
        if column.name.lower() in own:
            raise SchemaChangeError(
                f"the column {column.name} of {schema.qualified} has a name that the mode {mode.name} reserves",
                hint="rename the column, or choose another mode or source_column",
                table=target.qualified,
            )


def _refuse_names_that_differ_by_case(target: TableName, schema: TableSchema) -> None:
    seen: dict[str, str] = {}
    for column in schema.columns:
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise SchemaChangeError(
                f"the columns {other} and {column.name} of {schema.qualified} differ only in case,"
                " which a lake does not support",
                hint="rename one of them",
                table=target.qualified,
            )


def empty_target(session: LakeSession, target: TableName, schema: TableSchema, *, anew: bool = False) -> bool:
    """
    Empty the target for a new copy and give it the columns of `schema`; returns whether it was recreated.

    It has to be if no column remains, or with `anew`: DuckLake reads the files of a table to empty it, and some are lost.
    """
    if not anew:
        session.execute(
            f"delete from {lake_table(target)}", doing="emptying the target", table=target.qualified
        )
        if stored_columns(session, target) == _expected(schema, UPSERT) or reshape(session, target, schema):
            return False
    log.warning("a lake table was created anew; comments and options are lost", table=target.qualified)
    before = known_layout(session, target)
    session.execute(f"drop table {lake_table(target)}", doing="making the target", table=target.qualified)
    session.memory.targets.pop(target, None)
    make_target(session, target, schema, before=before)
    check_target(session, target, schema)
    return True


def apply_fold(
    session: LakeSession,
    target: TableName,
    schema: TableSchema,
    fold: Fold,
    *,
    group: str | None = None,
    mode: TableMode = UPSERT,
) -> None:
    """Write the net effect of a run that was folded on this session's connection."""
    few = fold.upsert_rows is not None and fold.upsert_rows <= session.inline_rows
    if fold.small and few and known_layout(session, target).is_plain:
        if fold.deletes is not None:
            delete_keys(session, target, schema, f"({fold.deletes})", own_rows(mode))
        insert_inlined(session, target, f"({fold.upserts})", fold.upsert_rows or 0)
        return
    with lake_errors("folding a batch", table=target.qualified):
        session.con.execute(f"create or replace temp table aqueduck_rows as {fold.upserts}")
        if fold.deletes is not None:
            session.con.execute(f"create or replace temp table aqueduck_keys as {fold.deletes}")
        if fold.patches is not None:
            session.con.execute(f"create or replace temp table aqueduck_patches as {fold.patches}")
            fetch_patches(session, target, schema, "aqueduck_patches", mode)
            session.con.execute("insert into aqueduck_rows by name from aqueduck_patched")
        if fold.ends is not None:
            session.con.execute(f"create or replace temp table aqueduck_ends as {fold.ends}")
    if fold.deletes is not None:
        delete_keys(session, target, schema, "aqueduck_keys", own_rows(mode))
    if fold.ends is not None:
        end_rows(session, target, _same_key(schema, "k.k"), mode, "aqueduck_ends")
    insert_rows(session, target, "aqueduck_rows", group=group, mode=mode)


def apply_files(
    session: LakeSession,
    target: TableName,
    schema: TableSchema,
    *,
    data: Sequence[str],
    deletes: Sequence[str],
    patches: Sequence[str],
    ends: Sequence[str] = (),
    group: str | None = None,
    mode: TableMode = UPSERT,
) -> None:
    """Write the net effect of a run that Spark tasks folded into files."""
    if patches:
        fetch_patches(session, target, schema, parquet_rows(patches), mode)
    if deletes:
        delete_keys(session, target, schema, parquet_rows(deletes), own_rows(mode))
    if ends:
        end_rows(session, target, _same_key(schema, "k.k"), mode, parquet_rows(ends))
    add_files(session, target, data, mode)
    if patches:
        insert_rows(session, target, "aqueduck_patched", group=group, mode=mode)


def fetch_patches(
    session: LakeSession, target: TableName, schema: TableSchema, patches: str, mode: TableMode = UPSERT
) -> None:
    """Read the missing cells of patches from the target into a temporary table, before the old rows are deleted."""
    if filters_rows(schema):
        [[lost]] = session.execute(
            f"select count(*) from {patches} p anti join {lake_table(target)} t"
            f" on {_same_key(schema, 'p.t')} and {current_rows(mode)}"
        )
        if lost:
            raise lost_value(schema)
    cells = ", ".join(
        f"case when p.u{i} then t.{ident(c.name)} else p.v{i} end as {ident(c.name)}"
        for i, c in enumerate(schema.columns)
    )
    cells += "".join(f", p.{ident(name)}" for name, _ in MODES[mode.name])
    cells += source_tag(mode)
    session.execute(
        f"create or replace temp table aqueduck_patched as select {cells} from {patches} p"
        f" left join {lake_table(target)} t on {_same_key(schema, 'p.t')} and {current_rows(mode)}",
        doing="reading unchanged values",
        table=target.qualified,
    )


def delete_keys(
    session: LakeSession, target: TableName, schema: TableSchema, keys: str, among: str = "true"
) -> None:
    """Delete the rows whose key is in the relation `keys` (k0, k1, …) and that satisfy `among`."""
    if not schema.key:
        delete_rows(session, target, schema, keys, among)
        return
    session.execute(
        f"delete from {lake_table(target)} as t using {keys} as k"
        f" where {_same_key(schema, 'k.k')} and {among}",
        doing="deleting rows",
        table=target.qualified,
    )


def insert_rows(
    session: LakeSession, target: TableName, rows: str, *, group: str | None = None, mode: TableMode = UPSERT
) -> None:
    """Insert rows into a table, matching columns by name."""
    [[count]] = session.execute(f"select count(*) from {rows}")
    if count == 0:
        return
    layout = known_layout(session, target)
    if not layout.is_plain:
        insert_by_layout(session, target, rows, count, layout)
        return
    if group is None or count <= session.inline_rows:
        insert_inlined(session, target, rows, count)
        return
    if session.encrypted:
        insert_and_sync(session, target, rows)
        return
    name = file_name(group, uuid.uuid4().hex[:8], "direct", 0)
    files = write_files(
        session.con, f"from {rows}", table_directory(session, target), name, table=target.qualified
    )
    add_files(session, target, [file.path for file in files], mode)


def insert_inlined(session: LakeSession, target: TableName, rows: str, count: int) -> None:
    """Insert a number of rows that DuckLake inlines."""
    if not count:
        return
    session.execute(
        f"insert into {lake_table(target)} by name from {rows}",
        doing="inserting rows",
        table=target.qualified,
    )
    session.memory.inlined_rows[target] = session.memory.inlined_rows.get(target, 0) + count


def add_files(
    session: LakeSession, target: TableName, paths: Sequence[str], mode: TableMode = UPSERT
) -> None:
    """
    Add Parquet files to the table; the files stay where they are.

    The rows of files that do not fit the table's layout are inserted, and all rows if the lake is encrypted.
    """
    if not paths:
        return
    layout = known_layout(session, target)
    fitting = [path for path in paths if layout.fits(path) and not session.encrypted]
    others = [path for path in paths if path not in fitting]
    if fitting:
        missing = "" if mode.plain else ", allow_missing => true"
        # Otherwise DuckLake takes the values of a column from a directory such as `env=prod`, wherever it is in the path.
        session.execute(
            f"call ducklake_add_data_files({literal(LAKE)}, {literal(target.name)},"
            f" {string_list(map(no_glob, fitting))}, schema => {literal(target.schema)}{missing},"
            f" hive_partitioning => {str(bool(layout.partition)).lower()})",
            doing="adding data files",
            table=target.qualified,
        )
        if layout.repeats_column:
            session.memory.misfiled.add(target)
    if others:
        insert_rows(session, target, parquet_rows(others), group=file_prefix(""))
        session.inserted += others


def _same_key(schema: TableSchema, other: str) -> str:
    """The condition that row `t` has the key in `other`0, `other`1, …."""
    return " and ".join(
        _same_value(schema.columns[k], f"t.{ident(schema.columns[k].name)}", f"{other}{i}")
        for i, k in enumerate(schema.key_indexes)
    )


def _same_value(column: Column, one: str, other: str) -> str:
    kind = lake_type(column)
    # A NaN in a numeric key is stored as NULL and must still match.
    return f"{one} is not distinct from {other}" if kind.startswith("DECIMAL") else equal(kind, one, other)
