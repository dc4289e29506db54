"""
The service of the flow `fanout`: ask the source, bring every destination to its newest lake snapshot, wait.

Two lanes share the work.  The *main lane* serves all destinations that are well: one read of the source's
changes for all of them.  The *side lane*, a thread of its own, serves the others: it asks lakes for
their cursors, seeds new destinations from a pinned lake snapshot, and tries failing ones again, each from its own
cursor.  So neither a long seed nor a broken destination holds up the rest.

What is true about progress is in the destinations' lakes; nothing here has to survive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from py4j.protocol import Py4JError

from aqueduck.app.fanout_source import FanoutSource
from aqueduck.app.fanout_status import FanoutStatus, StateFile, state_path
from aqueduck.app.fanout_tenants import Tenant, Tenants
from aqueduck.app.maintenance_fanout import DestinationUpkeep, only_instance
from aqueduck.errors import (
    AqueduckError,
    ConfigError,
    LakeWriteError,
    ReservedColumnError,
    RoutingError,
    SourceExpiredError,
    SparkStartError,
)
from aqueduck.fanout_config import FanoutConfig, load_fanout
from aqueduck.fanout_plan import TRIES
from aqueduck.lake.source_lake import ReadPlan
from aqueduck.spark.fanout_query import CycleResult, Workers, find_cursors, run_cycle
from aqueduck.spark.session import build_session

__all__ = ["FanoutService", "fanout_state", "run_fanout"]

log = structlog.get_logger()

SEED_WAVE = 500
"""Destinations that are seeded by one read of the source."""
_FATAL = (RoutingError, ReservedColumnError, ConfigError, SparkStartError)


class FanoutService:
    """One source table and the destinations that this instance serves."""

    def __init__(
        self, config: FanoutConfig, *, env: Mapping[str, str] = os.environ, spark: Any = None
    ) -> None:
        self.config = config
        self.status = FanoutStatus(config.instance.id)
        self.state_file = StateFile(state_path(config))
        self.tenants = Tenants(config, self.status, env)
        self.source = FanoutSource(config, env)
        self._spark: Any = spark
        self._own_spark = spark is None
        self._counted = -1
        self._progress = self.state_file.path.with_suffix(".progress")
        self._upkeep = DestinationUpkeep(config.maintenance)

    def prepare(self) -> None:
        """Refuse what can be refused before Spark starts: the table, its columns, the routing values."""
        plan = self.source.plan_scan()
        ids = [*(t.destination.id for t in self.tenants), *self.tenants.elsewhere]
        values = [*(t.destination.value for t in self.tenants), *self.tenants.elsewhere.values()]
        self.source.check_values(plan, values, ids)
        if self.config.dynamic is not None:
            self.tenants.discover(self.source.values(plan))

    @property
    def spark(self) -> Any:
        if self._spark is None:
            spark = self.config.spark
            self._spark = build_session(spark.master, spark.conf, "aqueduck fanout")
        return self._spark

    @property
    def workers(self) -> Workers:
        cores = int(self.spark.sparkContext.defaultParallelism)
        return Workers(
            self.config.instance.id,
            # A task writes several destinations at a time, and keeps their sessions for the next cycle.
            tasks=max(1, cores // 4),
            max_open=self.config.pool.max_open,
            progress_file=str(self._progress),
        )

    # -- the main lane

    def poll(self) -> bool:
        """One cycle for the destinations that are well; whether there was anything to do."""
        self.status.polls += 1
        try:
            latest = self.source.latest()
        except AqueduckError as exc:
            self._source_failed(exc)
            return False
        self.status.source_error = None
        self.status.source_snapshot = latest
        self._progressed()
        self._lags(latest)
        behind = [t for t in self.tenants if t.well and t.cursor != latest]
        if not behind:
            return False
        self._cycle(behind, latest, lane="main")
        self._lags(latest)
        return True

    def _cycle(self, tenants: Sequence[Tenant], latest: int, *, lane: str) -> None:
        """Bring destinations that have a cursor to `latest`, or as far as one cycle goes."""
        start = min(t.cursor for t in tenants if t.cursor is not None)
        main = lane == "main"
        try:
            if any(t.cursor is not None and t.cursor > latest for t in tenants):
                raise SourceExpiredError("a destination is ahead of the source, which was put back")
            end = min(latest, start + self.config.poll.max_snapshots)
            plan = self.source.plan(start, end)
        except SourceExpiredError as exc:
            self._reseed(tenants, latest, exc)
            return
        except _FATAL:
            raise
        except AqueduckError as exc:
            self._source_failed(exc)
            return
        tenants = [t for t in tenants if t.cursor is not None and t.cursor < end]
        result = self._run(
            plan, tenants, lane,
            parts=1 if plan.reads and end - start < 50 else self._cores,
            count_after=max(start, self._counted) if main else None,
        )  # fmt: skip
        if result is not None:
            self._note(tenants, result)
            if main:
                self._counted = max(self._counted, end)
                self.tenants.discover(result.report.unknown)

    @property
    def _cores(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)

    def _run(
        self,
        plan: ReadPlan,
        tenants: Sequence[Tenant],
        lane: str,
        *,
        parts: int = 1,
        count_after: int | None = None,
    ) -> CycleResult | None:
        """Run the job; a job that fails as a whole leaves what destinations committed, so all are asked again."""
        mine = [t.destination for t in tenants]
        others = [t.destination.value for t in self.tenants if t not in tenants]
        try:
            return run_cycle(
                self.spark, plan, mine, self.workers,
                elsewhere=[*others, *self.tenants.elsewhere.values()] if count_after is not None else (),
                parts=parts, count_after=count_after,
                want_unknown=self.config.dynamic is not None and count_after is not None, lane=lane,
            )  # fmt: skip
        except _FATAL:
            raise
        except AqueduckError as exc:
            log.warning("cycle failed", lane=lane, error=str(exc))
            self.tenants.failed(tenants, str(exc))
            for tenant in tenants:
                tenant.known = False
            return None

    def _reseed(self, tenants: Sequence[Tenant], latest: int, why: SourceExpiredError) -> None:
        """Those whose range has a gap are seeded again; the others go on with the next cycle."""
        first = self.source.readable_from(latest)
        for tenant in tenants:
            if tenant.cursor is not None and not first <= tenant.cursor <= latest:
                log.warning("destination is seeded again", destination=tenant.status.id, reason=str(why))
                tenant.at(None)
                self.status.reseeds += 1
                self.status.errors[why.code, tenant.status.id] += 1

    # -- the side lane

    def help_others(self) -> bool:
        """One round for destinations that the main lane does not serve; whether there was anything to do."""
        now = time.time()
        waiting = [t for t in self.tenants if not t.well and t.due(now)]
        unknown = [t for t in waiting if not t.known]
        if unknown:
            self._ask(unknown)
            return True
        new = [t for t in waiting if t.cursor is None][:SEED_WAVE]
        if new:
            self._seed(new)
            return True
        if waiting:
            self._try_again(waiting)
            return True
        return False

    def _ask(self, tenants: Sequence[Tenant]) -> None:
        """Ask lakes for their cursors; one that belongs to another table or value counts as none."""
        try:
            uuid = self.source.uuid()
            found = find_cursors(self.spark, [t.destination for t in tenants], self.workers, lane="side")
        except _FATAL:
            raise
        except AqueduckError as exc:
            self.tenants.failed(tenants, str(exc))
            return
        by_id = {t.destination.id: t for t in tenants}
        for name, cursor, source_uuid, value, error in found:
            tenant = by_id[name]
            if error is not None:
                self.tenants.failed([tenant], error)
                continue
            fits = source_uuid == uuid and value == tenant.destination.value
            tenant.at(cursor if fits else None)
            tenant.known = True
            tenant.recovered()

    def _seed(self, tenants: Sequence[Tenant]) -> None:
        """Give new destinations their rows as of now; the lake snapshot is pinned before anything is read."""
        for tenant in tenants:
            tenant.status.state = "SEEDING"
        self._write_state()
        try:
            plan = self.source.plan_seed()
        except _FATAL:
            raise
        except AqueduckError as exc:
            self.tenants.failed(tenants, str(exc))
            return
        log.info("seeding", destinations=len(tenants), lake_snapshot=plan.end)
        first = self._counted < 0 and bool(plan.reads)
        result = self._run(plan, tenants, "side", count_after=-1 if first else None)
        if result is not None:
            self._counted = max(self._counted, plan.end)
            self._note(tenants, result)
            log.info(
                "seeded", destinations=len(tenants), rows=result.report.rows, seconds=round(result.seconds, 3)
            )

    def _try_again(self, tenants: Sequence[Tenant]) -> None:
        try:
            latest = self.source.latest()
        except AqueduckError as exc:
            self._source_failed(exc)
            return
        for tenant in [t for t in tenants if t.cursor == latest]:
            tenant.recovered()
        behind = [t for t in tenants if t.cursor != latest]
        if behind:
            self._cycle(behind, latest, lane="side")

    def _note(self, tenants: Sequence[Tenant], result: CycleResult) -> None:
        self.tenants.note(tenants, result)
        self._progressed()
        self._write_state()

    def _source_failed(self, exc: AqueduckError) -> None:
        self.status.source_error = str(exc)
        self.status.errors[exc.code, ""] += 1
        log.warning("source out of reach", error=str(exc))

    def _lags(self, latest: int) -> None:
        behind = [t for t in self.tenants if t.cursor is not None and t.cursor < latest]
        since: dict[int, float] = {}
        if behind:
            with contextlib.suppress(AqueduckError):
                since = self.source.seconds_since(sorted({(t.cursor or 0) + 1 for t in behind}))
        for tenant in self.tenants:
            cursor = latest if tenant.cursor is None else tenant.cursor
            tenant.status.lag_snapshots = max(0, latest - cursor)
            tenant.status.lag_seconds = since.get(cursor + 1, 0.0)

    def _progressed(self) -> None:
        self.status.progress_at = time.time()
        self.status.ready = all(t.known for t in self.tenants)

    def healthy(self) -> bool:
        """Green while anything moves, also inside a long job; red when nothing has for a while."""
        with contextlib.suppress(OSError):
            self.status.progress_at = max(self.status.progress_at, self._progress.stat().st_mtime)
        return self.status.healthy(patience_seconds=max(60.0, 5 * self.config.poll.interval_seconds))

    def _write_state(self) -> None:
        self.state_file.write(self.status)

    # -- running

    def run_once(self, stopping: threading.Event) -> None:
        """Catch up with what is there now; raises if a destination could not."""
        target = self.source.latest()
        while not stopping.is_set():
            worked = self.help_others()
            well = [t for t in self.tenants if t.well]
            if any(t.cursor is not None and t.cursor < target for t in well):
                worked = self.poll() or worked
                if self.status.source_error is not None:
                    raise LakeWriteError(f"the source cannot be read: {self.status.source_error}")
            left = [t for t in self.tenants if not (t.well and (t.cursor or 0) >= target)]
            self._write_state()
            if not left:
                return
            if all(t.status.failures >= TRIES for t in left):
                raise LakeWriteError(
                    f"{len(left)} destinations could not be written, {left[0].status.id} among them:"
                    f" {left[0].status.last_error}"
                )
            if not worked:
                stopping.wait(0.2)

    def supervise(self, stopping: threading.Event, reload: threading.Event, path: Path | None) -> None:
        """Poll until told to stop; the side lane runs beside it."""
        failure: list[BaseException] = []
        side = threading.Thread(target=self._side_lane, args=(stopping, failure), daemon=True)
        side.start()
        while not stopping.is_set():
            if reload.is_set() and path is not None:
                reload.clear()
                self._reload(path)
            self.poll()
            self._write_state()
            if failure:
                raise failure[0]
            if not any(t.well and (t.cursor or 0) < self.status.source_snapshot for t in self.tenants):
                # Only this lane writes them, and it does not now.
                well = [t.destination for t in self.tenants if t.well]
                self._upkeep.some((d.id, d.place, d.target) for d in well)
                _wait_any(stopping, reload, self.config.poll.interval_seconds)
        side.join(timeout=60)

    def _side_lane(self, stopping: threading.Event, failure: list[BaseException]) -> None:
        while not stopping.is_set():
            try:
                worked = self.help_others()
            except Exception as exc:  # noqa: BLE001 - ends the service with its error
                failure.append(exc)
                return
            if worked:
                self._write_state()
            else:
                stopping.wait(0.5)

    def _reload(self, path: Path) -> None:
        """Take over the destinations of the changed file; one that is wrong changes nothing."""
        before = self.config
        try:
            config = load_fanout(path)
            fixed = {"destinations": config.destinations, "dynamic": config.dynamic, "poll": config.poll}
            if self.config.model_copy(update=fixed) != config:
                log.warning("only destinations, dynamic and poll are taken over without a restart")
            self.config = self.config.model_copy(update=fixed)
            self.tenants.take_over(self.config)
            self.prepare()
        except AqueduckError as exc:
            log.warning("configuration not taken over", error=str(exc))
            if self.config is not before:
                self.config = before
                self.tenants.take_over(before)
            return
        log.info("configuration taken over", destinations=len(self.tenants))

    def stop(self) -> None:
        """End Spark and the sessions; what is committed is committed."""
        with contextlib.suppress(OSError, AqueduckError):
            self._write_state()
        if self._spark is not None and self._own_spark:
            # A Spark that is gone already cannot be stopped.
            with contextlib.suppress(OSError, Py4JError):
                self._spark.stop()
            self._spark = None
        self.source.close()


def _wait_any(stopping: threading.Event, reload: threading.Event, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not stopping.is_set() and not reload.is_set() and time.monotonic() < deadline:
        stopping.wait(min(0.5, max(0.01, deadline - time.monotonic())))


def fanout_state(path: Path) -> list[dict[str, Any]]:
    """What `aqueduck status` shows: the destinations as the service last wrote them."""
    return StateFile(state_path(load_fanout(path))).read()


def run_fanout(path: Path, *, once: bool) -> None:
    """`aqueduck run` on a file of this flow: until SIGTERM or ctrl-C, SIGHUP reads the file again."""
    stopping, reload = threading.Event(), threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.set())
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    config = load_fanout(path)
    with only_instance(config):
        _run(FanoutService(config), stopping, reload, path, once=once)
    log.info("stopped")


def _run(
    service: FanoutService, stopping: threading.Event, reload: threading.Event, path: Path, *, once: bool
) -> None:
    try:
        service.prepare()
        log.info("fan-out started", destinations=len(service.tenants), instance=service.config.instance.id)
        if once:
            service.run_once(stopping)
        else:
            service.supervise(stopping, reload, path)
    finally:
        service.stop()
