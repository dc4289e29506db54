"""The stage cuts only at commits, keeps order across barriers, and forgets what the lake has."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from aqueduck.model.batches import plan_fold_tasks
from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.decode.decoder import Commit, Rows, Truncate, make_layout

TABLE = TableSchema(1, "public", "t", (Column("id", 23, -1), Column("v", 25, -1)), ("id",), "d")
LAYOUT = make_layout(TABLE, 0)


def inserted(first: int, n: int = 1, layout: object = LAYOUT) -> Rows:
    ids = list(range(first, first + n))
    columns = {
        "_op": [1] * n, "_ord": ids, "_lsn": [1] * n, "_seq": ids, "_ts": [0] * n, "_xid": [1] * n, "_kc": [False] * n,
        "_old": [0] * n, "_unchanged": [None] * n, "n0": [str(i) for i in ids], "n1": ["x" * 100] * n, "o0": [None] * n,
    }  # fmt: skip
    batch = pa.RecordBatch.from_pydict(columns, schema=LAYOUT.arrow)
    return Rows(LAYOUT, batch, inserts=n, updates=0, deletes=0, key_changes=0, unchanged=0, first_ord=first)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "stage", segment_bytes=2_000, bytes_max=10_000, position=0)


def test_an_open_transaction_is_not_offered(stage: Stage) -> None:
    """Rows without their commit are never part of a batch."""
    stage.add(inserted(1))
    stage.cut()
    assert stage.furthest(0, 1 << 30) == 0
    assert stage.pending
    stage.add(Commit(10, 0, 1))
    stage.cut()
    assert stage.furthest(0, 1 << 30) == 10


def test_a_large_transaction_is_spilled_and_appears_whole(stage: Stage) -> None:
    """A transaction beyond the segment size is on disk before it ends, and comes as one cut."""
    for i in range(0, 100, 10):
        stage.add(inserted(i, 10))
    stage.add(Commit(10, 0, 1))
    stage.cut()
    (cut,) = stage.between(0, 10)
    assert len(cut.segments) > 1
    assert sum(s.rows for s in cut.segments) == 100
    read = pa.concat_tables(pa.ipc.open_file(s.path).read_all() for s in cut.segments)
    assert read["_ord"].to_pylist() == list(range(100))


def test_a_transaction_that_is_cut_off_leaves_nothing(stage: Stage, tmp_path: Path) -> None:
    """Abandoning an open transaction removes its rows and its spilled files."""
    for i in range(0, 100, 10):
        stage.add(inserted(i, 10))
    assert list((tmp_path / "stage").iterdir())
    stage.abandon_open()
    assert not list((tmp_path / "stage").iterdir())
    assert not stage.pending


def test_rows_around_a_truncate_stay_on_their_side(stage: Stage) -> None:
    """P-S11: in order, even when the transaction before it is still in memory."""
    stage.add(inserted(1))
    stage.add(Commit(10, 0, 1))
    stage.add(inserted(2))
    stage.add(Truncate(LAYOUT, 3))
    stage.add(inserted(4))
    stage.add(Commit(20, 0, 1))
    stage.cut()
    (cut,) = stage.between(0, 20)
    assert [(s.kind, s.first_ord) for s in cut.segments] == [
        ("rows", 1),
        ("rows", 2),
        ("truncate", 3),
        ("rows", 4),
    ]
    (unit,) = plan_fold_tasks(cut.segments)
    assert unit.truncate is not None
    assert [s.first_ord for s in unit.segments] == [3, 4]
    kept = plan_fold_tasks(cut.segments, keep_truncated=[unit.table_oid])
    assert [[s.first_ord for s in u.segments] for u in kept] == [[1, 2], [3, 4]]


def test_a_batch_stays_within_its_bytes(stage: Stage) -> None:
    """Batches end at the last cut within the limit, and have at least one cut."""
    for i in range(4):
        stage.add(inserted(100 + i * 10, 5))
        stage.add(Commit(10 * i + 10, 0, 1))
        stage.cut()
    size = stage.between(0, 10)[0].bytes
    assert stage.furthest(0, 2 * size) == 20
    assert stage.furthest(0, 1) == 10
    assert stage.furthest(20, 1 << 30) == 40


def test_a_full_stage_pauses_until_the_lake_has_it(stage: Stage, tmp_path: Path) -> None:
    """P-S20: beyond the byte limit the reader pauses; released cuts free their files and the reader."""
    for i in range(20):
        stage.add(inserted(i * 10, 10))
        stage.add(Commit(10 * i + 10, 0, 1))
    stage.cut()
    assert stage.full
    stage.release(200)
    assert not bool(stage.full)
    assert not list((tmp_path / "stage").iterdir())
    assert stage.staged_bytes == 0
    assert stage.durable == 200


def test_one_transaction_larger_than_the_stage_does_not_pause(stage: Stage) -> None:
    """An open transaction never pauses its own reader: that would be a deadlock."""
    for i in range(0, 1000, 10):
        stage.add(inserted(i, 10))
    assert not stage.full


def test_too_many_changes_pause_as_well(tmp_path: Path) -> None:
    """P-S20, P-S27: `max_queued_changes` counts changes that wait for the lake, and status shows them by table."""
    stage = Stage(tmp_path / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=0, rows_max=25)
    for i in range(3):
        stage.add(inserted(i * 10, 10))
        stage.add(Commit(10 * i + 10, 7_000_000 + i, 1))
        if i == 0:
            stage.cut()
    assert not bool(stage.full), "what is not cut yet does not count"
    [(rows, size)] = stage.queued().values()
    assert rows == 30
    assert size > 0
    assert stage.oldest_us == 7_000_000
    stage.cut()
    assert bool(stage.full)
    stage.release(10)
    assert not bool(stage.full)
    stage.release(30)
    assert stage.queued() == {}
    assert stage.oldest_us is None
