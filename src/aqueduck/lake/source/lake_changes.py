"""
Read the changes of a lake table between two lake snapshots, once for all destinations.

`read_routed` reads a plan of `source_lake` and assigns a destination to every row; `chunks` returns the rows
by bucket.  `destination` applies them.

A row of a routed relation has `d` (index of the destination), `b` (bucket), `s` (lake snapshot), `r` (row id),
`op` (true: the row exists afterwards; false: it was removed), `bad` (number of a column whose value no lake keeps), and
the source's columns as `c0`, `c1`, ….  DuckLake's insertions and deletions suffice: an update is one of each, and each
side is routed by its own value.  Ranges are inclusive at both ends, so they begin one after the cursor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import equal, ident
from aqueduck.lake.source.change_sides import (
    dated,
    refuse_merged_updates,
    refuse_relaid_rows,
    side,
    sides,
)
from aqueduck.lake.source.source_lake import RangeRead, ReadPlan, SourceLake
from aqueduck.lake.values.kept_types import sent, unkept
from aqueduck.model.errors import LakeWriteError, RoutingError
from aqueduck.model.routing import SnapshotRange

__all__ = ["ReadReport", "Routes", "check_routes", "chunks", "read_routed"]

CHUNK_ROWS = 16_384
CHUNK_BYTES = 8 << 20
UNKNOWN_VALUES_MAX = 10_000

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Routes:
    """The destination of each routing value, as lists of the same length."""

    values: tuple[str, ...]
    cursors: tuple[int, ...]
    buckets: tuple[int, ...]
    """-1 if another instance serves the destination."""


@dataclass
class ReadReport:
    """Counts and findings of a read."""

    rows: int = 0
    unrouted: int = 0
    """Rows whose routing value belongs to no destination."""
    nulls: int = 0
    """Rows without a routing value."""
    moves: int = 0
    """Updates that moved a row from one destination to another."""
    unknown: list[str] = field(default_factory=list)
    """Routing values that belong to no destination, if requested."""
    expected: dict[int, int] = field(default_factory=dict)
    """If destinations count their rows: how many each must have at the plan's end."""
    seconds: float = 0.0


def check_routes(lake: PooledLake, plan: ReadPlan, routes: Routes, ids: Sequence[str]) -> None:
    """Raise if a routing value is not valid for the column's type, or if two of them are equal as that type."""
    rows = lake.execute(
        f"with g as (select unnest(?::varchar[]) as v, unnest(?::varchar[]) as id),"
        f" t as (select id, try_cast(v as {plan.field_type}) as t from g)"
        " select id, null from t where t is null union all"
        " select min(id), max(id) from t where t is not null group by t having count(*) > 1",
        [list(routes.values), list(ids)],
        doing="checking the routing values",
    )
    name = plan.source.columns[plan.field].name
    for first, second in rows:
        if second is None:
            raise RoutingError(
                f"the routing_value of {first} is not a valid {plan.field_type}, the type of {name}",
                hint="correct the value, or route by another column",
            )
        raise RoutingError(
            f"the routing values of {first} and {second} are the same {plan.field_type}",
            hint="give each destination a different value",
        )


def read_routed(
    pool: LakePool,
    plan: ReadPlan,
    routes: Routes,
    *,
    count_after: int | None = None,
    want_unknown: bool = False,
) -> tuple[str, ReadReport]:
    """
    Read the plan into a relation of the pool's engine; returns its name and a report.

    Rows of lake snapshots after `count_after` that belong to no destination are counted; None counts none.
    A session that was attached before the source flushed inlined rows may look for them in the old place.  A failed
    read is therefore retried once with a new session.
    """
    name = f"routed_{next(_numbers)}"
    try:
        return name, _read_routed(pool, name, plan, routes, count_after, want_unknown)
    except LakeWriteError:
        return name, _read_routed(pool, name, plan, routes, count_after, want_unknown)


def _read_routed(
    pool: LakePool, name: str, plan: ReadPlan, routes: Routes, count_after: int | None, want_unknown: bool
) -> ReadReport:
    report = ReadReport()
    con = pool.con.cursor()
    with pool.use(plan.place, read_only=True) as lake, lake_errors("reading the source"):
        source = SourceLake(lake, plan.table)
        source.refuse_stale_session(plan.end)
        _make_routes(con, f"{name}_routes", plan, routes)
        others = "left" if count_after is not None else "inner"
        mine = "t.b >= 0"
        cells = ", ".join(
            f"c{i}" if i == plan.field else f"case when {mine} then c{i} end as c{i}"
            for i in range(len(plan.source.columns))
        )
        odd = unkept(plan.source.columns)
        bad = (
            f"case when {mine} then {odd} end".replace("{", "{{").replace("}", "}}")
            if odd
            else "null::integer"
        )
        routed = (
            f"select t.d, t.b, s, r, op, {bad} as bad, {cells} from ({{}}) x {others} join {name}_routes t"
            f" on {equal(plan.field_type, f'x.c{plan.field}', 't.v')}"
            f" where t.d is null or {'true' if plan.scan else 's > t.cursor'}"
        )
        con.execute(f"create or replace table {name} as {routed.format(_nothing(plan))}")
        with lake.transaction():  # no merge can happen between the check for merged files and the reads
            for selected in _reads(lake, plan):
                lake.execute(f"insert into {name} {routed.format(selected)}", doing="reading the source")
        if not plan.scan:
            # Lake snapshots that expired during the read may be missing from it.
            source.refuse_gap(plan.start, plan.end)
        source.refuse_other_history(plan.end, plan.stamp)
        [[report.rows]] = con.execute(f"select count(*) from {name}").fetchall()
        if count_after is not None:
            value = f"c{plan.field}"
            unrouted = f"from {name} where d is null and op and (s > {count_after})"
            [[report.unrouted, report.nulls]] = con.execute(
                f"select count({value}), count(*) - count({value}) {unrouted}"
            ).fetchall()
            if want_unknown and report.unrouted:
                rows = con.execute(
                    f"select distinct {value}::varchar {unrouted} and {value} is not null limit {UNKNOWN_VALUES_MAX}"
                ).fetchall()
                report.unknown = sorted(str(row[0]) for row in rows)
        if plan.counted:
            report.expected = _expected(con, lake, plan, name)
        con.execute(f"drop table {name}_routes")
        if any(read.span.removes for read in plan.reads) and plan.keys:
            [[report.moves]] = con.execute(
                f"select count(*) from {name} a join {name} z using (s, r)"
                " where a.op and not z.op and a.d is distinct from z.d"
            ).fetchall()
    return report


def chunks(pool: LakePool, name: str, plan: ReadPlan, bucket: int) -> Iterator[tuple[bytes, int]]:
    """The rows of a bucket, sorted by destination, as Arrow streams of a few megabytes with their numbers of rows."""
    con = pool.con.cursor()
    con.execute("set arrow_lossless_conversion = true")  # values keep their types in Arrow
    cells = ", ".join(f"{sent(c.type, f'c{i}')} as c{i}" for i, c in enumerate(plan.source.columns))
    with lake_errors("handing out changes"):
        reader = con.execute(
            f"select d, s, r, op, bad, {cells} from {name} where b = {bucket} order by d"
        ).to_arrow_reader(CHUNK_ROWS)
        for batch in reader:
            yield from _streams(batch)


def _streams(batch: pa.RecordBatch) -> Iterator[tuple[bytes, int]]:
    if batch.num_rows == 0:
        return
    rows = max(1, batch.num_rows * CHUNK_BYTES // max(batch.nbytes, 1))
    for start in range(0, batch.num_rows, rows):
        piece = batch.slice(start, rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write_batch(piece)
        yield sink.getvalue().to_pybytes(), piece.num_rows


def _reads(lake: PooledLake, plan: ReadPlan) -> Iterator[str]:
    """Queries for (s, r, op, c0, c1, …), in which each change has its own lake snapshot."""
    for read in plan.reads:
        if plan.scan:
            source = f"{lake.table(read.table)} at (version => {plan.end})"
            yield f"select {plan.end}::bigint as s, 0::bigint as r, true as op{_cells(read.cells)} from {source}"
            continue
        spans = dated(lake, read.table_id, read.span)
        if read.placed or not plan.keys:
            for span in spans:
                yield _changes(lake, plan, read, span)
        else:
            yield _still_there(lake, read)
            for span in spans:
                if span.removes:
                    yield _select(
                        "false", side(lake, read.table, "deletions", span, _removed_cells(plan, read))
                    )


def _changes(lake: PooledLake, plan: ReadPlan, read: RangeRead, span: SnapshotRange) -> str:
    added = _cells(read.cells)
    if not span.removes:
        return _select("true", side(lake, read.table, "insertions", span, added))
    if not plan.keys:
        # The new version of an updated row is not an inserted row, and neither is a rewritten one.
        refuse_relaid_rows(lake, read.table, read.table_id, span)
        refuse_merged_updates(lake, read.table, read.table_id, span)
        removed = side(lake, read.table, "deletions", span, "")
        return _select("true", side(lake, read.table, "insertions", span, added)) + (
            f" where not exists (select 1 from ({removed}) z"
            " where z.aqueduck_s = aqueduck_i.aqueduck_s and z.aqueduck_r = aqueduck_i.aqueduck_r)"
        )
    both = sides(lake, read.table, read.table_id, span, added, _removed_cells(plan, read))
    return f"{both} {_select('true', 'from added')} union all {_select('false', 'from removed')}"


def _select(op: str, source: str) -> str:
    return (
        f"select aqueduck_s as s, aqueduck_r as r, {op} as op, * exclude (aqueduck_s, aqueduck_r)"
        f" from ({source}) aqueduck_i"
    )


def _cells(cells: Iterable[str]) -> str:
    return "".join(f", {cell} as c{i}" for i, cell in enumerate(cells))


def _removed_cells(plan: ReadPlan, read: RangeRead) -> str:
    """The cells of a removed row, as far as they are needed: routing value and key."""
    wanted = {plan.field, *plan.keys}
    columns = zip(read.cells, plan.source.columns, strict=True)
    return _cells(cell if i in wanted else f"null::{c.type}" for i, (cell, c) in enumerate(columns))


def _still_there(lake: PooledLake, read: RangeRead) -> str:
    """
    A query for the added rows that still exist at the range's end.

    It is used if rows have no place in a file by which to recognize those that were removed at once.
    """
    added = side(lake, read.table, "insertions", read.span, "")
    newest = f"select aqueduck_r, max(aqueduck_s) as aqueduck_s from ({added}) group by aqueduck_r"
    rows = f"select *, rowid as aqueduck_r from {lake.table(read.table)} at (version => {read.span.last})"
    return (
        f"select aqueduck_s as s, aqueduck_r as r, true as op{_cells(read.cells)}"
        f" from ({rows}) join ({newest}) using (aqueduck_r)"
    )


def _expected(con: duckdb.DuckDBPyConnection, lake: PooledLake, plan: ReadPlan, name: str) -> dict[int, int]:
    """The number of rows in the source for each destination at the plan's end."""
    field = ident(plan.source.columns[plan.field].name)
    counted = con.execute(
        f"with rows_of as (select {field} as v from {lake.table(plan.table)} at (version => {plan.end}))"
        f" select t.d, count(x.v) from {name}_routes t left join rows_of x on {equal(plan.field_type, 'x.v', 't.v')}"
        " where t.b >= 0 group by t.d"
    ).fetchall()
    return {int(d): int(count) for d, count in counted}


def _nothing(plan: ReadPlan) -> str:
    cells = ", ".join(f"null::{column.type} as c{i}" for i, column in enumerate(plan.source.columns))
    return f"select 0::bigint as s, 0::bigint as r, true as op, {cells} where false"


def _make_routes(con: duckdb.DuckDBPyConnection, name: str, plan: ReadPlan, routes: Routes) -> None:
    given = pa.table(
        {
            "v": pa.array(routes.values, pa.string()),
            "d": pa.array(range(len(routes.values)), pa.int32()),
            "b": pa.array(routes.buckets, pa.int32()),
            "cursor": pa.array(routes.cursors, pa.int64()),
        }
    )
    con.register("given_routes", given)
    con.execute(
        f"create or replace table {name} as select try_cast(v as {plan.field_type}) as v, d, b, cursor from given_routes"
    )
    con.unregister("given_routes")
