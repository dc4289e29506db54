"""The progress of a group's copies, as their tasks report it: for the log, the registry and the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from aqueduck.lake.ledger.table_states import TableState
from aqueduck.sync.copying.copy_journal import CopyJournal

__all__ = ["CopyProgress", "Progress"]

log = structlog.get_logger()

LOGGED_BYTES_MIN = 4 << 20
LOG_SECONDS = 5.0


@dataclass(slots=True)
class CopyProgress:
    """One copy, as reported by its tasks."""

    journal: CopyJournal
    began_at: datetime
    ended_at: datetime | None = None
    rows_at_end: int = 0

    @property
    def bytes_total(self) -> int:
        return sum(c.bytes for c in self.journal.chunks)

    def rows(self) -> int:
        return self.rows_at_end if self.ended_at else sum(f.rows for _, f in self.journal.done().values())

    def bytes(self) -> int:
        if self.ended_at:
            return self.bytes_total
        chunks = self.journal.chunks
        return sum(chunks[number].bytes for number in self.journal.done() if number < len(chunks))

    def share(self) -> float:
        return 1.0 if self.ended_at else self.bytes() / max(1, self.bytes_total)

    def seconds_left(self) -> float | None:
        share = self.share()
        elapsed = (datetime.now(UTC) - self.began_at).total_seconds()
        return elapsed * (1 - share) / share if share else None


class Progress:
    """The last copy of each table of a group."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._copies: dict[int, CopyProgress] = {}
        self._logged_at = time.monotonic()

    def of(self, oid: int) -> CopyProgress | None:
        return self._copies.get(oid)

    def begin(self, oid: int, journal: CopyJournal, began_at: datetime) -> None:
        self._copies[oid] = CopyProgress(journal, began_at)

    def end(self, oid: int, rows: int) -> None:
        copy = self._copies.get(oid)
        if copy is not None:  # otherwise the table was removed right after its copy was committed
            copy.rows_at_end = rows
            copy.ended_at = datetime.now(UTC)

    def forget(self, oid: int) -> None:
        self._copies.pop(oid, None)

    def log(self, states: Mapping[int, TableState], is_busy: Callable[[int], bool]) -> None:
        """Log a line for each copy that takes long."""
        if time.monotonic() - self._logged_at < LOG_SECONDS:
            return
        self._logged_at = time.monotonic()
        for oid, copy in list(self._copies.items()):
            state = states.get(oid)
            if state is None or copy.ended_at is not None or not is_busy(oid):
                continue
            if copy.bytes_total > LOGGED_BYTES_MIN:
                left = copy.seconds_left()
                log.info(
                    "copying", group=self._group, table=state.source, rows=copy.rows(),
                    done=f"{100 * copy.share():.0f} %", seconds_left=None if left is None else round(left),
                )  # fmt: skip
