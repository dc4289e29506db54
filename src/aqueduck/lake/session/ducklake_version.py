"""
The versions of DuckLake and DuckDB that this Aqueduck works with, and what it relies on in them.

A catalog of another version is refused when it is attached, before anything is read or written.  `CATALOG_TABLES`,
`FUNCTIONS` and `WORKAROUNDS` are the checklist for the next version of DuckLake: a test compares them with the code, and each
workaround has a test that fails as soon as DuckLake no longer needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import duckdb

from aqueduck.model.errors import LakeVersionError

__all__ = ["CATALOG_TABLES", "FORMAT", "FUNCTIONS", "WORKAROUNDS", "Workaround", "version_error"]

FORMAT = "1.0"
"""The version of the catalogs that DuckLake creates, reads and writes in DuckDB 1.5."""

CATALOG_TABLES = frozenset(
    {
        "ducklake_column",
        "ducklake_data_file",
        "ducklake_delete_file",
        "ducklake_file_column_stats",
        "ducklake_file_partition_value",
        "ducklake_files_scheduled_for_deletion",
        "ducklake_inlined_data_tables",
        "ducklake_metadata",
        "ducklake_partition_column",
        "ducklake_partition_info",
        "ducklake_schema",
        "ducklake_snapshot",
        "ducklake_snapshot_changes",
        "ducklake_sort_expression",
        "ducklake_sort_info",
        "ducklake_table",
        "ducklake_table_column_stats",
        "ducklake_table_stats",
        "ducklake_view",
    }
)
"""
Tables of DuckLake's catalog that are read.  Two are also written: `ducklake_table_column_stats` (ADR 32, ADR 66) and
`ducklake_file_partition_value` (ADR 72).
"""

FUNCTIONS = frozenset(
    {
        "ducklake_add_data_files",
        "ducklake_cleanup_old_files",
        "ducklake_expire_snapshots",
        "ducklake_flush_inlined_data",
        "ducklake_list_files",
        "ducklake_merge_adjacent_files",
        "ducklake_options",
        "ducklake_rewrite_data_files",
        "ducklake_snapshots",
        "ducklake_table_changes",
        "ducklake_table_deletions",
        "ducklake_table_info",
        "ducklake_table_insertions",
    }
)
"""Functions of DuckLake that are called, and the setting `ducklake_default_data_inlining_row_limit`."""


@dataclass(frozen=True, slots=True)
class Workaround:
    """Code that exists because of how one version of DuckLake or DuckDB behaves."""

    module: str
    """The module with the code, below `aqueduck`."""
    reason: str
    test: str
    """The test in `tests/lake/conformance/test_ducklake.py` that pins the behaviour; when it fails, the code may go."""


WORKAROUNDS = (
    Workaround(
        "lake.target.inserts",
        "ducklake_add_data_files takes no key (ADR 70)",
        "test_an_encrypted_file_cannot_be_added",
    ),
    Workaround(
        "lake.source.change_sides",
        "a row deleted from a merged file is dated by its insertion (ADR 51)",
        "test_the_first_deletion_from_a_merged_file_is_dated_wrongly",
    ),
    Workaround(
        "lake.source.source_lake",
        "a merge gives updated rows new row ids",
        "test_a_merge_gives_updated_rows_new_row_ids_wrongly",
    ),
    Workaround(
        "lake.upkeep.table_upkeep",
        "removed rows reappear if they are flushed after a rewrite (ADR 32)",
        "test_a_flush_after_a_rewrite_shows_removed_rows_again_wrongly",
    ),
    Workaround(
        "lake.upkeep.statistics",
        "statistics of a table are narrower than its rows after a file of NULLs (ADR 66)",
        "test_a_filter_misses_rows_after_a_file_of_nulls_wrongly",
    ),
    Workaround(
        "lake.target.places",
        "a bucket hides the rows of files that were written for other partitions",
        "test_a_bucket_hides_the_rows_of_files_from_before_wrongly",
    ),
    Workaround(
        "lake.target.evolve",
        "a column gets the id of one that was added and dropped in one transaction (ADR 9)",
        "test_a_new_column_shows_values_of_one_that_was_added_and_dropped_wrongly",
    ),
)

_CATALOG = re.compile(r"catalog version is (\S+), but the extension requires version ([\d.]+\d)")
_FILE = re.compile(
    r"database file with version number (\d+), but we can only read versions? between \d+ and (\d+)"
)
_DOCS = "see docs/compatibility.md, section Versions of the lake"


def version_error(message: str) -> LakeVersionError | None:
    """The error for a catalog that DuckLake or DuckDB refuses because of its version; None for any other message."""
    if found := _CATALOG.search(message):
        theirs, ours = found.groups()
        what = f"the lake's catalog has DuckLake version {theirs}, but this is DuckLake {ours} in DuckDB {duckdb.__version__}"
        return LakeVersionError(what, hint=_older(theirs) if _is_older(theirs, ours) else _newer(ours))
    if found := _FILE.search(message):
        theirs, ours = found.groups()
        what = (
            f"the lake's catalog is a DuckDB file of storage version {theirs}, but DuckDB {duckdb.__version__}"
            f" reads versions up to {ours}"
        )
        return LakeVersionError(what, hint=_newer(FORMAT))
    return None


def _is_older(theirs: str, ours: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", theirs)
    return found is not None and (int(found[1]), int(found[2])) < tuple(map(int, ours.split(".")[:2]))


def _older(theirs: str) -> str:
    return (
        f"back up the catalog, then migrate it from {theirs}: attach it once in DuckDB {duckdb.__version__} with the option"
        f" automatic_migration; {_DOCS}"
    )


def _newer(ours: str) -> str:
    return (
        "install an Aqueduck that supports the newer version, or configure another catalog: Aqueduck creates a catalog of"
        f" version {ours} if there is none; {_DOCS}"
    )
