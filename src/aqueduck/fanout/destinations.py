"""
The destinations that an instance serves, with its knowledge of each: cursor, failures, next try.

`ServedDestinations` follows the configuration and the results of cycles; `fanout.service` decides what to do when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from aqueduck.config.fanout import DestinationConfig, FanoutConfig, assigned
from aqueduck.config.lake_place import lake_address
from aqueduck.fanout.status import FLOW, DestinationStatus, FanoutStatus
from aqueduck.lake.destinations.cycle import Applied, Destination
from aqueduck.model.errors import AqueduckError
from aqueduck.model.routing import backoff_seconds
from aqueduck.overview import metrics
from aqueduck.spark.query.fanout_query import CycleResult

__all__ = ["ServedDestination", "ServedDestinations"]

log = structlog.get_logger()

STILL_SNAPSHOTS = 100
STILL_SECONDS = 600.0
"""How many lake snapshots, and for how long, a cursor may lag if none of them touched the table."""
_MISCOUNTED = (
    "its row count differed from the source's; if that happens again, the key columns are not unique"
)


class ServedDestination:
    """A destination and the service's knowledge of it."""

    def __init__(self, destination: Destination, status: DestinationStatus, *, inside: bool = False) -> None:
        self.destination = destination
        self.inside = inside
        """
        Whether its lake is the source's own, where each commit of the cursor creates a lake snapshot of the
        source.
        """
        self.status = status
        self.known = False
        """Whether the cursor was read from its lake."""
        self.stamp: int | None = None
        """The stamp of the cursor's lake snapshot; None if its lake does not record it."""
        self.reached: int | None = None
        """
        The lake snapshot up to which it is complete: that of the cursor, or a later one without changes in
        between.
        """
        self.reached_stamp: int | None = None
        self.moved_at = time.monotonic()
        self.again = False
        """It needs to be re-seeded by a scan: replaying the history that failed would fail again."""
        self.alone = False
        """Jobs that include it failed as a whole more than once: it is retried alone."""

    @property
    def cursor(self) -> int | None:
        return self.destination.cursor

    def at(self, cursor: int | None, stamp: int | None = None) -> None:
        self.destination = replace(self.destination, cursor=cursor)
        self.stamp = stamp
        self.status.cursor = cursor
        self.reached, self.reached_stamp, self.moved_at = cursor, stamp, time.monotonic()

    def reach(self, snapshot: int, stamp: int | None) -> None:
        """Advance to this lake snapshot without changes to the table; the cursor need not be written for that."""
        if self.reached == self.cursor:
            self.moved_at = time.monotonic()
        self.reached, self.reached_stamp = snapshot, stamp

    def settles(self, destinations: int) -> bool:
        """
        Whether to advance the cursor past unchanged lake snapshots before they expire.

        The cursor's own commit may be the source's next lake snapshot; that one is too recent to require
        another move.
        """
        if self.cursor is None or self.reached is None or self.reached == self.cursor:
            return False
        apart = self.reached - self.cursor > STILL_SNAPSHOTS + 2 * destinations
        older = (self.reached_stamp or 0) - (self.stamp or 0) > STILL_SECONDS * 1_000_000
        return apart or older or (not self.inside and time.monotonic() - self.moved_at > STILL_SECONDS)

    @property
    def well(self) -> bool:
        """Whether the main lane serves it."""
        return self.known and self.cursor is not None and self.status.failures == 0

    def asked(self) -> None:
        """Record its lake's answer; a failed destination stays failed until a write succeeds."""
        self.known = True
        if self.status.failures == 0:
            self.recovered()

    def due(self, now: float) -> bool:
        return self.status.retry_at is None or self.status.retry_at <= now

    def recovered(self) -> None:
        status = self.status
        status.failures, status.last_error, status.retry_at = 0, None, None
        self.alone = False
        status.state = "live" if self.cursor is not None else "pending"


class ServedDestinations:
    """All destinations, by id."""

    def __init__(self, config: FanoutConfig, status: FanoutStatus, env: Mapping[str, str]) -> None:
        self.config = config
        self.elsewhere: dict[str, str] = {}
        """Routing values that other instances serve, by destination."""
        self._status = status
        self._env = env
        self._all: dict[str, ServedDestination] = {}
        self._inside: set[str] = set()
        self._noting = threading.Lock()
        self.take_over(config, config.destinations)

    def __iter__(self) -> Iterator[ServedDestination]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, name: str) -> ServedDestination:
        return self._all[name]

    def values(self) -> set[str]:
        """The routing values of all destinations, including those of other instances."""
        return {one.destination.value for one in self} | set(self.elsewhere.values())

    def take_over(self, config: FanoutConfig, destinations: Sequence[DestinationConfig]) -> None:
        """Serve exactly these destinations; unchanged ones continue as they are."""
        wanted: dict[str, Destination] = {}
        elsewhere: dict[str, str] = {}
        for each in destinations:
            if assigned(config.instance.partition, each.id):
                wanted[each.id] = self._destination(each, config)
            else:
                elsewhere[each.id] = each.routing_value
        self.config, self.elsewhere = config, elsewhere
        for name in [name for name in self._all if name not in wanted]:
            log.info("destination removed", destination=name)
            del self._all[name]
            self._status.destinations.pop(name, None)
            metrics.forget_destination(FLOW, name)
        for destination in wanted.values():
            running = self._all.get(destination.id)
            if running is None or replace(running.destination, cursor=None) != destination:
                self._add(destination)

    def add(self, destinations: Sequence[DestinationConfig]) -> None:
        """Also serve these destinations, which have new ids."""
        for each in destinations:
            if assigned(self.config.instance.partition, each.id):
                self._add(self._destination(each, self.config))
            else:
                self.elsewhere[each.id] = each.routing_value

    def _add(self, destination: Destination) -> None:
        status = self._status.destinations[destination.id] = DestinationStatus(destination.id)
        self._all[destination.id] = ServedDestination(
            destination, status, inside=destination.id in self._inside
        )

    def _destination(self, each: DestinationConfig, config: FanoutConfig) -> Destination:
        place = config.place_of(each, self._env)
        if lake_address(each, self._env) == lake_address(config.source, self._env):
            self._inside.add(each.id)
        return Destination(
            each.id, each.routing_value, place, config.target_of(each), None, config.layout_of(each)
        )

    # -- results

    def record(self, served: Sequence[ServedDestination], result: CycleResult) -> None:
        """Record the result of a job."""
        by_id = {one.destination.id: one for one in served}
        report, s = result.report, self._status
        with self._noting:
            s.cycles += 1
            s.reads += result.reads
            s.rows_read += report.rows
            metrics.observe_read(FLOW, rows=report.rows, seconds=report.seconds)
            s.unrouted_rows += report.unrouted
            s.null_rows += report.nulls
            s.routing_moves += report.moves
            s.pool_open = result.pool_open
            s.pool_created += result.pool_created
            s.pool_evicted += result.pool_evicted
            if report.unrouted or report.nulls:
                log.warning("rows without a destination", rows=report.unrouted, nulls=report.nulls)
            for applied in result.applied:
                self._record_one(by_id[applied.id], applied)
                if applied.miscounted or applied.reason:
                    reason = applied.reason or _MISCOUNTED
                    log.warning("destination is seeded again", destination=applied.id, reason=reason)

    def _record_one(self, one: ServedDestination, applied: Applied) -> None:
        if applied.error is not None:
            self.failed([one], applied.error)
            return
        status, rows = one.status, applied.rows
        one.at(applied.cursor, applied.stamp)
        one.again = applied.cursor is None
        status.rows_written += rows.get("written", 0)
        status.rows_deleted += rows.get("deleted", 0)
        status.rows_upserted += rows.get("upserted", 0)
        status.rows_matched += rows.get("matched", 0)
        metrics.observe_destination(FLOW, status.id, write_seconds=applied.seconds)
        status.seeds += int(applied.seeded)
        self._status.conflicts += rows.get("conflicts", 0)
        self._status.orphaned_preimages += rows.get("orphans", 0)
        self._status.reseeds += int(applied.cursor is None)
        self._status.miscounts += int(applied.miscounted)
        if any(rows.get(kind) for kind in ("written", "deleted", "upserted")):
            status.last_change_at = time.time()
        one.recovered()
        if applied.reason is not None:
            status.last_error = applied.reason
            metrics.count_destination_error(FLOW, status.id, _code(applied.reason))

    def failed(self, served: Sequence[ServedDestination], error: str) -> None:
        """Record a failure: they wait for their next try; their cursors stay."""
        for one in served:
            status = one.status
            status.failures += 1
            status.last_error, status.state = error, "errored"
            status.retry_at = time.time() + backoff_seconds(status.failures)
            metrics.count_destination_error(FLOW, status.id, _code(error))
            log.warning("destination failed", destination=status.id, failures=status.failures, error=error)


def _code(error: str) -> str:
    found = AqueduckError.from_text(error)
    return found.code if found else AqueduckError.code
