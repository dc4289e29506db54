"""
Parquet files in the lake's data path: what they are called and how they are written.

Spark tasks and the committer write them; the lake learns of them when `apply` adds them.  Until
then they are nobody's, and `orphans` removes the ones that a dead batch left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from aqueduck.errors import DataPathError
from aqueduck.lake.failures import lake_errors
from aqueduck.lake.sql import literal
from aqueduck.lake.storage import join, make_directory, remove_file, sync_file

__all__ = ["WrittenFile", "file_name", "file_prefix", "parquet_limits", "write_arrow", "write_files"]

# Measured on a sysbench-like table of 1 M rows: half the size of snappy or lz4, in no more time.
_OPTIONS = "format parquet, compression zstd, compression_level 1, write_empty_file false, return_stats"
ROW_GROUP_BYTES = 32 << 20
DICTIONARY_BYTES, DICTIONARIES_BYTES = 1 << 20, 64 << 20
# A dictionary pays where values come again: so often at least, in a sample of so many rows.
REPEATS_MIN, SAMPLE_ROWS = 4, 8192


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written and is on disk."""

    path: str
    rows: int
    bytes: int


def file_prefix(group: str) -> str:
    """What the names of a group's files begin with; a group's name has no dash."""
    return f"aqueduck-{group}-"


def file_name(group: str, run_id: str, batch: str | int, unit: str | int) -> str:
    """The name of one file: unique by run of the service, batch and unit of work."""
    return f"{file_prefix(group)}{run_id}-{batch}-{unit}.parquet"


def parquet_limits(columns: int) -> str:
    """
    Options that keep a writer of so many columns within a task's memory.

    A row group is held until it is written, so wide or large rows make small ones.  Each text column
    has a dictionary, 1 MiB unless there are many.
    """
    dictionary = min(DICTIONARY_BYTES, DICTIONARIES_BYTES // max(columns, 1))
    return f"row_group_size_bytes {ROW_GROUP_BYTES}, string_dictionary_page_size_limit {dictionary}"


def write_files(
    con: duckdb.DuckDBPyConnection,
    query: str,
    directory: str,
    name: str,
    *,
    columns: int = 1,
    table: str | None = None,
) -> list[WrittenFile]:
    """Write the rows of a query with so many columns as a file, safe on disk; no file if there are no rows."""
    path = join(directory, name)
    with _written_or_removed(path, table):
        make_directory(directory)
        with lake_errors("writing a data file", table=table):
            rows = con.execute(
                f"copy ({query}) to {literal(path)} ({_OPTIONS}, {parquet_limits(columns)})"
            ).fetchall()
        files = [WrittenFile(path, int(row[1]), int(row[2])) for row in rows if row[1]]
        for file in files:
            sync_file(file.path)
    return files


def write_arrow(
    batches: Iterable[pa.RecordBatch],
    names: list[str],
    directory: str,
    name: str,
    *,
    table: str | None = None,
) -> WrittenFile:
    """Write batches (one at least) that are the lake's values already as a local file, safe on disk: a third less work than by a query."""
    path = join(directory, name)
    with _written_or_removed(path, table):
        make_directory(directory)
        groups = _row_groups(batches, names)
        group = next(groups)
        rows = group.num_rows
        # A row group is compressed in a thread while the next one arrives, so that the server need not wait.
        with _open_writer(path, group) as writer, ThreadPoolExecutor(1) as thread:
            under_way = thread.submit(writer.write_table, group, row_group_size=rows)
            for group in groups:
                under_way.result()
                under_way = thread.submit(writer.write_table, group, row_group_size=group.num_rows)
                rows += group.num_rows
            under_way.result()
        sync_file(path)
        return WrittenFile(path, rows, Path(path).stat().st_size)


def _open_writer(path: str, first: pa.Table) -> pq.ParquetWriter:
    sample = first.slice(0, SAMPLE_ROWS)
    repeated = [
        name
        for name in first.column_names
        if pc.count_distinct(sample[name]).as_py() * REPEATS_MIN <= sample.num_rows
    ]
    encodings = {f.name: _encoding(f.type) for f in first.schema if f.name not in repeated}
    return pq.ParquetWriter(
        path,
        first.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=repeated or False,
        column_encoding={name: encoding for name, encoding in encodings.items() if encoding} or None,
        store_schema=False,
    )


def _encoding(kind: pa.DataType) -> str | None:
    """Lengths and numbers as differences: smaller by a tenth; texts of random digits take a third less time to write, hex ones no less."""
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


@contextlib.contextmanager
def _written_or_removed(path: str, table: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        remove_file(path)
        reason = (exc.strerror or "unknown reason").lower()
        hint = "check free space and the rights on lake.data_path"
        raise DataPathError(f"a data file cannot be written: {reason}", hint=hint, table=table) from exc
    except BaseException:
        remove_file(path)
        raise
