"""
Expire lake snapshots that are no longer needed, and remove the files that only they used.

Each step is bounded and is one short transaction of the catalog.  Between steps, the caller decides whether to
continue; during a step, it keeps commits out.  A lake snapshot expires only together with all older ones, so that
readers of changes never find a gap.
"""

from __future__ import annotations

from datetime import datetime

from aqueduck.lake.session.sql import literal
from aqueduck.lake.upkeep.table_upkeep import Lake

__all__ = ["count_snapshots", "expire_some", "remove_some_files"]

SNAPSHOTS_A_STEP = 500
FILES_A_STEP = 200


def count_snapshots(lake: Lake) -> int:
    [[count]] = lake.execute(
        f"select count(*) from {lake.metadata}.ducklake_snapshot", doing="counting lake snapshots"
    )
    return int(count)


def expire_some(lake: Lake, *, older_than: datetime, keep_from: int | None) -> int:
    """Expire the oldest lake snapshots that are older than `older_than` and before `keep_from`; returns how many."""
    rows = lake.execute(
        f"select snapshot_id, epoch(snapshot_time::timestamptz) from {lake.metadata}.ducklake_snapshot"
        f" where snapshot_id < (select max(snapshot_id) from {lake.metadata}.ducklake_snapshot)"
        f" order by snapshot_id limit {SNAPSHOTS_A_STEP}",
        doing="looking for old lake snapshots",
    )
    old = []
    for snapshot, seconds in rows:
        if seconds >= older_than.timestamp() or (keep_from is not None and snapshot >= keep_from):
            break
        old.append(int(snapshot))
    if old:
        lake.execute(
            f"call ducklake_expire_snapshots({literal(lake.alias)}, versions => {old})",
            doing="expiring lake snapshots",
        )
    return len(old)


def remove_some_files(lake: Lake, *, older_than: datetime) -> int:
    """Remove files that no lake snapshot has used since `older_than`; returns how many."""
    rows = lake.execute(
        f"select epoch_us(schedule_start::timestamptz) from {lake.metadata}.ducklake_files_scheduled_for_deletion"
        f" order by 1 limit {FILES_A_STEP}",
        doing="looking for old files",
    )
    old = [us for (us,) in rows if us < older_than.timestamp() * 1e6]
    if not old:
        return 0
    removed = lake.execute(
        f"call ducklake_cleanup_old_files({literal(lake.alias)}, older_than => make_timestamptz({old[-1] + 1}))",
        doing="removing old files",
    )
    return len(removed)
