"""The chain as people run it: three services with Spark on one database, killed and restarted under load."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fanout_lakes import Fan, document
from tests.fix_postgres import Database, wait_until

SECONDS = float(os.environ.get("AQUEDUCK_CHAIN_SECONDS", "120"))
COMPANIES = {"quack": "quack", "teal": "teal"}
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(SECONDS + 900)]


@dataclass
class Service:
    """`aqueduck run` on one file, started again by the test when it was killed."""

    name: str
    file: Path
    starts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "aqueduck.cli", *arguments, "-c", str(self.file)]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        with (self.file.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command("run"), env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.starts += 1

    def kill(self) -> None:
        """Kill -9 of the driver, the JVM and every worker."""
        assert self.process is not None
        if self.process.poll() is None:
            parent = psutil.Process(self.process.pid)
            for member in [*parent.children(recursive=True), parent]:
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue
            self.process.wait(timeout=60)

    def answers(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.env, capture_output=True, text=True, timeout=300, check=False
        )

    def log(self) -> str:
        file = self.file.parent / f"{self.name}.log"
        return f"-- {self.name}\n{file.read_text(errors='replace')[-3000:]}" if file.exists() else ""


@pytest.fixture
def server(new_server: Callable[..., EmbeddedPostgres]) -> EmbeddedPostgres:
    return new_server(version=18)


@pytest.fixture
def db(server: EmbeddedPostgres) -> Iterator[Database]:
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("create database chain")
    database = Database(server, "chain")
    database.execute(
        "create table t (id int primary key, company text, n int, note text);"
        "create table other (id int primary key, v text);"
        "alter table t replica identity full;"
        "create publication faucet_pub for table t"
    )
    yield database
    database.observer.close()


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    source = LakePlace(catalog=f"sqlite:{tmp_path}/lake.sqlite", data_path=f"{tmp_path}/data")
    fan = Fan(tmp_path, dict(COMPANIES), routing_field="company", places={"source": source})
    yield fan
    fan.close()


@pytest.fixture
def services(db: Database, fan: Fan, tmp_path: Path) -> Iterator[list[Service]]:
    upkeep = {"interval_seconds": 3, "delete_share": 0.05, "grace_hours": 0}
    files: dict[str, Any] = {
        "sync": {
            "source": {"dsn": db.service_dsn},
            "lake": {"catalog": fan.place("source").catalog, "data_path": fan.place("source").data_path, "inline_rows": 5},
            "groups": [{"name": "chain", "flush_interval_ms": 200, "tables": [{"source": "public.t"}]}],
            "maintenance": {**upkeep, "retention_hours": 0.002, "readers": [f"{tmp_path}/fanout.yaml"]},
            "state_dir": f"{tmp_path}/sync_state",
            "server": {"port": 0},
        },
        "fanout": {
            **document(fan, routing={"field": "company", "key_columns": ["id"]}),
            "maintenance": upkeep,
            "server": {"port": 0},
        },
        "events": {
            "version": 1,
            "source": {
                "type": "postgres-cdc",
                "config": {"connection_url": db.service_dsn, "slot_name": "faucet_slot", "publication_name": "faucet_pub"},
            },
            "sink": {"type": "jsonl", "config": {"path": f"{tmp_path}/changes.jsonl"}},
            "state": {"type": "file", "config": {"path": f"{tmp_path}/bookmark"}},
            "server": {"port": 0},
        },
    }  # fmt: skip
    made = []
    for name, values in files.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(values))
        made.append(Service(name, file))
    yield made
    for service in made:
        if service.process is not None:
            service.kill()


def load(db: Database, stopping: threading.Event) -> None:
    """Small transactions, some large ones, all kinds of changes, even while the server restarts."""
    dice, numbers = random.Random(1), iter(range(1, 10_000_000))
    while not stopping.is_set():
        try:
            with psycopg.connect(db.dsn, autocommit=True) as conn:
                while not stopping.wait(dice.random() * 0.2):
                    with conn.transaction():
                        for _ in range(dice.choice((1, 1, 2, 30))):
                            conn.execute(statement(dice, next(numbers)).encode())
        except psycopg.OperationalError:
            stopping.wait(0.2)


def statement(dice: random.Random, number: int) -> str:
    company = dice.choice(("'quack'", "'teal'", "'mallard'", "null"))
    one = f"id = (select id from t order by md5(id::text || {number}) limit 1)"
    return dice.choice(
        (
            f"insert into t values ({number}, {company}, {number}, repeat('x', {dice.randint(0, 50)}))",
            f"insert into t values ({number}, {company}, {number}, null)",
            f"update t set company = {company} where {one}",
            f"update t set n = n + 1 where {one}",
            f"update t set id = -{number} where {one}",
            f"delete from t where {one}",
        )
    )


def events_rows(file: Path) -> list[tuple[Any, ...]]:
    rows: dict[int, tuple[Any, ...]] = {}
    for line in file.read_text().splitlines():
        event = json.loads(line)
        if event["before"] is not None:
            removed = rows.pop(event["before"]["id"], None)
            assert removed is not None, "a row is removed that no event has brought"
        if event["after"] is not None:
            assert event["after"]["id"] not in rows, "a row comes twice"
            rows[event["after"]["id"]] = tuple(event["after"].values())
    return sorted(rows.values(), key=repr)


def test_killed_services_and_a_restarted_server_lose_and_double_nothing(
    server: EmbeddedPostgres, db: Database, fan: Fan, services: list[Service], tmp_path: Path
) -> None:
    """P-T04, P-S17, P-E03, hazards 8, 13: services killed and the server restarted under load and upkeep; all ends equal the source."""
    sync, fanout, _events = services
    stopping, dice = threading.Event(), random.Random(2)
    worker = threading.Thread(target=load, args=(db, stopping))

    def log() -> str:
        return "\n".join(service.log() for service in services)

    sync.start()
    wait_until(
        lambda: (tmp_path / "lake.sqlite").exists() and lake_has_table(fan),
        "the lake has the table",
        180,
        log=log,
    )
    for service in services:
        service.start()
    wait_until(lambda: (tmp_path / "bookmark").exists(), "events have a bookmark", 180, log=log)
    worker.start()
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            stopping.wait(dice.uniform(5, 20))
            victim = dice.choice([*services, None])
            if victim is None:
                db.observer.close()
                server.stop(mode="fast")
                server.start()
                db.__post_init__()
            else:
                victim.kill()
            for service in services:
                service.start()
    finally:
        stopping.set()
        worker.join()

    def same() -> bool:
        for service in services:
            service.start()
        rows = sorted(db.query("select * from t"), key=repr)
        return rows == sorted(fan.look("source", "from lake.t"), key=repr) and not differing(fan)

    wait_until(same, "lake and destinations are equal to the source", 300, log=log, pause=2)
    rows = sorted(db.query("select * from t"), key=repr)
    wait_until(
        lambda: events_rows(tmp_path / "changes.jsonl") == rows,
        "events add up to the source",
        120,
        log=log,
        pause=1,
    )
    assert len(rows) > 50
    assert sum(service.starts for service in services) > len(services), "nothing was killed"
    for service in (sync, fanout):
        verified = service.answers("verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr


def lake_has_table(fan: Fan) -> bool:
    return bool(
        fan.look("source", "select 1 from duckdb_tables() where database_name = 'lake' and table_name = 't'")
    )


def differing(fan: Fan) -> list[str]:
    """Destinations that are not the rows of the lake with their value."""
    rows = sorted(fan.look("source", "from lake.t"), key=repr)
    return [name for name, value in COMPANIES.items() if fan.rows(name) != [r for r in rows if r[1] == value]]
