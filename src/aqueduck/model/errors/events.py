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
    """The family of errors about change events and their sinks; never raised itself."""


class EventValueError(EventError):
    """The text of a value is not what PostgreSQL writes for its type."""

    code = "events.value"


class TransactionTooLargeError(EventError):
    """A transaction has more changes than `max_staged_records` allows."""

    code = "events.too_large"


class BookmarkError(EventError):
    """The bookmark cannot be read or written, or does not fit the sink or the source."""

    code = "events.bookmark"


class SinkPathError(EventError):
    """A file of the sink or the state cannot be opened or made."""

    code = "sink.path"


class SinkTableError(EventError):
    """The table of the sink has other columns than events need."""

    code = "sink.table"


class SinkWriteError(EventError):
    """Writing to the sink failed, such as on a full disk; nothing of the batch counts as delivered."""

    code = "sink.write"
    retry = Retry.AUTO


class SinkRejectedError(EventError):
    """The sink answered that it will not take an event, now or later."""

    code = "sink.rejected"


class SinkUnreachableError(EventError):
    """The sink did not answer, or answered that it cannot take events now."""

    code = "sink.unreachable"
    retry = Retry.AUTO
