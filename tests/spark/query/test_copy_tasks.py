from __future__ import annotations

import itertools

import pytest

from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.copy.table_copy import Chunk
from aqueduck.spark.query.copy_job import TASK_BYTES_MAX, TASK_BYTES_MIN, CopyItem, CopyJob

MIB = 1 << 20
SCHEMA = TableSchema(1, "public", "t", (Column("id", 23, -1),), ("id",), "d")


def tasks_of(sizes: list[int], cores: int) -> list[list[int]]:
    """The sizes of the chunks of each task."""
    chunks = [Chunk(i, "public", "t", 0, None, size) for i, size in enumerate(sizes)]
    items = tuple(CopyItem(SCHEMA, c, "/d", str(c.number), None) for c in chunks)
    tasks = CopyJob("", "", "/d", items).tasks(cores)
    assert list(itertools.chain(*tasks)) == list(range(len(sizes)))
    return [[sizes[number] for number in task] for task in tasks]


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("count", [1, 9, 1600])
def test_tasks_grow_smaller_so_that_all_cores_end_together(cores: int, count: int) -> None:
    sums = [sum(task) for task in tasks_of([64 * MIB] * count, cores)]
    assert max(sums) <= TASK_BYTES_MAX + 32 * MIB
    assert sums == sorted(sums, reverse=True)
    assert len(sums) >= min(cores, count)
    left = [sum(sums[i:]) for i in range(len(sums))]
    assert all(
        size <= max(rest // cores, TASK_BYTES_MIN) + 32 * MIB for size, rest in zip(sums, left, strict=True)
    )


def test_small_chunks_share_a_task() -> None:
    """A thousand small tables are no thousand tasks, nor a thousand connections."""
    tasks = tasks_of([8192] * 1000, 2)
    assert len(tasks) == 1
    tasks = tasks_of([4 * MIB] * 100, 2)
    assert all(sum(task) + 4 * MIB >= TASK_BYTES_MIN for task in tasks[:-1])
