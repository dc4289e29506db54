"""
A whole group without Spark: the service's own runner, its copies, its capture and its commits, in this process.

What lies between two calls of `apply` becomes one batch.  `tasks=True` folds it as Spark's tasks do, into files; the
default leaves it to the driver.  Options of tables are given as in a configuration file.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aqueduck.config.sync import SyncConfig, load_config
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.batches import plan_fold_tasks
from aqueduck.model.schema import parse_lsn
from aqueduck.postgres.capture.capture import Capture
from aqueduck.postgres.capture.stage import Cut, Stage
from aqueduck.sync.control import Parting, Wanted
from aqueduck.sync.groups.group import GroupRunner
from aqueduck.sync.groups.group_tables import add_tables, remove_tables
from aqueduck.sync.prepare import prepare_group
from aqueduck.sync.verify import TableComparison, verify_tables
from aqueduck.sync.watching.source_watch import SourceWatch
from tests.fix_postgres import Database, wait_until

Options = Mapping[str, Any]


class WholeGroup:
    """A group; `tables` are the options of each by its name.  Groups of one directory share a lake."""

    def __init__(
        self,
        db: Database,
        directory: Path,
        tables: Mapping[str, Options],
        *,
        name: str = "test",
        group: Options | None = None,
        salt_env: str | None = None,
        user: str = "postgres",
        inline_rows: int = 5,
        catalog: str | None = None,
    ) -> None:
        self.db, self.name = db, name
        self._catalog = catalog or f"sqlite:{directory}/lake.sqlite"
        self._dsn = db.dsn_for(user)
        self.directory = directory
        self._group, self._salt_env = dict(group or {}), salt_env
        self._inline_rows = inline_rows
        self.start(tables)

    def start(self, tables: Mapping[str, Options], **keywords: Any) -> None:
        """Like a service that starts: prepare, capture, copy what is due."""
        self.start_without_copies(tables, **keywords)
        self.copy()

    def start_without_copies(self, tables: Mapping[str, Options], **keywords: Any) -> None:
        """The same, without raising failures."""
        self.config = self._config(tables)
        self.lake = open_lake(self.config.lake)
        try:
            ready = prepare_group(self.config, Wanted(self.config.groups[0]), self.lake, **keywords)
            self.runner = GroupRunner(self.config, None, self.lake, threading.Lock(), ready)  # type: ignore[arg-type]
        except BaseException:
            self.lake.close()
            raise
        self.refused = ready.refused
        self.watch = SourceWatch()
        runner = self.runner
        runner.copier.jobs.run = lambda job: job.run(range(len(job.items)))
        runner.copier.jobs.cancel = lambda: None
        runner.book.inform_capture()
        runner.book.inform_tasks()
        self._start_capture()
        runner.copier.start()

    def _start_capture(self) -> None:
        position = self.runner.stored_position()
        self.stage = Stage(
            self.runner.directory / "stage", segment_bytes=1 << 20, bytes_max=1 << 30, position=position
        )
        self.capture = Capture(self.runner.settings(position), self.stage)
        self.capture.start()

    def restart_capture(self) -> None:
        """Like a query that failed and is started again."""
        self.capture.stop()
        self.runner.versions.clear()
        self._start_capture()

    def _config(self, tables: Mapping[str, Options]) -> SyncConfig:
        values = {
            "source": {"dsn": self._dsn},
            "lake": {
                "catalog": self._catalog,
                "data_path": f"{self.directory}/data",
                "inline_rows": self._inline_rows,
            },
            "groups": [
                {"name": self.name, **self._group, "tables": [{"source": t, **o} for t, o in tables.items()]}
            ],
            "state_dir": f"{self.directory}/state",
            "mask_salt_env": self._salt_env,
        }
        file = self.directory / f"{self.name}.yaml"
        file.write_text(json.dumps(values))  # JSON is YAML
        return load_config(file)

    def stop(self) -> None:
        self.capture.stop()
        self.runner.copier.stop()
        self.lake.close()

    def with_options(self, **options: Any) -> None:
        """Settings of the group from its next start on."""
        self._group.update(options)

    def restart(self, tables: Mapping[str, Options]) -> None:
        self.stop()
        self.start(tables)

    def add(self, table: str, **options: Any) -> None:
        """Follow one more table, while everything runs; its copy is waited for."""
        add_tables(self.runner, self._config({table: options}).groups[0].tables, handover=lambda oid: None)
        self.copy()

    def remove(self, table: str) -> None:
        """Follow a table no more, while everything runs."""
        gone = [oid for oid, t in self.runner.tables.items() if t.schema.name == table]
        remove_tables(self.runner, dict.fromkeys(gone, Parting("a test removed it")))

    def copy(self) -> None:
        """Copy what is due, and wait for it."""
        copier = self.runner.copier
        copier.start()
        wait_until(lambda: not copier.busy, "the copies have ended", 60)
        copier.raise_failures()

    def apply(self, *, tasks: bool = False) -> None:
        """Everything that is committed in the source now, as one batch; then new copies that it calls for."""
        self.apply_only(tasks=tasks)
        self.copy()

    def apply_only(self, *, tasks: bool = False) -> None:
        """The batch alone, even while a copy is running."""
        cuts = self.cuts()
        if cuts:
            planned = plan_fold_tasks(
                (s for cut in cuts for s in cut.segments),
                direct_bytes_max=-1 if tasks else 1 << 40,
                keep_truncated=[oid for oid, table in self.runner.tables.items() if table.mode.keeps],
            )
            writer = self.runner.query.writer
            self.runner.commit(
                [(task, writer.write(task)) for task in planned], cuts[-1].position, cuts[-1].time_us
            )
            self.stage.release(cuts[-1].position)

    def cuts(self) -> tuple[Cut, ...]:
        """What is committed in the source now and not in the lake yet."""
        target = parse_lsn(self.db.value("select pg_current_wal_flush_lsn()::text"))

        def seen() -> bool:
            self.capture.check()
            self.capture.ask_position()
            return self.capture.seen >= target

        wait_until(seen, "the capture has seen it", 60)
        with self.stage.changed:
            self.stage.cut()
            return self.stage.between(self.runner.status.position, 1 << 62)

    def read(self, statement: str) -> list[tuple[Any, ...]]:
        return self.lake.query(statement)[0]

    def columns(self, table: str) -> list[str]:
        return [name for (name,) in self.read(f"select column_name from (describe lake.main.{table})")]

    def verify(self) -> list[TableComparison]:
        return verify_tables(self.config, session=self.lake)

    @property
    def copies(self) -> int:
        """How many copies were committed."""
        rows = self.read("select commit_message from lake.snapshots() where commit_message like 'copy of %'")
        return len(rows)


@contextlib.contextmanager
def whole_group(
    db: Database, directory: Path, tables: Mapping[str, Options], **keywords: Any
) -> Iterator[WholeGroup]:
    group = WholeGroup(db, directory, tables, **keywords)
    try:
        yield group
    finally:
        group.stop()
