"""
Visibility: which transactions of the source a snapshot shows.

A snapshot that a replication slot exports has a position, and shows exactly what was committed before it. A
snapshot taken by SQL has none: a commit is in the WAL shortly before snapshots show it, or long before if
standbys must confirm it. In that case transaction ids decide.

Only this module decides which changes a copy already has: one change (`shows`), the changes of a batch (`mask`),
or a whole segment (`shows_all`).
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from aqueduck.model.changes import SegmentRef

__all__ = ["Visibility", "visibility_of"]

_NUMBERS = 1 << 32


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a snapshot shows: nothing committed at or after `position`, and not all before it."""

    position: int
    xmax: int | None = None
    """The first transaction id not yet assigned; None if the position alone decides."""
    running: tuple[int, ...] = ()
    """Transactions with lower ids that are not shown either."""

    @classmethod
    def from_snapshot(cls, text: str, position: int) -> Visibility:
        """From the result of `pg_current_snapshot`, and a position that was read after it."""
        _, xmax, running = text.split(":")
        numbers = tuple(int(xid) % _NUMBERS for xid in running.split(",") if xid)
        return cls(position, int(xmax) % _NUMBERS, numbers)

    def shows(self, commit_lsn: int, xid: int) -> bool:
        if commit_lsn >= self.position:
            return False
        if self.xmax is None:
            return True
        # Ids wrap around after four billion: an id is older if it is less than half of them behind.
        return 0 < (self.xmax - xid) % _NUMBERS < _NUMBERS // 2 and xid not in self.running

    def shows_all(self, segment: SegmentRef) -> bool:
        """Whether it certainly shows all changes of a segment, which ends with a commit."""
        if segment.kind == "truncate" and segment.commit_lsn:
            return self.shows(segment.commit_lsn, segment.xid)
        return self.xmax is None and segment.last_lsn <= self.position

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """The changes of a segment that the snapshot shows, by the columns `_lsn` and `_xid`."""
        shown = pc.less(batch["_lsn"], self.position)
        if self.xmax is None:
            return shown
        behind = pc.bit_wise_and(pc.subtract(self.xmax, batch["_xid"]), _NUMBERS - 1)
        older = pc.and_(pc.greater(behind, 0), pc.less(behind, _NUMBERS // 2))
        ended = pc.invert(pc.is_in(batch["_xid"], value_set=pa.array(self.running, pa.int64())))
        return pc.and_(shown, pc.and_(older, ended))


def visibility_of(position: int | Visibility) -> Visibility:
    """The visibility of a snapshot at a position: it shows every earlier commit."""
    return position if isinstance(position, Visibility) else Visibility(position)
