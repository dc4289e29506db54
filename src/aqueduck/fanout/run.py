"""
Running a fan-out: catch up once, or follow the source until stopped, with the side lane beside it.

`fanout.service` does the work of a cycle; this module has the schedule, the signals, the reload of the file,
and the server.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from aqueduck.config.fanout import load_fanout
from aqueduck.fanout.maintain import only_instance
from aqueduck.fanout.overview import FanoutOverviews
from aqueduck.fanout.service import FanoutService
from aqueduck.fanout.verify_schedule import fanout_verifier
from aqueduck.model.errors import LakeWriteError, own_error
from aqueduck.model.routing import TRIES
from aqueduck.service.summary import announce, lake_text, summarized
from aqueduck.state_files.destinations import DestinationsFile, state_path
from aqueduck.web.server import serve

__all__ = [
    "catch_up",
    "fanout_state",
    "follow",
    "main_lane",
    "reload_file",
    "run_fanout",
    "run_once",
    "side_lane",
]

log = structlog.get_logger()

TURN_SECONDS = 0.5


def run_once(service: FanoutService, stopping: threading.Event) -> None:
    """`aqueduck run --once`: catch up, then raise if a row of the table or a value of the pattern was left out."""
    catch_up(service, stopping)
    if service.status.left_out:
        raise LakeWriteError(_failures(service.status.left_out))


def catch_up(service: FanoutService, stopping: threading.Event) -> None:
    """Bring every destination up to date; raises if one could not be written."""
    target = service.source.latest()
    while not stopping.is_set():
        worked = service.help_others()
        if any(one.well for one in service.served):
            worked = service.poll() or worked
        if service.status.source_error is not None:
            raise LakeWriteError(f"the source cannot be read: {service.status.source_error}")
        left = [one for one in service.served if not (one.well and (one.reached or 0) >= target)]
        service.write_state()
        if not left:
            return
        if all(one.status.failures >= TRIES for one in left):
            raise LakeWriteError(_failures({one.status.id: one.status.last_error or "" for one in left}))
        if not worked:
            stopping.wait(0.2)


def _failures(errors: Mapping[str, str]) -> str:
    """Destinations and their errors, grouped by error."""
    by_error: dict[str, list[str]] = {}
    for name, error in errors.items():
        by_error.setdefault(error, []).append(name)
    listed = "; ".join(f"{', '.join(sorted(names))}: {error}" for error, names in by_error.items())
    return f"{len(errors)} destinations could not be written: {listed}"


def follow(
    service: FanoutService, stopping: threading.Event, reload: threading.Event, path: Path | None
) -> None:
    """Poll until stopped, with the side lane beside it."""
    failure: list[BaseException] = []
    side = threading.Thread(target=side_lane, args=(service, stopping, failure), daemon=True)
    side.start()
    verifier = fanout_verifier(service)
    service.verifying = lambda: verifier.doing
    verifier.start()
    try:
        main_lane(service, stopping, reload, path, failure)
    finally:
        stopping.set()  # if this lane failed, the other one must not continue alone
        verifier.stop()
        side.join(timeout=60)


def main_lane(
    service: FanoutService,
    stopping: threading.Event,
    reload: threading.Event,
    path: Path | None,
    failure: list[BaseException],
) -> None:
    """Poll for the healthy destinations; raises what ended the side lane."""
    while not stopping.is_set():
        if reload.is_set() and path is not None:
            reload.clear()
            reload_file(service, path)
        service.poll()
        service.write_state()
        if failure:
            raise failure[0]
        latest, away = service.status.source_snapshot, service.status.source_error is not None
        if away or not any(one.well and (one.reached or 0) < latest for one in service.served):
            # Only this lane writes them, and it is not writing now.
            well = [one.destination for one in service.served if one.well]
            service.upkeep.some(((d.id, d.place, d.target) for d in well), service.places)
            _wait(service, stopping, reload)


def side_lane(service: FanoutService, stopping: threading.Event, failure: list[BaseException]) -> None:
    """Help the other destinations: new, unknown or failing ones."""
    while not stopping.is_set():
        try:
            worked = service.help_others()
        except Exception as exc:  # noqa: BLE001 - ends the service with its error
            failure.append(exc)
            return
        if worked:
            service.write_state()
        else:
            stopping.wait(TURN_SECONDS)


def _wait(service: FanoutService, stopping: threading.Event, reload: threading.Event) -> None:
    """Wait until the next poll; each turn of the loop counts as a sign of life."""
    deadline = time.monotonic() + service.config.poll.interval_seconds
    while not stopping.is_set() and not reload.is_set() and time.monotonic() < deadline:
        service.status.moved_at = time.time()
        stopping.wait(min(TURN_SECONDS, max(0.01, deadline - time.monotonic())))


def reload_file(service: FanoutService, path: Path) -> None:
    """Apply the destinations of the changed file; on an error nothing changes."""
    before = service.config
    try:
        config = load_fanout(path)
        fixed = {
            "destinations": config.destinations,
            "destinations_table": config.destinations_table,
            "dynamic": config.dynamic,
            "poll": config.poll,
        }
        if before.model_copy(update=fixed) != config:
            log.warning("only destinations, destinations_table, dynamic and poll change without a restart")
        service.take_over(before.model_copy(update=fixed))
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with the new file, the service continues with the old one
        log.warning("configuration not taken over", error=str(own_error(exc)))
        return
    log.info("configuration taken over", destinations=len(service.served))


def fanout_state(path: Path) -> list[dict[str, Any]]:
    """What `aqueduck status` shows: the destinations as the service last wrote them."""
    return DestinationsFile(state_path(load_fanout(path))).read()


def run_fanout(path: Path, *, once: bool) -> None:
    """`aqueduck run` on a file of this flow: until SIGTERM or ctrl-C; SIGHUP reloads the file."""
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
        log.info("fan-out started", destinations=len(service.served), instance=service.config.instance.id)
        place = service.source.place
        source = f"{service.config.source.table} of {lake_text(place.catalog, place.data_path)}"
        target = f"{len(service.served)} destinations"
        if once:
            announce(source=source, target=target, page=None)
            run_once(service, stopping)
            return
        with (
            summarized(FanoutOverviews(service), served=service.config.server.enabled) as overviews,
            serve(service.config.server, overviews, None) as page,
        ):
            announce(source=source, target=target, page=page)
            follow(service, stopping, reload, path)
    finally:
        service.stop()
