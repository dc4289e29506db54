"""Wait for a running sync service, and hold its slot: what the demo and the benchmarks ask of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from aqueduck.model.errors import AqueduckError
from aqueduck.sync.service import SyncService

__all__ = ["hold", "wait_until_seen", "wait_until_streaming"]


def hold(service: SyncService, group: str, on: bool, *, seconds: float = 30.0) -> None:
    """Release the group's slot, or take it again; meanwhile the changes wait in WAL."""
    runner = service.runner(group)
    path = runner.directory / "hold"
    if not on:
        path.unlink(missing_ok=True)
        return
    path.touch()
    _wait(lambda: bool(runner.report().get("held")), seconds, "the capture did not release its slot")


def wait_until_streaming(service: SyncService, group: str, *, seconds: float) -> None:
    """Wait until every copy is complete and the capture reads the slot."""
    runner = service.runner(group)

    def streams() -> bool:
        service.check()
        runner.copier.raise_failures()
        return bool(runner.report()) and all(state.ready for state in runner.states.values())

    _wait(streams, seconds, "the stream did not start")


def wait_until_seen(service: SyncService, group: str, position: int, *, seconds: float) -> None:
    """Wait until everything that the server had written at `position` is in the lake."""
    runner = service.runner(group)

    def caught_up() -> bool:
        service.check()
        report = runner.report()
        return int(report.get("seen", 0)) >= position and not report.get("pending", True)

    _wait(caught_up, seconds, "the lake did not catch up")


def _wait(done: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise AqueduckError(f"{complaint} within {seconds:.0f} s")
        time.sleep(0.05)
