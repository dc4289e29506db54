"""
Object stores as DuckDB and pyarrow want to be told of them: endpoint and credentials by data path.

A process that writes files beside a lake (`storage`, tasks) knows a path only, so it is told once which
store the paths below a data path are in: `know_store`.  Credentials come from the variables of the process itself and
never travel in plans or options.  Lakes of a fan-out are attached with theirs by `pool`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping

import duckdb
import pyarrow.fs

from aqueduck.config.object_store import read_properties
from aqueduck.lake.session.sql import ident, literal

__all__ = ["as_directory", "create_secret", "know_store", "remote_filesystem", "store_of", "tune_uploads"]

_SECRET_KEYS = {
    "s3_access_key_id": "key_id",
    "s3_secret_access_key": "secret",
    "s3_session_token": "session_token",
    "s3_region": "region",
    "s3_endpoint": "endpoint",
    "s3_use_ssl": "use_ssl",
    "s3_url_style": "url_style",
}
UPLOAD_BYTES_MAX = "50GB"
"""The largest file; parts are a ten-thousandth of it, and each writer holds a few of them in memory."""

_known: dict[str, tuple[tuple[str, str], ...]] = {}


def know_store(data_path: str, properties: Mapping[str, str]) -> None:
    """Files below the data path are in this store; variables are those of this process."""
    if properties:
        found = read_properties(properties, os.environ, "lake: properties.")
        _known[as_directory(data_path)] = tuple(sorted(found.items()))


def store_of(path: str) -> tuple[tuple[str, str], ...]:
    """The store that a path is in; empty where nothing was said about it."""
    below = [prefix for prefix in _known if as_directory(path).startswith(prefix)]
    return _known[max(below, key=len)] if below else ()


def create_secret(con: duckdb.DuckDBPyConnection, data_path: str, store: Iterable[tuple[str, str]]) -> None:
    """
    Let an engine read and write below a data path.

    Two lakes of one engine may have different credentials; newer ones for the same path replace the older.
    """
    name = f"store_{hashlib.sha256(data_path.encode()).hexdigest()[:32]}"
    settings = ["type s3"]
    if data_path:
        settings.append(f"scope {literal(as_directory(data_path))}")
    settings += [f"{_SECRET_KEYS[key]} {literal(value)}" for key, value in store if key in _SECRET_KEYS]
    con.execute(f"create or replace secret {ident(name)} ({', '.join(settings)})")


def tune_uploads(con: duckdb.DuckDBPyConnection) -> None:
    """Parts of 5 MB instead of 80: they have to fit into the memory of a small task."""
    con.execute(f"set global s3_uploader_max_filesize = {literal(UPLOAD_BYTES_MAX)}")


def remote_filesystem(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """The file system that a URI is in, and the path there."""
    store = store_of(path)
    if not store:
        found: tuple[pyarrow.fs.FileSystem, str] = pyarrow.fs.FileSystem.from_uri(path)
        return found
    return _s3(store), path.partition("://")[2]


@functools.cache
def _s3(store: tuple[tuple[str, str], ...]) -> pyarrow.fs.FileSystem:
    given = dict(store)
    return pyarrow.fs.S3FileSystem(
        access_key=given.get("s3_access_key_id"),
        secret_key=given.get("s3_secret_access_key"),
        session_token=given.get("s3_session_token"),
        region=given.get("s3_region"),
        endpoint_override=given.get("s3_endpoint"),
        scheme="http" if given.get("s3_use_ssl", "true").lower() == "false" else "https",
        force_virtual_addressing=given.get("s3_url_style") == "vhost",
    )


def as_directory(path: str) -> str:
    """The path with a slash at its end, as prefixes and scopes need it."""
    return path if path.endswith("/") else path + "/"
