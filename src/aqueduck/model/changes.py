"""
Captured changes by reference: what a staged segment holds, without its rows.

A `SegmentRef` is what crosses Spark in place of the changes themselves.  The Arrow files
that it points to are written in `postgres` and read in `lake`; nothing here opens them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["OLD_FULL", "OLD_KEY", "OLD_NONE", "OP_DELETE", "OP_INSERT", "OP_UPDATE", "SegmentRef"]

OP_INSERT, OP_UPDATE, OP_DELETE = 1, 2, 3
"""Values of a segment's column `_op`."""

OLD_NONE, OLD_KEY, OLD_FULL = 0, 1, 2
"""Values of a segment's column `_old`: no old image, its key only, the whole row."""


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """One staged segment: changes of one table under one version of its columns, in stream order."""

    table_oid: int
    version: int
    kind: Literal["rows", "truncate"]
    path: str
    """The Arrow IPC file; empty for a truncate, whose place in the order is `first_ord`."""
    rows: int
    bytes: int
    inserts: int
    updates: int
    deletes: int
    key_changes: int
    """Updates that changed key columns."""
    unchanged: int
    """Rows with cells of unchanged TOAST values."""
    first_ord: int
    last_lsn: int
    """End position of the last commit in the segment."""
    last_ts: int
    """Time of that commit, in microseconds since the Unix epoch."""
    schema_json: str
    """The `TableSchema` that the segment's columns follow."""
    last_ord: int = 0
    """The place of its last change in the stream order."""
    commit_lsn: int = 0
    """For a truncate: the values that rows of a segment have as `_lsn`, `_ts`, `_xid` and `_seq`."""
    commit_ts: int = 0
    xid: int = 0
    seq: int = 0
    key: str | None = None
    """The key of the file, if it is a sealed copy: see `lake.ledger.parking`."""

    def to_dict(self) -> dict[str, Any]:
        """The reference as plain values, for JSON and Spark rows."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SegmentRef:
        """The reverse of `to_dict`; a missing or unknown name is a `TypeError`."""
        return cls(**values)
