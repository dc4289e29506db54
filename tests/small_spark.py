"""
As much of a Spark session as a fan-out uses, in this process: the service's own jobs run, without a JVM.

`SmallSpark` is the twin of `SparkSession` for `spark.query.fanout_query`: it maps partitions one after the other.  What only a
real Spark shows (closures that travel, workers that die) is tested in `tests/spark/query/test_fanout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class SmallTaskContext:
    """The place of `pyspark.TaskContext`: which partition is worked on."""

    partition = 0

    @classmethod
    def get(cls) -> SmallTaskContext:
        return cls()

    def partitionId(self) -> int:  # noqa: N802 - Spark's name
        return self.partition


@dataclass
class Frame:
    """Partitions of Arrow batches."""

    partitions: list[list[pa.RecordBatch]]

    def mapInArrow(self, task: Task, _schema: str) -> Frame:  # noqa: N802 - Spark's name
        done = []
        for number, batches in enumerate(self.partitions):
            SmallTaskContext.partition = number
            done.append(list(task(iter(batches))))
        return Frame(done)

    def repartitionById(self, count: int, column: str) -> Frame:  # noqa: N802 - Spark's name
        partitions: list[list[pa.RecordBatch]] = [[] for _ in range(count)]
        for batch in (batch for batches in self.partitions for batch in batches):
            for row in range(batch.num_rows):
                partitions[batch[column][row].as_py()].append(batch.slice(row, 1))
        return Frame(partitions)

    def collect(self) -> list[SimpleNamespace]:
        batches = [batch for batches in self.partitions for batch in batches]
        return [SimpleNamespace(**row) for batch in batches for row in batch.to_pylist()]


class SmallSpark:
    """A session with two cores' worth of tasks."""

    def __init__(self) -> None:
        self.sparkContext = SimpleNamespace(
            defaultParallelism=2,
            setJobGroup=lambda *_, **__: None,
            setLocalProperty=lambda *_: None,
            cancelJobGroup=lambda *_: None,
        )

    def range(self, start: int, end: int, _step: int, _partitions: int) -> Any:
        ids = [pa.RecordBatch.from_pydict({"id": [i]}) for i in range(start, end)]
        return Frame([[batch] for batch in ids])
