from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aqueduck.model.schema import Column, TableSchema
from tests.chunk_files import written_chunk


@pytest.mark.parametrize(("columns", "cell"), [(1, "x" * 400_000), (1600, "7")], ids=["large", "wide"])
def test_a_chunk_of_any_shape_fits_in_a_tasks_memory(tmp_path: Path, columns: int, cell: str) -> None:
    """Promise 4: megabytes in a row, or as many columns as PostgreSQL allows, are written in row groups that stay small."""
    rows = 4_000_000 // (columns * len(cell))
    schema = TableSchema(
        1, "public", "t", tuple(Column(f"c{i}", 25, -1) for i in range(columns)), ("c0",), "d"
    )
    array = pa.array([cell] * rows)
    batch = pa.RecordBatch.from_arrays([array] * columns, names=[f"n{i}" for i in range(columns)])
    batches = 80 if columns == 1 else 4
    file = written_chunk(
        (batch for _ in range(batches)),
        schema,
        data_path=str(tmp_path),
        directory=str(tmp_path),
        name="c",
        chunk=0,
    )
    [path] = file.paths
    assert pq.read_metadata(path).num_rows == file.rows == rows * batches
