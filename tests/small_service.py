"""
A service without Spark: the real capture, the real lake commits, batches when a test says so.

What lies between two calls of `apply` becomes one batch, so a test decides which changes reach the lake together.
`running` applies them all the time, like a service does.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.lake.commit.commit import commit_batch
from aqueduck.lake.fold.fold_tasks import FoldedTasks, plan_batch
from aqueduck.lake.ledger.progress import Position
from aqueduck.lake.ledger.table_states import read_states
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.batches import LeftToDriver, plan_fold_tasks
from aqueduck.model.schema import parse_lsn
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.session.group_lock import lock_group
from aqueduck.state_files.files import write_tables
from aqueduck.sync.control import Wanted
from aqueduck.sync.prepare import prepare_group
from tests.fix_postgres import Database, wait_until

Table = str | dict[str, Any]
"""A table's name, or what a configuration says of it."""


def small_config(
    db: Database, directory: Path, *tables: Table, catalog: str | None = None, user: str = "postgres"
) -> SyncConfig:
    """Written as `aqueduck.yaml` as well, for commands."""
    listed = [{"copy": False, **({"source": t} if isinstance(t, str) else t)} for t in tables]
    values = {
        "source": {"dsn": db.dsn_for(user)},
        "lake": {"catalog": catalog or f"sqlite:{directory}/lake.sqlite", "data_path": f"{directory}/data"},
        "groups": [{"name": "test", "tables": listed}],
        "state_dir": f"{directory}/state",
        "spark": {"master": "local[2]"},
    }
    file = directory / "aqueduck.yaml"
    file.write_text(json.dumps(values))  # JSON is YAML
    return load_config(file)


class SmallService:
    """One group named `test`; all of its tables start empty and ready."""

    def __init__(self, db: Database, directory: Path, *tables: Table, catalog: str | None = None) -> None:
        self.db = db
        self.config = small_config(db, directory, *tables, catalog=catalog)
        self.lake = open_lake(self.config.lake)
        self.ready = prepare_group(self.config, Wanted(self.config.groups[0]), self.lake)
        self.position = self.ready.position
        self._lock = db.connect()
        lock_group(self._lock, "test")
        write_tables(directory / "tables.json", [(t.schema, None) for t in self.ready.tables.values()])
        self._keep_truncated = [oid for oid, table in self.ready.tables.items() if table.mode.keeps]
        settings = CaptureSettings(
            dsn=db.dsn,
            slot="aqueduck_test",
            publication="aqueduck_test",
            position=self.position,
            directory=str(directory),
        )
        self._stage = Stage(
            directory / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=self.position
        )
        self._capture = Capture(settings, self._stage)
        self._capture.start()

    def apply(self) -> None:
        """Everything that is committed in the source now, as one batch."""
        target = parse_lsn(self.db.value("select pg_current_wal_flush_lsn()::text"))

        def seen() -> bool:
            self._capture.check()
            self._capture.ask_position()
            return self._capture.seen >= target

        wait_until(seen, "the capture has seen it", 60)
        self._commit()

    def _commit(self) -> None:
        with self._stage.changed:
            self._stage.cut()
            cuts = self._stage.between(self.position, 1 << 62)
        if not cuts:
            return
        segments = [s for cut in cuts for s in cut.segments]
        tasks: FoldedTasks = [
            (task, LeftToDriver.SMALL)
            for task in plan_fold_tasks(segments, keep_truncated=self._keep_truncated)
        ]
        end = Position(
            "test", cuts[-1].position, cuts[-1].time_us, self.ready.system_identifier, self.ready.timeline
        )
        plan = plan_batch(tasks, read_states(self.lake, "test"), end, before=self.position)
        commit_batch(self.lake, plan)
        self.position = end.position
        self._stage.release(end.position)

    @contextlib.contextmanager
    def running(self, seconds: float = 0.1) -> Iterator[None]:
        """Batches all the time."""
        stopping = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not stopping.wait(seconds):
                    self._capture.check()
                    self._commit()
            except BaseException as exc:  # noqa: BLE001 - raised by the test
                failures.append(exc)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
        for failure in failures:
            raise failure

    def change_lake(self, statement: str) -> None:
        """Do something to the lake behind everybody's back."""
        self.lake.execute(statement)

    def stop(self) -> None:
        """Like a service that ends: the slot is free, and no process holds the group."""
        self._capture.stop()
        self._lock.close()

    def close(self) -> None:
        self.stop()
        self.lake.close()


@contextlib.contextmanager
def small_service(db: Database, directory: Path, *tables: Table, **keywords: Any) -> Iterator[SmallService]:
    service = SmallService(db, directory, *tables, **keywords)
    try:
        yield service
    finally:
        service.close()
