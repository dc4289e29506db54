"""The visible state of a table follows from its lifecycle, its lake state and the proof."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aqueduck.model.errors import ConnectionLostError
from aqueduck.model.lifecycle import SyncState
from aqueduck.postgres.registry.registry import TableObservation
from aqueduck.service.probe import OLD_SECONDS, Probe
from aqueduck.spark.query.copy_job import CopyJob
from aqueduck.sync.observe import observe_group, observe_table, table_state
from tests.fix_postgres import Database, wait_until
from tests.whole_group import whole_group

PENDING, SNAPSHOT, CATCHUP, STREAMING, ERRORED = SyncState

#: As the docstring of `lifecycle` draws them.
MOVES = {
    (PENDING, SNAPSHOT),
    (SNAPSHOT, CATCHUP),
    (CATCHUP, STREAMING),
    (PENDING, STREAMING),
    (STREAMING, CATCHUP),
    *((state, PENDING) for state in SyncState if state is not PENDING),
    *((state, ERRORED) for state in SyncState if state is not ERRORED),
    (ERRORED, CATCHUP),
    (ERRORED, STREAMING),
}


def test_a_table_goes_through_its_states_and_comes_to_rest(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S03, P-S07: copied, failed, retried: only allowed transitions; the last one needs no new traffic."""
    db.execute("create table t (id int primary key); insert into t select generate_series(1, 50)")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        runner, copier = group.runner, group.runner.copier
        [oid] = runner.tables
        seen: list[SyncState] = []
        tries = itertools.count(1)

        def look() -> SyncState:
            runner.refresh()
            seen.append(table_state(runner, oid))
            return seen[-1]

        def run(job: CopyJob) -> Any:
            look()
            if next(tries) == 1:
                raise ConnectionLostError("the snapshot is gone")
            return job.run(range(len(job.items)))

        wait_until(lambda: look() is STREAMING, "the first copy is in")
        copier.jobs.run = run
        again = copier.again
        monkeypatch.setattr(copier, "again", lambda table: (look(), again(table)))
        runner.resync(oid)
        wait_until(lambda: not copier.busy, "the copy has failed", 60)
        with pytest.raises(ConnectionLostError):
            copier.raise_failures()
        assert look() is ERRORED
        copier.retry_now(oid)
        wait_until(lambda: not copier.busy, "the copy has ended", 60)
        wait_until(lambda: look() is STREAMING, "it streams, although nothing is written any more")
        moves = [(a, b) for a, b in itertools.pairwise(seen) if a is not b]
        runner.proof.last = Probe(time.monotonic() - OLD_SECONDS, True, 0)
        assert look() is CATCHUP, "nobody has looked for a long time"
        assert {PENDING, SNAPSHOT, ERRORED} <= set(seen)
        assert set(moves) - MOVES == set()


def test_a_copy_counts_its_rows_and_is_a_commit(db: Database, tmp_path: Path) -> None:
    """P-S27, P-T01: rows that were copied are synced rows, and the table and its group have a time of their last commit."""
    db.execute("create table t (id int primary key); insert into t select generate_series(1, 50)")
    with whole_group(db, tmp_path, {"t": {}}) as group:
        [oid] = group.runner.tables
        row: Any = SimpleNamespace(observed=TableObservation(id=1))
        seen = observe_table(group.runner, 1, oid, row)
        assert (seen.rows_synced, seen.applied_lsn) == (50, group.runner.states[oid].copy_position)
        assert seen.last_sync_at is not None
        assert observe_group(group.runner, 1).last_sync_at is not None
        db.execute("insert into t values (51)")
        group.apply()
        assert observe_table(group.runner, 1, oid, row).rows_synced == 51
