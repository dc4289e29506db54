from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aqueduck.lake.commit.arrow_files import write_arrow
from aqueduck.lake.session.files import ROW_GROUP_BYTES
from aqueduck.model.errors import ConnectionLostError

BATCH = pa.RecordBatch.from_arrays([pa.array(["x" * 1_000_000] * 20)], names=["n0"])


def batches(count: int, then: Exception | None = None) -> Iterator[pa.RecordBatch]:
    for _ in range(count):
        yield BATCH
    if then is not None:
        raise then


def test_row_groups_stay_small(tmp_path: Path) -> None:
    """A row group has two batches here, because one is below the limit."""
    assert BATCH.nbytes < ROW_GROUP_BYTES < 2 * BATCH.nbytes
    file = write_arrow(batches(5), ["v"], str(tmp_path), "a.parquet")
    metadata = pq.read_metadata(file.path)
    assert metadata.num_rows == file.rows == 100
    assert metadata.num_row_groups == 3
    assert file.bytes == Path(file.path).stat().st_size


def test_memory_holds_one_row_group(tmp_path: Path) -> None:
    """Written rows are not kept in memory, however long a chunk is."""
    before, most = pa.total_allocated_bytes(), 0

    def fresh() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for _ in range(30):
            yield pa.RecordBatch.from_arrays([pa.array(["x" * 1_000_000] * 20)], names=["n0"])
            most = max(most, pa.total_allocated_bytes() - before)

    assert write_arrow(fresh(), ["v"], str(tmp_path), "a.parquet").rows == 600
    assert most < 4 * ROW_GROUP_BYTES


def test_a_reader_that_fails_leaves_no_file(tmp_path: Path) -> None:
    lost = ConnectionLostError("the server is away")
    assert write_arrow(batches(4), ["v"], str(tmp_path), "a.parquet").rows == 80
    with pytest.raises(ConnectionLostError):
        write_arrow(batches(4, lost), ["v"], str(tmp_path), "b.parquet")
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    other = pa.RecordBatch.from_arrays([pa.array([1])], names=["n0"])
    with pytest.raises(ValueError, match="schema"):
        write_arrow([BATCH, BATCH, other], ["v"], str(tmp_path), "a.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "dictionary"),
    [
        ([n % 2000 for n in range(10_000)], True),
        ([n // 5 for n in range(10_000)], True),
        (["a text that is always the same"] * 10_000, True),
        ([None] * 10_000, True),
        ([n % 5000 for n in range(10_000)], False),
        (list(range(10_000)), False),
        ([f"text {n}" for n in range(10_000)], False),
        ([1, 1, 1, 1], True),
        ([1, 2, 3, 4], False),
    ],
)
def test_values_that_come_again_get_a_dictionary(
    tmp_path: Path, values: list[object], dictionary: bool
) -> None:
    """In any order: in turns, in runs, or only one of them."""
    batch = pa.RecordBatch.from_arrays([pa.array(values)], names=["n0"])
    if batch.schema.field(0).type == pa.null():
        batch = pa.RecordBatch.from_arrays([pa.array(values, pa.int32())], names=["n0"])
    file = write_arrow([batch], ["v"], str(tmp_path), "a.parquet")
    encodings = pq.read_metadata(file.path).row_group(0).column(0).encodings
    assert ("RLE_DICTIONARY" in encodings) is dictionary
    assert pq.read_table(file.path)["v"].to_pylist() == values
