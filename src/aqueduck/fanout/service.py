"""
The service of the flow `fanout`: poll the source, bring every destination to its newest lake snapshot, wait.

Two lanes share the work. The *main lane* serves all healthy destinations, with one read of the source's
changes for all of them. The *side lane*, a separate thread, serves the others: it reads cursors from lakes,
seeds new destinations from a pinned lake snapshot, and retries failing ones, each from its own cursor. So
neither a long seed nor a broken destination delays the rest.

Progress is stored in the destinations' lakes. The state file holds the one other thing that must survive a
restart: the values for which the pattern created destinations. `fanout.run` schedules the lanes;
`fanout.overview` makes the picture of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from py4j.protocol import Py4JError

from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.fanout_roster import Made, Roster, made_of, values_of
from aqueduck.config.lake_place import LakePlace
from aqueduck.fanout.destinations import ServedDestination, ServedDestinations
from aqueduck.fanout.maintain import DestinationUpkeep
from aqueduck.fanout.progress import LaneProgress
from aqueduck.fanout.status import FLOW, FanoutStatus, destination_rows
from aqueduck.lake.source.allowed_places import AllowedPlaces
from aqueduck.lake.source.fanout_source import FanoutSource
from aqueduck.lake.source.source_lake import ReadPlan
from aqueduck.model.errors import (
    AqueduckError,
    ConfigError,
    LakeTableMissingError,
    MergedChangesError,
    ReservedColumnError,
    RoutingError,
    SourceDivergedError,
    SourceExpiredError,
    SparkStartError,
    VerifyDifferenceError,
)
from aqueduck.overview import metrics
from aqueduck.service.verify_schedule import Verdicts
from aqueduck.spark.query.fanout_query import CycleResult, Workers, find_cursors, run_cycle
from aqueduck.spark.session.session import build_session
from aqueduck.state_files.destinations import DestinationsFile, state_path

__all__ = ["FanoutService"]

log = structlog.get_logger()

HANG_SECONDS = 60.0
"""A job that uses no processor time for this long is ended; its destinations are then retried one by one."""
COUNT_SHARE = 50
"""After a cycle that took one second, destinations are counted in one cycle within this many seconds."""
SEED_WAVE = 500
"""Destinations that are seeded by one read of the source."""
_FATAL = (RoutingError, ReservedColumnError, ConfigError, SparkStartError)


class FanoutService:
    """One source table and the destinations that this instance serves."""

    def __init__(
        self, config: FanoutConfig, *, env: Mapping[str, str] = os.environ, spark: Any = None
    ) -> None:
        self.config = config
        self.env = env
        self.status = FanoutStatus(config.instance.id)
        self.state_file = DestinationsFile(state_path(config))
        self.served = ServedDestinations(config, self.status, env)
        self.source = FanoutSource(config, env)
        self._spark: Any = spark
        self._own_spark = spark is None
        self._counted = -1
        self._count_at = 0.0
        """When destinations are next counted."""
        self._to_count = False
        """Whether anything was applied since the last count."""
        self.upkeep = DestinationUpkeep(config.maintenance)
        self.verdicts = Verdicts(state_path(config).with_suffix(".verified.json"))
        self.reseed_wanted: set[str] = set()
        """Destinations that were found to differ; the main lane re-seeds them."""
        self.verifying: Callable[[], tuple[str, ...]] = tuple
        self._listed_at: int | None = None
        self._roster: Roster | None = None
        self._unknown: deque[str] = deque()
        """Values without a destination that the first seed met; the main lane adds them."""
        self._made: Made | None = None
        """All values for which the pattern ever created a destination; None until they were looked up."""
        path = self.state_file.path
        self.progress = {lane: LaneProgress(path.with_suffix(f".{lane}")) for lane in ("main", "side")}

    def prepare(self) -> None:
        """Refuse what can be refused before Spark starts: the table, its columns, the routing values."""
        self.take_over(self.config)

    def take_over(self, config: FanoutConfig) -> None:
        """
        Serve what a configuration says; unchanged destinations continue as they are.

        Everything is read and checked before anything changes: an error leaves the service as it was.
        """
        plan = self.source.plan_scan()
        named = config.destinations
        self.source.check_values(plan, [d.routing_value for d in named], [d.id for d in named])
        self._serve(config, plan, self.source.values(plan) if config.dynamic is not None else ())

    def _serve(self, config: FanoutConfig, plan: ReadPlan, values: Sequence[str] = ()) -> None:
        """
        Serve the destinations of the file, of its table, and of the pattern for these values and those seen
        before.
        """
        made = self.state_file.recall() if self._made is None else self._made
        roster = Roster(config, self.env, functools.partial(self.source.canonical, plan), made)
        if config.destinations_table is not None:
            roster.add_rows(self.source.listed(config.destinations_table, plan), AllowedPlaces(config))
        found = roster.add_values([*values_of(config, made, self.env), *values])
        self._made = made | made_of(config, found, self.env)
        self.served.take_over(config, roster.destinations)
        self.config, self._roster, self._listed_at = config, roster, plan.end
        self._report_left_out()

    def _look_for_destinations(self, latest: int) -> None:
        """The destinations of the table, and those for values that no cycle of the main lane will report."""
        if self._unknown:
            self._discover([self._unknown.popleft() for _ in range(len(self._unknown))])
        # Without a healthy destination there is no cycle that meets new values.
        alone = self.config.dynamic is not None and not any(one.well for one in self.served)
        if latest != self._listed_at and (alone or self.config.destinations_table is not None):
            plan = self.source.plan_scan()
            self._serve(self.config, plan, self.source.values(plan) if alone else ())

    def _discover(self, values: Sequence[str]) -> None:
        """Serve the destinations that the pattern creates for new values in the changes."""
        assert self._roster is not None
        assert self._made is not None
        new = self._roster.add_values(values)
        self._made |= made_of(self.config, new, self.env)
        self.served.add(new)
        self._report_left_out()
        if new:
            log.info("destinations discovered", new=len(new), destinations=len(self.served))

    def _report_left_out(self) -> None:
        assert self._roster is not None
        before, now = self.status.left_out, dict(self._roster.left_out)
        for name, problem in now.items():
            if before.get(name) != problem:
                log.warning("destination left out", destination=name, problem=problem)
        self.status.left_out = now

    @property
    def spark(self) -> Any:
        if self._spark is None:
            spark = self.config.spark
            self._spark = build_session(
                spark.master, spark.conf, "aqueduck fanout", state_dir=self.config.state_dir
            )
        return self._spark

    @property
    def workers(self) -> Workers:
        return Workers(
            self.config.instance.id,
            # A task writes several destinations at a time, and keeps their sessions for the next cycle.
            tasks=max(1, self._cores // 4),
            max_open=self.config.pool.max_open,
        )

    # -- the main lane

    def poll(self) -> bool:
        """Run one cycle for the healthy destinations; returns whether there was anything to do."""
        self.status.polls += 1
        self.status.moved_at = time.time()
        try:
            latest = self._look([one for one in self.served if one.well])
            self._look_for_destinations(latest)
        except _FATAL:
            raise
        except AqueduckError as exc:
            self._source_failed(exc)
            return False
        if self.status.source_error is not None:
            log.info("back again")
        self.status.source_error = None
        self.status.source_snapshot = latest
        self._reseed_wanted()
        self._lags(latest)
        behind = [one for one in self.served if one.well and self._has_work(one, latest)]
        end = latest
        if not behind and self._to_count and time.monotonic() >= self._count_at:
            behind = [one for one in self.served if one.well]
            end = max((one.cursor or 0 for one in behind), default=latest)
        if not behind:
            return False
        self._cycle(behind, end, lane="main")
        self._lags(latest)
        return True

    def _look(self, served: Sequence[ServedDestination]) -> int:
        """
        The source's newest lake snapshot; a destination whose cursor belongs to another history will be
        re-seeded.
        """
        asked = {s for one in served for s in (one.cursor, one.reached) if s is not None}
        latest, stamps = self.source.look(asked)
        for one in served:
            if one.cursor is None:
                continue
            if one.reached is not None and stamps.get(one.reached) != one.reached_stamp:
                one.reached, one.reached_stamp = one.cursor, one.stamp
            stamp = stamps.get(one.cursor)
            if one.cursor > latest or (stamp is not None and one.stamp not in (None, stamp)):
                why = "the source lake was restored: its lake snapshot {} differs from what was read"
                self._seed_again(one, SourceDivergedError(why.format(one.cursor)))
            elif one.stamp is None:
                one.stamp = stamp  # an earlier version did not store it
        self._pass_by(served, latest, stamps.get(latest))
        return latest

    def _has_work(self, one: ServedDestination, latest: int) -> bool:
        return one.reached != latest or one.settles(len(self.served))

    def _pass_by(self, served: Sequence[ServedDestination], latest: int, stamp: int | None) -> None:
        """
        Advance destinations past lake snapshots that did not touch the table, if they have read everything
        before.
        """
        behind = [one for one in served if one.reached not in (None, latest)]
        since = min((one.reached for one in behind if one.reached is not None), default=latest)
        if since == latest or latest - since > self.config.poll.max_snapshots:
            return
        last = self.source.last_touch(since, latest)
        for one in behind:
            if one.reached is not None and one.reached >= last:
                one.reach(latest, stamp)

    def _cycle(self, served: Sequence[ServedDestination], latest: int, *, lane: str) -> None:
        """Bring destinations that have a cursor to `latest`, or as far as one cycle reaches."""
        start = min(one.reached for one in served if one.reached is not None)
        main = lane == "main"
        end = min(latest, start + self.config.poll.max_snapshots)
        try:
            plan = self._plan(served, start, end, latest)
            self._look(served)  # the plan may be from a later history than the previous look
        except _FATAL:
            raise
        except AqueduckError as exc:
            self._source_failed(exc, () if main else served)
            return
        if plan is None:
            return
        served = [one for one in served if one.cursor is not None and (one.cursor < end or start == end)]
        count = main and bool(plan.keys) and time.monotonic() >= self._count_at
        plan = replace(plan, counted=plan.counted or count)
        everyone = len(served) == sum(one.well for one in self.served)
        result = self._run(
            plan, served, lane,
            parts=1 if plan.reads and end - start < 50 else self._cores,
            count_after=max(start, self._counted) if main else None,
        )  # fmt: skip
        if result is not None:
            self._record(served, result)
            if count:
                self._count_at = time.monotonic() + COUNT_SHARE * result.seconds
            if main:
                self._to_count = bool(plan.keys) and not (count and everyone)
                self._counted = max(self._counted, end)
                if result.report.unknown:
                    self._discover(result.report.unknown)

    def _plan(
        self, served: Sequence[ServedDestination], start: int, end: int, latest: int
    ) -> ReadPlan | None:
        """How to read a range; None if it can no longer be read and destinations must be re-seeded."""
        try:
            return self.source.plan(start, end)
        except SourceExpiredError as exc:
            first = self.source.readable_from(latest)
            lost = [one for one in served if one.reached is not None and not first <= one.reached <= latest]
            why: AqueduckError = exc
        except (LakeTableMissingError, RoutingError, ReservedColumnError) as exc:
            if end == latest:
                raise
            lost = [one for one in served if one.cursor is not None and one.cursor < end]
            why = exc
        for one in lost:
            self._seed_again(one, why)
        return None

    @property
    def places(self) -> list[LakePlace]:
        """The lakes of the source and of all destinations, as far as this instance knows."""
        return [self.source.place, *(one.destination.place for one in self.served)]

    @property
    def _cores(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)

    def _run(
        self,
        plan: ReadPlan,
        served: Sequence[ServedDestination],
        lane: str,
        *,
        parts: int = 1,
        count_after: int | None = None,
    ) -> CycleResult | None:
        """
        Run the job. If it fails as a whole, some destinations may have committed, so all their cursors are
        read again.
        """
        workers, hanging = self._watched(lane)
        mine = {one.destination.id: one.destination for one in served}
        others = [one.destination.value for one in self.served if one.destination.id not in mine]
        try:
            return run_cycle(
                self.spark, plan, list(mine.values()), workers,
                elsewhere=[*others, *self.served.elsewhere.values()] if count_after is not None else (),
                parts=parts, count_after=count_after,
                want_unknown=self.config.dynamic is not None and count_after is not None, lane=lane,
                hanging=hanging,
            )  # fmt: skip
        except _FATAL:
            raise
        except MergedChangesError as exc:
            for one in served:
                self._seed_again(one, exc)
            return None
        except AqueduckError as exc:
            log.warning("cycle failed", lane=lane, error=str(exc))
            self.served.failed(served, str(exc))
            for one in served:
                one.known, one.alone = False, one.status.failures > 1
            return None

    def _watched(self, lane: str) -> tuple[Workers, Callable[[], bool]]:
        """Workers that report progress in this lane, and a test whether they are stuck."""
        progress = self.progress[lane]
        progress.restart()
        workers = replace(self.workers, progress_file=str(progress.path))
        return workers, lambda: progress.idle_seconds() > HANG_SECONDS

    def _reseed_wanted(self) -> None:
        """Re-seed destinations that were found to differ; only this lane writes healthy ones."""
        for one in [one for one in self.served if one.well and one.destination.id in self.reseed_wanted]:
            self.reseed_wanted.discard(one.destination.id)
            self._seed_again(one, VerifyDifferenceError("it differs from the source"))

    def _seed_again(self, one: ServedDestination, why: AqueduckError) -> None:
        """Re-seed it with the current rows; its cursor is no longer valid."""
        log.warning("destination is seeded again", destination=one.status.id, reason=str(why))
        one.at(None)
        one.again = True
        one.status.state, one.status.last_error = "pending", str(why)
        self.status.reseeds += 1
        metrics.count_destination_error(FLOW, one.status.id, why.code)

    # -- the side lane

    def help_others(self) -> bool:
        """
        Run one round for destinations that the main lane does not serve; returns whether there was anything
        to do.
        """
        now = time.time()
        waiting = [one for one in self.served if not one.well and one.due(now)]
        unknown = [one for one in waiting if not one.known]
        if unknown:
            self._ask(unknown)
            return True
        new = [one for one in waiting if one.cursor is None][:SEED_WAVE]
        if new:
            self._seed(new)
            return True
        if waiting:
            self._try_again(waiting)
            return True
        return False

    def _ask(self, served: Sequence[ServedDestination]) -> None:
        """Read the cursors from lakes; a cursor of another table or value counts as none."""
        try:
            plan = self.source.plan_scan()
        except _FATAL:
            raise
        except AqueduckError as exc:
            self._source_failed(exc, served)
            return
        try:
            workers, hanging = self._watched("side")
            mine = [one.destination for one in served]
            found = find_cursors(self.spark, plan, mine, workers, lane="side", hanging=hanging)
        except _FATAL:
            raise
        except AqueduckError as exc:
            self.served.failed(served, str(exc))
            return
        by_id = {one.destination.id: one for one in served}
        for each in found:
            one = by_id[each.id]
            if each.error is not None:
                self.served.failed([one], each.error)
                continue
            one.at(None if one.again else each.cursor, each.stamp)
            one.status.rows_before = each.rows - one.status.rows_here
            one.status.last_change_at = each.changed_at
            one.asked()
        self.status.moved_at = time.time()

    def _seed(self, served: Sequence[ServedDestination]) -> None:
        """Seed new destinations with the current rows; the lake snapshot is pinned before anything is read."""
        again = [one for one in served if one.again]
        served = again or served
        try:
            plan = self.source.plan_scan() if again else self.source.plan_seed(self.config.poll.max_snapshots)
            self.status.seed = (len(served), self.source.rows(plan), time.time())
        except _FATAL:
            raise
        except AqueduckError as exc:
            self._source_failed(exc, served)
            return
        for one in served:
            one.status.state = "seeding"
        # Include values for which the pattern is about to create a destination: once their rows are deleted
        # at the source, nothing else names them.
        self.write_state()
        log.info("seeding", destinations=len(served), lake_snapshot=plan.end)
        first = self._counted < 0 and bool(plan.reads)
        try:
            result = self._run(plan, served, "side", count_after=-1 if first else None)
        finally:
            self.status.seed = None
        if result is not None:
            if first:
                self._counted = max(self._counted, plan.end)
                self._unknown.extend(result.report.unknown)
            self._record(served, result)
            log.info(
                "seeded", destinations=len(served), rows=result.report.rows, seconds=round(result.seconds, 3)
            )

    def _try_again(self, served: Sequence[ServedDestination]) -> None:
        try:
            latest = self._look(served)
        except AqueduckError as exc:
            self._source_failed(exc, served)
            return
        behind = [one for one in served if one.reached is not None and self._has_work(one, latest)]
        for one in [one for one in served if one.reached is not None and one not in behind]:
            one.recovered()
        if behind:
            self._cycle([one for one in behind if one.alone][:1] or behind, latest, lane="side")

    def _record(self, served: Sequence[ServedDestination], result: CycleResult) -> None:
        self.served.record(served, result)
        self.status.moved_at = time.time()
        self.write_state()

    def _source_failed(self, exc: AqueduckError, waiting: Sequence[ServedDestination] = ()) -> None:
        """Make destinations of the side lane wait until the main lane's next look; it is not their failure."""
        if self.status.source_error is None:
            log.warning("source out of reach: waiting and trying again", error=str(exc))
        self.status.source_error = str(exc)
        metrics.count_error(exc.code, flow=FLOW)
        for one in waiting:
            one.status.retry_at = time.time() + self.config.poll.interval_seconds

    def _lags(self, latest: int) -> None:
        behind = [one for one in self.served if one.reached is not None and one.reached < latest]
        since: dict[int, float] = {}
        if behind:
            with contextlib.suppress(AqueduckError):
                since = self.source.seconds_since(sorted({(one.reached or 0) + 1 for one in behind}))
        for one in self.served:
            cursor = latest if one.reached is None else one.reached
            one.status.lag_snapshots = max(0, latest - cursor)
            one.status.lag_seconds = since.get(cursor + 1, 0.0)

    def write_state(self) -> None:
        """Write what `aqueduck status` shows and what the pattern created, if it changed."""
        for name, status in list(self.status.destinations.items()):
            status.verified = self.verdicts[name]
        self.state_file.remember(self._made or Made())
        self.state_file.write(destination_rows(self.status))

    def stop(self) -> None:
        """End Spark and the sessions; committed work stays committed."""
        with contextlib.suppress(OSError, AqueduckError):
            self.write_state()
        if self._spark is not None and self._own_spark:
            # Stopping a Spark that is already gone fails.
            with contextlib.suppress(OSError, Py4JError):
                self._spark.stop()
            self._spark = None
        self.source.close()
