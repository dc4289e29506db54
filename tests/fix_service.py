"""
The service as a user runs it: a process of its own, that tests may stop, kill and start again.

`Sync` writes a configuration for a test's database and lake, runs `aqueduck run` on it, and compares
source and lake through connections of its own: psycopg on one side, DuckDB on the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.engine import load_extension
from tests.fix_postgres import Database, _new_database, wait_until

START_SECONDS = 180.0


@dataclass
class Sync:
    """One configuration with one group."""

    db: Database
    directory: Path
    tables: tuple[str, ...]
    group_options: dict[str, Any] = field(default_factory=dict)
    copy: bool = False
    """Whether rows that are there before are copied; without, everything comes by the stream."""
    modes: dict[str, str] = field(default_factory=dict)
    """Of tables that are not upserted."""
    user: str | None = None
    """The role of the service; by default one that is no superuser and has the documented rights."""
    dsn: str | None = None
    """How the service reaches the source, where it is not directly."""
    catalog: str = ""
    """Of the lake; by default a file of SQLite."""
    group: str = "test"
    spark: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Other sections of the file."""
    arguments: tuple[str, ...] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.catalog = self.catalog or f"sqlite:{self.directory}/lake.sqlite"

    @property
    def config_file(self) -> Path:
        return self.directory / "aqueduck.yaml"

    def write_config(self) -> None:
        group = {"name": self.group, "flush_interval_ms": 200, **self.group_options}
        group["tables"] = [
            {"source": t, "copy": self.copy, "mode": self.modes.get(t, "upsert")} for t in self.tables
        ]
        config = {
            "source": {"dsn": self.dsn or self.db.dsn_for(self.user or self.db.service_role())},
            "lake": {
                "catalog": self.catalog,
                "data_path": f"{self.directory}/data",
            },
            "groups": [group],
            "state_dir": f"{self.directory}/state",
            "spark": self.spark,
            "server": {"port": 0},  # several services run side by side
            "mask_salt_env": "AQUEDUCK_TEST_SALT",
            **self.options,
        }
        self.config_file.write_text(json.dumps(config))  # JSON is YAML

    # -- running it

    def start(self, *arguments: str, fault: str | None = None) -> subprocess.Popen[bytes]:
        self.write_config()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AQUEDUCK_FAULT": fault or ""}
        env["AQUEDUCK_TEST_SALT"] = "salt"
        log = open(self.directory / "log.txt", "ab")  # noqa: SIM115 - the process keeps it
        command = [sys.executable, "-m", "aqueduck.cli", "run", "-c", str(self.config_file)]
        command += [*self.arguments, *arguments]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        log.close()
        self.processes.append(process)
        return process

    def init(self) -> None:
        """`aqueduck init`: publication, slot and lake, without starting Spark."""
        self.write_config()
        command = [sys.executable, "-m", "aqueduck.cli", "init", "-c", str(self.config_file)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)

    def started(self) -> subprocess.Popen[bytes]:
        """A service that streams."""
        process = self.start()
        wait_until(
            lambda: self.streams() or process.poll() is not None,
            "the service streams",
            START_SECONDS,
            log=self.log,
        )
        assert process.poll() is None, self.log()
        return process

    @contextlib.contextmanager
    def one_batch(self) -> Iterator[None]:
        """What happens inside reaches a running service as one batch; then source and lake are equal."""
        with self.held():
            yield
        self.wait_same()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Changes made inside wait in WAL, and then arrive as one batch."""
        hold = self.directory / "state" / self.group / "hold"
        hold.touch()
        wait_until(lambda: not self.slot_active(), "the capture lets go of the slot")
        yield
        hold.unlink()

    def die(self, point: str) -> None:
        """Run until a process of the service dies at the fault point, then kill -9 of everything that is left."""
        passed = passing(self.directory / "log.txt", point)
        process = self.start(fault=point)
        wait_until(lambda: passed() or process.poll() is not None, point, START_SECONDS, log=self.log)
        self.kill(process)
        assert passed(), f"it did not die at {point}\n{self.log()}"

    def once(self, *, fault: str | None = None) -> int:
        """`aqueduck run --once`; the exit code."""
        process = self.start("--once", fault=fault)
        code = process.wait(timeout=START_SECONDS)
        self.end(process)
        return code

    def catch_up(self) -> None:
        """Run once, expect success, expect equality."""
        assert self.once() == 0, self.log()
        self.assert_same()

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the service and everything it started are gone and the slot is free."""
        process.wait(timeout=START_SECONDS)
        wait_until(lambda: not self.slot_active(), "the slot is free", 30)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill -9 of the whole service: the driver, the JVM and every worker."""
        try:
            parent = psutil.Process(process.pid)
            family = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            family = []
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        self.end(process)

    def stop(self, process: subprocess.Popen[bytes]) -> float:
        """SIGTERM; how long it took to end."""
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        return time.monotonic() - began

    def log(self) -> str:
        return (self.directory / "log.txt").read_text(errors="replace")[-6000:]

    # -- looking at it

    def slot_active(self) -> bool:
        return bool(
            self.db.query(
                f"select from pg_replication_slots where active and slot_name = 'aqueduck_{self.group}'"
            )
        )

    def streams(self) -> bool:
        """Whether it is read: a slot that is still being made is active, too, and misses what commits meanwhile."""
        return self.slot_active() and self.confirmed() > 0

    def confirmed(self) -> int:
        return int(
            self.db.value(
                "select coalesce(confirmed_flush_lsn - '0/0'::pg_lsn, 0) from pg_replication_slots"
                f" where slot_name = 'aqueduck_{self.group}'"
            )
        )

    def lake(self, query: str) -> list[tuple[Any, ...]]:
        """Ask the lake through a connection of the test's own."""
        return self._on_lake(query, "read_only")

    def change_lake(self, statement: str) -> None:
        """Do something to the lake behind the service's back, as soon as the service lets go of its catalog."""

        def changed() -> bool:
            try:
                self._on_lake(statement, "")
            except duckdb.TransactionException as exc:
                if "locked" not in str(exc):
                    raise
                return False
            return True

        wait_until(changed, "the catalog is free")

    def _on_lake(self, query: str, options: str) -> list[tuple[Any, ...]]:
        con = duckdb.connect(":memory:")
        try:
            for name in ("ducklake", "sqlite_scanner", "postgres_scanner"):
                load_extension(con, name)
            con.execute("set TimeZone = 'UTC'")
            con.execute(f"attach 'ducklake:{self.catalog}' as lake" + (f" ({options})" if options else ""))
            return con.execute(query).fetchall()
        finally:
            con.close()

    def lake_rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.lake(f"from lake.{table}"), key=repr)

    def source_rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.db.query(f"select * from {table}"), key=repr)

    def differing(self, tables: tuple[str, ...] | None = None) -> list[str]:
        """Tables whose source and lake rows are not equal; one that the lake does not have yet is among them."""
        return [t for t in tables or self.tables if not self._is_same(t)]

    def _is_same(self, table: str) -> bool:
        try:
            return self.source_rows(table) == self.lake_rows(f"main.{table.split('.')[-1]}")
        except duckdb.CatalogException:
            return False

    def assert_same(self) -> None:
        for table in self.tables:
            assert self.lake_rows(f"main.{table.split('.')[-1]}") == self.source_rows(table), (
                f"{table} differs"
            )

    def wait_same(self, seconds: float = 180.0) -> None:
        wait_until(
            lambda: not self.differing(), "source and lake are equal", seconds, log=self.log, pause=0.3
        )

    # -- tables that come and go while it runs

    def follow(self, *tables: str, copy: bool = True) -> None:
        """Add tables to the running service, and wait until they stream."""
        for table in tables:
            self.db.execute(
                "select aqueduck.add_table(%s, group_name => %s, copy => %s)", (table, self.group, copy)
            )
        self.tables = tables
        self.wait_state("STREAMING", *tables)

    def wait_state(self, state: str, *tables: str) -> None:
        wanted = dict.fromkeys(tables, state)
        wait_until(
            lambda: wanted.items() <= self.states().items(), f"{tables} are {state}", 180, log=self.log
        )

    def states(self) -> dict[str, str]:
        return dict(self.db.query("select source, state from aqueduck.status()"))


def passing(log: Path, point: str) -> Callable[[], bool]:
    """Whether a process that writes to the log passed the fault point, from now on."""
    before = log.stat().st_size if log.exists() else 0
    said = f"passed the fault point {point.partition(':')[0]}\n".encode()
    return lambda: said in log.read_bytes()[before:]


@pytest.fixture(scope="session")
def shared_service(pg: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sync]:
    """One service for many tests: starting Spark takes longer than most of them."""
    db = _new_database(pg)
    db.execute("create table anchor (id int primary key)")
    sync = Sync(db, tmp_path_factory.mktemp("shared"), ("public.anchor",), {"segment_bytes": "2MiB"})
    sync.group = "shared"
    process = sync.started()
    yield sync
    sync.stop(process)
    db.drop()


@pytest.fixture
def shared(shared_service: Sync) -> Iterator[Sync]:
    """The shared service without tables; `follow` adds what a test made in the schema public."""
    sync = shared_service
    assert sync.processes[-1].poll() is None, sync.log()
    (sync.directory / "log.txt").write_text("")
    yield sync
    sync.tables = ()
    sources = [s for s in sync.states() if s != "public.anchor"]
    for source in sources:
        sync.db.execute("select aqueduck.remove_table(%s, drop_target => true)", (source,))
    published = "select count(*) from pg_publication_tables where pubname = 'aqueduck_shared'"
    wait_until(
        lambda: sync.db.value(published) == 1,
        "the test's tables are gone",
        120,
        log=lambda: (
            f"{sync.db.query('select pubname::text, tablename::text from pg_publication_tables')}\n{sync.log()}"
        ),
    )
    open_removals = "select count(*) from aqueduck.table_mappings where removed_at is not null"
    wait_until(lambda: sync.db.value(open_removals) == 0, "their targets are dropped", 120, log=sync.log)
    tables = "select table_name from duckdb_tables() where database_name = 'lake' and schema_name = 'main'"
    for (name,) in sync.lake(tables):
        if name != "anchor":
            sync.change_lake(f'drop table if exists lake.main."{name}"')
    left = "select format('drop table if exists public.%I cascade', tablename) from pg_tables where schemaname = 'public'"
    for (statement,) in sync.db.query(left + " and tablename <> 'anchor'"):
        sync.db.execute(statement)


@pytest.fixture
def sync_of(db: Database, tmp_path: Path) -> Iterator[Any]:
    """Makes a `Sync` for tables of `db`; all processes that it started are killed afterwards."""
    made: list[Sync] = []

    def make(
        *tables: str, database: Database | None = None, copy: bool = False, **group_options: Any
    ) -> Sync:
        made.append(Sync(database or db, tmp_path, tables, group_options, copy=copy))
        return made[-1]

    yield make
    for sync in made:
        for process in sync.processes:
            if process.poll() is None:
                sync.kill(process)
