"""
Parquet files below the lake's data path: how they are named and written.

Spark tasks and the committer write them.  They become part of a table when `apply` adds them.  Until
then they are orphans, and `orphans` removes those that a failed batch left behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import duckdb

from aqueduck.lake.session.encryption import encrypted_with
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import literal
from aqueduck.lake.session.storage import discard_file, join, make_directory, sync_file
from aqueduck.model.errors import DataPathError, system_reason

__all__ = [
    "PARQUET",
    "ROW_GROUP_BYTES",
    "WrittenFile",
    "file_name",
    "file_prefix",
    "parquet_limits",
    "write_files",
    "written_or_removed",
]

# No Bloom filters: with them, DuckDB does not find rows by a BLOB (see `lake.session.sql.equal`).
PARQUET = "format parquet, write_bloom_filter false"
# Measured on a sysbench-like table of 1 M rows: half the size of snappy or lz4 in the same time.
_OPTIONS = f"{PARQUET}, compression zstd, compression_level 1, write_empty_file false, return_stats"
ROW_GROUP_BYTES = 32 << 20
DICTIONARY_BYTES, DICTIONARIES_BYTES = 1 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written and synced to disk."""

    path: str
    rows: int
    bytes: int


def file_prefix(group: str) -> str:
    """The prefix of a group's file names; a group's name contains no dash."""
    return f"aqueduck-{group}-"


def file_name(group: str, run_id: str, batch: str | int, task: str | int) -> str:
    """The name of a file, unique by service run, batch and task."""
    return f"{file_prefix(group)}{run_id}-{batch}-{task}.parquet"


def parquet_limits(columns: int) -> str:
    """
    Options that keep a writer with this number of columns within a task's memory.

    A row group is limited in bytes, because it is held in memory until it is written.  The dictionary of each
    text column is at most 1 MiB, and smaller if there are many columns.
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
    key: str | None = None,
) -> list[WrittenFile]:
    """
    Write the rows of a query to a file and sync it; `columns` is the query's number of columns.  No rows, no file.

    With a `key`, the file is encrypted, which needs `prepare_encryption`.
    """
    path = join(directory, name)
    with written_or_removed(path, table):
        make_directory(directory)
        with lake_errors("writing a data file", table=table):
            rows = con.execute(
                f"copy ({query}) to {literal(path)} ({_OPTIONS}, {parquet_limits(columns)}{encrypted_with(key)})"
            ).fetchall()
        files = [WrittenFile(path, int(row[1]), int(row[2])) for row in rows if row[1]]
        for file in files:
            sync_file(file.path)
    return files


@contextlib.contextmanager
def written_or_removed(path: str, table: str | None) -> Iterator[None]:
    """Remove the file if writing it fails; an error of the disk becomes a `DataPathError`."""
    try:
        yield
    except OSError as exc:
        discard_file(path)
        hint = "check free space and the rights on lake.data_path"
        raise DataPathError(
            f"a data file cannot be written: {system_reason(exc)}", hint=hint, table=table
        ) from exc
    except BaseException:
        discard_file(path)
        raise
