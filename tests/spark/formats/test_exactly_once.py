"""From `postgres_cdc` into `ducklake`, killed at every durable step: each change is in the lake once, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.pool import LakePool
from tests.fix_postgres import Database, wait_until

POINTS = (
    "write.after_commit",
    "write.part_written",
    "capture.before_confirm",
    "write.before_commit",
    "capture.staged",
    "test.offset_logged",
    "test.commit_logged",
)
POLL_POINTS = ("write.after_commit", "capture.before_confirm", "poll.before_advance", "poll.advanced")


def run(db: Database, directory: Path, fault: str = "", capture: str = "stream") -> int:
    # A killed reader's slot is free when the server has noticed.
    free = "select count(*) = 0 from pg_replication_slots where slot_name = 's' and active"
    wait_until(lambda: db.value(free), "the slot is free")
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.formats.micro_batches", str(directory), db.dsn, capture],
        env={**os.environ, "AQUEDUCK_FAULT": fault, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


def check(
    db: Database,
    directory: Path,
    points: tuple[str, ...],
    capture: str = "stream",
    *,
    rows: int = 300,
    passes: int = 2,
) -> None:
    """Die at the n-th pass of each point, with this many rows in each of four transactions."""
    db.execute("create table t (id int primary key, v int)")
    assert run(db, directory, capture=capture) == 0, "the slot is made"
    number = 0
    for point in points:
        for _ in range(4):
            db.execute(f"insert into t select g, g from generate_series({number + 1}, {number + rows}) g")
            db.execute(
                f"update t set v = v + 1 where id % 50 = {number % 50}; delete from t where id % 97 = 0"
            )
            number += rows
        assert run(db, directory, f"{point}:{passes}", capture) == -9, f"{point} was passed"
    assert run(db, directory, capture=capture) == 0
    pool = LakePool(max_open=1)
    with pool.use(LakePlace(catalog=f"sqlite:{directory}/lake.sqlite", data_path=""), read_only=True) as lake:
        history = lake.execute(f"select id, v, _op from {lake.alias}.history order by _commit_lsn, _seq")
        places = lake.execute(
            f"select count(*), count(distinct (_commit_lsn, _seq)) from {lake.alias}.history"
        )
        known = {
            str(path).rsplit("/", 1)[-1]
            for (path,) in lake.execute(f"select path from {lake.metadata}.ducklake_data_file")
        }
    pool.close()
    assert places[0][0] == places[0][1], "nothing is there twice"
    left: dict[int, int] = {}
    for key, value, op in history:
        if op == "delete":
            del left[key]
        else:
            assert (key in left) == (op == "update")
            left[key] = value
    assert sorted(left.items()) == db.query("select id, v from t order by id"), "nothing is missing"
    ours = {path.name for path in (directory / "lake").rglob("aqueduck-*.parquet")}
    assert ours <= known, "no file of a task is left over"


@pytest.mark.faults
@pytest.mark.kills("jobs", *POINTS)
def test_a_kill_at_every_step_loses_and_doubles_nothing(db: Database, tmp_path: Path) -> None:
    """Guarantee 10, hazard 8: SIGKILL at each durable step between the slot and the lake."""
    check(db, tmp_path, POINTS)


@pytest.mark.faults
@pytest.mark.kills("jobs", *POLL_POINTS)
def test_a_kill_while_polling_loses_and_doubles_nothing(db: Database, tmp_path: Path) -> None:
    """P-E09: `capture = poll`: the slot is moved by SQL, after Spark's commit only."""
    check(db, tmp_path, POLL_POINTS, "poll")
