"""
Detect and refuse encrypted lakes.

DuckLake encrypts the files that it writes and keeps a key for each.  It has no key for a file that another program
wrote and added, and can then no longer read the table.  Code that adds files therefore refuses an encrypted lake.
"""

from __future__ import annotations

import duckdb

from aqueduck.lake.session.failures import lake_errors
from aqueduck.model.errors import EncryptedLakeError

__all__ = ["is_encrypted", "refuse_encrypted"]


def is_encrypted(con: duckdb.DuckDBPyConnection, metadata: str) -> bool:
    """Whether DuckLake encrypts the files of the attached lake whose catalog is in the schema `metadata`."""
    with lake_errors("reading the catalog"):
        rows = con.execute(
            f"select value from {metadata}.ducklake_metadata where key = 'encrypted'"
        ).fetchall()
    return any(str(value).lower() == "true" for (value,) in rows)


def refuse_encrypted(con: duckdb.DuckDBPyConnection, metadata: str) -> None:
    """Raise if the lake is encrypted."""
    if is_encrypted(con, metadata):
        raise EncryptedLakeError(
            "the lake is encrypted, so it could not read files written by Aqueduck",
            hint="create another lake without the option ENCRYPTED, and configure its catalog and data path",
        )
