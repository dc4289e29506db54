"""
What benches share: their own server, the sysbench-like table, the limit, and the meters.

The limit is `pg_recvlogical` draining the same backlog to /dev/null: one core of PostgreSQL's walsender. The
service under test runs in this process, warmed up, and is paused while the backlog is created.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from aqueduck.config.sync import GroupConfig, SyncConfig, parse_config
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lab.lab_server import lab_server
from aqueduck.lab.waiting import hold, wait_until_seen
from aqueduck.model.schema import lsn_text, parse_lsn
from aqueduck.sync.service import SyncService

__all__ = [
    "CAPTURE",
    "SETTINGS",
    "TABLE",
    "Meter",
    "Workbench",
    "bench_server",
    "seconds_to_send",
    "workbench",
]

SETTINGS = {"max_wal_size": "16GB", "shared_buffers": "256MB", "checkpoint_timeout": "1h"}
"""Settings of a server that keeps a large backlog and runs checkpoints only when a bench asks."""

CAPTURE = str(GroupConfig.model_fields["capture"].default)
"""How the benches capture unless asked otherwise: as the product does."""

TABLE = """
create table sbtest (id int primary key, k int not null, c char(120) not null, pad char(60) not null);
create procedure fill(first int, n int, per_tx int) language plpgsql as $$
begin
  for i in 0 .. (n - 1) / per_tx loop
    insert into sbtest
      select first + i * per_tx + g, (g * 7919 + i) % 100000,
             left(md5(g::text) || md5(i::text) || md5((g + i)::text) || md5((g * i)::text), 119),
             left(md5((g - i)::text) || md5((i * 31)::text), 59)
      from generate_series(0::bigint, least(per_tx, n - i * per_tx) - 1) g;
    commit;
  end loop;
end $$;
"""


@dataclass
class Workbench:
    """A running server, a running service, and the clock between them."""

    directory: Path
    server: EmbeddedPostgres
    service: SyncService
    conn: psycopg.Connection[Any]

    def wait_for(self, position: int, *, seconds: float = 900.0) -> None:
        """Wait until the lake has everything up to `position`."""
        deadline = time.monotonic() + seconds
        while self.service.position("bench") < position:
            self.service.check()
            if time.monotonic() > deadline:
                raise TimeoutError("the lake did not catch up")
            time.sleep(0.005)

    def files(self) -> dict[str, int]:
        """The number and the median size of the lake's data files of the table."""
        metadata = self.service.lake.metadata
        [[count, size]] = self.service.lake.execute(
            f"select count(*), median(f.file_size_bytes) from {metadata}.ducklake_data_file f"
            f" join {metadata}.ducklake_table t using (table_id)"
            " where t.table_name = 'sbtest' and t.end_snapshot is null and f.end_snapshot is null"
        )
        return {"files": count, "median_file_kb": round((size or 0) / 1000)}

    def wait_quiet(self) -> None:
        """Wait until the lake has everything that is committed now."""
        wait_until_seen(self.service, "bench", self.position(), seconds=120)

    def position(self) -> int:
        row = self.conn.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def committed_position(self) -> int:
        """
        Commit one last small change of the synced table; the lake has caught up when it passes the returned
        position.
        """
        with self.conn.transaction():
            self.conn.execute(
                "insert into sbtest select coalesce(max(id), 1000000000) + 1, 0, 'last', 'row' from sbtest"
                " where id >= 1000000000"
            )
            row = self.conn.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            return parse_lsn(row[0]) + 1

    @contextlib.contextmanager
    def backlog(self) -> Iterator[None]:
        """Pause the service while a backlog is created; a second slot sees the same backlog."""
        self._settle()
        hold(self.service, "bench", True)
        self.conn.execute("select pg_create_logical_replication_slot('bench_limit', 'pgoutput')")
        yield
        self.conn.execute("checkpoint")

    def _settle(self, seconds: float = 30.0) -> None:
        """
        Wait until the service's slot starts from here, as the limit's new slot does.

        The server advances a slot's restart position only with records that it writes every 15 s.
        """
        here = lsn_text(self.position())
        moved = (
            "select restart_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = 'aqueduck_bench'"
        )
        deadline = time.monotonic() + seconds
        while self.conn.execute(moved, (here,)).fetchone() != (True,) and time.monotonic() < deadline:
            self.conn.execute("select pg_log_standby_snapshot()")
            self.wait_for(self.committed_position())
            time.sleep(0.3)

    def limit_seconds(self, upto: str) -> float:
        """Seconds that PostgreSQL itself needs to send the backlog."""
        publication = self.service.config.groups[0].publication
        return seconds_to_send(self.server, self.conn, publication, upto)


CONFIG = """
source: {{ dsn: "{dsn}" }}
lake: {{ catalog: "{catalog}", data_path: "{directory}/lake_data" }}
groups:
  - name: bench
    capture: {capture}
    tables: [{tables}]
state_dir: "{directory}/state"
"""


@contextlib.contextmanager
def bench_server(settings: Mapping[str, str]) -> Iterator[tuple[Path, EmbeddedPostgres]]:
    """A directory with a server; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="aqueduck-bench-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o711)  # the server may run as another user, who must be able to enter
        with lab_server(directory, settings) as server:
            yield directory, server


def seconds_to_send(
    server: EmbeddedPostgres, conn: psycopg.Connection[Any], publication: str, upto: str
) -> float:
    """Seconds that PostgreSQL itself needs to send the backlog of the slot `bench_limit`, which is dropped."""
    command = [
        str(server.bin("pg_recvlogical")), "-d", server.dsn, "--slot", "bench_limit", "--start",
        "-o", "proto_version=1", "-o", f"publication_names={publication}", "-f", "/dev/null",
        "--endpos", upto, "--no-loop",
    ]  # fmt: skip
    began = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    conn.execute("select pg_drop_replication_slot('bench_limit')")
    return seconds


@contextlib.contextmanager
def workbench(
    *,
    setup: str = TABLE,
    tables: Sequence[str] = ("sbtest",),
    capture: str = CAPTURE,
    partitions: int | None = None,
    catalog: str = "sqlite",
) -> Iterator[Workbench]:
    """
    Start everything, with targets in this number of partitions, and with a catalog in SQLite or in a database of the
    same server; remove everything afterwards.
    """
    with bench_server(SETTINGS) as (directory, server), psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(setup.encode())
        if catalog == "postgres":
            conn.execute("create database lake")
        service = SyncService(_config(server.dsn, directory, tables, capture, partitions, catalog))
        service.prepare()
        service.start()
        try:
            yield Workbench(directory, server, service, conn)
        finally:
            service.stop()


def _config(
    dsn: str, directory: Path, tables: Sequence[str], capture: str, partitions: int | None, catalog: str
) -> SyncConfig:
    layout = f', partition_by: ["bucket({partitions}, id)"]' if partitions else ""
    listed = ", ".join(f"{{ source: public.{table}, copy: false{layout} }}" for table in tables)
    return parse_config(
        CONFIG.format(
            dsn=dsn,
            directory=directory,
            tables=listed,
            capture=capture,
            catalog=f"sqlite:{directory}/lake.sqlite"
            if catalog == "sqlite"
            else f"postgres:{make_conninfo(dsn, dbname='lake')}",
        ),
        base_dir=directory,
        env={},
    )


@dataclass
class Meter:
    """CPU seconds and peak resident memory of our own processes: the Python ones together, and the JVM."""

    peak_python_bytes: int = 0
    peak_jvm_bytes: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Meter:
        self._cpu = self._total_cpu()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.seconds = time.monotonic() - self._began
        self.cpu_seconds = self._total_cpu() - self._cpu
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            python = jvm = 0
            for process in _our_processes():
                with contextlib.suppress(psutil.Error):
                    if process.name().startswith("java"):
                        jvm += process.memory_info().rss
                    else:
                        python += _pss_bytes(process.pid)
            self.peak_python_bytes = max(self.peak_python_bytes, python)
            self.peak_jvm_bytes = max(self.peak_jvm_bytes, jvm)

    @staticmethod
    def _total_cpu() -> float:
        total = 0.0
        for process in _our_processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _pss_bytes(pid: int) -> int:
    """
    Resident memory, with pages that forks share counted once. Uses the kernel's own sum: reading every
    mapping would slow the bench.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return 0


def _our_processes() -> list[psutil.Process]:
    """Our process and its children, without the database server and its tools."""
    me = psutil.Process()
    ours = [me]
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not child.name().startswith(("postgres", "pg_")):
                ours.append(child)
    return ours
