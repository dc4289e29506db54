"""
The initial copy as a Spark batch job: tasks read ranges of pages and write Parquet files.

The driver holds the exported snapshot open.  Tasks use it to read their chunks, write one file per chunk below the
lake's data path, and write a state file once the chunk is on disk.  A task has several chunks, possibly of several
tables.  The caller commits the files.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aqueduck import faults
from aqueduck.lake.commit.copy_files import ChunkFile, write_chunk
from aqueduck.lake.fold.fold_tasks import TASK_MEMORY
from aqueduck.lake.session.object_stores import know_store
from aqueduck.model.columns.projection import copies_cells
from aqueduck.model.errors import AqueduckError, CopyDisturbedError, own_error
from aqueduck.model.layout import PLAIN, TableLayout
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.copy.table_copy import Chunk, ChunkReader
from aqueduck.state_files.files import replace_file

__all__ = ["CopyItem", "CopyJob", "cancel_copies", "run_copy"]

POOL = "copy"
TASK_BYTES_MIN, TASK_BYTES_MAX = 32 << 20, 256 << 20
READERS = 2


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One chunk of one table, and its destination."""

    schema: TableSchema
    chunk: Chunk
    directory: str
    name: str
    journal_path: str | None
    """A state file that is written when the chunk is done, on storage that workers and driver share."""
    more: str = ""
    """The columns that the mode adds, as part of a select list."""
    more_names: tuple[str, ...] = ()
    layout: TableLayout = PLAIN


@dataclass(frozen=True, slots=True)
class CopyJob:
    """The copy job, as passed to workers."""

    dsn: str
    snapshot: str
    data_path: str
    items: tuple[CopyItem, ...]
    properties: dict[str, str] = field(default_factory=dict)
    """Settings of the object store, if the data path is in one; credentials are names of variables."""
    task_memory: int = TASK_MEMORY
    """The memory limit of DuckDB in a task, in bytes."""

    def run(self, numbers: Sequence[int]) -> list[ChunkFile]:
        """Copy these items, two at a time: the server sends one while the other is compressed or written."""
        know_store(self.data_path, self.properties)
        left, readers, alone = deque(numbers), min(READERS, len(numbers)), threading.Lock()
        with ThreadPoolExecutor(readers) as pool:
            parts = [pool.submit(self._copy, left, alone) for _ in range(readers)]
        done = {number: file for part in parts for number, file in part.result().items()}
        return [done[number] for number in numbers]

    def _copy(self, left: deque[int], alone: threading.Lock) -> dict[int, ChunkFile]:
        """Copy items until none are left."""
        try:
            with ChunkReader(self.dsn, self.snapshot) as reader:
                return {number: self._copy_item(self.items[number], reader, alone) for number in _taken(left)}
        except BaseException:
            left.clear()  # the task fails, so the other reader can stop
            raise

    def _copy_item(self, item: CopyItem, reader: ChunkReader, alone: threading.Lock) -> ChunkFile:
        read = reader.rows if copies_cells(item.schema) else reader.texts
        done = write_chunk(
            read(item.schema.streamed, item.chunk),
            item.schema,
            data_path=self.data_path,
            directory=item.directory,
            name=item.name,
            chunk=item.chunk.number,
            alone=alone,
            more=item.more,
            more_names=item.more_names,
            layout=item.layout,
            task_memory=self.task_memory,
        )
        if item.journal_path is not None:
            replace_file(Path(item.journal_path), done.to_json(), sync=True)
        faults.point("copy.chunk_written")
        return done

    def tasks(self, cores: int) -> list[list[int]]:
        """
        Group the items into tasks: in order, each with a core's share of the remaining bytes, so that all cores stay busy.

        A minimum size limits the overhead per task.  A maximum size keeps other tasks, such as those of a stream, from
        waiting long.
        """
        left = sum(item.chunk.bytes for item in self.items)
        tasks: list[list[int]] = []
        size = limit = 0
        for number, item in enumerate(self.items):
            if not tasks or size + item.chunk.bytes // 2 > limit:
                tasks.append([])
                size, limit = 0, min(max(left // cores, TASK_BYTES_MIN), TASK_BYTES_MAX)
            tasks[-1].append(number)
            size += item.chunk.bytes
            left -= item.chunk.bytes
        return tasks


def run_copy(spark: SparkSession, name: str, job: CopyJob) -> list[ChunkFile]:
    """Copy all items; blocks until they are done or `cancel_copies` is called with the name.  Raises a task's error as ours."""
    if not job.items:
        return []
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", POOL)
    spark.sparkContext.setJobGroup(name, "copy", interruptOnCancel=True)
    tasks = job.tasks(spark.sparkContext.defaultParallelism)
    # Not a DataFrame: planning one takes the JVM 0.1 s, and there is nothing to plan.
    work = spark.sparkContext.parallelize(tasks, len(tasks))
    try:
        done = work.flatMap(functools.partial(_copy_task, job)).collect()
    except (PySparkException, Py4JError) as exc:
        # Without an error of ours, a worker or an executor was lost; the rest is copied later.
        raise AqueduckError.from_text(str(exc)) or CopyDisturbedError(
            f"a task of the copy was lost: {type(exc).__name__}"
        ) from exc
    files = dict(done)
    return [files[number] for number in range(len(job.items))]


def cancel_copies(spark: SparkSession, name: str) -> None:
    """Cancel the running copy jobs with this name."""
    spark.sparkContext.cancelJobGroup(name)


def _copy_task(job: CopyJob, numbers: Sequence[int]) -> list[tuple[int, ChunkFile]]:
    try:
        done = job.run(numbers)
    except Exception as exc:  # noqa: BLE001 - a bug says its kind and place; its message may hold anything
        raise own_error(exc) from None
    _settle()
    return list(zip(numbers, done, strict=True))


def _taken(left: deque[int]) -> Iterator[int]:
    while True:
        try:
            yield left.popleft()
        except IndexError:
            return


@functools.cache
def _settle() -> None:
    """Once per worker: exclude loaded kernels from the garbage collection that Spark does after each task."""
    gc.collect()
    gc.freeze()
