"""
The service as it is, but for Spark: its loop, its registry, its groups, their capture and commits run in this process.

`LocalQuery` replaces the streaming query, with the same capture and the same commits.  So a test may cut, restart and
restore everything that the loop talks to, hundreds of times a minute.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.model.batches import LeftToDriver, plan_fold_tasks
from aqueduck.model.errors import AqueduckError
from aqueduck.overview.values import FlowOverview
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.capture_settings import CaptureSettings
from aqueduck.postgres.capture.stage import Stage
from aqueduck.postgres.session.server import flushed_position
from aqueduck.sync.overview import SyncOverviews
from aqueduck.sync.service import SyncService
from tests.fix_postgres import Database, wait_until


class LocalQuery:
    """A group's query, in a thread of this process; see `spark.query.sync_query`."""

    def __init__(self, _spark: Any, run_dir: Path, _writer: Any, commit: Callable[..., None]) -> None:
        self._directory, self._commit = run_dir, commit
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.fold_seconds = 0.0

    def start(self, settings: CaptureSettings, *, once: bool = False) -> None:
        self._failure = None
        self._stopping = threading.Event()
        end = flushed_position(settings.dsn) if once else None
        self._thread = threading.Thread(target=self._run, args=(settings, self._stopping, end), daemon=True)
        self._thread.start()

    def _run(self, settings: CaptureSettings, stopping: threading.Event, end: int | None) -> None:
        position = settings.position
        stage = Stage(self._directory / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=position)
        capture = Capture(settings, stage)
        capture.start()
        try:
            while not stopping.wait(0.02):
                capture.check()
                if end is not None:
                    capture.ask_position()
                seen = capture.seen
                with stage.changed:
                    stage.cut()
                    cuts = stage.between(position, 1 << 62)
                if cuts:
                    planned = plan_fold_tasks(
                        (s for cut in cuts for s in cut.segments), direct_bytes_max=1 << 40
                    )
                    self._commit(
                        [(task, LeftToDriver.SMALL) for task in planned], cuts[-1].position, cuts[-1].time_us
                    )
                    position = cuts[-1].position
                    stage.release(position)
                if end is not None and seen >= end:
                    return
        except BaseException as exc:  # noqa: BLE001 - raised by `check`
            self._failure = exc
        finally:
            capture.stop()

    @property
    def active(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def check(self) -> None:
        if self._failure is not None and not self.active:
            raise self._failure

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=20)


class NoSpark:
    def stop(self) -> None:
        pass


def local_config(
    db: Database, directory: Path, groups: dict[str, Sequence[str]], **options: Any
) -> SyncConfig:
    """Written as `aqueduck.yaml` as well, for commands; `groups` are the tables of each in the file. The role is no superuser."""
    values = {
        "source": {"dsn": db.service_dsn},
        "lake": {"catalog": f"sqlite:{directory}/lake.sqlite", "data_path": f"{directory}/data"},
        "groups": [
            {"name": name, "flush_interval_ms": 50, **options, "tables": [{"source": t} for t in tables]}
            for name, tables in groups.items()
        ],
        "state_dir": f"{directory}/state",
    }
    file = directory / "aqueduck.yaml"
    file.write_text(json.dumps(values))  # JSON is YAML
    return load_config(file)


class LocalService:
    """`aqueduck run` in a thread; `error` is what ended it."""

    def __init__(self, db: Database, config: SyncConfig) -> None:
        self.db, self.config = db, config
        self.service = SyncService(config, spark=NoSpark())
        self.error: BaseException | None = None
        self.looks = 0
        """How often the loop has looked at what is wanted, with or without an answer."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._overviews = SyncOverviews(self.service)

    def start(self) -> LocalService:
        self.service.prepare()
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.service.start()
            follow = self.service.reconciler.follow
            self.service.reconciler.follow = functools.partial(self._follow, follow)  # type: ignore[method-assign]
            self.service.supervise(self._stopping)
        except BaseException as exc:  # noqa: BLE001 - a test looks at it
            self.error = exc

    def _follow(self, follow: Callable[[], None]) -> None:
        follow()
        self.looks += 1

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=60)
        self.service.stop()

    def alive(self) -> None:
        """Raises what ended the service."""
        if self.error is not None:
            raise self.error

    # -- what is, read by the observer and in the lake

    def state(self, source: str) -> str | None:
        rows = self.db.query("select state from aqueduck.status() where source = %s", (source,))
        return rows[0][0] if rows else None

    def published(self, group: str = "test") -> set[str]:
        named = "select schemaname || '.' || tablename from pg_publication_tables where pubname = %s"
        return {name for (name,) in self.db.query(named, (f"aqueduck_{group}",))}

    def flow(self) -> FlowOverview:
        """The picture that page, API, metrics and probes share."""
        return self._overviews.overview().flows[0]

    def copies(self) -> int:
        """How many copies were committed."""
        said = "select count(*) from lake.snapshots() where commit_message like 'copy of %'"
        return int(self.service.query_lake(said)[0][0][0])

    def in_lake(self, table: str) -> list[tuple[Any, ...]]:
        try:
            return self.service.query_lake(f"from lake.main.{table} order by all")[0]
        except AqueduckError as exc:  # it does not exist yet, or another process commits
            return [(type(exc).__name__,)]

    def wait_same(self, *tables: str, seconds: float = 30) -> None:
        """Source rows = lake rows."""
        for table in tables:

            def same(table: str = table) -> bool:
                self.alive()
                return self.in_lake(table) == self.db.query(f"select * from {table} order by 1")

            wait_until(same, f"{table} in the lake is as in the source", seconds)

    def wait_state(self, source: str, state: str | None, seconds: float = 30) -> None:
        def reached() -> bool:
            self.alive()
            return self.state(source) == state

        wait_until(reached, f"{source} is {state}", seconds)

    def wait_streaming(self, *sources: str, seconds: float = 30) -> None:
        for source in sources:
            self.wait_state(source, "STREAMING", seconds)


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups query and copy in this process; the registry is read all the time."""
    monkeypatch.setattr("aqueduck.sync.reconcile.RECONCILE_SECONDS", 0.1)
    monkeypatch.setattr("aqueduck.sync.reconcile.REOPEN_SECONDS", 0.2, raising=False)
    monkeypatch.setattr("aqueduck.sync.groups.group.SyncQuery", LocalQuery)
    monkeypatch.setattr(
        "aqueduck.sync.groups.group.run_copy", lambda _spark, _jobs, job: job.run(range(len(job.items)))
    )
    monkeypatch.setattr("aqueduck.sync.groups.group.cancel_copies", lambda _spark, _jobs: None)


@contextlib.contextmanager
def local_service(db: Database, config: SyncConfig) -> Iterator[LocalService]:
    made = LocalService(db, config)
    try:
        yield made.start()
    finally:
        made.stop()
