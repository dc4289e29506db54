"""Errors about change events and their sinks."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "BookmarkError",
    "EventError",
    "EventValueError",
    "SinkPathError",
    "SinkRejectedError",
    "SinkTableError",
    "SinkUnreachableError",
    "SinkWriteError",
    "TransactionTooLargeError",
]


class EventError(AqueduckError):
    """The family of errors about change events and their sinks; never raised directly."""


class EventValueError(EventError):
    """The text of a value is not what PostgreSQL writes for its type."""

    code = "events.value"


class TransactionTooLargeError(EventError):
    """A transaction has more changes than `max_staged_records` allows."""

    code = "events.too_large"


class BookmarkError(EventError):
    """The bookmark cannot be read or written, or does not match the sink or the source."""

    code = "events.bookmark"


class SinkPathError(EventError):
    """A file of the sink or the state cannot be opened or created."""

    code = "sink.path"


class SinkTableError(EventError):
    """The sink's table does not have the columns that events need."""

    code = "sink.table"


class SinkWriteError(EventError):
    """Writing to the sink failed, for example on a full disk; no event of the batch counts as delivered."""

    code = "sink.write"
    retry = Retry.AUTO


class SinkRejectedError(EventError):
    """The sink rejected an event permanently."""

    code = "sink.rejected"


class SinkUnreachableError(EventError):
    """The sink did not answer, or cannot accept events now."""

    code = "sink.unreachable"
    retry = Retry.AUTO
