"""
The life of a synced table: its states, failures and when to try again.

    PENDING ──▶ SNAPSHOT ──▶ CATCHUP ──▶ STREAMING     with a copy
    PENDING ──────────────────────────▶ STREAMING     copy: false
    STREAMING ──▶ CATCHUP                              parked changes are replayed after a pause
    SNAPSHOT, CATCHUP, STREAMING, ERRORED ──▶ PENDING  a new copy was asked for
    any ──▶ ERRORED ──▶ CATCHUP or STREAMING           tried again with success: the copy, or what was parked

Pure functions over frozen values; the time is passed in.  Which state a table is in follows from what is known of it, see
`sync.observe`; where it is stored is `postgres.registry.registry`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime, timedelta

from aqueduck.model.errors import AqueduckError, Retry
from aqueduck.model.retries import doubled

__all__ = [
    "ErrorClass",
    "Failure",
    "Lifecycle",
    "SyncState",
    "classify",
    "fail",
    "retry_delay",
    "retry_is_due",
]

FIRST_SECONDS, LONGEST_SECONDS = 30.0, 1800.0


class SyncState(enum.StrEnum):
    """The state of a table, in the words that users see; what the lake stores is a `TableState` of `lake.ledger.table_states`."""

    PENDING = "PENDING"
    """Registered, and waiting for its turn."""
    SNAPSHOT = "SNAPSHOT"
    """The table is being copied; its changes are parked."""
    CATCHUP = "CATCHUP"
    """The copy is complete; parked changes are being replayed."""
    STREAMING = "STREAMING"
    """Changes are applied as they arrive."""
    ERRORED = "ERRORED"
    """The table failed; its changes are parked."""


class ErrorClass(enum.StrEnum):
    """What resolves an error."""

    TRANSIENT = "transient"
    """Time: it is retried automatically."""
    CONFIGURATION = "configuration"
    """A person who corrects the cause."""
    RESOURCE = "resource"
    """A person who frees space."""


_RESOURCE_CODES = frozenset({"pg.slot_limit", "stage.full"})


@dataclass(frozen=True, slots=True)
class Failure:
    """The last error of a table, as stored and shown."""

    code: str
    error_class: ErrorClass
    message: str


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """A table's state and its failures since it last streamed."""

    state: SyncState
    since: datetime
    failures: int = 0
    """Consecutive failures; reset to zero when the table streams."""
    failure: Failure | None = None
    """The last failure; shown until the table streams again."""
    retry_at: datetime | None = None
    """Only while ERRORED; `None` waits for a person."""


def fail(life: Lifecycle, error: AqueduckError, now: datetime) -> Lifecycle:
    """The table after one more failure, with the time of the next try if a retry can help."""
    error_class = classify(error)
    wait = retry_delay(life.failures) if error_class is ErrorClass.TRANSIENT else None
    return Lifecycle(
        SyncState.ERRORED,
        life.since if life.state is SyncState.ERRORED else now,
        failures=life.failures + 1,
        failure=Failure(error.code, error_class, str(error)),
        retry_at=None if wait is None else now + wait,
    )


def retry_is_due(life: Lifecycle, now: datetime) -> bool:
    """Whether an errored table is due for an automatic retry."""
    return life.state is SyncState.ERRORED and life.retry_at is not None and life.retry_at <= now


def retry_delay(failures: int) -> timedelta:
    """The pause after a failure that follows this many others: 30 s, 1 min, 2 min … 30 min."""
    return timedelta(seconds=doubled(FIRST_SECONDS, failures, LONGEST_SECONDS))


def classify(error: AqueduckError) -> ErrorClass:
    """What resolves an error: retryable errors are transient."""
    if error.retry is Retry.AUTO:
        return ErrorClass.TRANSIENT
    return ErrorClass.RESOURCE if error.code in _RESOURCE_CODES else ErrorClass.CONFIGURATION
