"""
The initial copy of a table as a Spark batch job: one task per chunk.

The driver holds the exported snapshot open; tasks use it, read their range of pages and write one
Parquet file each into the lake's data path.  Committing the files is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aqueduck.errors import AqueduckError
from aqueduck.lake.copy_files import ChunkFile, write_chunk
from aqueduck.postgres.table_copy import Chunk, read_chunk
from aqueduck.schema import TableSchema

__all__ = ["CopyTask", "run_copy"]

POOL = "copy"


@dataclass(frozen=True, slots=True)
class CopyTask:
    """What a worker needs to copy any chunk of one table."""

    dsn: str
    snapshot: str
    schema: TableSchema
    chunks: tuple[Chunk, ...]
    data_path: str
    directory: str
    file_prefix: str
    progress_dir: str
    """On storage that workers and driver share: a file appears for each chunk that is done."""

    def run(self, number: int) -> ChunkFile:
        chunk = self.chunks[number]
        done = write_chunk(
            read_chunk(self.dsn, self.snapshot, self.schema, chunk),
            self.schema,
            data_path=self.data_path,
            directory=self.directory,
            name=f"{self.file_prefix}-copy-{number}",
            chunk=number,
        )
        (Path(self.progress_dir) / f"{number}.json").write_text(done.to_json())
        return done


def run_copy(spark: SparkSession, task: CopyTask) -> list[ChunkFile]:
    """Copy all chunks; blocks until they are done.  A failed task is raised as our error."""
    Path(task.progress_dir).mkdir(parents=True, exist_ok=True)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", POOL)
    numbers = spark.range(0, len(task.chunks), 1, len(task.chunks))
    try:
        rows = numbers.mapInArrow(_copy_chunks(task), "file string").collect()
    except (PySparkException, Py4JError) as exc:
        raise AqueduckError.from_text(str(exc)) or AqueduckError(
            f"the copy failed: {type(exc).__name__}"
        ) from exc
    return [ChunkFile.from_json(row.file) for row in rows]


def copied_so_far(progress_dir: str) -> Sequence[ChunkFile]:
    """The chunks that are done, as far as their tasks have said."""
    files = Path(progress_dir).glob("*.json")
    return [ChunkFile.from_json(text) for file in files if (text := file.read_text())]


def _copy_chunks(task: CopyTask) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def copy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            files = [task.run(number).to_json() for number in batch["id"].to_pylist()]
            yield pa.RecordBatch.from_arrays([pa.array(files, pa.string())], names=["file"])

    return copy
