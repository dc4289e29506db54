"""
Units of work on the lake's side: a task folds one into files, the driver turns all into a plan.

`UnitWriter` travels to Spark's workers and needs no catalog: it writes Parquet into the directory of
the target, under a name that tells whose file it is, and keys and patches into the stage beside the
segments.  `plan_batch` puts the units of a batch back together, run by run.
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
from aqueduck.lake.session.files import PARQUET, file_prefix, parquet_limits, write_files
from aqueduck.lake.session.object_stores import know_store
from aqueduck.lake.session.sql import literal
from aqueduck.lake.session.storage import discard_file, join, make_directory
from aqueduck.model.batches import Unit
from aqueduck.model.changes import SegmentRef
from aqueduck.model.columns.projection import is_clear
from aqueduck.model.errors import ConfigError, ResyncNeededError
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import TableSchema
from aqueduck.state_files.files import read_modes, read_skips, read_tables

__all__ = [
    "TASK_MEMORY",
    "UnitFiles",
    "UnitWriter",
    "parked_units",
    "plan_batch",
    "remove_scratch",
    "skips_of",
    "task_engine",
]

TASK_MEMORY = 160_000_000
COLUMNS_PER_MEGABYTE = 5  # what each column takes in vectors on its way, however few rows there are


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """What a task made of a unit; None where there was nothing to write."""

    data: str | None
    deletes: str | None
    patches: str | None
    rows: int
    ends: str | None = None
    skip_before: int = 0
    """What was left out; if that is not what should be, the driver folds the segments again."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UnitFiles:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class UnitWriter:
    """Folds units into files, in a Spark task."""

    group: str
    run_id: str
    data_path: str
    scratch: str
    """Where keys and patches go: on storage that workers and driver share, emptied at each start."""
    tables_file: str
    """A note of the driver: where the files of each table go."""
    skips_file: str
    """A note of the driver: tables that are not ready or still catch up with their copy."""
    properties: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Of the object store where the data path is one; credentials are names of variables."""
    task_memory: int = field(default=TASK_MEMORY, kw_only=True)
    """What DuckDB may use in a task, in bytes."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UnitWriter:
        return cls(**json.loads(text))

    def write(self, unit: Unit) -> UnitFiles | None:
        """None leaves the unit to the driver."""
        know_store(self.data_path, self.properties)
        skip_before = read_skips(Path(self.skips_file)).get(unit.table_oid, 0)
        _, place = read_tables(Path(self.tables_file)).get(unit.table_oid, (None, None))
        if skip_before is None or place is None:
            return None
        mode = read_modes(Path(self.tables_file)).get(unit.table_oid, UPSERT)
        schema = columns_of(unit.segments[0])
        if not is_clear(schema) or not schema.columns or lacks_key(mode, schema, unit.segments):
            return None
        try:
            return self._folded(unit, schema, place, skip_before, mode)
        except (ResyncNeededError, ConfigError):
            return None  # the driver knows what to do about it, or has the salt that this worker lacks

    def _folded(
        self, unit: Unit, schema: TableSchema, place: str, skip_before: int, mode: TableMode
    ) -> UnitFiles:
        first = unit.segments[0].first_ord
        # Each attempt has a name of its own: what a lost or repeated task wrote is never taken for the result.
        attempt = uuid.uuid4().hex[:8]
        name = f"{file_prefix(self.group)}{self.run_id}-{unit.table_oid}-{first}-{unit.bucket}-{attempt}"
        with (
            task_engine(self.data_path, len(schema.columns), self.task_memory) as con,
            folded(
                con,
                unit.segments,
                schema,
                bucket=unit.bucket,
                buckets=unit.buckets,
                skip_before=skip_before,
                own=unit.own,
                how=fold_of(mode),
            ) as fold,
        ):
            data = None
            rows = 0
            if fold.upsert_rows != 0:
                for file in write_files(
                    con, fold.upserts, place, f"{name}.parquet",
                    columns=len(schema.columns), table=schema.qualified,
                ):  # fmt: skip
                    data, rows = file.path, file.rows
            make_directory(self.scratch)
            deletes = self._aside(con, fold.deletes, f"{name}-deletes", schema)
            patches = self._aside(con, fold.patches, f"{name}-patches", schema)
            ends = self._aside(con, fold.ends, f"{name}-ends", schema)
        return UnitFiles(data, deletes, patches, rows, ends, skip_before)

    def _aside(
        self, con: duckdb.DuckDBPyConnection, query: str | None, name: str, schema: TableSchema
    ) -> str | None:
        if query is None:
            return None
        path = join(self.scratch, f"{name}.parquet")
        _write(con, query, path, schema)
        return path


@contextlib.contextmanager
def task_engine(
    data_path: str, columns: int, task_memory: int = TASK_MEMORY
) -> Iterator[duckdb.DuckDBPyConnection]:
    """An engine for one task on a table of so many columns; a new one costs 20 ms, an old one keeps its memory."""
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
    """For the note `skips`: tables that are not ready, or have changes to leave out after `position`."""
    return {
        s.oid: s.copy_position if s.ready else None
        for s in states
        if not s.ready or s.copy_position > position
    }


def remove_scratch(units: Iterable[tuple[Unit, UnitFiles | None]]) -> None:
    """Keys and patches that tasks left for a commit, after it."""
    for _, files in units:
        for path in (files.deletes, files.patches, files.ends) if files is not None else ():
            if path is not None:
                discard_file(path)


def parked_units(
    units: Iterable[tuple[Unit, UnitFiles | None]], states: Mapping[int, TableState]
) -> list[SegmentRef]:
    """Segments of the tables that are not ready, in order, each once."""
    found = {}
    for unit, _ in units:
        if not states[unit.table_oid].ready:
            for segment in unit.segments:
                found[unit.table_oid, segment.first_ord] = segment
    return [segment for _, segment in sorted(found.items())]


def plan_batch(
    units: list[tuple[Unit, UnitFiles | None]],
    states: Mapping[int, TableState],
    position: Position,
    *,
    before: int,
    parked: Iterable[SegmentRef] = (),
    version: Callable[[SegmentRef], TableSchema] = columns_of,
) -> BatchPlan:
    """
    One batch as a plan: ready tables with their runs in order, and for each its segments or its files.

    `before` is where the batch begins; `parked` are the segments of the other tables, already in the
    parking; `version` tells the columns of a segment.
    """
    tables: dict[int, dict[int, list[tuple[Unit, UnitFiles | None]]]] = {}
    for unit, files in units:
        if states[unit.table_oid].ready:
            tables.setdefault(unit.table_oid, {}).setdefault(unit.run, []).append((unit, files))
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
    runs: list[list[tuple[Unit, UnitFiles | None]]],
    before: int,
    version: Callable[[SegmentRef], TableSchema],
) -> TablePlan:
    skip_before = state.copy_position if state.copy_position > before else 0
    # What the copy has is left out with its columns: those that the copy brought are newer.
    left = [run for run in runs if any(s.last_lsn > skip_before for unit, _ in run for s in unit.segments)]
    plans = tuple(_run(p, skip_before, version) for p in left)
    return TablePlan(state.oid, state.target, plans, skip_before, state.schema, state.mode, state.target_uuid)


def _run(
    pieces: list[tuple[Unit, UnitFiles | None]],
    skip_before: int,
    version: Callable[[SegmentRef], TableSchema],
) -> RunPlan:
    first = pieces[0][0]
    files = [f for _, f in pieces if f is not None]
    if len(files) < len(pieces) or any(f.skip_before != skip_before for f in files):
        # Left to us, or folded before the table's copy came in: all segments of the run, once each.
        segments = {s.first_ord: s for unit, _ in pieces for s in unit.segments}
        return RunPlan(
            schema=version(first.segments[0]),
            segments=tuple(segments[o] for o in sorted(segments)),
        )
    return RunPlan(
        schema=version(first.segments[0]),
        segments=() if first.truncate is None else (first.truncate,),
        data=tuple(f.data for f in files if f.data),
        deletes=tuple(f.deletes for f in files if f.deletes),
        patches=tuple(f.patches for f in files if f.patches),
        ends=tuple(f.ends for f in files if f.ends),
    )
