"""
Sessions with a lake: open it, run statements and transactions.

If `open_lake` fails, it leaves nothing behind: it checks the data path first, and removes a catalog file
or directories that it created.  `lake.ledger` reads and writes our own tables, `lake.target` the targets.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.encryption import is_encrypted, prepare_encryption
from aqueduck.lake.session.engine import (
    is_remote,
    load_extension,
    new_connection,
    one_transaction,
    open_store,
    trust_no_statistics,
)
from aqueduck.lake.session.failures import classify_attach, lake_errors
from aqueduck.lake.session.object_stores import know_store
from aqueduck.lake.session.sql import LAKE, ident, literal
from aqueduck.model.connections import CLIENT_END, login_demands, with_search_path
from aqueduck.model.errors import (
    CatalogUnreachableError,
    ConfigError,
    DataPathError,
    LakeError,
    LakeWriteError,
    system_reason,
)
from aqueduck.model.layout import TableLayout, WantedLayout
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName, TableSchema

if TYPE_CHECKING:  # they import this module
    from aqueduck.lake.direct.catalog_rows import Described
    from aqueduck.lake.target.places import Place

__all__ = [
    "METADATA",
    "OWN_SCHEMA",
    "LakeSession",
    "SessionMemory",
    "access_options",
    "attach",
    "catalog_file",
    "catalog_kind",
    "catalog_place",
    "catalog_settings",
    "extensions_for",
    "open_lake",
]

OWN_SCHEMA = "aqueduck"
"""The lake schema of our own tables."""
METADATA = f"__ducklake_metadata_{LAKE}"
"""The name under which DuckLake attaches the catalog database."""

_SCANNERS = {"postgres": "postgres_scanner", "sqlite": "sqlite_scanner"}


@dataclass
class SessionMemory:
    """Facts about the lake that a session has cached; a new connection starts with the counts only, see `reopen`."""

    targets: dict[TableName, tuple[TableSchema, TableMode]] = field(default_factory=dict)
    """Target tables that were compared with this schema and mode."""
    places: dict[TableName, Place | None] = field(default_factory=dict)
    """The tables and views found under the names of targets, see `places`."""
    schema_version: int | None = None
    """DuckLake's schema version for which `targets` and `places` are valid."""
    inlined_rows: dict[TableName, int] = field(default_factory=dict)
    """Inlined rows of each table, including deleted ones."""
    knows_own_targets: bool = False
    """Whether the lake is known to have the record of our own targets."""
    settled: set[TableName] = field(default_factory=set)
    """Tables whose statistics stay right, see `settle_statistics`."""
    misfiled: set[TableName] = field(default_factory=set)
    """Tables with files whose partition values may have to be mended, see `mend_partition_values`."""
    described: dict[TableName, Described] = field(default_factory=dict)
    """Tables as `lake.direct` found them in the catalog; valid like `targets`."""
    positions: dict[str, int] = field(default_factory=dict)
    """The position at which this session's last batch of a group ended and from which the next one must continue."""


@dataclass
class LakeSession:
    """
    One connection to a lake, attached as `lake`; `lake.session` says why there is a second kind of session.

    Threads may share it: a transaction blocks other threads until it ends.
    """

    config: LakeConfig
    threads: int | None = None
    memory_limit: str | None = None
    read_only: bool = False
    memory: SessionMemory = field(default_factory=SessionMemory, repr=False)
    limits: dict[TableName, int] = field(default_factory=dict, repr=False)
    """The limits for inlined rows of those targets whose limit differs from the configuration."""
    wanted: dict[TableName, WantedLayout] = field(default_factory=dict, repr=False)
    """The layouts that the configuration wants for targets, if any."""
    inline_rows: int = field(default=0, init=False, repr=False)
    """The limit for inlined rows that is in force now; see `inlining`."""
    encrypted: bool = field(default=False, init=False)
    """Whether DuckLake encrypts the files of this lake."""
    threads_all: int = field(default=1, init=False, repr=False)
    threads_now: int = field(default=1, init=False, repr=False)
    """How many threads the engine has, and how many it uses now; see `one_thread`."""
    added: set[tuple[TableName, str]] = field(default_factory=set, init=False, repr=False)
    """The columns that the last transaction has added so far, with their names in lower case; see `evolve`."""
    laid_out: dict[TableName, TableLayout] = field(default_factory=dict, init=False, repr=False)
    """The layouts of tables that the last transaction has created so far."""
    inserted: list[str] = field(default_factory=list, init=False, repr=False)
    """Files of tasks whose rows the last transaction has inserted, and which are not needed after its commit."""
    renamed: dict[TableName, list[tuple[str, str]]] = field(default_factory=dict, init=False, repr=False)
    """The columns that the last transaction has renamed so far, which the catalog does not show before its commit."""
    _con: duckdb.DuckDBPyConnection | None = field(default=None, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _readings: int = field(default=0, repr=False)
    alias: str = field(default=LAKE, init=False, repr=False)
    metadata: str = field(default=METADATA, init=False, repr=False)

    @property
    def con(self) -> duckdb.DuckDBPyConnection:
        """DuckDB's connection; callers must wrap its use in `lake_errors`."""
        if self._con is None:
            raise LakeWriteError("the session with the lake is closed")
        return self._con

    @property
    def kind(self) -> str:
        """What the catalog is: postgres, sqlite or duckdb."""
        return catalog_kind(self.config.catalog)

    def execute(
        self,
        statement: str,
        parameters: Sequence[Any] = (),
        *,
        doing: str = "a lake statement",
        table: str | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run one statement and fetch its result; `doing` and `table` describe it in an error."""
        with self._lock, lake_errors(doing, table=table):
            return self.con.execute(statement, list(parameters) or None).fetchall()

    def query(
        self, statement: str, parameters: Sequence[Any] = ()
    ) -> tuple[list[tuple[Any, ...]], list[str]]:
        """Rows and column names."""
        with self._lock, lake_errors("a lake query"):
            result = self.con.execute(statement, list(parameters) or None)
            return result.fetchall(), [column[0] for column in result.description or ()]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in one transaction, which becomes one lake snapshot or is rolled back."""
        with self._lock:
            self.inline(self.config.inline_rows)  # a failed transaction may have left another limit
            self.added.clear()
            self.renamed.clear()
            self.laid_out.clear()
            self.inserted.clear()
            with one_transaction(self.execute, self.con):
                yield

    def inline(self, rows: int) -> None:
        """Set the largest number of rows that one insert, update or delete inlines."""
        if rows != self.inline_rows:
            self.execute(_inline_statement(rows), doing="setting the limit of inlining")
            self.inline_rows = rows

    @contextlib.contextmanager
    def one_thread(self, *, apply: bool = True) -> Iterator[None]:
        """
        Run the block's statements in one thread, or with `apply=False` in all threads again.

        For a statement on a few rows, waking other threads costs more CPU time than the work.
        """
        before, wanted = self.threads_now, 1 if apply else self.threads_all
        self._use_threads(wanted)
        try:
            yield
        finally:
            # A failed transaction accepts no statement until it is rolled back; then the outer block restores them.
            with contextlib.suppress(LakeError):
                self._use_threads(before)

    def _use_threads(self, number: int) -> None:
        if number != self.threads_now:
            self.execute(f"set threads = {number}", doing="setting the number of threads")
            self.threads_now = number

    @contextlib.contextmanager
    def reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A second connection to the same lake, for long reads that must not delay commits."""
        with self._lock:
            con = self.con.cursor()
            self._readings += 1
        try:
            con.execute("set TimeZone = 'UTC'")
            yield con
        finally:
            con.close()
            with self._lock:
                self._readings -= 1

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Block other threads; yields false if one of them is reading on a second connection."""
        with self._lock:
            yield self._readings == 0

    def renew(self) -> None:
        """Replace the connection but keep the cached facts; inside `alone`."""
        known = self.memory
        self.reopen()
        self.memory = known

    def reopen(self) -> None:
        """Replace the connection, whatever its state, and clear the cached facts, but not the counts of inlined rows."""
        with self._lock:
            self.close()
            self.memory = SessionMemory(inlined_rows=self.memory.inlined_rows)
            self._con = _attached(self)
            self.inline_rows = self.config.inline_rows
            [[self.threads_all]] = self.execute("select current_setting('threads')")
            self.threads_now = self.threads_all

    def close(self) -> None:
        """Close the session; a second call does nothing."""
        with self._lock:
            if self._con is not None:
                # Detaching releases a catalog file at once, even if there are other cursors.
                with contextlib.suppress(duckdb.Error):
                    self._con.execute(f"detach {ident(LAKE)}")
                self._con.close()
                self._con = None

    def __enter__(self) -> LakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_lake(
    cfg: LakeConfig, *, threads: int | None = None, memory_limit: str | None = None, read_only: bool = False
) -> LakeSession:
    """Attach the lake, and create it if it is missing, unless `read_only`."""
    session = LakeSession(cfg, threads, memory_limit, read_only)
    if read_only:
        session.reopen()
        return session
    with _removing_what_is_new(cfg):
        _check_data_path(cfg.data_path)
        session.reopen()
        try:
            session.execute(
                f"create schema if not exists {ident(LAKE)}.{ident(OWN_SCHEMA)}", doing="preparing the lake"
            )
        except BaseException:
            session.close()
            raise
    return session


def _attached(session: LakeSession) -> duckdb.DuckDBPyConnection:
    con = new_connection(threads=session.threads, memory_limit=session.memory_limit)
    trust_no_statistics(con)
    kind = session.kind
    try:
        for name in extensions_for(kind):
            load_extension(con, name)
        if is_remote(session.config.data_path):
            know_store(session.config.data_path, session.config.properties)
            open_store(con, session.config.data_path)
        attach(con.execute, session.config.catalog, _attach_statement(session.config, session.read_only))
        con.execute(_inline_statement(session.config.inline_rows))
        session.encrypted = is_encrypted(con, session.metadata)
        if session.encrypted:
            prepare_encryption(con, read_only=session.read_only)
    except duckdb.Error as exc:
        con.close()
        raise classify_attach(exc, kind) from None  # the original quotes the connection string
    except BaseException:
        con.close()
        raise
    return con


def _attach_statement(cfg: LakeConfig, read_only: bool) -> Callable[[str], str]:
    options = [
        f"data_path {literal(cfg.data_path)}",
        *access_options(catalog_kind(cfg.catalog), read_only=read_only),
    ]
    return lambda place: f"attach {literal(f'ducklake:{place}')} as {ident(LAKE)} ({', '.join(options)})"


def attach(execute: Callable[[str], object], catalog: str, statement: Callable[[str], str]) -> None:
    """
    Attach a lake by `statement`, with a search path that keeps a PostgreSQL catalog from calling functions of users,
    and with keepalives that make its server notice when we are gone.

    What a pooler refuses to set is left out: the search path of the role applies, and the pooler's keepalives.
    """
    for place in (catalog_place(catalog, guarded=True), catalog_place(catalog, guarded=True, ends=False)):
        try:
            execute(statement(place))
        except duckdb.Error as exc:
            if "startup parameter" not in str(exc):
                raise
        else:
            return
    execute(statement(catalog_place(catalog)))


def access_options(kind: str, *, read_only: bool) -> list[str]:
    """The options to attach a catalog of this kind."""
    options = ["read_only"] if read_only else []
    if kind == "sqlite":
        # With the write-ahead log, readers of the lake do not block commits.
        options += [] if read_only else ["meta_journal_mode 'WAL'"]
        options.append("meta_busy_timeout 5000")
    return options


def _inline_statement(rows: int) -> str:
    # Not an option of `attach`, which would apply until the end of the session.
    return f"set ducklake_default_data_inlining_row_limit = {rows}"


def catalog_kind(catalog: str) -> str:
    """The kind of a catalog: postgres, sqlite or duckdb."""
    if catalog.startswith(("postgres:", "postgresql:")):
        return "postgres"
    return "sqlite" if catalog.startswith("sqlite:") else "duckdb"


def extensions_for(kind: str) -> list[str]:
    """The DuckDB extensions for a lake with a catalog of this kind."""
    return ["ducklake", *([_SCANNERS[kind]] if kind in _SCANNERS else [])]


def catalog_place(catalog: str, *, guarded: bool = False, ends: bool = True) -> str:
    """
    The catalog in DuckLake's notation; with `guarded`, the search path has only the server's own functions, and
    with `ends` too, the server's end of the connection has keepalives.
    """
    if catalog_kind(catalog) != "postgres":
        return catalog
    parts = catalog_settings(catalog)
    guard = {"options": with_search_path(parts.get("options"), ends=ends)} if guarded else {}
    return "postgres:" + make_conninfo("", **{**CLIENT_END, **login_demands(parts), **parts, **guard})


def catalog_settings(catalog: str, key: str = "lake.catalog") -> dict[str, Any]:
    """The libpq settings of a catalog in PostgreSQL."""
    uri = catalog.startswith(("postgres://", "postgresql://"))
    try:
        return conninfo_to_dict(catalog if uri else catalog.partition(":")[2])
    except psycopg.ProgrammingError:
        raise ConfigError(f"{key} has no valid PostgreSQL connection string after postgres:") from None


def catalog_file(catalog: str) -> Path | None:
    """The file of a catalog; None for a catalog in PostgreSQL."""
    return None if catalog_kind(catalog) == "postgres" else Path(catalog.removeprefix("sqlite:"))


@contextlib.contextmanager
def _removing_what_is_new(cfg: LakeConfig) -> Iterator[None]:
    """Remove the catalog's file and directories after a failure, if they did not exist before."""
    file = catalog_file(cfg.catalog)
    new_file = file if file is not None and not file.exists() else None
    paths = [] if file is None else [file.parent]
    paths += [] if is_remote(cfg.data_path) else [Path(cfg.data_path)]
    new_directories = [d for path in paths for d in (path, *path.parents) if not d.exists()]
    try:
        if file is not None:
            _make_directory(file.parent)
        yield
    except BaseException:
        if new_file is not None:
            for suffix in ("", "-wal", "-shm", "-journal", ".wal"):
                new_file.with_name(new_file.name + suffix).unlink(missing_ok=True)
        for directory in sorted(set(new_directories), key=lambda d: len(d.parts), reverse=True):
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        hint = "check the path in lake.catalog and the rights on it"
        raise CatalogUnreachableError(
            f"the directory of lake.catalog cannot be created: {system_reason(exc)}", hint=hint
        ) from exc


def _check_data_path(data_path: str) -> None:
    """Raise if a local path cannot be written, before the catalog is created."""
    if is_remote(data_path):
        return
    directory = Path(data_path)
    probe = directory / f".aqueduck-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as exc:
        hint = f"make {directory} a directory that this user may write, or set another lake.data_path"
        raise DataPathError(f"lake.data_path cannot be written: {system_reason(exc)}", hint=hint) from exc
