"""
Change events of a test's database: without Spark through capture and stage, or by `aqueduck run` as a user has it.

The expectation is always independent: JSON is read with `json`, values come from psycopg.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from aqueduck.config.events import load_events
from aqueduck.envelopes.envelope import Envelope
from aqueduck.envelopes.json_events import stretch_lines
from aqueduck.events.service import EventsService
from aqueduck.model.event_parts import piece_stretches, plan_pieces
from aqueduck.model.schema import parse_lsn
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.events_capture import EventsSettings, EventsStage, events_capture
from aqueduck.postgres.publications.slots import create_slot
from tests.fix_postgres import Database, wait_until
from tests.fix_service import START_SECONDS, passing
from tests.forks import Forked


class Watched:
    """The events of all tables of a database from now on, captured without Spark."""

    def __init__(
        self,
        db: Database,
        directory: Path,
        *,
        segment_bytes: int = 1 << 20,
        slot: str = "s",
        dsn: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.db = db
        if not db.query("select from pg_publication where pubname = 'p'"):
            db.execute("create publication p for all tables")
        with db.connect() as conn:
            position = create_slot(conn, slot, (settings or {}).get("plugin", "pgoutput"))
        capture = CaptureSettings(
            dsn=dsn or db.dsn, slot=slot, publication="p", position=position,
            directory=str(directory), segment_bytes=segment_bytes, slot_retries=1,
            **(settings or {}),
        )  # fmt: skip
        self.settings = EventsSettings(capture, **options)
        self.stage = EventsStage(
            directory / "stage", segment_bytes=segment_bytes, bytes_max=1 << 30, position=position,
            max_messages=self.settings.max_messages, max_staged_records=self.settings.max_staged_records,
        )  # fmt: skip
        self.capture = events_capture(self.settings, self.stage)
        self.capture.start()
        self._after = 0

    def pieces(self, *, piece_bytes: int = 1 << 20) -> list[str]:
        """Everything committed until now that was not taken before."""
        end = parse_lsn(self.db.value("select pg_current_wal_insert_lsn()::text"))

        def seen() -> bool:
            self.capture.check()
            self.capture.ask_position()
            return self.capture.seen >= end

        self.db.execute("select pg_logical_emit_message(true, 'x', 'y')")
        wait_until(seen, "the capture has seen it", 60)
        self.stage.cut()
        cuts = self.stage.between(self._after, 1 << 62)
        self._after = cuts[-1].position if cuts else self._after
        return plan_pieces((s for c in cuts for s in c.segments), piece_bytes=piece_bytes)

    def texts(self, envelope: Envelope = "default", **options: Any) -> list[str]:
        """The lines of those events."""
        found = []
        for piece in self.pieces(**options):
            for stretch in piece_stretches(piece):
                for lines in stretch_lines(stretch, envelope, database=self.db.name):
                    text = lines.text.to_pybytes()
                    assert lines.ends[-1] == len(text)
                    assert text.endswith(b"\n")
                    found += text.decode().removesuffix("\n").split("\n")
        return found

    def events(self, envelope: Envelope = "default", **options: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.texts(envelope, **options)]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    watched: list[Watched] = []

    def make(db: Database, **options: Any) -> Watched:
        directory = tmp_path / f"watched-{len(watched)}"
        directory.mkdir()
        watched.append(Watched(db, directory, **options))
        return watched[-1]

    yield make
    for one in watched:
        one.capture.stop()


@dataclass
class Flow:
    """A file of the flow `events` for a test's database, and processes that run it."""

    db: Database
    directory: Path
    sink: dict[str, Any] = field(
        default_factory=lambda: {"type": "jsonl", "config": {"path": "./changes.jsonl"}}
    )
    state: dict[str, Any] = field(default_factory=lambda: {"type": "file", "config": {"path": "./state"}})
    source: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    forked: list[Forked] = field(default_factory=list)

    @property
    def config_file(self) -> Path:
        return self.directory / "faucet.yaml"

    @property
    def log_file(self) -> Path:
        return self.directory / "log.txt"

    def write_config(self) -> None:
        config = {
            "version": 1,
            "source": {
                "type": "postgres-cdc",
                "config": {
                    "connection_url": self.db.service_dsn,
                    "slot_name": "faucet_slot",
                    "publication_name": "faucet_pub",
                    **self.source,
                },
            },
            "sink": self.sink,
            "state": self.state,
            **self.more,
        }
        self.config_file.write_text(json.dumps(config))  # JSON is YAML

    def service(self) -> EventsService:
        """The service in this process, without Spark."""
        self.write_config()
        config = load_events(self.config_file)
        assert config is not None
        return EventsService(config, with_spark=False)

    def start(self, *arguments: str, fault: str | None = None) -> subprocess.Popen[bytes]:
        """`aqueduck run` with Spark."""
        self.write_config()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AQUEDUCK_FAULT": fault or ""}
        command = [sys.executable, "-m", "aqueduck.cli", "run", "-c", str(self.config_file), *arguments]
        with open(self.log_file, "ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def fork(self, *, once: bool = False, fault: str | None = None, file_bytes: int | None = None) -> Forked:
        """The same without Spark, within a moment."""
        self.write_config()
        forked = Forked(
            "tests.events_process:run", self.log_file, fault=fault, file_bytes=file_bytes,
            config_file=str(self.config_file), once=once,
        )  # fmt: skip
        self.forked.append(forked)
        return forked

    def once(self, *, fault: str | None = None, file_bytes: int | None = None) -> int:
        """Catch up without Spark; the exit code."""
        code = self.fork(once=True, fault=fault, file_bytes=file_bytes).wait()
        self.wait_free()
        return code

    def wait_free(self) -> None:
        wait_until(lambda: not self.slot_active(), "the slot is free", 60, log=self.log)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill -9 of the whole family."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            for member in [*parent.children(recursive=True), parent]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait(timeout=60)
        self.wait_free()

    def die(self, point: str) -> None:
        """Run on Spark until the driver dies at the fault point, then kill -9 of the family that is left."""
        passed = passing(self.log_file, point)
        process = self.start(fault=point)
        wait_until(lambda: passed() or process.poll() is not None, point, START_SECONDS, log=self.log)
        self.kill(process)
        assert passed(), f"it did not die at {point}\n{self.log()}"

    def slot_active(self) -> bool:
        query = (
            "select from pg_replication_slots where active and slot_name = 'faucet_slot' and database = %s"
        )
        return bool(self.db.query(query, [self.db.name]))

    def streams(self) -> bool:
        """Whether it is read: a slot that is still being made is active, too, and misses what commits meanwhile."""
        return self.slot_active() and self.confirmed() > 0

    def confirmed(self) -> int:
        query = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = 'faucet_slot'"
        return parse_lsn(self.db.value(query) or "0/0")

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")[-6000:] if self.log_file.exists() else ""

    def lines(self, name: str = "changes.jsonl") -> list[dict[str, Any]]:
        file = self.directory / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        assert text == "" or text.endswith("\n"), "the file ends in half a line"
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def count(self, name: str = "changes.jsonl") -> int:
        """How many whole lines there are; the last one may be on its way."""
        file = self.directory / name
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def rotated(self) -> list[dict[str, Any]]:
        return [e for path in sorted(self.directory.glob("changes-*.jsonl")) for e in self.lines(path.name)]


@pytest.fixture
def flow_of(db: Database, tmp_path: Path) -> Iterator[Callable[..., Flow]]:
    """Makes a `Flow` for `db`; all processes that it started are killed afterwards."""
    made: list[Flow] = []

    def make(**options: Any) -> Flow:
        made.append(Flow(options.pop("database", db), tmp_path, **options))
        return made[-1]

    yield make
    for flow in made:
        for process in flow.processes:
            if process.poll() is None:
                flow.kill(process)
        for forked in flow.forked:
            forked.end(signal.SIGKILL)
        flow.wait_free()
        flow.db.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'faucet_slot'"
        )
