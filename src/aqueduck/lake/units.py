"""
Units of work on the lake's side: a task folds one into files, the driver turns all into a plan.

`UnitWriter` travels to Spark's workers and needs no catalog: it writes Parquet into the directory of
the target, under a name that tells whose file it is, and keys and patches into the stage beside the
segments.  `plan_batch` puts the units of a batch back together, run by run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import duckdb

from aqueduck.batches import Unit
from aqueduck.lake.commit import BatchPlan, RunPlan, TablePlan
from aqueduck.lake.engine import open_kernel
from aqueduck.lake.failures import lake_errors
from aqueduck.lake.fold import folded
from aqueduck.lake.progress import Position
from aqueduck.lake.sql import literal
from aqueduck.lake.storage import join, make_directory
from aqueduck.schema import TableName, TableSchema

__all__ = ["UnitFiles", "UnitWriter", "plan_batch", "task_connection"]

TASK_MEMORY = "384MB"

_kernel: duckdb.DuckDBPyConnection | None = None


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """What a task made of a unit; None where there was nothing to write."""

    data: str | None
    deletes: str | None
    patches: str | None
    rows: int

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
    directories: Mapping[int, str]
    """The directory of each table's files, by the source's oid."""
    scratch: str
    """Where keys and patches go: on storage that workers and driver share, emptied at each start."""

    def write(self, unit: Unit) -> UnitFiles:
        schema = TableSchema.from_json(unit.segments[0].schema_json)
        first = unit.segments[0].first_ord
        name = f"aqueduck-{self.group}-{self.run_id}-{unit.table_oid}-{first}-{unit.bucket}"
        con = task_connection(self.data_path)
        with folded(con, unit.segments, schema, bucket=unit.bucket, buckets=unit.buckets) as fold:
            data = None
            rows = 0
            if fold.upsert_rows != 0:
                make_directory(self.directories[unit.table_oid])
                data = join(self.directories[unit.table_oid], f"{name}.parquet")
                rows = _write(con, fold.upserts, data, schema.qualified)
            make_directory(self.scratch)
            deletes = self._aside(con, fold.deletes, f"{name}-deletes", schema)
            patches = self._aside(con, fold.patches, f"{name}-patches", schema)
        return UnitFiles(data if rows else None, deletes, patches, rows)

    def _aside(self, con: duckdb.DuckDBPyConnection, query: str | None, name: str, schema: TableSchema) -> str | None:
        if query is None:
            return None
        path = join(self.scratch, f"{name}.parquet")
        _write(con, query, path, schema.qualified)
        return path


def task_connection(data_path: str) -> duckdb.DuckDBPyConnection:
    """One engine for all tasks of a worker."""
    global _kernel
    if _kernel is None:
        _kernel = open_kernel(data_path, threads=1, memory_limit=TASK_MEMORY)
    return _kernel


def _write(con: duckdb.DuckDBPyConnection, query: str, path: str, table: str) -> int:
    with lake_errors("writing a file", table=table):
        row = con.execute(f"copy ({query}) to {literal(path)} (format parquet, compression snappy)").fetchone()
    return int(row[0]) if row else 0


def plan_batch(
    units: list[tuple[Unit, UnitFiles | None]],
    targets: Mapping[int, TableName],
    position: Position,
) -> BatchPlan:
    """One batch as a plan: tables, their runs in order, and for each its segments or its files."""
    tables: dict[int, dict[int, list[tuple[Unit, UnitFiles | None]]]] = {}
    for unit, files in units:
        tables.setdefault(unit.table_oid, {}).setdefault(unit.run, []).append((unit, files))
    return BatchPlan(
        position,
        tuple(
            TablePlan(targets[oid], tuple(_run(pieces) for _, pieces in sorted(runs.items())))
            for oid, runs in tables.items()
        ),
    )


def _run(pieces: list[tuple[Unit, UnitFiles | None]]) -> RunPlan:
    first = pieces[0][0]
    files = [f for _, f in pieces if f is not None]
    return RunPlan(
        schema=TableSchema.from_json(first.segments[0].schema_json),
        truncate_first=first.truncate_first,
        segments=first.segments if first.direct else (),
        data=tuple(f.data for f in files if f.data),
        deletes=tuple(f.deletes for f in files if f.deletes),
        patches=tuple(f.patches for f in files if f.patches),
    )
