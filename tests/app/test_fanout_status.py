"""What the fan-out tells about itself."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path

from aqueduck.app.fanout_status import DestinationStatus, FanoutStatus, StateFile

ROOT = Path(__file__).parents[2]


def test_every_metric_is_documented() -> None:
    """P-F17: docs/fanout.md names each metric."""
    text = (ROOT / "docs" / "fanout.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text))
    assert set(FanoutStatus("i").metrics()) <= named


def test_the_metrics_that_users_know_are_there() -> None:
    """P-F17: polls, reads, rows, per destination writes and lag, unrouted, pool, moves, conflicts, orphans, errors."""
    status = FanoutStatus("i", polls=3, unrouted_rows=2, null_rows=1, routing_moves=4)
    status.destinations["a"] = DestinationStatus("a", cursor=7, rows_upserted=5, lag_snapshots=2)
    status.errors["lake.write", "a"] += 1
    metrics = status.metrics()
    assert (metrics["polls_total"], metrics["unrouted_rows_total"]) == (3, 3)
    assert metrics["dest_last_snapshot_id"] == {"a": 7}
    assert metrics["dest_lag_snapshots"] == {"a": 2}
    assert metrics["errors_total"] == {("lake.write", "a"): 1}
    assert metrics["cdc_routing_mutations_total"] == 4


def test_health_follows_progress() -> None:
    """P-F13: green while there is progress of any kind, red once it has stopped."""
    status = FanoutStatus("i")
    assert status.healthy(patience_seconds=60)
    status.progress_at = time.time() - 61
    assert not status.healthy(patience_seconds=60)


def test_the_state_file_is_plain_sql_and_rests_when_nothing_changes(tmp_path: Path) -> None:
    """P-F03, P-F18: one row per destination with its error; an idle service does not write it again."""
    file = StateFile(tmp_path / "deep" / "state.sqlite")
    status = FanoutStatus("instance-1")
    status.destinations["a"] = DestinationStatus(
        "a", "FAILING", 4, last_error="[lake.write] no", rows_upserted=2
    )
    status.destinations["b"] = DestinationStatus("b", "STREAMING", 5)
    file.write(status)
    written = file.path.stat().st_mtime_ns
    file.write(status)
    assert file.path.stat().st_mtime_ns == written
    con = sqlite3.connect(file.path)
    rows = con.execute(
        "select destination_id, instance_id, last_snapshot_id, rows_replicated, last_error from destinations"
    )
    assert rows.fetchall() == [("a", "instance-1", 4, 2, "[lake.write] no"), ("b", "instance-1", 5, 0, None)]
    con.close()
    del status.destinations["b"]
    file.write(status)
    assert [row["destination_id"] for row in file.read()] == ["a"]
