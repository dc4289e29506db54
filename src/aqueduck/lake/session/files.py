"""
Parquet files in the lake's data path: what they are called and how they are written.

Spark tasks and the committer write them; the lake learns of them when `apply` adds them.  Until
then they are nobody's, and `orphans` removes the ones that a dead batch left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import duckdb

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

# Without Bloom filters: by them, DuckDB does not find the rows of a BLOB (see `lake.session.sql.equal`).
PARQUET = "format parquet, write_bloom_filter false"
# Measured on a sysbench-like table of 1 M rows: half the size of snappy or lz4, in no more time.
_OPTIONS = f"{PARQUET}, compression zstd, compression_level 1, write_empty_file false, return_stats"
ROW_GROUP_BYTES = 32 << 20
DICTIONARY_BYTES, DICTIONARIES_BYTES = 1 << 20, 64 << 20


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
    with written_or_removed(path, table):
        make_directory(directory)
        with lake_errors("writing a data file", table=table):
            rows = con.execute(
                f"copy ({query}) to {literal(path)} ({_OPTIONS}, {parquet_limits(columns)})"
            ).fetchall()
        files = [WrittenFile(path, int(row[1]), int(row[2])) for row in rows if row[1]]
        for file in files:
            sync_file(file.path)
    return files


@contextlib.contextmanager
def written_or_removed(path: str, table: str | None) -> Iterator[None]:
    """After a failure the file is gone; one of the disk is a `DataPathError`."""
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
