"""
Configure DuckDB and pyarrow for object stores: endpoint and credentials by data path.

Code that writes files below a data path (`storage`, tasks) has only the path.  `know_store` registers once per process
which store a data path is in.  Credentials come from environment variables of the process and never appear
in plans or options.  `pool` attaches the lakes of a fan-out with their own credentials.
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
"""The largest file size.  An upload part is a ten-thousandth of it, and each writer holds a few parts in memory."""

_known: dict[str, tuple[tuple[str, str], ...]] = {}


def know_store(data_path: str, properties: Mapping[str, str]) -> None:
    """Register the store of a data path; variables are read from this process's environment."""
    if properties:
        found = read_properties(properties, os.environ, "lake: properties.")
        _known[as_directory(data_path)] = tuple(sorted(found.items()))


def store_of(path: str) -> tuple[tuple[str, str], ...]:
    """The settings of the store that a path is in; empty if none was registered."""
    below = [prefix for prefix in _known if as_directory(path).startswith(prefix)]
    return _known[max(below, key=len)] if below else ()


def create_secret(con: duckdb.DuckDBPyConnection, data_path: str, store: Iterable[tuple[str, str]]) -> None:
    """
    Give an engine the credentials for a data path.

    Lakes of one engine may have different credentials; a later call for the same path replaces the earlier ones.
    """
    name = f"store_{hashlib.sha256(data_path.encode()).hexdigest()[:32]}"
    settings = ["type s3"]
    if data_path:
        settings.append(f"scope {literal(as_directory(data_path))}")
    settings += [f"{_SECRET_KEYS[key]} {literal(value)}" for key, value in store if key in _SECRET_KEYS]
    con.execute(f"create or replace secret {ident(name)} ({', '.join(settings)})")


def tune_uploads(con: duckdb.DuckDBPyConnection) -> None:
    """Upload in parts of 5 MB instead of 80 MB, so that they fit into the memory of a small task."""
    con.execute(f"set global s3_uploader_max_filesize = {literal(UPLOAD_BYTES_MAX)}")


def remote_filesystem(path: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """The file system of a URI, and the path within it."""
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
    """The path with a trailing slash, as prefixes and scopes need it."""
    return path if path.endswith("/") else path + "/"
