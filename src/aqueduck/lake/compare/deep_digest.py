"""
Deep digests of a fan-out: every row of a destination's table, and of the source at the destination's cursor.

Rows are summed in buckets of their keys, and listed for the buckets that differ: as hashes, never as values, and so many
at most, so that memory does not grow with the tables.  No condition on a column is left to a file's statistics or Bloom
filter: conditions are computed for each row, so that nothing can hide a row from both sides.  Both sides are pinned: the
source at the cursor, the destination at one of its own lake snapshots.
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
"""Types of which DuckDB takes different values for equal: a month and 30 days, 12:00+01 and 11:00+00."""

Sums = dict[int, tuple[int, int]]
"""By bucket: rows, and the sum of their hashes."""


@dataclass(frozen=True, slots=True)
class Routing:
    """By which column rows are routed, and by which they are told apart."""

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
        """Each row as the hash of its key, the hash of its content, and its routing value."""
        keys = [self._column(key) for key in self.routing.keys] or self.columns
        return (
            f"select hash({_cells(keys)}) as k, hash({_cells(self.columns)}) as h, {ident(self.routed.name)} as routed"
            f" from {lake.table(self.name)} at (version => {int(self.version)})"
        )

    def own(self, lake: PooledLake) -> str:
        """The same, and whether it has the routing value that is the statement's first parameter."""
        kind = self.routed.type
        same = equal(kind, "routed", f"cast(? as {kind})")
        return f"(select *, coalesce({same}, false) as own from ({self.hashed(lake)}))"

    def asked(self, lake: PooledLake) -> str:
        """The same, for each value of the relation `asked`."""
        kind = self.routed.type
        same = equal(kind, "x.routed", f"try_cast(asked.value as {kind})")
        return f"({self.hashed(lake)}) x join asked on {same}"


def _cells(columns: Sequence[SourceColumn]) -> str:
    # A struct's hash depends on the order of its fields, which a destination may have in another one.
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
    """A destination at one lake snapshot of its own."""

    state: State
    version: int
    others: frozenset[str]
    """Routing values that other destinations keep in the same table, as their states say."""


@dataclass(slots=True)
class DeepSums:
    """What a destination's table has: sums of its own rows, and how many rows have another routing value."""

    own: Sums = field(default_factory=dict)
    foreign: dict[str | None, int] = field(default_factory=dict)
    """By routing value, which never leaves this process."""
    more_values: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows differ, and how."""

    missing: int = 0
    extra: int = 0
    changed: int = 0
    repeated: int = 0


def read_every_row(pool: LakePool) -> None:
    """From now on the pool's engine leaves no file or row group out because of what is noted about it."""
    pool.con.execute(f"set disabled_optimizers = '{_NEITHER_SIDE_SKIPS}'")


def pin(lake: PooledLake, destination: Destination) -> Pin | None:
    """The destination's cursor and the lake snapshot that has it; None before its seed."""
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
    return Pin(state, int(version), frozenset(v for v, told in rows if _same_table(told, destination)))


def _same_table(told: str | None, destination: Destination) -> bool:
    terms = None if told is None else Terms.from_json(told)
    return terms is None or terms.target == str(destination.target.folded)


# -- reading


def sum_destination(lake: PooledLake, table: TableAt, value: str) -> DeepSums:
    """Every row of a destination's table: its own by bucket, and the others by routing value."""
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
    """What the source has for each destination, by its id; one read for all of them."""
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
    """Which of some routing values the source has."""
    if not values:
        return set()
    with _asking(lake, {value: value for value in values}):
        rows = lake.execute(f"select distinct asked.id from {table.asked(lake)}", doing="reading the source")
    return {value for (value,) in rows}


def list_rows(lake: PooledLake, table: TableAt, value: str, buckets: Sequence[int], of: int) -> pa.Table:
    """The hashes of the rows with a routing value that are in some of `of` buckets, so many at most."""
    chosen = f"cast(k % {of} as integer) in ({', '.join(map(str, buckets))})"
    with lake_errors("comparing rows"):
        return lake.con.execute(
            f"select k, h from {table.own(lake)} where own and {chosen} limit {LISTED_ROWS_MAX}", [value]
        ).to_arrow_table()


@contextlib.contextmanager
def _asking(lake: PooledLake, values: Mapping[str, str]) -> Iterator[None]:
    """The relation `asked`: ids, and the routing values that they stand for."""
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
    """Buckets whose sums are not the same on both sides."""
    return sorted(b for b in source.keys() | here.keys() if source.get(b) != here.get(b))


def compare_listed(source: pa.Table, here: pa.Table, *, append_only: bool) -> Counts:
    """How many keys differ, and how; of rows that are only ever added, how many are too few and too many."""
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
