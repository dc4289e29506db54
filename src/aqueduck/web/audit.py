"""
A log line for each change and for each refusal, with the client's address.

Refusals of one address are counted and logged at most every few seconds, so that guessing tokens leaves a
trace but does not fill the disk. The address is that of the connection: headers in which a client states its
address are ignored.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import structlog

__all__ = ["Audit"]

log = structlog.get_logger()

PAUSE_SECONDS = 10.0
CLIENTS_MAX = 1000
"""Addresses that are remembered; the least recently active one is dropped first."""


class Audit:
    """The log of one server."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._refused: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """When an address was last logged, and how many refusals followed."""

    def change(
        self,
        client: str,
        token: str | None,
        method: str,
        path: str,
        names: Mapping[str, object],
        error: str | None,
    ) -> None:
        """Log a change, even if it failed: it may have been made if the connection to the source was lost."""
        failed = {} if error is None else {"error": error}
        log.info("request", method=method, path=path, client=client, token=token, **names, **failed)

    def refusal(self, client: str, code: str, method: str, path: str) -> None:
        last, count = self._refused.pop(client, (float("-inf"), 0))
        if self._now() - last < PAUSE_SECONDS:
            self._refused[client] = last, count + 1
            return
        self._refused[client] = self._now(), 0
        while len(self._refused) > CLIENTS_MAX:
            self._refused.popitem(last=False)
        log.warning(
            "request refused", client=client, code=code, method=method, path=path, not_shown_before=count
        )
