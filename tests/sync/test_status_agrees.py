"""SQL, the command line, the API, the page, the metrics and the readiness probe show the same status."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from aqueduck.cli import commands as cli
from aqueduck.config.server import ServerConfig
from aqueduck.model.errors import NoKeyError
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.service import SyncService
from aqueduck.web.server import serve
from tests.fix_postgres import Database, wait_until
from tests.local_service import LocalService, NoSpark, local_config, local_service

pytestmark = pytest.mark.usefixtures("without_spark")

Told = dict[str, tuple[str, str | None]]
"""State and error code of each table."""


@dataclass
class Asker:
    """Asks everybody."""

    db: Database
    service: LocalService
    address: str
    file: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.address + path, timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as exc:
            return exc.read().decode()

    def sql(self) -> Told:
        rows = self.db.query("select source, state, error_code from aqueduck.status()")
        return {source: (state, code) for source, state, code in rows}

    def tables(self) -> dict[str, str]:
        return dict(self.db.query("select source, state from aqueduck.tables()"))

    def command(self) -> Told:
        self.monkeypatch.setattr(sys, "argv", ["aqueduck", "status", "-c", str(self.file), "--json"])
        self.capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main()
        out = self.capsys.readouterr().out
        rows = json.loads(out[out.index("\n[") if "\n[" in out else out.index("[") :])
        return {row["source"]: (row["state"], row["error_code"]) for row in rows}

    def api(self) -> Told:
        return _told(json.loads(self.get("api/v1/tables"))["tables"])

    def page(self) -> Told:
        """What the page is fed with."""
        with urllib.request.urlopen(self.address + "api/v1/events", timeout=10) as stream:
            for line in stream:
                if line.startswith(b"data:"):
                    parts = json.loads(line[5:])["set"]
                    return _told([part for key, part in parts.items() if key.startswith("table:")])
        raise AssertionError("the page is fed with nothing")

    def metrics(self) -> dict[str, str]:
        said = re.findall(r"aqueduck_table_state\{(.*?)\} 1\.0", self.get("metrics"))
        labels = [dict(re.findall(r'(\w+)="(.*?)"', one)) for one in said]
        return {found["table"]: found["state"] for found in labels}

    def errored(self) -> set[str]:
        return set(json.loads(self.get("readyz"))["errored"])

    def differences(self, wanted: Told) -> list[str]:
        """All answers that differ."""
        states = {source: state for source, (state, _) in wanted.items()}
        said: dict[str, Any] = {
            "SQL": (self.sql(), wanted),
            "tables()": (self.tables(), states),
            "the command line": (self.command(), wanted),
            "the API": (self.api(), wanted),
            "the page": (self.page(), wanted),
            "the metrics": (self.metrics(), states),
            "readyz": (self.errored(), {source for source, state in states.items() if state == "ERRORED"}),
        }
        return [f"{who}: {found}" for who, (found, right) in said.items() if found != right]

    def agree(self, wanted: Told) -> None:
        left: list[str] = ["no source was asked"]

        def same() -> bool:
            self.service.alive()
            left[:] = self.differences(wanted)
            return not left

        wait_until(same, f"all say {wanted}", 30, log=lambda: "\n".join(left))


def _told(rows: list[dict[str, Any]]) -> Told:
    return {row["source"]: (row["state"], row["error"] and row["error"]["code"]) for row in rows}


@contextlib.contextmanager
def asked(
    db: Database,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tables: list[str],
) -> Iterator[Asker]:
    config = local_config(db, directory, {"test": tables}, on_type_change="stop")
    with local_service(db, config) as service:
        server = ServerConfig(host="127.0.0.1", port=0)
        with serve(server, SyncOverviews(service.service), None, interval=0.1) as address:
            assert address is not None
            yield Asker(db, service, address, directory / "aqueduck.yaml", capsys, monkeypatch)


def test_everybody_says_the_same(
    db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01: streaming, errored while it was added, errored while it was written, disabled, and with a disabled group."""
    db.execute("create table well (id int primary key); insert into well values (1)")
    db.execute("create table keyless (id int); create table again (id int primary key)")
    db.execute("create table moment (id int primary key, v text)")
    with asked(db, tmp_path, capsys, monkeypatch, ["public.well", "public.keyless", "public.again"]) as asker:
        refused = ("ERRORED", "pg.no_key")
        streams = ("STREAMING", None)
        now = {"public.well": streams, "public.keyless": refused, "public.again": streams}
        asker.agree(now)

        db.execute("drop table again; create table again (id int primary key)")
        now["public.again"] = ("ERRORED", "pg.table_recreated")
        asker.agree(now)

        db.execute("select aqueduck.add_table('public.moment', group_name => 'test')")
        now["public.moment"] = streams
        asker.agree(now)
        db.execute("alter table moment alter v type int using 1; insert into moment values (1, 1)")
        wait_until(lambda: asker.sql()["public.moment"][0] == "ERRORED", "it cannot be written")
        now["public.moment"] = asker.sql()["public.moment"]
        db.execute("select aqueduck.disable_table('public.well')")
        now["public.well"] = ("PENDING", None)
        asker.agree(now)

        db.execute("select aqueduck.enable_table('public.well'); alter table keyless add primary key (id)")
        now["public.well"], now["public.keyless"] = streams, streams
        db.execute("select aqueduck.resync_table('public.again')")
        now["public.again"] = streams
        asker.agree(now)

        db.execute("select aqueduck.disable_group('test')")
        for source in ("public.well", "public.keyless", "public.again"):
            now[source] = ("PENDING", None)
        asker.agree(now)


def test_an_errored_group_is_errored_everywhere(
    db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01, P-S19: its tables are errored as well, with the group's error."""
    db.execute("create table a (id int primary key); create table b (id int primary key)")
    with asked(db, tmp_path, capsys, monkeypatch, ["public.a"]) as asker:
        db.execute(
            "select aqueduck.create_group('other'); select aqueduck.add_table('public.b', group_name => 'other')"
        )
        asker.agree({"public.a": ("STREAMING", None), "public.b": ("STREAMING", None)})
        drop = (
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = 'aqueduck_other' and active;"
            "select pg_drop_replication_slot('aqueduck_other')"
        )

        def dropped() -> bool:
            with contextlib.suppress(psycopg.errors.ObjectInUse):
                db.execute(drop)
            return not db.query("select from pg_replication_slots where slot_name = 'aqueduck_other'")

        wait_until(dropped, "the slot is gone")
        asker.agree({"public.a": ("STREAMING", None), "public.b": ("ERRORED", "pg.slot_lost")})


def test_everybody_says_the_same_of_states_on_the_way(
    db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01, P-S03: before a copy, during it, and while the stream is not read."""
    db.execute("create table t (id int primary key); insert into t values (1)")
    db.execute("create table later (id int primary key); insert into later values (1)")
    copies = threading.Semaphore(0)

    def held(_spark: Any, _jobs: Any, job: Any) -> Any:
        assert copies.acquire(timeout=120)
        return job.run(range(len(job.items)))

    monkeypatch.setattr("aqueduck.sync.groups.group.run_copy", held)
    with asked(db, tmp_path, capsys, monkeypatch, ["public.t"]) as asker:
        asker.agree({"public.t": ("SNAPSHOT", None)})
        copies.release()
        asker.agree({"public.t": ("STREAMING", None)})
        with db.connect() as conn:
            conn.execute("begin; insert into later values (2)")  # its copy waits for this transaction
            db.execute("select aqueduck.add_table('public.later', group_name => 'test')")
            wait_until(lambda: "public.later" in asker.tables(), "it is added")
            asker.agree({"public.t": ("STREAMING", None), "public.later": ("PENDING", None)})
            conn.execute("commit")
        asker.agree({"public.t": ("STREAMING", None), "public.later": ("SNAPSHOT", None)})
        copies.release()
        asker.agree(dict.fromkeys(("public.t", "public.later"), ("STREAMING", None)))
        hold = tmp_path / "state" / "test" / "hold"
        hold.touch()
        asker.agree(dict.fromkeys(("public.t", "public.later"), ("CATCHUP", None)))
        hold.unlink()
        asker.agree(dict.fromkeys(("public.t", "public.later"), ("STREAMING", None)))


def test_a_lake_that_takes_nothing_is_not_shown_as_streamed_into(
    db: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T01: a hanging commit stops neither status nor watches, and its tables are not STREAMING."""
    monkeypatch.setattr("aqueduck.sync.observe.STILL_SECONDS", 0.5)
    monkeypatch.setattr("aqueduck.sync.service.WATCH_SECONDS", 0.1)
    db.execute("create table t (id int primary key)")
    with asked(db, tmp_path, capsys, monkeypatch, ["public.t"]) as asker:
        asker.agree({"public.t": ("STREAMING", None)})
        with asker.service.service.commit_lock:
            db.execute("insert into t values (1)")
            asker.agree({"public.t": ("CATCHUP", None)})
        asker.agree({"public.t": ("STREAMING", None)})
        asker.service.wait_same("t")


def test_a_run_that_ends_says_that_a_table_is_errored(db: Database, tmp_path: Path) -> None:
    """P-T01: `run --once` ends with the error of a table that could not be added; the others are complete."""
    db.execute(
        "create table keyless (id int); create table well (id int primary key); insert into well values (1)"
    )
    service = SyncService(
        local_config(db, tmp_path, {"test": ["public.keyless", "public.well"]}), spark=NoSpark()
    )
    try:
        service.prepare()
        service.start(once=True)
        with pytest.raises(NoKeyError):
            service.run_once(threading.Event())
        assert service.query_lake("select id from lake.main.well")[0] == [(1,)]
    finally:
        service.stop()
