"""
The steps of a chain that write: sync, maintenance and fan-out, each in a process that may be killed.

Everything is the product's own but Spark: what its tasks do is done one after the other.  `tests.chain` calls these
through `tests.forks`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import psycopg

from aqueduck.config.fanout import load_fanout
from aqueduck.config.sync import MaintenanceConfig, load_config
from aqueduck.fanout import run as fanout_run
from aqueduck.fanout.service import FanoutService
from aqueduck.model.errors import MaintenanceError
from aqueduck.spark.query import fanout_query
from aqueduck.sync.maintain import maintain_sync
from tests.fix_postgres import Database
from tests.small_spark import SmallSpark, SmallTaskContext
from tests.whole_group import whole_group

SYNC_FAULTS = ("lake.before_commit", "lake.after_commit", "copy.before_landing", "copy.landed")
FANOUT_FAULTS = (
    "fanout.read", "fanout.before_commit", "fanout.before_commit:2", "fanout.after_commit",
    "fanout.before_seed", "fanout.after_seed",
)  # fmt: skip


@dataclass
class Source:
    """As much of `Database` as a group needs, over a connection of this process."""

    dsn: str

    def dsn_for(self, user: str) -> str:
        return self.dsn

    def value(self, statement: str) -> Any:
        [(value,)] = self._conn.execute(statement.encode()).fetchall()
        return value

    def __enter__(self) -> Self:
        self._conn = psycopg.connect(self.dsn, autocommit=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conn.close()


def warm_up() -> None:
    """The kernels are those of events, which are warmed up there."""


def sync(
    dsn: str, directory: str, tables: dict[str, dict[str, Any]], *, inline_rows: int, tasks: bool
) -> None:
    """Everything that is committed in the source now, copies first."""
    with (
        Source(dsn) as source,
        whole_group(cast("Database", source), Path(directory), tables, inline_rows=inline_rows) as running,
    ):
        running.apply(tasks=tasks)


def maintain(directory: str, readers: list[str]) -> None:
    """Everything that `aqueduck maintain` can do to the lake, as early as it may."""
    options = MaintenanceConfig(
        retention_hours=1e-9, grace_hours=0, delete_share=0.05, readers=tuple(readers)
    )
    config = load_config(Path(directory) / "test.yaml").model_copy(update={"maintenance": options})
    report = maintain_sync(config)
    if report["error"] is not None:
        raise MaintenanceError(report["error"])


def fanout(config_file: str) -> None:
    """`aqueduck run --once` of a fan-out."""
    vars(fanout_query)["TaskContext"] = SmallTaskContext
    service = FanoutService(load_fanout(Path(config_file)), env={}, spark=SmallSpark())
    try:
        service.prepare()
        fanout_run.catch_up(service, threading.Event())
    finally:
        service.source.close()
