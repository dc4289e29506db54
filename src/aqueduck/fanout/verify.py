"""
`aqueduck verify` for a fan-out: every destination against the source at the destination's own cursor.

DuckDB computes a row count and a sum of row hashes for both sides in bounded memory: it reads the source once
for all destinations at the same cursor, and each destination in one transaction together with its cursor. So
the service can run meanwhile, and nothing needs to be paused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from aqueduck.config.fanout import FanoutConfig, assigned
from aqueduck.config.lake_place import resolve
from aqueduck.fanout.service import FanoutService
from aqueduck.fanout.verdicts import DestinationComparison, Verdict
from aqueduck.fanout.verify_deep import compare_deeply
from aqueduck.lake.destinations.cycle import Destination
from aqueduck.lake.destinations.destination import State, read_state
from aqueduck.lake.destinations.destination_table import refuse_others
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import equal, ident
from aqueduck.lake.source.source_lake import SourceLake
from aqueduck.lake.values.kept_types import compared
from aqueduck.model.errors import AqueduckError, ConfigError, own_error
from aqueduck.model.routing import SourceColumn, SourceTable

__all__ = ["compare_sums", "verify_destinations"]

THREADS = 4
MEMORY = "1GB"
APPEND_ONLY = "append-only: rows that the source later updated or deleted stay here unchanged"

Sums = tuple[int, int]
"""The row count and the sum of row hashes: equal for the same rows in any order."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One destination's side of the comparison."""

    state: State
    sums: Sums


def verify_destinations(
    config: FanoutConfig,
    *,
    env: Mapping[str, str] = os.environ,
    only: Sequence[str] = (),
    deep: bool = False,
    progress: Callable[[str, str, float], None] = lambda _name, _doing, _share: None,
) -> list[DestinationComparison]:
    """
    Compare all destinations of this instance, or only those with these ids; `deep` compares every row.

    A row of the table of destinations that cannot be served is not compared, with the reason.
    """
    service = FanoutService(config, env=env)
    try:
        service.prepare()
    finally:
        service.source.close()
    destinations = [one.destination for one in service.served if not only or one.destination.id in only]
    left_out = [
        DestinationComparison(name, "not compared", note=problem)
        for name, problem in service.status.left_out.items()
        if assigned(config.instance.partition, name) and (not only or name in only)
    ]
    unknown = sorted(set(only) - {d.id for d in destinations} - {each.destination for each in left_out})
    if unknown:
        raise ConfigError(f"no destination has the id {unknown[0]}", hint="see aqueduck status")
    pool = LakePool(max_open=max(THREADS, min(config.pool.max_open, 50)), memory_limit=MEMORY)
    source = resolve(config.source, {}, env)
    try:
        if deep:
            found = compare_deeply(
                pool, config, source, destinations, service.served.values, progress, THREADS
            )
        else:
            found = compare_sums(pool, config, source, destinations, progress, THREADS)
        return [*found, *left_out]
    finally:
        pool.close()


def compare_sums(
    pool: LakePool,
    config: FanoutConfig,
    place: Any,
    destinations: Sequence[Destination],
    progress: Callable[[str, str, float], None],
    threads: int,
) -> list[DestinationComparison]:
    """The verdict on each destination by counts and sums, in their order."""

    def one(each: tuple[int, Destination]) -> _Side | DestinationComparison:
        number, destination = each
        progress("destinations", "reading", number / len(destinations))
        try:
            with pool.use(destination.place, read_only=True) as lake:
                return _read_destination(lake, destination, config.routing.field)
        except Exception as exc:  # noqa: BLE001 - an error of one destination must not stop the comparison of others
            return DestinationComparison(destination.id, "not compared", note=str(own_error(exc)))

    with ThreadPoolExecutor(max_workers=threads) as workers:
        found = list(workers.map(one, enumerate(destinations)))
    sides = {d.id: side for d, side in zip(destinations, found, strict=True) if isinstance(side, _Side)}
    results = {c.destination: c for c in found if isinstance(c, DestinationComparison)}
    for cursor in sorted({side.state.cursor for side in sides.values()}):
        mine = [d for d in destinations if d.id in sides and sides[d.id].state.cursor == cursor]
        progress("source", f"reading lake snapshot {cursor}", len(results) / len(destinations))
        try:
            with pool.use(place, read_only=True) as lake:
                sums = _read_source(lake, config, mine, cursor, sides[mine[0].id].state.source)
        except AqueduckError as exc:
            for d in mine:
                results[d.id] = DestinationComparison(d.id, "not compared", cursor=cursor, note=str(exc))
            continue
        for d in mine:
            results[d.id] = _judge(d, sides[d.id], sums[d.id], append_only=not config.routing.key_columns)
    return [results[d.id] for d in destinations]


def _judge(
    destination: Destination, side: _Side, source: Sums, *, append_only: bool
) -> DestinationComparison:
    note = None
    verdict: Verdict
    if side.sums == source:
        verdict = "identical"
    elif append_only:
        verdict, note = "not compared", APPEND_ONLY
    else:
        verdict = "different"
        note = "the row counts agree, but cells differ" if side.sums[0] == source[0] else None
    return DestinationComparison(destination.id, verdict, source[0], side.sums[0], side.state.cursor, note)


def _read_destination(
    lake: PooledLake, destination: Destination, field: str
) -> _Side | DestinationComparison:
    """Read rows and cursor in one transaction."""
    with lake.transaction():
        state = read_state(lake, destination.id)
        if state is None:
            return DestinationComparison(destination.id, "not compared", note="it is not seeded yet")
        routed = _column(state.source, field)
        rerouted = state.terms is not None and state.terms.field != routed.id
        if state.value != destination.value or not state.is_about(destination) or rerouted:
            note = "its rows belong to another routing value, column or table; it waits for its seed"
            return DestinationComparison(destination.id, "not compared", note=note)
        refuse_others(lake, destination.target, state.table)
        rows = lake.execute(
            f"select {_sums(state.source.columns)} from {lake.table(destination.target)}"
            f" where {equal(routed.type, ident(routed.name), f'cast(? as {routed.type})')}",
            (destination.value,),
            doing="reading a destination",
        )
    return _Side(state, (int(rows[0][0]), int(rows[0][1])))


def _read_source(
    lake: PooledLake,
    config: FanoutConfig,
    destinations: Sequence[Destination],
    cursor: int,
    seen: SourceTable,
) -> dict[str, Sums]:
    """The source's rows for each destination at a lake snapshot."""
    source = SourceLake(lake, config.source.table_name)
    source.refuse_gap(cursor, cursor)
    _, _, table = source.table_at(cursor)
    if table.uuid != seen.uuid:
        raise ConfigError("the source table was re-created, and the destination waits for its seed")
    routed = _column(table, config.routing.field)
    given = pa.table({"value": [d.value for d in destinations], "id": [d.id for d in destinations]})
    with lake_errors("reading the source"):
        lake.con.register("asked", given)
        try:
            rows = lake.con.execute(
                f"select asked.id, {_sums(table.columns, 'x')}"
                f" from (from {lake.table(config.source.table_name)} at (version => {cursor})) x"
                f" join asked on x.{ident(routed.name)} = try_cast(asked.value as {routed.type}) group by asked.id"
            ).fetchall()
        finally:
            lake.con.unregister("asked")
    found = {name: (int(count), int(total)) for name, count, total in rows}
    return {d.id: found.get(d.id, (0, 0)) for d in destinations}


def _column(table: SourceTable, name: str) -> SourceColumn:
    return next(c for c in table.columns if c.name.lower() == name.lower())


def _sums(columns: Sequence[SourceColumn], table: str = "") -> str:
    prefix = f"{table}." if table else ""
    cells = ", ".join(compared(column.type, f"{prefix}{ident(column.name)}") for column in columns)
    return f"count(*), coalesce(sum(hash({cells})::hugeint), 0)"
