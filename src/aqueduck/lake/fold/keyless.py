"""
Tables without a key: a row is identified by all of its columns, and several rows may be equal.

PostgreSQL sends the full old row with each update and delete (REPLICA IDENTITY FULL).  A run therefore adds
rows and removes a number of equal rows; which of the equal rows are removed does not matter.
`net_rows` folds a run, and `delete_rows` removes rows from the target; `fold_modes` and `apply` call them.
"""

from __future__ import annotations

from aqueduck.lake.fold.fold import Fold, Work
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import ident, lake_table
from aqueduck.lake.target.evolve import stored_columns
from aqueduck.model.changes import OP_DELETE, OP_INSERT
from aqueduck.model.columns.typemap import cast_sql
from aqueduck.model.schema import TableName, TableSchema

__all__ = ["delete_rows", "net_rows"]

COUNT = "aqueduck_count"


def net_rows(work: Work) -> Fold:
    """How many copies of each row a run adds or removes; `deletes` has whole rows as k0, k1, … with a count."""
    columns = work.schema.columns

    def side(image: str, amount: int, ops: str) -> str:
        cells = [f"r.{image}{i}" for i in range(len(columns))]
        typed = ", ".join(
            f"{cast_sql(c, cell)} as k{i}" for i, (c, cell) in enumerate(zip(columns, cells, strict=True))
        )
        source = work.scans.scan(["_op", *(f"{image}{i}" for i in range(len(columns)))])
        return f"select {typed}, {amount} as amount from {source} r where {ops} and {work.in_bucket(', '.join(cells))}"

    net = work.table(
        "net",
        f"select * exclude (amount), sum(amount)::bigint as {COUNT} from ("
        f"{side('n', 1, f'r._op <> {OP_DELETE}')} union all {side('o', -1, f'r._op <> {OP_INSERT}')}"
        f") group by all having sum(amount) <> 0",
    )
    added = work.value(f"select sum({COUNT}) from {net} where {COUNT} > 0")
    taken = work.value(f"select -sum({COUNT}) from {net} where {COUNT} < 0")
    names = ", ".join(f"k{i} as {ident(c.name)}" for i, c in enumerate(columns))
    each = f"select * exclude ({COUNT}) from (select * replace (unnest(range({COUNT})) as {COUNT}) from {net} where {COUNT} > 0)"
    upserts = f"select {names} from ({each})" if added else work.no_rows()
    deletes = f"select * replace (-{COUNT} as {COUNT}) from {net} where {COUNT} < 0" if taken else None
    return Fold(upserts, deletes, None, added, taken, 0)


def delete_rows(
    session: LakeSession, target: TableName, schema: TableSchema, rows: str, among: str = "true"
) -> None:
    """For each of `rows`, delete as many equal rows as its count says, among those that satisfy `among`."""
    keys = ", ".join(f"k{i}" for i in range(len(schema.columns)))
    each = ", ".join(f"k.k{i}" for i in range(len(schema.columns)))
    same = " and ".join(
        f"t.{ident(c.name)} is not distinct from k.k{i}" for i, c in enumerate(schema.columns)
    )
    wanted = f"(select {keys}, sum({COUNT}) as {COUNT} from {rows} group by all) k on {same} where {among}"
    place = f"k.{COUNT} as aqueduck_wanted, row_number() over (partition by {each}) as aqueduck_place"
    doing, table = "deleting rows", lake_table(target)
    if "rowid" not in stored_columns(session, target):
        session.execute(
            f"delete from {table} where rowid in (select id from (select t.rowid as id, {place}"
            f" from {table} t join {wanted}) where aqueduck_place <= aqueduck_wanted)",
            doing=doing,
            table=target.qualified,
        )
        return
    # A column named rowid hides DuckLake's: delete all equal rows, then insert the surplus again.
    for statement in (
        "create or replace temp table aqueduck_kept as select * exclude (aqueduck_wanted, aqueduck_place) from"
        f" (select t.*, {place} from {table} t join {wanted}) where aqueduck_place > aqueduck_wanted",
        f"delete from {table} as t using {rows} as k where {same} and {among}",
        f"insert into {table} by name from aqueduck_kept",
    ):
        session.execute(statement, doing=doing, table=target.qualified)
