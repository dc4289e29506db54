"""
Encrypted lakes, by what their catalog says.

DuckLake encrypts the files that it writes itself and keeps a key for each.  It has no key for a file that was written
by somebody else and added: of such a table it can read nothing any more.  So whoever adds files refuses an encrypted lake.
"""

from __future__ import annotations

import duckdb

from aqueduck.lake.session.failures import lake_errors
from aqueduck.model.errors import EncryptedLakeError

__all__ = ["is_encrypted", "refuse_encrypted"]


def is_encrypted(con: duckdb.DuckDBPyConnection, metadata: str) -> bool:
    """Whether DuckLake encrypts the files of the attached lake whose own tables are in the schema `metadata`."""
    with lake_errors("reading the catalog"):
        rows = con.execute(
            f"select value from {metadata}.ducklake_metadata where key = 'encrypted'"
        ).fetchall()
    return any(str(value).lower() == "true" for (value,) in rows)


def refuse_encrypted(con: duckdb.DuckDBPyConnection, metadata: str) -> None:
    """Raise if files that we write could not be read in this lake."""
    if is_encrypted(con, metadata):
        raise EncryptedLakeError(
            "the lake is encrypted, and files written by Aqueduck could not be read in it",
            hint="make another lake, without the option ENCRYPTED, and name its catalog and data path",
        )
