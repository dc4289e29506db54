"""
DuckDB as an engine: connections with fixed settings, and extensions that are never downloaded.

The extensions are signed, are installed as Python wheels like DuckDB itself, and are loaded from there by
path.  `open_kernel` opens the engine with which Spark tasks fold and write files.  `catalog` attaches
the lake.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb

from aqueduck.lake.session.object_stores import create_secret, store_of, tune_uploads
from aqueduck.lake.session.sql import literal
from aqueduck.model.errors import CatalogUnreachableError
from aqueduck.state_files.scratch import scratch_directory

__all__ = [
    "is_remote",
    "load_extension",
    "new_connection",
    "one_transaction",
    "open_kernel",
    "open_store",
    "trust_no_statistics",
]

_numbers = itertools.count(1)


def new_connection(
    *, threads: int | None = None, memory_limit: str | None = None
) -> duckdb.DuckDBPyConnection:
    """An in-memory database that downloads nothing, spills to its own directory and uses UTC."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "preserve_insertion_order": "false",
        "temp_directory": _spill_directory(),
    }
    if threads is not None:
        settings["threads"] = str(threads)
    if memory_limit is not None:
        settings["memory_limit"] = memory_limit
    con = duckdb.connect(":memory:", config=settings)
    con.execute("set TimeZone = 'UTC'")
    return con


def trust_no_statistics(con: duckdb.DuckDBPyConnection) -> None:
    """Make the engine ignore a lake's statistics of whole tables, which may be wrong (ADR 66)."""
    con.execute("set disabled_optimizers = 'statistics_propagation'")


def open_kernel(
    data_path: str, *, threads: int | None = None, memory_limit: str | None = None
) -> duckdb.DuckDBPyConnection:
    """An engine that folds and writes files under `data_path`, without a lake."""
    con = new_connection(threads=threads, memory_limit=memory_limit)
    if is_remote(data_path):
        open_store(con, data_path)
    return con


def open_store(con: duckdb.DuckDBPyConnection, data_path: str) -> None:
    """Configure an engine for the object store of a data path, if `know_store` was called for it."""
    load_extension(con, "httpfs")
    tune_uploads(con)
    if store := store_of(data_path):
        create_secret(con, data_path, store)


def is_remote(path: str) -> bool:
    """Whether a path is in an object store instead of on this machine."""
    return "://" in path


def load_extension(con: duckdb.DuckDBPyConnection, name: str) -> None:
    """Load an extension from its wheel."""
    con.execute(f"load {literal(str(_extension_file(name)))}")


def _extension_file(name: str) -> Path:
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        file = Path(place) / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        if file.is_file():
            return file
    wheel = f"duckdb-extension-{name.replace('_', '-')}=={duckdb.__version__}"
    raise CatalogUnreachableError(
        f"the extension {name} of DuckDB {duckdb.__version__} is not installed", hint=f"pip install {wheel}"
    )


def _spill_directory() -> str:
    # DuckDB creates it when a query exceeds its memory, and removes it at the end; after a kill, the next start does.
    return str(scratch_directory(tempfile.gettempdir()) / f"spill-{os.getpid()}-{next(_numbers)}")


@contextlib.contextmanager
def one_transaction(execute: Callable[..., object], con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Run the block in one transaction of `con`, which becomes one lake snapshot or is rolled back; `execute` runs its statements."""
    execute("begin", doing="starting a lake transaction")
    try:
        yield
        execute("commit", doing="the lake's commit")
    except BaseException:
        # After a failed commit or a lost connection, the transaction has already ended.
        with contextlib.suppress(duckdb.Error):
            con.execute("rollback")
        raise
