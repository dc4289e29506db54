"""
Encrypted lakes: detect them, load what they need, and seal files of our own that lie in their data path.

DuckLake encrypts the files that it writes and keeps a key for each in the catalog.  A file that another program wrote
cannot be added, because `ducklake_add_data_files` of DuckLake 1.5.5 takes no key (ADR 70).  The rows of tasks are therefore
inserted by the committer, and what tasks and parking write for it is scratch or sealed.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from aqueduck.lake.session.engine import load_extension
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import literal, string_list
from aqueduck.lake.session.storage import no_glob
from aqueduck.model.errors import EncryptedLakeError

if TYPE_CHECKING:  # it imports this module
    from aqueduck.lake.session.catalog import LakeSession

__all__ = [
    "can_encrypt",
    "encrypted_with",
    "is_encrypted",
    "new_key",
    "parquet_rows",
    "prepare_encryption",
    "seal_file",
    "unseal_file",
]

CRYPTO = "httpfs"
"""The extension with OpenSSL.  Without it, DuckDB 1.5.5 refuses to encrypt and takes five times as long to decrypt."""


def is_encrypted(con: duckdb.DuckDBPyConnection, metadata: str) -> bool:
    """Whether DuckLake encrypts the files of the attached lake whose catalog is in the schema `metadata`."""
    with lake_errors("reading the catalog"):
        rows = con.execute(
            f"select value from {metadata}.ducklake_metadata where key = 'encrypted'"
        ).fetchall()
    return any(str(value).lower() == "true" for (value,) in rows)


def can_encrypt() -> bool:
    """Whether the extension is installed that DuckDB needs to encrypt."""
    return importlib.util.find_spec(f"duckdb_extension_{CRYPTO}") is not None


def prepare_encryption(con: duckdb.DuckDBPyConnection, *, read_only: bool = False) -> None:
    """Load what DuckDB needs for the files of an encrypted lake; reading also works without it."""
    if can_encrypt():
        load_extension(con, CRYPTO)
    elif not read_only:
        raise EncryptedLakeError(
            f"the lake is encrypted, and DuckDB encrypts files only with its extension {CRYPTO}, which is not installed",
            hint=f"pip install duckdb-extension-{CRYPTO}=={duckdb.__version__}, here and on Spark's workers",
        )


def new_key() -> str:
    """A new key with 128 random bits, in the form of 32 characters that DuckDB uses as they are."""
    return secrets.token_hex(16)


def encrypted_with(key: str | None) -> str:
    """The option of `copy … to` for a file with this key, after other options; empty without a key."""
    return "" if key is None else f", encryption_config {{footer_key_value: {literal(key)}}}"


def parquet_rows(paths: Sequence[str], keys: Sequence[str | None] = ()) -> str:
    """A relation with the rows of Parquet files, each encrypted with its key or not at all; directories such as `a=1` mean nothing."""
    if not any(keys):
        return f"read_parquet({string_list(map(no_glob, paths))}, hive_partitioning => false)"
    files = (
        f"from read_parquet({literal(no_glob(path))}, hive_partitioning => false,"
        f" encryption_config = {{footer_key_value: {literal(key or '')}}})"
        for path, key in zip(paths, keys, strict=True)
    )
    return f"({' union all by name '.join(files)})"


def seal_file(session: LakeSession, source: str, path: str) -> str:
    """Write an encrypted copy of a file, as the only value of a Parquet file; returns its key."""
    key = new_key()
    session.execute(
        f"copy (select content from read_blob({literal(no_glob(source))})) to {literal(path)}"
        f" (format parquet, compression uncompressed{encrypted_with(key)})",
        doing="encrypting a file",
    )
    return key


def unseal_file(session: LakeSession, path: str, key: str, destination: Path) -> None:
    """Write the content of an encrypted copy to a local file."""
    [[content]] = session.execute(
        f"select content from {parquet_rows([path], [key])}", doing="decrypting a file"
    )
    destination.write_bytes(content)
