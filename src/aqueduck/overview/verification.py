"""
Decisions about comparing a service's data with its source; pure.

Each *subject*, a table or a destination, is compared once per interval. Its last verdict is kept: a failed
comparison neither withdraws nor proves anything. `service.verify_schedule` runs the comparisons and decides
when to pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from aqueduck.overview.values import VerifyOverview

__all__ = ["NEVER", "Look", "after", "due", "in_words", "rest_seconds"]

NEVER = VerifyOverview()
RECHECK_SECONDS = 300.0
"""When a subject that differs is compared again: it may have been repaired."""
RETRY_SECONDS = 600.0
"""When a subject whose comparison failed is compared again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One comparison of one subject."""

    verdict: Literal["identical", "different", "not compared"]
    differences: int = 0
    note: str | None = None
    heals: bool = False
    """Whether a seed would remove the difference."""


def after(known: VerifyOverview, look: Look, at: datetime, *, deep: bool) -> VerifyOverview:
    """The record of a subject after a comparison."""
    if look.verdict == "not compared":
        return replace(known, failed_at=at, failure=look.note)
    return VerifyOverview(
        verdict=look.verdict,
        at=at,
        identical_at=at if look.verdict == "identical" else known.identical_at,
        differences=look.differences,
        note=look.note,
        deep=deep,
    )


def in_words(known: VerifyOverview) -> str | None:
    """The remarks that accompany the verdict."""
    failed = None if known.failure is None else f"not compared since: {known.failure}"
    return "; ".join(filter(None, (known.note, failed))) or None


def due(
    known: Mapping[str, VerifyOverview], subjects: Iterable[str], interval: float, now: datetime, most: int
) -> Sequence[str]:
    """The subjects to compare now: those that wait longest, starting with those never compared."""
    ready = [(_due_at(known.get(name, NEVER), interval), name) for name in subjects]
    waiting = sorted(
        ((at, name) for at, name in ready if at is None or at <= now),
        key=lambda each: (each[0] is not None, each[0] or now, each[1]),
    )
    return [name for _, name in waiting[:most]]


def _due_at(known: VerifyOverview, interval: float) -> datetime | None:
    times = []
    if known.at is not None:
        wait = min(interval, RECHECK_SECONDS) if known.verdict == "different" else interval
        times.append(known.at + timedelta(seconds=wait))
    if known.failed_at is not None:
        times.append(known.failed_at + timedelta(seconds=min(interval, RETRY_SECONDS)))
    return max(times, default=None)


def rest_seconds(worked: float, share: float) -> float:
    """How long to rest after work, so that work takes this share of the time."""
    return worked * (1 / share - 1)
