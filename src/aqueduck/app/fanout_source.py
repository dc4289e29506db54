"""
The source of a fan-out as the driver sees it: one session with its catalog, shared by both lanes.

Plans are made here; reading them is the workers' business (`spark.fanout_query`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from aqueduck.errors import SourceExpiredError
from aqueduck.fanout_config import FanoutConfig
from aqueduck.lake.lake_changes import Routes, check_routes
from aqueduck.lake.pool import LakePool, PooledLake
from aqueduck.lake.source_lake import ReadPlan, SourceLake
from aqueduck.lake_place import resolve

__all__ = ["FanoutSource"]

log = structlog.get_logger()


class FanoutSource:
    """Asks the source's catalog, one question at a time."""

    def __init__(self, config: FanoutConfig, env: Mapping[str, str]) -> None:
        self._routing = config.routing
        self._table = config.source.table_name
        self._place = resolve(config.source, {}, env)
        self._pool = LakePool(threads=1)
        self._asking = threading.Lock()

    @contextlib.contextmanager
    def _session(self) -> Iterator[tuple[PooledLake, SourceLake]]:
        with self._asking, self._pool.use(self._place, read_only=True) as lake:
            yield lake, SourceLake(lake, self._table)

    def latest(self) -> int:
        with self._session() as (_, source):
            return source.latest()

    def uuid(self) -> str:
        """The identity of the table as it is now."""
        with self._session() as (_, source):
            return source.table_at(source.latest())[2].uuid

    def readable_from(self, latest: int) -> int:
        with self._session() as (_, source):
            return source.readable_from(latest)

    def plan(self, start: int, end: int) -> ReadPlan:
        """The changes after `start`."""
        with self._session() as (_, source):
            return source.plan(self._routing.field, self._routing.key_columns, start, end)

    def plan_scan(self) -> ReadPlan:
        """All rows of now."""
        with self._session() as (_, source):
            return source.plan_scan(self._routing.field, self._routing.key_columns, source.latest())

    def plan_seed(self) -> ReadPlan:
        """What a new destination gets: the rows of now, or nothing and a cursor before all history."""
        plan = self.plan_scan()
        if self._routing.seed_mode == "scan":
            return plan
        with self._session() as (_, source):
            before = max(source.table_at(plan.end)[1] - 1, 0)
            try:
                source.refuse_gap(before, plan.end)
            except SourceExpiredError as exc:
                log.warning("history has expired, seeding by a scan", error=str(exc))
                return plan
        return replace(plan, reads=(), start=before, end=before)

    def check_values(self, plan: ReadPlan, values: Sequence[str], ids: Sequence[str]) -> None:
        """Refuse routing values that do not fit the column."""
        with self._session() as (lake, _):
            check_routes(lake, plan, Routes(tuple(values), (), ()), ids)

    def values(self, plan: ReadPlan) -> list[str]:
        """All routing values that the source has at the plan's end."""
        [read] = plan.reads
        with self._session() as (lake, _):
            rows = lake.execute(
                f"select distinct ({read.cells[plan.field]})::varchar as value"
                f" from {lake.table(read.table)} at (version => {plan.end})",
                doing="looking for routing values",
            )
        return sorted(str(value) for (value,) in rows if value is not None)

    def seconds_since(self, snapshots: Sequence[int]) -> dict[int, float]:
        """How long ago each of the lake snapshots was made."""
        with self._session() as (_, source):
            return {s: max(0.0, time.time() - (source.seconds_at(s) or time.time())) for s in snapshots}

    def close(self) -> None:
        self._pool.close()
