"""
Deep digests of a fan-out: every row of a destination's table, and of the source at the destination's cursor.

Hashes of rows are summed in buckets of their keys, and rows of differing buckets are listed: as hashes, never as
values, and a limited number of them, so that memory does not grow with the tables.  Conditions are evaluated on each
row instead of by a file's statistics or Bloom filter, which could hide a row from both sides.  Both sides are pinned:
the source at the cursor, the destination at one of its own lake snapshots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from aqueduck.lake.destinations.cycle import Destination
from aqueduck.lake.destinations.destination import STATE, State, Terms, read_state
from aqueduck.lake.session.engine import new_connection
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import equal, ident
from aqueduck.lake.values.kept_types import compared
from aqueduck.model.routing import SourceColumn
from aqueduck.model.schema import TableName

__all__ = [
    "BUCKETS",
    "Counts",
    "DeepSums",
    "Pin",
    "Routing",
    "TableAt",
    "compare_listed",
    "differing_buckets",
    "fold_buckets",
    "list_rows",
    "pin",
    "read_every_row",
    "sum_destination",
    "sum_source",
    "values_in_source",
]

BUCKETS = 1024
LISTED_ROWS_MAX = 200_000
OTHER_VALUES_MAX = 10_000
_NEITHER_SIDE_SKIPS = "join_filter_pushdown,statistics_propagation,filter_pushdown"
_EQUAL_AND_NOT_THE_SAME = ("INTERVAL", "TIME WITH TIME ZONE")
"""Types for which DuckDB treats different values as equal: a month and 30 days, 12:00+01 and 11:00+00."""

Sums = dict[int, tuple[int, int]]
"""The number of rows and the sum of their hashes, by bucket."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The column by which rows are routed, and those that identify a row."""

    field: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableAt:
    """A table at a lake snapshot: the source's at a cursor, or a destination's."""

    name: TableName
    version: int
    columns: tuple[SourceColumn, ...]
    routing: Routing

    @property
    def routed(self) -> SourceColumn:
        return self._column(self.routing.field)

    def _column(self, name: str) -> SourceColumn:
        return next(c for c in self.columns if c.name.lower() == name.lower())

    def hashed(self, lake: PooledLake) -> str:
        """A query for each row's hash of the key, hash of the content, and routing value."""
        keys = [self._column(key) for key in self.routing.keys] or self.columns
        return (
            f"select hash({_cells(keys)}) as k, hash({_cells(self.columns)}) as h, {ident(self.routed.name)} as routed"
            f" from {lake.table(self.name)} at (version => {int(self.version)})"
        )

    def own(self, lake: PooledLake) -> str:
        """The same, and whether the row has the routing value given as the statement's first parameter."""
        kind = self.routed.type
        same = equal(kind, "routed", f"cast(? as {kind})")
        return f"(select *, coalesce({same}, false) as own from ({self.hashed(lake)}))"

    def asked(self, lake: PooledLake) -> str:
        """The same, for each value of the relation `asked`."""
        kind = self.routed.type
        same = equal(kind, "x.routed", f"try_cast(asked.value as {kind})")
        return f"({self.hashed(lake)}) x join asked on {same}"


def _cells(columns: Sequence[SourceColumn]) -> str:
    # A struct's hash depends on the order of its fields, and a destination may have another order.
    cells = [
        f"cast({ident(c.name)} as {c.type})"
        if "STRUCT" in c.type.upper()
        else compared(c.type, ident(c.name))
        for c in columns
    ]
    cells += [
        f"cast({ident(c.name)} as varchar)"
        for c in columns
        if any(kind in c.type.upper() for kind in _EQUAL_AND_NOT_THE_SAME)
    ]
    return ", ".join(cells)


@dataclass(frozen=True, slots=True)
class Pin:
    """A destination, pinned at one of its lake snapshots."""

    state: State
    version: int
    others: frozenset[str]
    """Routing values that other destinations keep in the same table, as their states say."""


@dataclass(slots=True)
class DeepSums:
    """A destination's table: sums of its own rows, and numbers of rows with other routing values."""

    own: Sums = field(default_factory=dict)
    foreign: dict[str | None, int] = field(default_factory=dict)
    """By routing value; these values never leave this process."""
    more_values: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of differing rows, by kind of difference."""

    missing: int = 0
    extra: int = 0
    changed: int = 0
    repeated: int = 0


def read_every_row(pool: LakePool) -> None:
    """Make the pool's engine read every file and row group, regardless of their statistics and filters."""
    pool.con.execute(f"set disabled_optimizers = '{_NEITHER_SIDE_SKIPS}'")


def pin(lake: PooledLake, destination: Destination) -> Pin | None:
    """The destination's cursor and a lake snapshot that contains it; None before the seed."""
    with lake.transaction():
        state = read_state(lake, destination.id)
        if state is None:
            return None
        [[version]] = lake.execute(f"from {ident(lake.alias)}.current_snapshot()")
        rows = lake.execute(
            f"select routing_value, source_columns from {lake.table(STATE)} where destination_id <> ?",
            (destination.id,),
            doing="reading the cursors",
        )
    return Pin(state, int(version), frozenset(v for v, stored in rows if _same_table(stored, destination)))


def _same_table(stored: str | None, destination: Destination) -> bool:
    terms = None if stored is None else Terms.from_json(stored)
    return terms is None or terms.target == str(destination.target.folded)


# -- reading


def sum_destination(lake: PooledLake, table: TableAt, value: str) -> DeepSums:
    """Read every row of a destination's table: its own rows by bucket, other rows by routing value."""
    sums = lake.execute(
        f"select cast(k % {BUCKETS} as integer), count(*), sum(h::hugeint) from {table.own(lake)} where own group by 1",
        (value,),
        doing="reading a destination",
    )
    others = lake.execute(
        f"select cast(routed as varchar), count(*) from {table.own(lake)} where not own group by 1"
        f" order by 2 desc limit {OTHER_VALUES_MAX + 1}",
        (value,),
        doing="reading a destination",
    )
    return DeepSums(
        {bucket: (int(rows), int(total)) for bucket, rows, total in sums},
        {name: int(rows) for name, rows in others[:OTHER_VALUES_MAX]},
        len(others) > OTHER_VALUES_MAX,
    )


def sum_source(lake: PooledLake, table: TableAt, values: Mapping[str, str], buckets: int) -> dict[str, Sums]:
    """The source's sums for each destination, by destination id, with one read for all of them."""
    found: dict[str, Sums] = {name: {} for name in values}
    with _asking(lake, values):
        for name, bucket, rows, total in lake.execute(
            f"select asked.id, cast(k % {buckets} as integer), count(*), sum(h::hugeint)"
            f" from {table.asked(lake)} group by all",
            doing="reading the source",
        ):
            found[name][bucket] = (int(rows), int(total))
    return found


def values_in_source(lake: PooledLake, table: TableAt, values: Sequence[str]) -> set[str]:
    """Those of the routing values that the source has."""
    if not values:
        return set()
    with _asking(lake, {value: value for value in values}):
        rows = lake.execute(f"select distinct asked.id from {table.asked(lake)}", doing="reading the source")
    return {value for (value,) in rows}


def list_rows(lake: PooledLake, table: TableAt, value: str, buckets: Sequence[int], of: int) -> pa.Table:
    """The hashes of rows with a routing value in the given buckets (of `of`), up to a limit."""
    chosen = f"cast(k % {of} as integer) in ({', '.join(map(str, buckets))})"
    with lake_errors("comparing rows"):
        return lake.con.execute(
            f"select k, h from {table.own(lake)} where own and {chosen} limit {LISTED_ROWS_MAX}", [value]
        ).to_arrow_table()


@contextlib.contextmanager
def _asking(lake: PooledLake, values: Mapping[str, str]) -> Iterator[None]:
    """Registers the relation `asked`: ids and their routing values."""
    with lake_errors("reading the source"):
        lake.con.register("asked", pa.table({"id": list(values), "value": list(values.values())}))
    try:
        yield
    finally:
        lake.con.unregister("asked")


# -- comparing


def fold_buckets(sums: Sums, buckets: int) -> Sums:
    """The same sums in fewer buckets; both numbers are powers of two."""
    folded: Sums = {}
    for bucket, (rows, total) in sums.items():
        before = folded.get(bucket % buckets, (0, 0))
        folded[bucket % buckets] = (before[0] + rows, before[1] + total)
    return folded


def differing_buckets(source: Sums, here: Sums) -> list[int]:
    """Buckets whose sums differ."""
    return sorted(b for b in source.keys() | here.keys() if source.get(b) != here.get(b))


def compare_listed(source: pa.Table, here: pa.Table, *, append_only: bool) -> Counts:
    """Numbers of differing keys by kind; with `append_only`, numbers of missing and surplus rows."""
    sides = {
        side: f"select k, count(*) as n, sum(h::hugeint) as total from {side} group by k"
        for side in ("source", "here")
    }
    con = new_connection(threads=1)
    try:
        con.register("source", source)
        con.register("here", here)
        with lake_errors("comparing rows"):
            [[missing, extra, changed, repeated, too_few, too_many]] = con.execute(
                "select count(*) filter (b.n is null), count(*) filter (a.n is null),"
                " count(*) filter (a.n = b.n and a.total <> b.total), count(*) filter (a.n <> b.n),"
                " coalesce(sum(greatest(coalesce(a.n, 0) - coalesce(b.n, 0), 0)), 0),"
                " coalesce(sum(greatest(coalesce(b.n, 0) - coalesce(a.n, 0), 0)), 0)"
                f" from ({sides['source']}) a full join ({sides['here']}) b using (k)"
            ).fetchall()
    finally:
        con.close()
    if append_only:
        return Counts(missing=int(too_few), extra=int(too_many))
    return Counts(int(missing), int(extra), int(changed), int(repeated))
