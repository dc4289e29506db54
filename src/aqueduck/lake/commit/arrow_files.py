"""
Write Arrow batches to Parquet files on local storage, for rows that need no cast.

This takes a third less work than a DuckDB query that writes the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aqueduck.lake.session.files import ROW_GROUP_BYTES, WrittenFile, written_or_removed
from aqueduck.lake.session.storage import join, make_directory, sync_file

__all__ = ["write_arrow"]

# A dictionary pays off if each value occurs at least this often, on average, in a sample of this many rows.
REPEATS_MIN, SAMPLE_ROWS = 4, 8192
_FEW = pa.array(np.sort(np.random.default_rng(0).choice(SAMPLE_ROWS, 256, replace=False)))


def write_arrow(
    batches: Iterable[pa.RecordBatch],
    names: list[str],
    directory: str,
    name: str,
    *,
    table: str | None = None,
) -> WrittenFile:
    """Write one or more batches as a file; memory holds one row group."""
    path = join(directory, name)
    with written_or_removed(path, table):
        make_directory(directory)
        groups = _row_groups(batches, names)
        group = next(groups)
        rows = 0
        with _open_writer(path, group) as writer:
            while group is not None:
                writer.write_table(group, row_group_size=group.num_rows)
                rows += group.num_rows
                group = next(groups, None)
        sync_file(path)
        return WrittenFile(path, rows, Path(path).stat().st_size)


def _open_writer(path: str, first: pa.Table) -> pq.ParquetWriter:
    repeated = [name for name in first.column_names if _repeats(first[name])]
    encodings = {f.name: _encoding(_stored(f.type)) for f in first.schema if f.name not in repeated}
    return pq.ParquetWriter(
        path,
        first.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=repeated or False,
        column_encoding={name: encoding for name, encoding in encodings.items() if encoding} or None,
        store_schema=False,
        store_decimal_as_integer=True,
    )


def _repeats(column: pa.ChunkedArray) -> bool:
    sample = column.slice(0, SAMPLE_ROWS).cast(_stored(column.type))
    if len(sample) == SAMPLE_ROWS and pc.count_distinct(sample.take(_FEW)).as_py() == len(_FEW):
        return False  # if values repeated often enough, even these few would contain duplicates
    return bool(pc.count_distinct(sample).as_py() * REPEATS_MIN <= len(sample))


def _stored(kind: pa.DataType) -> pa.DataType:
    """The storage type: UUID and JSON are extension types over bytes and text."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _encoding(kind: pa.DataType) -> str | None:
    """
    Delta encodings for lengths and numbers.

    Files are a tenth smaller.  Texts of random digits take a third less time to write; hex texts take the same time.
    """
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return "DELTA_LENGTH_BYTE_ARRAY"
    if pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return "DELTA_BINARY_PACKED"
    return None


def _row_groups(batches: Iterable[pa.RecordBatch], names: list[str]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held).rename_columns(names)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held).rename_columns(names)
