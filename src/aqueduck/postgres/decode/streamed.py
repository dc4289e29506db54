"""
Transactions that the server streams before they end (protocol version 2), as the decoder sees them.

Such a transaction is sent in blocks, between other transactions and their blocks; its commit or abort is sent
last.  Until then its changes are numbered within the transaction only.  If a subtransaction is rolled back, all
changes since its first one are void: later ones were made within it.
The decoder reports this with `Forget` and, at the commit, `Finish`; `spills` applies it to staged segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from aqueduck.model.schema import TableSchema
from aqueduck.postgres.decode.layouts import Layout
from aqueduck.postgres.decode.pgoutput import Ints
from aqueduck.postgres.decode.pgoutput_messages import WireRelation

__all__ = ["Description", "Finish", "Forget", "StreamedTransaction"]


@dataclass(frozen=True, slots=True)
class Forget:
    """The changes of a streamed transaction from number `first` on are void; 0 ends it."""

    stream: int
    first: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A streamed transaction has committed: its changes belong here, from `first_ord` on.  A `Commit` follows."""

    stream: int
    lsn: int
    time_us: int
    first_ord: int
    changes: int
    """The number of its changes, including those of tables that are not followed."""
    tables: Mapping[int, TableSchema]
    """By version: tables with facts that were invisible before the commit, such as a new type or the loss of their key."""


@dataclass(frozen=True, slots=True)
class Description:
    """A relation as the server described it, whether or not it is followed; a later description has a higher number."""

    relation: WireRelation
    number: int


@dataclass(slots=True)
class StreamedTransaction:
    """What the decoder remembers of a transaction between its blocks."""

    xid: int
    changes: int = 0
    """The number of its changes up to the current block."""
    layouts: dict[int, Layout | None] = field(default_factory=dict)
    """The server describes relations to each streamed transaction anew."""
    described: dict[int, Description] = field(default_factory=dict)
    """The descriptions from which these layouts were made."""
    unresolved: dict[int, WireRelation] = field(default_factory=dict)
    """By version: relations with types that may be this transaction's own, or a key that it may have dropped."""
    _first: dict[int, int] = field(default_factory=dict)
    """The number of each (sub)transaction's first change, in ascending order."""

    def record(self, xids: Ints, numbers: Ints) -> None:
        """Record changes of these (sub)transactions, with these numbers."""
        turns = np.flatnonzero(np.diff(xids)) + 1
        for at in (0, *turns.tolist()):
            self._first.setdefault(int(xids[at]), int(numbers[at]))

    def roll_back(self, part: int) -> int | None:
        """The number of the first change that is void now, if any change of that subtransaction was received."""
        first = self._first.get(part)
        if first is None:
            return None
        while self._first and next(reversed(self._first.values())) >= first:
            self._first.popitem()
        self.changes = first
        return first
