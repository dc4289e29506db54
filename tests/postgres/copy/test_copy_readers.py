"""A task of a copy reads two chunks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from aqueduck.lake.fold import fold_tasks as units
from aqueduck.model.errors import AqueduckError, LakeWriteError
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.copy.table_copy import ChunkReader, export_snapshot, plan_chunks
from aqueduck.spark.query import copy_job
from aqueduck.spark.query.copy_job import READERS, CopyItem, CopyJob
from tests.fix_postgres import Database

ROWS = 20_000


@contextmanager
def made_job(db: Database, directory: Path, column: str) -> Iterator[CopyJob]:
    """The copy of a table of some chunks."""
    db.execute(f"create table t (id int primary key, v {column})")
    db.execute(f"insert into t (id) select generate_series(1, {ROWS})")
    schema = describe_table(db.observer, "t")
    chunks = plan_chunks(db.observer, schema, chunk_bytes=1 << 17)
    assert len(chunks) > 4
    items = tuple(CopyItem(schema, c, str(directory), f"c{c.number}", None) for c in chunks)
    snapshot = export_snapshot(db.dsn)
    try:
        yield CopyJob(db.dsn, snapshot.name, str(directory), items)
    finally:
        snapshot.close()


@pytest.mark.parametrize("column", ["text default 'x'", "int[] default '{1}'"], ids=["Arrow", "DuckDB"])
def test_every_row_comes_once(
    db: Database, tmp_path: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-S05: for each reader.  DuckDB's memory is the whole task's: it casts one chunk at a time."""
    engines = most = 0

    @contextmanager
    def counted(data_path: str, columns: int, memory: int) -> Iterator[duckdb.DuckDBPyConnection]:
        nonlocal engines, most
        engines += 1
        most = max(most, engines)
        with units.task_engine(data_path, columns, memory) as con:
            yield con
        engines -= 1

    monkeypatch.setattr("aqueduck.lake.commit.copy_files.task_engine", counted)
    with made_job(db, tmp_path, column) as job:
        files = job.run(range(len(job.items)))
    assert most == ("[]" in column)
    assert [file.chunk for file in files] == list(range(len(job.items)))
    assert sum(file.rows for file in files) == ROWS
    count = "select count(*), count(distinct id) from read_parquet(?)"
    assert duckdb.execute(count, [[path for file in files for path in file.paths]]).fetchone() == (ROWS, ROWS)


def test_each_reader_has_a_connection(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with one chunk needs one."""
    made: list[ChunkReader] = []

    def make(dsn: str, snapshot: str) -> ChunkReader:
        made.append(ChunkReader(dsn, snapshot))
        return made[-1]

    monkeypatch.setattr(copy_job, "ChunkReader", make)
    with made_job(db, tmp_path, "text") as job:
        job.run(range(len(job.items)))
        assert len(made) == READERS
        job.run([0])
        assert len(made) == READERS + 1


def test_a_failure_of_one_ends_both(db: Database, tmp_path: Path, arm: Callable[[str], None]) -> None:
    """What is left is not read in vain."""
    arm("copy.chunk_written:raise")
    with made_job(db, tmp_path, "text") as job, pytest.raises(LakeWriteError, match=r"copy\.chunk_written"):
        job.run(range(len(job.items)))
    written = list(tmp_path.rglob("*.parquet"))
    assert 0 < len(written) < len(job.items)
    with pytest.raises(AqueduckError):
        replace(job, snapshot="none").run([1, 2])
