"""
The driver's access to the source of a fan-out: one session with its catalog, shared by both lanes.

The driver makes plans; workers read them (`spark.query.fanout_query`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.fanout_roster import LISTED_KEYS
from aqueduck.config.lake_place import resolve
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import ident
from aqueduck.lake.source.lake_changes import Routes, check_routes
from aqueduck.lake.source.source_lake import ReadPlan, SourceLake
from aqueduck.model.errors import LakeTableMissingError, LakeWriteError, RoutingError, SourceExpiredError
from aqueduck.model.schema import parse_table_name

__all__ = ["FanoutSource"]

log = structlog.get_logger()


class FanoutSource:
    """Queries the source's catalog, one query at a time."""

    def __init__(self, config: FanoutConfig, env: Mapping[str, str]) -> None:
        self._routing = config.routing
        self._table = config.source.table_name
        self.place = resolve(config.source, {}, env)
        self._pool = LakePool(threads=1)
        self._asking = threading.Lock()

    @contextlib.contextmanager
    def _session(self) -> Iterator[tuple[PooledLake, SourceLake]]:
        with self._asking, self._pool.use(self.place, read_only=True) as lake:
            yield lake, SourceLake(lake, self._table)

    def latest(self) -> int:
        with self._session() as (_, source):
            return source.latest()

    def look(self, snapshots: Iterable[int]) -> tuple[int, dict[int, int]]:
        """The newest lake snapshot, with its stamp and the stamps of those `snapshots` that exist."""
        try:
            return self._look(snapshots)
        except LakeWriteError:
            return self._look(snapshots)  # a session that saw another history was discarded

    def _look(self, snapshots: Iterable[int]) -> tuple[int, dict[int, int]]:
        with self._session() as (_, source):
            latest = source.latest()
            source.refuse_stale_session(latest)
            return latest, source.stamps({latest, *snapshots})

    def last_touch(self, since: int, latest: int) -> int:
        with self._session() as (_, source):
            return source.last_touch(since, latest)

    def readable_from(self, latest: int) -> int:
        with self._session() as (_, source):
            return source.readable_from(latest)

    def plan(self, start: int, end: int) -> ReadPlan:
        """The changes after `start`."""
        with self._session() as (_, source):
            return source.plan(self._routing.field, self._routing.key_columns, start, end)

    def plan_scan(self) -> ReadPlan:
        """All current rows."""
        with self._session() as (_, source):
            return source.plan_scan(self._routing.field, self._routing.key_columns, source.latest())

    def plan_seed(self, max_snapshots: int) -> ReadPlan:
        """
        The seed of a new destination: all current rows, or no rows and a cursor before all history.

        In the second case the table starts with the columns at the end of the first cycle, because the current columns
        may never have existed together with the changes in between.
        """
        plan = self.plan_scan()
        if self._routing.seed_mode == "scan":
            return plan
        with self._session() as (_, source):
            table_id, made, _ = source.table_at(plan.end)
            before = max(made - 1, 0)
            end = min(before + max_snapshots, plan.end)
            try:
                source.refuse_unreadable(table_id, before, plan.end)
                first = source.plan_scan(self._routing.field, self._routing.key_columns, end)
            except (SourceExpiredError, RoutingError, LakeTableMissingError) as exc:
                log.warning("history cannot be replayed, seeding by a scan instead", error=str(exc))
                return plan
            stamp = source.stamps([before]).get(before)
        return replace(first, reads=(), start=before, end=before, stamp=stamp)

    def check_values(self, plan: ReadPlan, values: Sequence[str], ids: Sequence[str]) -> None:
        """Raise if routing values are not valid for the column's type."""
        with self._session() as (lake, _):
            check_routes(lake, plan, Routes(tuple(values), (), ()), ids)

    def values(self, plan: ReadPlan) -> list[str]:
        """All routing values in the source at the plan's end."""
        [read] = plan.reads
        with self._session() as (lake, _):
            rows = lake.execute(
                f"select distinct ({read.cells[plan.field]})::varchar as value"
                f" from {lake.table(read.table)} at (version => {plan.end})",
                doing="looking for routing values",
            )
        return sorted(str(value) for (value,) in rows if value is not None)

    def canonical(self, plan: ReadPlan, values: Sequence[str]) -> list[str | None]:
        """Each value in the form of the routing column's type; None for a value that is not valid for it."""
        with self._session() as (lake, _):
            [[found]] = lake.execute(
                f"select list_transform(?::varchar[], lambda v: try_cast(v as {plan.field_type})::varchar)",
                [list(values)],
                doing="checking the routing values",
            )
        return list(found)

    def rows(self, plan: ReadPlan) -> int:
        """The number of rows that a scan plan will read."""
        with self._session() as (lake, _):
            counted = [
                lake.execute(f"select count(*) from {lake.table(r.table)} at (version => {plan.end})")[0][0]
                for r in plan.reads
            ]
        return sum(map(int, counted))

    def listed(self, table: str, plan: ReadPlan) -> list[dict[str, str]]:
        """The rows of the table of destinations at the plan's end, as texts; NULLs are left out."""
        name = parse_table_name(table, default_schema="main", fold_case=False)
        with self._session() as (lake, _):
            SourceLake(lake, name, key="destinations_table").table_at(plan.end)
            place = f"{lake.table(name)} at (version => {plan.end})"
            found = lake.execute(f"select column_name from (describe from {place})")
            columns = [column for (column,) in found if column.lower() in LISTED_KEYS]
            texts = ", ".join(f"{ident(column)}::varchar" for column in columns) or "1"
            rows = lake.execute(f"select {texts} from {place}", doing="reading the table of destinations")
        keys = [column.lower() for column in columns]
        return [{k: v for k, v in zip(keys, row, strict=True) if v is not None} for row in rows if keys]

    def seconds_since(self, snapshots: Sequence[int]) -> dict[int, float]:
        """The age of each of the lake snapshots."""
        with self._session() as (_, source):
            return {s: max(0.0, time.time() - (source.seconds_at(s) or time.time())) for s in snapshots}

    def close(self) -> None:
        self._pool.close()
