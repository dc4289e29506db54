"""
The work of one task of a fan-out: load the changes of a bucket of destinations and apply them to each.

Destinations are independent.  A few threads write them in parallel, destinations of one lake one after another, and
a failure affects only its own destination.  `spark.query.fanout_query` calls this in tasks; nothing here uses Spark.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from aqueduck.lake.destinations.cycle import Applied, Destination
from aqueduck.lake.destinations.destination import apply_changes, seed
from aqueduck.lake.destinations.net_changes import drop, fold, load, refuse_unkept
from aqueduck.lake.session.pool import LakePool
from aqueduck.lake.source.source_lake import ReadPlan
from aqueduck.model.errors import own_error

__all__ = ["apply_bucket"]


def apply_bucket(
    pool: LakePool,
    plan: ReadPlan,
    destinations: Mapping[int, Destination],
    chunks: Iterable[bytes],
    *,
    instance: str,
    threads: int = 4,
    expected: Mapping[int, int] | None = None,
    progressed: Callable[[int, int], None] = lambda _rows, _destinations: None,
) -> list[Applied]:
    """Bring every destination to the end of the plan, or report its error; a scan plan seeds them."""
    net = fold(pool, load(pool, chunks, plan), plan)
    expected = expected or {}

    def one(index: int, destination: Destination) -> Applied:
        try:
            refuse_unkept(pool, net, index, plan)
            with pool.use(destination.place) as lake:
                if plan.scan:
                    return seed(lake, destination, index, net, plan, instance)
                return apply_changes(
                    lake, destination, index, net, plan, instance, expected=expected.get(index)
                )
        except Exception as exc:  # noqa: BLE001 - an error of one destination must not stop the others
            return Applied(destination.id, destination.cursor, error=str(own_error(exc)))
        finally:
            progressed(net.of(index).get("rows", 0), 1)

    def one_lake(group: list[tuple[int, Destination]]) -> list[Applied]:
        return [one(index, destination) for index, destination in group]

    try:
        with ThreadPoolExecutor(max_workers=threads) as workers:
            return list(itertools.chain.from_iterable(workers.map(one_lake, _by_lake(destinations))))
    finally:
        drop(pool, net.name)


def _by_lake(destinations: Mapping[int, Destination]) -> list[list[tuple[int, Destination]]]:
    groups: dict[tuple[str, str | None], list[tuple[int, Destination]]] = {}
    for index, destination in destinations.items():
        place = destination.place
        groups.setdefault((place.catalog, place.metadata_schema), []).append((index, destination))
    return list(groups.values())
