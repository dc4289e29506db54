"""The status of a fan-out."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from aqueduck.config.fanout_roster import Made
from aqueduck.fanout.progress import LaneProgress
from aqueduck.fanout.status import DestinationStatus, FanoutStatus, destination_rows
from aqueduck.spark.query.fanout_query import Workers
from aqueduck.state_files.destinations import DestinationsFile
from tests.fix_postgres import wait_until


def test_a_job_notes_how_far_it_is(tmp_path: Path) -> None:
    """P-F10, P-F13: rows and destinations add up over tasks, even while a line is half written; a new job begins at zero."""
    lane = LaneProgress(tmp_path / "deep" / "one.side")
    assert lane.look() == 0.0
    lane.restart()
    workers = Workers("i", tasks=2, progress_file=str(lane.path))
    workers.progressed(1000)
    workers.progressed(500, 1)
    with lane.path.open("ab") as file:
        file.write(b"70")
    assert time.time() - lane.look() < 60
    assert (lane.rows, lane.destinations) == (1500, 1)
    with lane.path.open("ab") as file:
        file.write(b"0 1\n")
    lane.look()
    assert (lane.rows, lane.destinations) == (2200, 2)
    lane.restart()
    lane.look()
    assert (lane.rows, lane.destinations) == (0, 0)
    os.utime(lane.path, (1, 1))
    assert lane.idle_seconds() == 0, "tasks that do not share the file do not hang"
    workers.progressed(1)
    os.utime(lane.path, (1, 1))
    assert lane.idle_seconds() > 1000


def test_only_work_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P-F13: a task that computes touches the file, one that hangs does not."""
    monkeypatch.setattr("aqueduck.spark.query.fanout_query.BEAT_SECONDS", 0.3)
    file = tmp_path / "side"
    file.touch()
    os.utime(file, (1, 1))
    workers = Workers("i", tasks=1, progress_file=str(file))
    with workers.alive():
        time.sleep(1.0)  # nothing may happen meanwhile: several beats
    assert file.stat().st_mtime == 1
    with workers.alive():
        wait_until(lambda: sum(range(50_000)) and file.stat().st_mtime > 1, "a busy task shows", 30)


def test_the_state_file_is_plain_sql_and_rests_when_nothing_changes(tmp_path: Path) -> None:
    """P-F03, P-F18: one row per destination with its error; an idle service does not write it again."""
    file = DestinationsFile(tmp_path / "deep" / "state.sqlite")
    status = FanoutStatus("instance-1")
    status.destinations["a"] = DestinationStatus(
        "a", "errored", 4, last_error="[lake.write] no", rows_upserted=2
    )
    status.destinations["b"] = DestinationStatus("b", "live", 5)
    file.write(destination_rows(status))
    written = file.path.stat().st_mtime_ns
    file.write(destination_rows(status))
    assert file.path.stat().st_mtime_ns == written
    con = sqlite3.connect(file.path)
    rows = con.execute(
        "select destination_id, instance_id, last_snapshot_id, rows_replicated, last_error from destinations"
    )
    assert rows.fetchall() == [("a", "instance-1", 4, 2, "[lake.write] no"), ("b", "instance-1", 5, 0, None)]
    con.close()
    del status.destinations["b"]
    file.write(destination_rows(status))
    assert [row["destination_id"] for row in file.read()] == ["a"]


def test_a_state_file_of_an_older_shape_is_made_anew(tmp_path: Path) -> None:
    """Everything in it comes from the lakes, so an upgrade needs no manual step."""
    path = tmp_path / "state.sqlite"
    con = sqlite3.connect(path)
    con.execute("create table destinations (destination_id text primary key, other text)")
    con.commit()
    con.close()
    status = FanoutStatus("i")
    status.destinations["a"] = DestinationStatus("a", "live", 4, lag_seconds=1.25, rows_before=7)
    DestinationsFile(path).remember(Made([("p", "there")]))
    DestinationsFile(path).write(destination_rows(status))
    assert DestinationsFile(path).recall() == {("p", "there")}, "only what comes from the lakes is made anew"
    [row] = DestinationsFile(path).read()
    assert (row["lag_seconds"], row["rows_replicated"], row["state"]) == (1.2, 7, "live")
