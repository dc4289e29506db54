"""
A source that cannot be reached: one warning when that begins, one line when it is over.

Several parts of a service notice it, each group and the watches on their own, and each retries. What they would
log about the same outage is left out.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import structlog

from aqueduck.model.errors import AqueduckError, ConnectionLostError, SourceUnreachableError

__all__ = ["Outage"]

log = structlog.get_logger()


class Outage:
    """The outage of one source, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: datetime | None = None
        self._noticed_at: datetime | None = None

    def covers(self, error: AqueduckError) -> bool:
        """Whether an error only says that the source is out of reach, which is logged once."""
        if not isinstance(error, ConnectionLostError | SourceUnreachableError):
            return False
        with self._lock:
            self._noticed_at = datetime.now(UTC)
            begins = self._since is None
            self._since = self._since or self._noticed_at
        if begins:
            log.warning("connection lost: waiting and trying again", error=str(error))
        return True

    @property
    def is_on(self) -> bool:
        return self._since is not None

    def end_if_seen(self, seen_at: datetime) -> None:
        """End it if the source was seen completely after the last error."""
        with self._lock:
            since, noticed_at = self._since, self._noticed_at
            if since is None or noticed_at is None or seen_at <= noticed_at:
                return
            self._since = self._noticed_at = None
        seconds = round((datetime.now(UTC) - since).total_seconds(), 1)
        log.info("back again", after_seconds=seconds)
