from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aqueduck.errors import ConnectionLostError
from aqueduck.lake.arrow_files import AHEAD, WriteBehind, write_arrow
from aqueduck.lake.files import ROW_GROUP_BYTES

BATCH = pa.RecordBatch.from_arrays([pa.array(["x" * 1_000_000] * 20)], names=["n0"])


def batches(count: int, then: Exception | None = None) -> Iterator[pa.RecordBatch]:
    for _ in range(count):
        yield BATCH
    if then is not None:
        raise then


def test_several_files_are_written_one_behind_the_other(tmp_path: Path) -> None:
    """Each has all of its rows, in row groups that stay small: of two batches here, as one is less than the limit."""
    assert BATCH.nbytes < ROW_GROUP_BYTES < 2 * BATCH.nbytes
    with WriteBehind() as behind:
        done = []
        for number in range(3):
            finish = write_arrow(batches(5), ["v"], str(tmp_path), f"{number}.parquet", behind)
            done.append(behind.submit(finish))
        files = [future.result() for future in done]
    for file in files:
        metadata = pq.read_metadata(file.path)
        assert metadata.num_rows == file.rows == 100
        assert metadata.num_row_groups == 3
        assert file.bytes == Path(file.path).stat().st_size


def test_who_is_faster_than_the_disk_waits() -> None:
    """Memory holds a fixed number of row groups, however slow the writing is."""
    go_on, last = threading.Event(), threading.Event()
    with WriteBehind() as behind:
        for _ in range(AHEAD):
            behind.submit(go_on.wait)
        one_more = threading.Thread(target=lambda: behind.submit(last.set))
        one_more.start()
        one_more.join(0.2)
        assert one_more.is_alive()
        go_on.set()
        one_more.join(10)
    assert last.is_set()


def test_a_reader_that_fails_leaves_no_file_and_keeps_the_one_before(tmp_path: Path) -> None:
    lost = ConnectionLostError("the server is away")
    with WriteBehind() as behind:
        before = behind.submit(write_arrow(batches(4), ["v"], str(tmp_path), "a.parquet", behind))
        with pytest.raises(ConnectionLostError):
            write_arrow(batches(4, lost), ["v"], str(tmp_path), "b.parquet", behind)
    assert before.result().rows == 80
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_what_fails_behind_the_reader_is_told_and_removed(tmp_path: Path) -> None:
    """A failure while writing is one of this file, not of the next; nothing of it stays."""
    other = pa.RecordBatch.from_arrays([pa.array([1])], names=["n0"])
    with WriteBehind() as behind:
        failed = behind.submit(write_arrow([BATCH, BATCH, other], ["v"], str(tmp_path), "a.parquet", behind))
        after = behind.submit(write_arrow(batches(1), ["v"], str(tmp_path), "b.parquet", behind))
    with pytest.raises(ValueError, match="schema"):
        failed.result()
    assert after.result().rows == 20
    assert [file.name for file in tmp_path.iterdir()] == ["b.parquet"]


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
    """In whatever order they come: in turns, in runs, or only one of them."""
    batch = pa.RecordBatch.from_arrays([pa.array(values)], names=["n0"])
    if batch.schema.field(0).type == pa.null():
        batch = pa.RecordBatch.from_arrays([pa.array(values, pa.int32())], names=["n0"])
    with WriteBehind() as behind:
        done = behind.submit(write_arrow([batch], ["v"], str(tmp_path), "a.parquet", behind))
    encodings = pq.read_metadata(done.result().path).row_group(0).column(0).encodings
    assert ("RLE_DICTIONARY" in encodings) is dictionary
    assert pq.read_table(done.result().path)["v"].to_pylist() == values
