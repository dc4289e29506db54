"""
Find the lake snapshot that shows the source as of a position or a time, from the lineage in commit messages.

For each batch, `commit.set_lineage` writes the group, the position and the time of its last source commit.  Copies and
maintenance create lake snapshots too, but only a batch's shows all tables as of one source commit.

Likewise, `relayout` notes which table's rows it wrote again, so that readers of changes do not take them for new ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aqueduck.lake.ledger.progress import read_position
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import LAKE, literal
from aqueduck.model.errors import NoSnapshotError
from aqueduck.model.schema import lsn_text

__all__ = ["SourceState", "relayout_note", "source_state_at"]

_BATCHES = f"""
    select snapshot_id, lsn, source_time, snapshot_time from (
        select snapshot_id, snapshot_time, commit_extra_info ->> 'group' as group_name, commit_extra_info ->> 'lsn_to' as lsn,
               to_timestamp(cast(commit_extra_info ->> 'source_commit_time_us' as bigint) / 1e6) as source_time
        from ducklake_snapshots({literal(LAKE)}) where author = 'aqueduck'
    ) where group_name = ? and lsn is not null
"""
_AS_NUMBER = (
    "(('0x' || split_part(lsn, '/', 1))::ubigint * 4294967296 + ('0x' || split_part(lsn, '/', 2))::ubigint)"
)


def relayout_note(table_id: int) -> str:
    """The note of a lake snapshot in which old rows of the table were deleted and inserted again."""
    return json.dumps({"relayout": table_id})


@dataclass(frozen=True, slots=True)
class SourceState:
    """A lake snapshot, and the last source commit in it."""

    snapshot: int
    lsn: str
    source_time: datetime | None
    lake_time: datetime
    reached: bool
    """Whether the lake has everything up to the requested point; if not, later snapshots may add more."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "snapshot": self.snapshot,
            "lsn": self.lsn,
            "source_time": self.source_time,
            "lake_time": self.lake_time,
            "reached": self.reached,
        }


def source_state_at(
    session: LakeSession, group: str, *, position: int | None = None, time: datetime | None = None
) -> SourceState:
    """The group's last batch with no source commit after `position`, or after `time`."""
    asked, value = (f"{_AS_NUMBER} <= ?", position) if time is None else ("source_time <= ?", time)
    rows, _ = session.query(f"{_BATCHES} and {asked} order by snapshot_id desc limit 1", [group, value])
    words = f"position {lsn_text(position)}" if position is not None else f"the time {time}"
    if not rows:
        raise NoSnapshotError(
            f"the lake has no snapshot of group {group} as of {words}",
            hint="the first batch after the copies creates one, and old ones may have expired: from ducklake_snapshots('lake')",
        )
    [(snapshot, lsn, source_time, lake_time)] = rows
    later, _ = session.query(f"{_BATCHES} and snapshot_id > ? limit 1", [group, snapshot])
    stored = read_position(session, group)
    reached = bool(later) or (position is not None and stored is not None and stored.position >= position)
    return SourceState(snapshot, lsn, source_time, lake_time, reached)
