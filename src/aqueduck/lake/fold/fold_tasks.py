"""
Fold tasks: a Spark task folds each one into files, and the driver combines all outcomes into a plan.

`FoldTaskWriter` is serialized to Spark's workers and needs no catalog.  It writes Parquet files into the target's
directory, under names that identify the group, and keys and patches into the stage next to the segments.  If it
leaves a fold task to the driver, its outcome has the reason, and the driver folds.  `plan_batch` combines the fold
tasks of a batch, run by run.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import duckdb

from aqueduck.lake.commit.commit import BatchPlan, RunPlan, TablePlan
from aqueduck.lake.fold.fold import folded
from aqueduck.lake.fold.fold_modes import fold_of, lacks_key
from aqueduck.lake.fold.segments import columns_of
from aqueduck.lake.ledger.progress import Position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.engine import open_kernel
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.files import PARQUET, file_prefix, parquet_limits
from aqueduck.lake.session.object_stores import know_store
from aqueduck.lake.session.partition_files import write_laid_out
from aqueduck.lake.session.sql import literal
from aqueduck.lake.session.storage import discard_file, join, make_directory
from aqueduck.model.batches import FoldTask, LeftToDriver
from aqueduck.model.changes import SegmentRef
from aqueduck.model.columns.projection import is_clear
from aqueduck.model.errors import ConfigError, ResyncNeededError
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableSchema
from aqueduck.model.visibility import Visibility
from aqueduck.state_files.files import read_layout, read_modes, read_skips, read_tables

__all__ = [
    "TASK_MEMORY",
    "FoldTaskWriter",
    "FoldedFiles",
    "FoldedTasks",
    "Outcome",
    "outcome_json",
    "plan_batch",
    "read_outcome",
    "remove_scratch",
    "segments_to_park",
    "settled",
    "skips_of",
    "task_engine",
]

TASK_MEMORY = 160_000_000
COLUMNS_PER_MEGABYTE = 5  # for the vectors of each column, however few rows there are


@dataclass(frozen=True, slots=True)
class FoldedFiles:
    """The files that a fold task wrote; `data` may be several, by the layout; others are None if there was nothing to write."""

    data: tuple[str, ...]
    deletes: str | None
    patches: str | None
    rows: int
    ends: str | None = None
    skip_before: int = 0
    """The position before which changes were left out; if it is out of date, the driver folds the segments again."""


Outcome = FoldedFiles | LeftToDriver
FoldedTasks = list[tuple[FoldTask, Outcome]]
"""The fold tasks of a batch with their outcomes."""


def outcome_json(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome) if isinstance(outcome, FoldedFiles) else outcome.value)


def read_outcome(text: str) -> Outcome:
    """Parse the text of `outcome_json`."""
    found = json.loads(text)
    if isinstance(found, str):
        return LeftToDriver(found)
    return FoldedFiles(**{**found, "data": tuple(found["data"])})


@dataclass(frozen=True, slots=True)
class FoldTaskWriter:
    """Folds fold tasks into files, in a Spark task."""

    group: str
    run_id: str
    data_path: str
    scratch: str
    """
    The directory for keys and patches, on storage that workers and driver share; emptied at each start.  For an encrypted
    lake, it is also the tables' directory.
    """
    tables_file: str
    """The driver's state file with the directory of each table's files."""
    skips_file: str
    """The driver's state file with the tables that are not ready or that still catch up with their copy."""
    properties: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Settings of the object store, if the data path is in one; credentials are names of variables."""
    task_memory: int = field(default=TASK_MEMORY, kw_only=True)
    """The memory limit of DuckDB in a task, in bytes."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FoldTaskWriter:
        return cls(**json.loads(text))

    def write(self, task: FoldTask) -> Outcome:
        """Fold the task; returns its files, or the reason why it is left to the driver."""
        if task.direct:
            return LeftToDriver.SMALL
        know_store(self.data_path, self.properties)
        skip_before = read_skips(Path(self.skips_file)).get(task.table_oid, 0)
        _, place = read_tables(Path(self.tables_file)).get(task.table_oid, (None, None))
        if skip_before is None:
            return LeftToDriver.PARKED
        if place is None:
            return LeftToDriver.NO_TARGET
        mode = read_modes(Path(self.tables_file)).get(task.table_oid, UPSERT)
        schema = columns_of(task.segments[0])
        left = _left_for_columns(task, schema, mode)
        if left is not None:
            return left
        try:
            return self._folded(task, schema, place, skip_before, mode)
        except ResyncNeededError:
            return LeftToDriver.NEEDS_COPY
        except ConfigError:
            return LeftToDriver.NO_SALT

    def _folded(
        self, task: FoldTask, schema: TableSchema, place: str, skip_before: int, mode: TableMode
    ) -> FoldedFiles:
        first = task.segments[0].first_ord
        # Each attempt has its own name, so that a file of a lost or repeated task is never taken for the result.
        attempt = uuid.uuid4().hex[:8]
        name = f"{file_prefix(self.group)}{self.run_id}-{task.table_oid}-{first}-{task.bucket}-{attempt}"
        with (
            task_engine(self.data_path, len(schema.columns), self.task_memory) as con,
            folded(
                con,
                task.segments,
                schema,
                bucket=task.bucket,
                buckets=task.buckets,
                skip_before=skip_before,
                own=task.own,
                how=fold_of(mode),
            ) as fold,
        ):
            files = []
            if fold.upsert_rows != 0:
                names = [*(c.name for c in schema.columns), *(n for n, _ in mode.columns)]
                layout = read_layout(Path(self.tables_file), task.table_oid)
                files = write_laid_out(
                    con, fold.upserts, place, name, layout, columns=names, table=schema.qualified
                )
            make_directory(self.scratch)
            deletes = self._aside(con, fold.deletes, f"{name}-deletes", schema)
            patches = self._aside(con, fold.patches, f"{name}-patches", schema)
            ends = self._aside(con, fold.ends, f"{name}-ends", schema)
        data, rows = tuple(file.path for file in files), sum(file.rows for file in files)
        return FoldedFiles(data, deletes, patches, rows, ends, skip_before)

    def _aside(
        self, con: duckdb.DuckDBPyConnection, query: str | None, name: str, schema: TableSchema
    ) -> str | None:
        if query is None:
            return None
        path = join(self.scratch, f"{name}.parquet")
        _write(con, query, path, schema)
        return path


def _left_for_columns(task: FoldTask, schema: TableSchema, mode: TableMode) -> LeftToDriver | None:
    if not is_clear(schema):
        return LeftToDriver.UNCLEAR_COLUMNS
    if not schema.columns:
        return LeftToDriver.NO_COLUMNS
    return LeftToDriver.NO_KEY if lacks_key(mode, schema, task.segments) else None


@contextlib.contextmanager
def task_engine(
    data_path: str, columns: int, task_memory: int = TASK_MEMORY
) -> Iterator[duckdb.DuckDBPyConnection]:
    """
    An engine for one task on a table with this number of columns.

    A new engine costs 20 ms; a reused one would keep its memory.
    """
    limit = task_memory + columns // COLUMNS_PER_MEGABYTE * 1_000_000
    con = open_kernel(data_path, threads=1, memory_limit=f"{limit}B")
    try:
        yield con
    finally:
        con.close()


def _write(con: duckdb.DuckDBPyConnection, query: str, path: str, schema: TableSchema) -> int:
    options = f"{PARQUET}, compression snappy, {parquet_limits(2 * len(schema.columns))}"
    with lake_errors("writing a file", table=schema.qualified):
        row = con.execute(f"copy ({query}) to {literal(path)} ({options})").fetchone()
    return int(row[0]) if row else 0


def skips_of(states: Iterable[TableState], position: int) -> dict[int, int | None]:
    """The content of the state file `skips`: tables that are not ready, or with changes after `position` to leave out."""
    skips = {s.oid: s.skip_before(position) if s.ready else None for s in states}
    return {oid: skip for oid, skip in skips.items() if skip != 0}


def remove_scratch(tasks: FoldedTasks, scratch: str) -> None:
    """Remove what tasks wrote for a commit to `scratch`, after the commit: keys and patches, and rows for an encrypted lake."""
    for _, files in tasks:
        written: tuple[str | None, ...] = ()
        if isinstance(files, FoldedFiles):
            written = (files.deletes, files.patches, files.ends, *files.data)
        for path in written:
            if path is not None and path.startswith(join(scratch, "")):
                discard_file(path)


def segments_to_park(tasks: FoldedTasks, states: Mapping[int, TableState]) -> list[SegmentRef]:
    """The segments of tables that are not ready, in order, each once."""
    found = {}
    for task, _ in tasks:
        if not states[task.table_oid].ready:
            for segment in task.segments:
                found[task.table_oid, segment.first_ord] = segment
    return [segment for _, segment in sorted(found.items())]


def settled(tasks: FoldedTasks, states: Mapping[int, TableState], position: int) -> FoldedTasks:
    """The outcomes that are valid for a batch that begins at `position`: files may have been written for other states."""
    return [(task, _settled(outcome, states[task.table_oid], position)) for task, outcome in tasks]


def _settled(outcome: Outcome, state: TableState, position: int) -> Outcome:
    if not state.ready:
        return LeftToDriver.PARKED
    if isinstance(outcome, FoldedFiles) and outcome.skip_before != state.skip_before(position):
        return LeftToDriver.COPY_CAME_IN
    return outcome


def plan_batch(
    tasks: FoldedTasks,
    states: Mapping[int, TableState],
    position: Position,
    *,
    before: int,
    parked: Iterable[SegmentRef] = (),
    version: Callable[[SegmentRef], TableSchema] = columns_of,
) -> BatchPlan:
    """
    Plan one batch: the ready tables with their runs in order, and the segments or files of each run.

    `before` is the position at which the batch begins; `parked` are the segments of the other tables, already copied to
    the parking directory; `version` returns the columns of a segment.
    """
    tables: dict[int, dict[int, FoldedTasks]] = {}
    for task, outcome in settled(tasks, states, before):
        if outcome is not LeftToDriver.PARKED:
            tables.setdefault(task.table_oid, {}).setdefault(task.run, []).append((task, outcome))
    return BatchPlan(
        position,
        tuple(
            _table(states[oid], [p for _, p in sorted(runs.items())], before, version)
            for oid, runs in tables.items()
        ),
        tuple(parked),
        start=before,
    )


def _table(
    state: TableState,
    runs: list[FoldedTasks],
    before: int,
    version: Callable[[SegmentRef], TableSchema],
) -> TablePlan:
    skip_before = state.skip_before(before)
    copied = Visibility(skip_before)
    # Runs that the copy includes are left out with their columns, because the copy's columns are newer.
    left = [run for run in runs if not all(copied.shows_all(s) for task, _ in run for s in task.segments)]
    plans = tuple(_run(p, version) for p in left)
    return TablePlan(state.oid, state.target, plans, skip_before, state.schema, state.mode, state.target_uuid)


def _run(tasks: FoldedTasks, version: Callable[[SegmentRef], TableSchema]) -> RunPlan:
    first = tasks[0][0]
    files = [outcome for _, outcome in tasks if isinstance(outcome, FoldedFiles)]
    if len(files) < len(tasks):  # all segments of the run, once each
        segments = {s.first_ord: s for task, _ in tasks for s in task.segments}
        return RunPlan(
            schema=version(first.segments[0]),
            segments=tuple(segments[o] for o in sorted(segments)),
        )
    return RunPlan(
        schema=version(first.segments[0]),
        segments=() if first.truncate is None else (first.truncate,),
        data=tuple(path for f in files for path in f.data),
        deletes=tuple(f.deletes for f in files if f.deletes),
        patches=tuple(f.patches for f in files if f.patches),
        ends=tuple(f.ends for f in files if f.ends),
    )
