"""Running an events flow until it is stopped or has caught up: signals, and the page."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import structlog

from aqueduck.config.events import EventsConfig
from aqueduck.config.server import ServerConfig
from aqueduck.events.overview import EventsOverviews
from aqueduck.events.service import EventsService
from aqueduck.events.status import record_error, sink_text
from aqueduck.model.errors import AqueduckError, ServerStartError, ServiceLockedError
from aqueduck.model.schema import lsn_text
from aqueduck.service.summary import announce, source_text, summarized
from aqueduck.web.server import serve

__all__ = ["init_events", "run_events"]

log = structlog.get_logger()


def init_events(config: EventsConfig) -> str:
    """`aqueduck init` for the flow `events`: create the slot and the first bookmark; returns a line for people."""
    service = EventsService(config)
    try:
        service.prepare()
        return f"slot {config.source.slot_name}, bookmark {lsn_text(service.position)}"
    finally:
        service.stop()


def run_events(
    config: EventsConfig, *, once: bool, trust_slot: bool = False, with_spark: bool = True
) -> None:
    """
    `aqueduck run` for the flow `events`: until SIGTERM, ctrl-C or a limit; with `once` until it has caught
    up.
    """
    stopping = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopping.set())
    service = EventsService(config, with_spark=with_spark)
    try:
        service.prepare(trust_slot=trust_slot)
        source, target = source_text(service.dsn), sink_text(config)
        if once:
            announce(source=source, target=target, page=None)
            service.start(once=True)
            service.run_once(stopping)
        else:
            with _served(service) as page:
                announce(source=source, target=target, page=page)
                service.start()
                service.supervise(stopping)
    except AqueduckError as exc:
        if not isinstance(exc, ServiceLockedError):
            record_error(service.directory, exc)
        raise
    finally:
        service.stop()
    log.info("stopped")


@contextlib.contextmanager
def _served(service: EventsService) -> Iterator[str | None]:
    """
    Serve the page beside the flow. Files of other CDC tools do not set a port, so two flows on one machine
    must not fail over it.
    """
    given = service.config.server
    wanted, page = given or ServerConfig(), None
    with contextlib.ExitStack() as stack:
        overviews = stack.enter_context(summarized(EventsOverviews(service), served=wanted.enabled))
        try:
            page = stack.enter_context(serve(wanted, overviews, None))
        except ServerStartError as exc:
            if given is not None:
                raise
            log.warning(
                "no page, probes and metrics", reason=exc.message, hint="set server.port; 0 picks a free port"
            )
        yield page
