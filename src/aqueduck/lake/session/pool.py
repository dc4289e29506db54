"""
A pool of lakes that are attached to one engine; the least recently used one is detached first.

A worker of the fan-out has one DuckDB and attaches lakes as needed.  Each thread takes a session with `use`; a session
that failed is discarded.  `catalog.LakeSession` is the session for a single lake; `lake.session` says why there are two.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.session.catalog import access_options, attach, catalog_file, catalog_kind, extensions_for
from aqueduck.lake.session.encryption import is_encrypted, prepare_encryption
from aqueduck.lake.session.engine import (
    is_remote,
    load_extension,
    new_connection,
    one_transaction,
    trust_no_statistics,
)
from aqueduck.lake.session.failures import classify_attach, lake_errors
from aqueduck.lake.session.object_stores import as_directory, create_secret, tune_uploads
from aqueduck.lake.session.sql import ident, literal, qualified
from aqueduck.model.errors import AqueduckError, CatalogUnreachableError, DataPathError, system_reason
from aqueduck.model.schema import TableName

__all__ = ["LakePool", "PooledLake"]

LOCK_SECONDS = 10.0


@dataclass
class PooledLake:
    """One attached lake with a connection; used by one thread at a time."""

    place: LakePlace
    alias: str
    con: duckdb.DuckDBPyConnection
    memory: dict[str, Any] = field(default_factory=dict)
    """Cached facts about the lake."""
    encrypted: bool = False
    """Whether DuckLake encrypts the files of this lake."""
    settled: set[TableName] = field(default_factory=set)
    """Tables whose statistics stay right, see `settle_statistics`."""

    @property
    def metadata(self) -> str:
        """The schema of DuckLake's own tables, as SQL."""
        kind = catalog_kind(self.place.catalog)
        schema = self.place.metadata_schema or ("public" if kind == "postgres" else "main")
        return qualified(f"__ducklake_metadata_{self.alias}", schema)

    def table(self, name: TableName) -> str:
        """A table of the lake, as SQL."""
        return qualified(self.alias, name.schema, name.name)

    def execute(
        self, statement: str, parameters: Sequence[Any] = (), *, doing: str = "a lake statement"
    ) -> list[tuple[Any, ...]]:
        """Run one statement and fetch its result."""
        with lake_errors(doing):
            return self.con.execute(statement, list(parameters) or None).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in one transaction, which becomes one lake snapshot or is rolled back."""
        with one_transaction(self.execute, self.con):
            yield


class LakePool:
    """Attached lakes, at most `max_open` unless more are in use."""

    def __init__(
        self, *, max_open: int = 50, threads: int | None = None, memory_limit: str | None = None
    ) -> None:
        self.max_open = max_open
        self.created = 0
        self.evicted = 0
        self.con = new_connection(threads=threads, memory_limit=memory_limit)
        trust_no_statistics(self.con)
        self._idle: OrderedDict[tuple[LakePlace, bool], PooledLake] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._allowed: dict[str, tuple[tuple[str, str], ...]] = {}
        self._numbers = itertools.count(1)

    @property
    def open(self) -> int:
        """The number of attached lakes."""
        return len(self._idle) + self._used

    @contextlib.contextmanager
    def use(self, place: LakePlace, *, read_only: bool = False) -> Iterator[PooledLake]:
        """A session with the lake; it is kept afterwards unless the block failed."""
        lake = self._take(place, read_only)
        try:
            yield lake
        except BaseException:
            self._give_back(lake, read_only, keep=False)
            raise
        # Only one process at a time can open a DuckDB file: detach it, so that others can.
        self._give_back(lake, read_only, keep=catalog_kind(place.catalog) != "duckdb")

    def forget(self, place: LakePlace) -> None:
        """Detach a lake that is not in use; the next session starts without cached facts."""
        with self._lock:
            for key in [key for key in self._idle if key[0] == place]:
                self._detach(self._idle.pop(key))

    def list_files(self, place: LakePlace) -> None:
        """Raise if the lake's object store cannot be listed."""
        con = self.con.cursor()
        try:
            with self._lock:
                self._load("httpfs")
                self._allow(place, con)
            pattern = as_directory(place.data_path) + "*"
            con.execute(f"select count(*) from glob({literal(pattern)})").fetchall()
        except duckdb.Error as exc:
            status = re.search(r"HTTP (?:code|error)?:? ?(\d{3})", str(exc), re.IGNORECASE)
            said = f"it answers {status[1]}" if status else type(exc).__name__
            hint = "check the bucket in data_path, the properties of the object store and its credentials"
            raise DataPathError(f"the object store cannot be listed: {said}", hint=hint) from None
        finally:
            con.close()

    def close(self) -> None:
        """Detach all lakes."""
        with self._lock:
            while self._idle:
                self._detach(self._idle.popitem()[1])
        self.con.close()

    def _take(self, place: LakePlace, read_only: bool) -> PooledLake:
        with self._lock:
            self._used += 1
            found = self._idle.pop((place, read_only), None)
            if found is not None:
                self._allow(place, found.con)
                return found
            if self.open > self.max_open and self._idle:
                self._detach(self._idle.popitem(last=False)[1])
                self.evicted += 1
        try:
            return self._attach(place, read_only)
        except BaseException:
            with self._lock:
                self._used -= 1
            raise

    def _give_back(self, lake: PooledLake, read_only: bool, *, keep: bool) -> None:
        with self._lock:
            self._used -= 1
            if keep and (lake.place, read_only) not in self._idle:
                self._idle[lake.place, read_only] = lake
            else:
                self._detach(lake)

    def _attach(self, place: LakePlace, read_only: bool) -> PooledLake:
        kind = catalog_kind(place.catalog)
        with self._lock:
            alias = f"lake_{next(self._numbers)}"
            self._load(*extensions_for(kind))
            if _may_be_remote(place):
                self._load("httpfs")
        if not read_only:
            _make_directories(place)
        con = self.con.cursor()
        try:
            con.execute("set TimeZone = 'UTC'")
            with self._lock:
                self._allow(place, con)
            options = ", ".join(_attach_options(place, read_only=read_only))
            attach(
                lambda statement: _execute_patiently(con, statement),
                place.catalog,
                lambda at: f"attach {literal(f'ducklake:{at}')} as {ident(alias)} ({options})",
            )
            lake = PooledLake(place, alias, con)
            lake.encrypted = is_encrypted(con, lake.metadata)
            if lake.encrypted:
                prepare_encryption(con, read_only=read_only)
        except duckdb.Error as exc:
            con.close()
            raise classify_attach(exc, kind) from None  # the original quotes the connection string
        except AqueduckError:
            con.close()
            raise
        self.created += 1
        return lake

    def _allow(self, place: LakePlace, con: duckdb.DuckDBPyConnection) -> None:
        """Give the engine the credentials of this lake, even if it had others for the same path."""
        if _may_be_remote(place) and self._allowed.get(place.data_path, ()) != place.properties:
            create_secret(con, place.data_path, place.properties)
            self._allowed[place.data_path] = place.properties

    def _load(self, *extensions: str) -> None:
        for name in extensions:
            if name not in self._loaded:
                load_extension(self.con, name)
                self._loaded.add(name)
                if name == "httpfs":
                    tune_uploads(self.con)

    def _detach(self, lake: PooledLake) -> None:
        with contextlib.suppress(duckdb.Error):
            lake.con.execute(f"detach {ident(lake.alias)}")
        lake.con.close()


def _execute_patiently(con: duckdb.DuckDBPyConnection, statement: str) -> None:
    """Retry for a while if another process has the DuckDB file open, because a writer opens it exclusively."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            con.execute(statement)
        except duckdb.IOException as exc:
            if "conflicting lock" not in str(exc).lower() or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _attach_options(place: LakePlace, *, read_only: bool) -> list[str]:
    """The options to attach a lake."""
    options = [f"data_path {literal(as_directory(place.data_path))}"] if place.data_path else []
    if place.metadata_schema is not None:
        options.append(f"metadata_schema {literal(place.metadata_schema)}")
    options += access_options(catalog_kind(place.catalog), read_only=read_only)
    return options if read_only else [*options, "data_inlining_row_limit 1000"]


def _may_be_remote(place: LakePlace) -> bool:
    return not place.data_path or is_remote(place.data_path)


def _make_directories(place: LakePlace) -> None:
    paths = [] if _may_be_remote(place) else [Path(place.data_path)]
    if (file := catalog_file(place.catalog)) is not None:
        paths.append(file.parent)
    for path in paths:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise CatalogUnreachableError(
                f"a directory of the lake cannot be created: {system_reason(exc)}"
            ) from exc
