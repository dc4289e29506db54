"""
Retries: the delays, and the only loop that uses them.

Nothing here waits: the caller passes the wait function, which is `time.sleep`, or the `wait` of an event that
ends the retries when the service stops.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["RESTART_SECONDS", "doubled", "doubling", "restart_delay", "retried"]

RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Delays before a query restarts; the last one applies to all later failures."""

T = TypeVar("T")


def retried(
    work: Callable[[], T],
    delays: Iterable[float],
    wait: Callable[[float], object],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    failed: Callable[[Exception], object] = lambda _: None,
) -> T:
    """
    The result of `work`, which is retried after each delay if it raised `on`.

    The error is raised when no delay is left, when `failed`, which sees each error before a wait, returns
    true because the error is final, and when `wait` returns true because the service stops.
    """
    for delay in delays:
        try:
            return work()
        except on as exc:
            if failed(exc) or wait(delay):
                raise
    return work()


def doubled(first: float, times: int, most: float) -> float:
    """A delay that was doubled this many times, up to its limit."""
    return min(first * float(2 ** min(times, 60)), most)  # 60: a larger exponent would overflow


def doubling(first: float, most: float, *, times: int, jitter: float = 0.0) -> Iterator[float]:
    """Delays that double; `jitter`, as a share of each, keeps two writers from retrying in lockstep."""
    for done in range(times):
        yield doubled(first, done, most) * random.uniform(1 - jitter, 1 + jitter)


def restart_delay(failures: int) -> float:
    """The pause before a restart of a query that failed this often before."""
    return RESTART_SECONDS[min(failures, len(RESTART_SECONDS) - 1)]
