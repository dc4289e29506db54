"""
The service of the events flow: prepares the slot, restores the bookmark, runs the query, delivers.

`EventsService` is the same object in `aqueduck run`, the tests and the bench. A transient failure restarts
the query from the bookmark, with backoff; any other failure ends the service with its error. `events.prepare`
checks the server, `events.wiring` creates sinks and bookmark stores, `events.run` runs the service.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import structlog

from aqueduck import faults
from aqueduck.config.events import EventsConfig
from aqueduck.events.prepare import PreparedSource, prepare_source
from aqueduck.events.status import (
    FLOW,
    EventsStatus,
    flow_dir,
    lock_name,
    record_error,
)
from aqueduck.events.watch import EventsWatch
from aqueduck.events.wiring import open_flow, own_tables, source_dsn
from aqueduck.model.bookmarks import Bookmark, BookmarkStore
from aqueduck.model.errors import (
    AqueduckError,
    ConnectionLostError,
    Retry,
    SinkUnreachableError,
    SinkWriteError,
    SlotLostError,
    SourceUnreachableError,
    SparkQueryError,
)
from aqueduck.model.event_parts import EventPart
from aqueduck.model.retries import restart_delay
from aqueduck.model.schema import lsn_text
from aqueduck.overview import metrics
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.events_capture import EventsSettings
from aqueduck.postgres.session.group_lock import GroupLocks
from aqueduck.service.outage import Outage
from aqueduck.service.probe import Proof, Reading
from aqueduck.sinks import Sink
from aqueduck.spark.query.events_query import EventsQuery
from aqueduck.spark.query.local_events import LocalEventsQuery
from aqueduck.spark.query.part_writer import PartWriter
from aqueduck.spark.session.session import build_session
from aqueduck.state_files.files import read_report, write_durable
from aqueduck.state_files.private_files import private_directory

__all__ = ["EventsService"]

log = structlog.get_logger()

LOCK_SECONDS = 2.0
WATCH_SECONDS = 5.0


class EventsService:
    """One slot, one sink, one bookmark."""

    def __init__(self, config: EventsConfig, *, with_spark: bool = True) -> None:
        self.config = config
        self._with_spark = with_spark
        self.dsn = source_dsn(config.source)
        self.directory = flow_dir(config)
        self.status = EventsStatus()
        self.failures = 0
        self._changed_at = time.monotonic()
        self._rows_seen = 0
        self._lock: GroupLocks | None = None
        self._lock_seen_at = 0.0
        self._watch = EventsWatch(config.source, self.dsn, self.directory)
        self._watched_at = 0.0
        self.proof = Proof()
        """What the source's catalog has shown of the slot."""
        self.seen_at = datetime.now(UTC)
        """When the source's catalog was last read."""
        self.source_error: AqueduckError | None = None
        self.outage = Outage()
        """Why it cannot be read now."""
        self._bookmarks: BookmarkStore | None = None
        self._sink: Sink | None = None
        self._source: PreparedSource | None = None
        self._bookmark: Bookmark | None = None
        self._query: EventsQuery | LocalEventsQuery | None = None
        self._spark: Any = None
        self._saving = threading.Lock()
        self._in_doubt = False
        """Whether the sink may hold events that the bookmark does not cover; until a recovery, neither advances."""
        self._ending = threading.Event()

    # -- starting

    def prepare(self, *, trust_slot: bool = False) -> None:
        """Refuse everything that can be refused before Spark starts."""
        self._lock = GroupLocks(self.dsn)
        self._lock.take(lock_name(self.config))
        private_directory(self.directory)
        self._sink, self._bookmarks = open_flow(self.config, self.dsn, self._pause)
        self._recover(trust_slot=trust_slot)

    def _pause(self, seconds: float) -> None:
        """Wait between two attempts of a sink; a stop request ends the wait."""
        if self._ending.wait(seconds):
            raise SinkUnreachableError("stopped while the sink was being retried")

    def _recover(self, *, trust_slot: bool = False) -> None:
        """Load the bookmark, restore the sink to it, and check that the slot still has the changes after it."""
        assert self._bookmarks is not None
        assert self._sink is not None
        known = self._bookmarks.load()
        if known is None or self.config.source.slot_type == "temporary":
            self._watch.begin_anew()
        self._source = prepare_source(
            self.config.source, self.dsn, known, self.directory / "confirmed", trust_slot=trust_slot
        )
        self._watch.look(self._source.timeline, self._source.position)
        self.source_error, self.seen_at = None, datetime.now(UTC)
        self._sink.recover(known)
        position = self._source.position
        time_us, events = (known.time_us, known.events) if known is not None else (None, 0)
        # Save the bookmark before the first event is written: otherwise a crash would leave events that no
        # bookmark covers.
        self._save(self._bookmark_at(position, time_us, events))

    def _bookmark_at(self, position: int, time_us: int | None, events: int) -> Bookmark:
        assert self._source is not None
        assert self._sink is not None
        source = self._source
        return Bookmark(
            position, source.system_identifier, time_us, self._sink.place(), events, source.timeline
        )

    def _save(self, bookmark: Bookmark) -> None:
        assert self._bookmarks is not None
        assert self._sink is not None
        self._in_doubt = True
        self._bookmarks.save(bookmark)
        self._bookmark = bookmark
        faults.point("bookmark.saved")
        self._sink.settle(bookmark.position)
        self._in_doubt = False

    def start(self, *, once: bool = False) -> None:
        for name in ("durable", "capture.json", "hold"):
            (self.directory / name).unlink(missing_ok=True)
        self._query = self._make_query()
        self._query.start(self._settings(), once=once)
        self.proof = Proof()
        self._changed_at = time.monotonic()
        self.status.state = "streaming"
        log.info("events started", slot=self.config.source.slot_name, position=lsn_text(self.position))

    @property
    def spark(self) -> Any:
        if self._spark is None:
            conf = {
                "spark.python.daemon.module": "aqueduck.spark.session.events_daemon",
                **self.config.spark.conf,
            }
            self._spark = build_session(self.config.spark.master, conf, "aqueduck events")
        return self._spark

    def _make_query(self) -> EventsQuery | LocalEventsQuery:
        assert self._sink is not None
        assert self._source is not None
        writer = PartWriter(
            str(self.directory / "parts"), self.config.envelope, self._source.database, self._sink.part_format
        )
        if not self._with_spark:
            return LocalEventsQuery(self.directory, writer, self._deliver)
        return EventsQuery(self.spark, self.directory, writer, self._deliver)

    def _settings(self) -> EventsSettings:
        assert self._source is not None
        assert self._sink is not None
        c, s = self.config, self.config.source
        most = self._sink.batch_bytes_max
        capture = CaptureSettings(
            dsn=self.dsn,
            slot=s.slot_name,
            publication=s.publication_name,
            position=self.position,
            system_identifier=self._source.system_identifier,
            timeline=0 if s.slot_type == "temporary" else self._source.timeline,
            directory=str(self.directory),
            segment_bytes=min(c.segment_bytes, most or c.segment_bytes),
            stage_bytes_max=c.stage_bytes_max,
            batch_bytes_max=min(c.batch_bytes_max, most or c.batch_bytes_max),
            flush_interval_seconds=c.flush_interval_ms / 1000,
            slot_retries=s.slot_acquire_retries,
            capture=s.capture,
            plugin=s.plugin,
            poll_interval_seconds=s.poll_interval_ms / 1000,
            poll_step_bytes=s.poll_step_bytes,
            catchup_bytes=s.catchup_bytes,
            silence_timeout_seconds=s.silence_timeout_seconds,
        )
        assert self._bookmarks is not None
        excluded = own_tables(self._bookmarks, self._source.system_identifier, self._source.database)
        return EventsSettings(
            capture,
            tables=tuple(t.to_json() for t in self._source.tables),
            temporary=s.slot_type == "temporary",
            max_messages=s.max_messages,
            max_staged_records=s.max_staged_records,
            excluded=excluded,
        )

    # -- running

    @property
    def bookmark(self) -> Bookmark | None:
        """The bookmark as last saved; None before the flow is prepared."""
        return self._bookmark

    @property
    def position(self) -> int:
        """The sink has everything before this position."""
        assert self._bookmark is not None
        return self._bookmark.position

    def _deliver(self, parts: Sequence[EventPart], position: int, time_us: int) -> None:
        """Deliver one batch, called by the query: first the sink, then the bookmark, then the slot."""
        assert self._sink is not None
        began = time.monotonic()
        events = sum(part.events for part in parts)
        with self._saving:
            assert self._bookmark is not None
            if self._in_doubt:
                raise SinkWriteError("the sink must be recovered before it accepts more events")
            self._in_doubt = True
            self._sink.write(parts, position)
            faults.point("sink.flushed")
            self._save(self._bookmark_at(position, time_us, self._bookmark.events + events))
        write_durable(self.directory / "durable", position)
        self.failures = 0
        self._changed_at = time.monotonic()
        self._count(events, sum(part.bytes for part in parts), time_us, self._changed_at - began)

    def _count(self, events: int, size: int, time_us: int, seconds: float) -> None:
        status = self.status
        status.events += events
        status.bytes += size
        status.batches += 1
        status.last_delivery_at = datetime.now(UTC)
        status.freshness_seconds = max(0.0, round(time.time() - time_us / 1e6, 3))
        metrics.observe_batch(
            self.config.source.slot_name,
            phase_seconds={"deliver": seconds},
            commit_seconds=seconds,
            changes=events,
            freshness_seconds=status.freshness_seconds,
        )

    def check(self) -> None:
        """Raise the error that ended the query, if any."""
        if self._query is not None:
            self._query.check()

    def supervise(self, stopping: threading.Event) -> None:
        """Keep the query running until the service is stopped or a limit of the run is reached."""
        runs = True
        while not stopping.wait(0.1):
            self.status.moved_at = time.time()
            try:
                with self._no_second_try():
                    if not runs:
                        runs = self._restart()
                    elif self._look_after():
                        return
            except AqueduckError as exc:
                runs = False
                self._failed(exc)
                if exc.retry is not Retry.AUTO:
                    raise
                delay = restart_delay(self.failures)
                self.failures += 1
                if not self.outage.covers(exc):
                    log.warning("events failed, trying again", error=str(exc), seconds=delay)
                stopping.wait(delay)

    @contextlib.contextmanager
    def _no_second_try(self) -> Iterator[None]:
        """
        Refuse to retry with a temporary slot: the failure dropped the slot, and continuing would silently
        skip its events.
        """
        try:
            yield
        except AqueduckError as exc:
            source = self.config.source
            if source.slot_type != "temporary" or exc.retry is not Retry.AUTO:
                raise
            raise SlotLostError(
                f"the temporary slot {source.slot_name} was dropped by a failure, and events since {lsn_text(self.position)}"
                f" were lost: [{exc.code}] {exc.message}",
                hint="start again from the present; slot_type: permanent keeps undelivered events",
            ) from exc

    def _look_after(self) -> bool:
        """Do what is due while the query runs; returns whether the run is over."""
        assert self._query is not None
        ended = not self._query.active
        self.check()
        if ended:
            raise SparkQueryError("the streaming query ended although it was not stopped")
        self._check_lock()
        self._watch_source()
        done = self._is_done()
        return self._tick(final=done) and done

    def _check_lock(self) -> None:
        """
        Check the lock: without it another service may have started, so nothing is written until we hold it
        again.
        """
        assert self._lock is not None
        if time.monotonic() - self._lock_seen_at >= LOCK_SECONDS:
            self._lock.check()
            self._lock_seen_at = time.monotonic()

    def _watch_source(self) -> None:
        assert self._source is not None
        if time.monotonic() - self._watched_at < WATCH_SECONDS:
            return
        self._watched_at = time.monotonic()
        try:
            self._watch.look(self._source.timeline, self.position)
        except (ConnectionLostError, SourceUnreachableError) as exc:
            self.outage.covers(exc)
            self.source_error = exc
            return
        self.source_error, self.seen_at = None, datetime.now(UTC)
        if self.report():
            self.outage.end_if_seen(self.seen_at)
        self._take_proof()
        self._note_reader()

    def _note_reader(self) -> None:
        """Log once that backlogs are not read in bulk."""
        trouble, before = self.report().get("bulk_trouble"), self.status.bulk_trouble
        if trouble and not before:
            log.warning("backlogs cannot be read in bulk: streamed", reason=trouble)
        self.status.bulk_trouble = trouble

    def _take_proof(self) -> None:
        """Whether what is shown as streaming streams."""
        assert self._watch.probe is not None
        report, source, before = self.report(), self.config.source, self.proof.error
        waits = not report or bool(report.get("paused")) or bool(report.get("held"))
        reading = Reading(
            source.slot_name,
            int(report.get("seen", 0)),
            int(report.get("received_bytes", 0)),
            waits or self.status.state != "streaming",
            str(report.get("reader", source.capture)) in ("poll", "bulk"),
        )
        self.proof.take(self._watch.probe, reading)
        if self.proof.error is not None and before is None:
            log.error("events do not stream", error=str(self.proof.error))

    def _restart(self) -> bool:
        """Restart from the bookmark; False while an earlier delivery is still running."""
        assert self._query is not None
        assert self._lock is not None
        self._query.stop()
        if self._query.active:
            return False
        self._lock.keep()
        with self._saving:
            self._recover()
        self.start()
        return True

    def _failed(self, error: AqueduckError) -> None:
        slot = self.config.source.slot_name
        self.status.state, self.status.last_error = "retrying", str(error)
        record_error(self.directory, error)
        metrics.count_error(error.code, flow=FLOW, group=slot)
        if error.retry is Retry.AUTO:
            self.status.restarts += 1
            metrics.count_retry(flow=FLOW, group=slot)

    def _is_done(self) -> bool:
        source = self.config.source
        if source.max_messages is not None and self.status.events >= source.max_messages:
            log.info("max_messages reached", events=self.status.events)
            return True
        if source.idle_timeout is None:
            return False
        report = self.report()
        rows = int(report.get("rows", 0))
        if not report or report.get("pending") or rows != self._rows_seen:
            self._rows_seen, self._changed_at = rows, time.monotonic()
        if time.monotonic() - self._changed_at < source.idle_timeout:
            return False
        log.info("idle_timeout reached", seconds=source.idle_timeout)
        return True

    def _tick(self, *, final: bool = False) -> bool:
        """
        Rotate a file that is due, even without new events or when a run ends.

        False while a batch is being delivered or must be delivered again.
        """
        assert self._sink is not None
        if not self._saving.acquire(blocking=final):
            return False
        try:
            if self._in_doubt:
                return False
            if self._sink.tick(self.position, final=final):
                assert self._bookmark is not None
                self._save(replace(self._bookmark, place=self._sink.place()))
            return True
        finally:
            self._saving.release()

    def run_once(self, stopping: threading.Event) -> None:
        """Run until the query has caught up and ended, or the service is stopped."""
        assert self._query is not None
        with self._no_second_try():
            while not self._query.wait(1):
                if stopping.is_set():
                    return
                self._check_lock()
            self.check()
            self._tick(final=True)
            assert self._source is not None
            self._watch.look(self._source.timeline, self.position)

    def stop(self) -> None:
        """Finish the current delivery, then end."""
        self._ending.set()
        if self._query is not None:
            self._query.stop()
            self._query = None
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        if self._spark is not None:
            self._spark.stop()
            self._spark = None
        for connection in (self._bookmarks, self._lock):
            if connection is not None:
                connection.close()
        self._bookmarks = self._lock = None

    # -- for observers

    def report(self) -> dict[str, Any]:
        """The capture's last report."""
        return read_report(self.directory / "capture.json")
