"""What becomes of a fold task: files, or a named reason why the driver folds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aqueduck.lake.fold.fold_tasks import (
    FoldedFiles,
    FoldedTasks,
    FoldTaskWriter,
    outcome_json,
    plan_batch,
    read_outcome,
    settled,
    skips_of,
)
from aqueduck.lake.ledger.progress import Position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.model.batches import FoldTask, LeftToDriver
from aqueduck.model.changes import SegmentRef
from aqueduck.model.schema import Column, TableName, TableSchema
from aqueduck.state_files.files import write_skips, write_tables

ID = Column("id", 23, -1, "integer", number=1)
TABLE = TableSchema(1, "public", "t", (ID,), ("id",), "d")
EMPTY = TableSchema(1, "public", "t", (), (), "d")
FOLDED = FoldedFiles(("a.parquet",), None, None, 3, None, skip_before=0)


def task(schema: TableSchema = TABLE, *, direct: bool = False, last_lsn: int = 300) -> FoldTask:
    segment = SegmentRef(
        1, 1, "rows", "s", 3, 30, 2, 1, 0, 0, 0, first_ord=1, last_lsn=last_lsn, last_ts=0, schema_json=schema.to_json()
    )  # fmt: skip
    return FoldTask(1, 0, direct, 0, 1, (segment,))


def state(*, ready: bool = True, copy_position: int = 0) -> TableState:
    return TableState(1, "public.t", TableName("main", "t"), ready, copy_position, schema=TABLE)


@pytest.mark.parametrize(
    ("given", "place", "skips", "reason"),
    [
        (task(direct=True), "data", {}, LeftToDriver.SMALL),
        (task(), "data", {1: None}, LeftToDriver.PARKED),
        (task(), None, {}, LeftToDriver.NO_TARGET),
        (task(EMPTY), "data", {}, LeftToDriver.NO_COLUMNS),
    ],
    ids=lambda value: value.value if isinstance(value, LeftToDriver) else "",
)  # fmt: skip
def test_a_task_that_writes_nothing_says_why(
    tmp_path: Path, given: FoldTask, place: str | None, skips: dict[int, int | None], reason: LeftToDriver
) -> None:
    """A task reports why the driver has to fold, in a word that is counted."""
    tables, notes = tmp_path / "tables.json", tmp_path / "skips.json"
    write_tables(tables, [(TABLE, place)])
    write_skips(notes, skips)
    writer = FoldTaskWriter("g", "run", str(tmp_path), str(tmp_path / "stage"), str(tables), str(notes))
    assert writer.write(given) is reason


@pytest.mark.parametrize("outcome", [FOLDED, *LeftToDriver])
def test_an_outcome_survives_the_way_through_spark(outcome: FoldedFiles | LeftToDriver) -> None:
    """An outcome reads back from JSON as it was."""
    assert read_outcome(outcome_json(outcome)) == outcome


def test_files_that_have_changes_of_the_copy_do_not_count() -> None:
    """A copy that came in while a task folded has brought some of its changes: the driver folds the rest."""
    given: FoldedTasks = [(task(), FOLDED)]
    assert settled(given, {1: state()}, 100) == given
    assert settled(given, {1: state(copy_position=200)}, 100) == [(given[0][0], LeftToDriver.COPY_CAME_IN)]
    assert settled(given, {1: state(copy_position=200)}, 200) == given, "the batch begins after it"
    assert settled(given, {1: state(ready=False)}, 100) == [(given[0][0], LeftToDriver.PARKED)]


@pytest.mark.parametrize(("copy_position", "runs"), [(0, 1), (299, 1), (300, 0)])
def test_a_run_that_the_copy_has_is_not_planned(copy_position: int, runs: int) -> None:
    """Tasks, driver and parking decide by one function what a copy includes: here, all of a run up to the copy's position."""
    plan = plan_batch(
        [(task(), LeftToDriver.SMALL)], {1: state(copy_position=copy_position)}, Position("g", 400, 0, "s", 1), before=100
    )  # fmt: skip
    [table] = plan.tables
    assert (len(table.runs), table.skip_before) == (runs, copy_position)


def test_tasks_learn_of_tables_that_are_not_ready_or_catch_up() -> None:
    """A table whose copy lies behind the stream needs no word."""
    states = [state(), replace(state(copy_position=200), oid=2), replace(state(ready=False), oid=3)]
    assert skips_of(states, 100) == {2: 200, 3: None}
    assert skips_of(states, 200) == {3: None}
