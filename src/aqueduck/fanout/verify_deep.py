"""
`aqueduck verify --deep` for a fan-out: every row of every destination against the source at the destination's
cursor.

Destinations are pinned first, which is quick, so that many have the same cursor and share one read of the
source. Then their tables are read at the pinned lake snapshots. Nothing needs to be paused: a cursor, its
rows and the source at that cursor no longer change. `lake.compare.deep_digest` defines what is read, and in
how much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from aqueduck.config.fanout import FanoutConfig
from aqueduck.fanout.verdicts import DeepCounts, DestinationComparison
from aqueduck.lake.compare.deep_digest import (
    BUCKETS,
    LISTED_ROWS_MAX,
    DeepSums,
    Pin,
    Routing,
    TableAt,
    compare_listed,
    differing_buckets,
    fold_buckets,
    list_rows,
    pin,
    read_every_row,
    sum_destination,
    sum_source,
    values_in_source,
)
from aqueduck.lake.destinations.cycle import Destination
from aqueduck.lake.destinations.destination_table import refuse_others
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.source.source_lake import SourceLake
from aqueduck.model.errors import AqueduckError, own_error

__all__ = ["compare_deeply"]

WAVE = 256
"""Destinations that share a read of the source."""
GROUPS_MAX = 1 << 17
"""Sums that one read of the source computes, for all its destinations."""

Progress = Callable[[str, str, float], None]


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A destination that can be compared."""

    destination: Destination
    at: Pin
    routing: Routing

    @property
    def table(self) -> TableAt:
        return TableAt(self.destination.target, self.at.version, self.at.state.source.columns, self.routing)


def compare_deeply(
    pool: LakePool,
    config: FanoutConfig,
    place: Any,
    destinations: Sequence[Destination],
    values: Callable[[], set[str]],
    progress: Progress,
    threads: int,
) -> list[DestinationComparison]:
    """
    The verdict on each destination, in their order.

    `values` are the routing values of all destinations, including those of other instances.
    """
    read_every_row(pool)
    deep = _Deep(pool, config, place, values, progress, threads)
    results: dict[str, DestinationComparison] = {}
    for first in range(0, len(destinations), WAVE):
        for found in deep.compare(destinations[first : first + WAVE]):
            results[found.destination] = found
    return [results[d.id] for d in destinations]


@dataclass(frozen=True, slots=True)
class _Deep:
    pool: LakePool
    config: FanoutConfig
    place: Any
    values: Callable[[], set[str]]
    progress: Progress
    threads: int

    def compare(self, destinations: Sequence[Destination]) -> Iterator[DestinationComparison]:
        pinned: list[_Pinned] = []
        for found in self._each(self._pin, destinations, self.threads):
            if isinstance(found, _Pinned):
                pinned.append(found)
            else:
                yield found
        for cursor in sorted({p.at.state.cursor for p in pinned}):
            mine = [p for p in pinned if p.at.state.cursor == cursor]
            try:
                yield from self._compare_at(cursor, mine)
            except AqueduckError as exc:  # the source cannot be read at this cursor
                yield from (_not_compared(p.destination, str(exc), cursor) for p in mine)

    def _each(self, do: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
        """The result of `do` for each destination; a failure does not stop the comparison of the others."""

        def one(item: Any) -> Any:
            try:
                return do(item)
            except Exception as exc:  # noqa: BLE001 - an error is no verdict
                about = item if isinstance(item, Destination) else item.destination
                return _not_compared(about, str(own_error(exc)))

        with ThreadPoolExecutor(max_workers=threads) as pool:
            return list(pool.map(one, items))

    def _pin(self, destination: Destination) -> _Pinned | DestinationComparison:
        with self.pool.use(destination.place, read_only=True) as lake:
            at = pin(lake, destination)
            if at is not None and at.state.is_about(destination):
                refuse_others(lake, destination.target, at.state.table)
        if at is None:
            return _not_compared(destination, "it is not seeded yet")
        routing = Routing(self.config.routing.field, self.config.routing.key_columns)
        found = _Pinned(destination, at, routing)
        terms = at.state.terms
        rerouted = terms is not None and terms.field != found.table.routed.id
        if at.state.value != destination.value or not at.state.is_about(destination) or rerouted:
            note = "its rows belong to another routing value, column or table; it waits for its seed"
            return _not_compared(destination, note)
        return found

    def _compare_at(self, cursor: int, pinned: Sequence[_Pinned]) -> Iterator[DestinationComparison]:
        self.progress("source", f"reading lake snapshot {cursor}", 0.0)
        buckets = min(BUCKETS, 1 << max(0, (GROUPS_MAX // len(pinned)).bit_length() - 1))
        with self.pool.use(self.place, read_only=True) as lake:
            source = SourceLake(lake, self.config.source.table_name)
            source.refuse_gap(cursor, cursor)
            _, _, seen = source.table_at(cursor)
            stale = [p for p in pinned if p.at.state.source.uuid != seen.uuid]
            for p in stale:
                note = "the source table was re-created, and the destination waits for its seed"
                yield _not_compared(p.destination, note, cursor)
            pinned = [p for p in pinned if p not in stale]
            if not pinned:
                return
            table = TableAt(self.config.source.table_name, cursor, seen.columns, pinned[0].routing)
            sums = sum_source(lake, table, {p.destination.id: p.destination.value for p in pinned}, buckets)
            judging = _Judging(self, lake, table, sums, buckets)
            yield from self._each(judging.judge, pinned, threads=1)


@dataclass(frozen=True, slots=True)
class _Judging:
    """Destinations at one cursor, with the source's sums for them."""

    deep: _Deep
    source_lake: PooledLake
    source: TableAt
    sums: dict[str, dict[int, tuple[int, int]]]
    buckets: int

    def judge(self, p: _Pinned) -> DestinationComparison:
        self.deep.progress("destinations", "comparing every row", 0.0)
        there = self.sums[p.destination.id]
        with self.deep.pool.use(p.destination.place, read_only=True) as lake:
            found = sum_destination(lake, p.table, p.destination.value)
            here = fold_buckets(found.own, self.buckets)
            differing = differing_buckets(there, here)
            counts = self._count(lake, p, differing) if differing else DeepCounts()
        counts = self._with_foreign(p, found, counts)
        rows = [sum(count for count, _ in side.values()) for side in (there, here)]
        return _verdict(p, counts, *rows, sums_differ=bool(differing))

    def _count(self, lake: PooledLake, p: _Pinned, buckets: list[int]) -> DeepCounts:
        """How many rows differ, by kind, in the buckets whose sums differ."""
        value = p.destination.value
        sides = [
            list_rows(self.source_lake, self.source, value, buckets, self.buckets),
            list_rows(lake, p.table, value, buckets, self.buckets),
        ]
        if any(len(side) == LISTED_ROWS_MAX for side in sides):
            return DeepCounts(more=True)
        counts = compare_listed(*sides, append_only=not p.routing.keys)
        return DeepCounts(counts.missing, counts.extra, counts.changed, counts.repeated)

    def _with_foreign(self, p: _Pinned, found: DeepSums, counts: DeepCounts) -> DeepCounts:
        """Add rows of another tenant, and rows whose values belong to no destination."""
        asked = [value for value in found.foreign if value is not None and value not in p.at.others]
        known = self.deep.values() & set(asked)
        known |= values_in_source(self.source_lake, self.source, [v for v in asked if v not in known])
        foreign = _rows(found, known)
        others = _rows(found, (v for v in found.foreign if v not in known and v not in p.at.others))
        return replace(counts, foreign=foreign, others=others)


def _rows(found: DeepSums, values: Iterable[str | None]) -> int:
    return sum(found.foreign[value] for value in values)


def _verdict(
    p: _Pinned, counts: DeepCounts, source_rows: int, rows: int, *, sums_differ: bool
) -> DestinationComparison:
    notes = []
    wrong = sums_differ or counts.foreign > 0
    if not p.routing.keys:
        wrong = counts.missing > 0 or counts.foreign > 0 or counts.more
        if counts.extra:
            notes.append(
                f"append-only: {counts.extra:,} rows that the source updated or deleted stay unchanged"
            )
        counts = replace(counts, extra=0)
    if wrong:
        notes.insert(0, _words(p, counts))
    if counts.others:
        notes.append(
            f"not compared: {counts.others:,} rows with routing values that neither the source nor a destination has"
        )
    return DestinationComparison(
        p.destination.id,
        "different" if wrong else "identical",
        source_rows,
        rows,
        p.at.state.cursor,
        "; ".join(notes) or None,
        counts,
    )


def _words(p: _Pinned, counts: DeepCounts) -> str:
    kinds = {
        "missing": counts.missing,
        "extra": counts.extra,
        "changed": counts.changed,
        "repeated": counts.repeated,
        "of another tenant": counts.foreign,
    }
    found = [f"{count:,} {kind}" for kind, count in kinds.items() if count]
    if counts.more:
        found.append("more rows than listed")
    return f"{p.destination.target.qualified}: rows {', '.join(found)}"


def _not_compared(destination: Destination, note: str, cursor: int | None = None) -> DestinationComparison:
    return DestinationComparison(destination.id, "not compared", cursor=cursor, note=note)
