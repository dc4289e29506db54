"""
Maintenance of a sync's lake: inside the service, on its schedule, or by `aqueduck maintain`.

The service's own session does the work under its commit lock: nothing else may write its tables meanwhile
(ADR 32). So `aqueduck maintain` runs maintenance itself only if no service runs the groups; otherwise it
leaves a request in `state_dir`, and the service runs it and writes the report.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from aqueduck.config.sync import SyncConfig
from aqueduck.lake.ledger.progress import progress_table, read_position
from aqueduck.lake.ledger.table_states import read_states
from aqueduck.lake.session.catalog import METADATA, OWN_SCHEMA, LakeSession, open_lake
from aqueduck.lake.session.files import file_prefix
from aqueduck.lake.upkeep.lake_readers import oldest_cursor
from aqueduck.lake.upkeep.maintenance import Kept, LakeWork, maintain
from aqueduck.lake.upkeep.orphans import remove_old_orphans
from aqueduck.lake.upkeep.relayout import relayout_step
from aqueduck.lake.upkeep.table_upkeep import Lake
from aqueduck.model.errors import MaintenanceError
from aqueduck.model.schema import TableName
from aqueduck.model.upkeep import MaintenanceReport
from aqueduck.overview.values import to_plain
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.group_lock import try_lock_group
from aqueduck.postgres.session.server import read_server
from aqueduck.state_files.files import replace_file
from aqueduck.sync.copying.copy_journal import journaled_files, journals_of

if TYPE_CHECKING:  # the service starts the maintainer
    from aqueduck.sync.service import SyncService

__all__ = ["Maintainer", "maintain_sync"]

log = structlog.get_logger()

LAKE_NAME = "lake"
OWN_TABLES = ("tables", "parked")
ANSWER_SECONDS = 60.0
RELAYOUT = " relayout"
"""The end of a request that asks for it."""


def _session_work(
    session: LakeSession,
    lock: contextlib.AbstractContextManager[object],
    tables: Callable[[], list[TableName]],
    keep: Callable[[], Kept],
    orphans: Callable[[Lake, datetime], int],
) -> LakeWork:
    @contextlib.contextmanager
    def exclusive() -> Iterator[LakeSession]:
        with lock, session.alone():
            yield session

    def may_renew() -> bool:
        with session.alone() as alone:
            return alone

    def renew() -> LakeSession:
        session.renew()
        return session

    def flushed(table: TableName) -> None:
        session.memory.inlined_rows[table] = 0

    return LakeWork(
        LAKE_NAME, "sync", exclusive, may_renew, renew, tables, keep, orphans, flushed,
        relayout=lambda table, after: relayout_step(session, table, after),
    )  # fmt: skip


def _keep(config: SyncConfig) -> Callable[[], Kept]:
    return lambda: oldest_cursor(config.maintenance.readers, config.lake.catalog)


# -- inside the service


class Maintainer:
    """A thread of the service that maintains the lake on schedule and on request."""

    def __init__(self, service: SyncService) -> None:
        self._service = service
        self._config = service.config.maintenance
        self._directory = _directory(service.config)
        self._work = _session_work(
            service.lake, service.commit_lock, self._tables, _keep(service.config), self._remove_orphans
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def _loop(self) -> None:
        due = time.monotonic() + self._config.interval_seconds
        while not self._stopping.wait(0.5):
            asked = _read(self._directory / "request")
            if asked is None and (not self._config.enabled or time.monotonic() < due):
                continue
            relayout = asked is not None and asked.endswith(RELAYOUT)
            report = maintain(self._work, self._config, stopping=self._stopping.is_set, relayout=relayout)
            due = time.monotonic() + self._config.interval_seconds
            if asked is not None:
                self._answer(asked, report)

    def _answer(self, asked: str, report: MaintenanceReport) -> None:
        try:
            (self._directory / "request").unlink(missing_ok=True)
            replace_file(
                self._directory / "report.json", json.dumps({"request": asked, "report": to_plain(report)})
            )
        except OSError as exc:
            log.warning("the report of maintenance cannot be written", reason=exc.strerror)

    def _tables(self) -> list[TableName]:
        tables = [TableName(OWN_SCHEMA, name) for name in OWN_TABLES]
        for runner in self._service.runners():
            tables.append(progress_table(runner.group.name))
            tables += [table.target for table in runner.tables.values()]
        return list(dict.fromkeys(tables))

    def _remove_orphans(self, lake: Lake, older_than: datetime) -> int:
        removed = 0
        for runner in self._service.runners():
            kept = runner.copier.kept_files()
            mine = tuple(
                f"{file_prefix(runner.group.name)}{run}-"
                for run in (runner.run_id, runner.copier.settings.run_id)
            )

            def keep(name: str, kept: set[str] = kept, mine: tuple[str, ...] = mine) -> bool:
                return name in kept or name.startswith(mine)

            removed += remove_old_orphans(
                lake,
                [table.target for table in runner.tables.values()],
                older_than=older_than,
                groups=[runner.group.name],
                keep=keep,
            )
        return removed


# -- the command


def maintain_sync(config: SyncConfig, *, relayout: bool = False) -> dict[str, Any]:
    """
    Maintain directly if no service runs the groups, otherwise through that service; returns the report as
    plain values.

    With `relayout`, files from before a change of a table's layout are rewritten.
    """
    with connect(config.source.dsn, application_name="aqueduck maintain") as conn:
        if not all(try_lock_group(conn, group.name) for group in config.groups):
            return _ask(config, relayout)
        with open_lake(config.lake) as session:
            groups = _groups(session, read_server(conn).system_identifier)
            if not all(try_lock_group(conn, name) for name in groups):
                session.close()
                return _ask(config, relayout)
            work = _session_work(
                session,
                contextlib.nullcontext(),
                lambda: _tables_of(session, groups),
                _keep(config),
                lambda lake, older_than: _orphans_of(config, session, groups, older_than),
            )
            plain: dict[str, Any] = to_plain(maintain(work, config.maintenance, relayout=relayout))
            return plain


def _ask(config: SyncConfig, relayout: bool) -> dict[str, Any]:
    """Request maintenance from the running service."""
    directory, asked = _directory(config), uuid.uuid4().hex + (RELAYOUT if relayout else "")
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / "request", asked)
    log.info("a service runs these groups; it was asked to maintain the lake")
    deadline = time.monotonic() + config.maintenance.budget_seconds + ANSWER_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            answer = json.loads((directory / "report.json").read_text())
            if answer["request"] == asked:
                report: dict[str, Any] = answer["report"]
                return report
        time.sleep(0.2)
    (directory / "request").unlink(missing_ok=True)
    raise MaintenanceError(
        "a service runs these groups, and did not answer",
        hint="call this where the service runs, with the same file: both use its state_dir",
    )


def _directory(config: SyncConfig) -> Path:
    return Path(config.state_dir) / "maintenance.notes"  # not a valid group name


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _groups(session: LakeSession, system_identifier: str) -> list[str]:
    """The lake's groups of the same source, including those that are not in the file."""
    rows = session.execute(
        f"select t.table_name from {METADATA}.ducklake_table t join {METADATA}.ducklake_schema s using (schema_id)"
        " where s.schema_name = ? and t.table_name like 'progress_%' and t.end_snapshot is null"
        " and s.end_snapshot is null order by 1",
        (OWN_SCHEMA,),
    )
    names = [name.removeprefix("progress_") for (name,) in rows]
    positions = ((name, read_position(session, name)) for name in names)
    return [name for name, p in positions if p is not None and p.system_identifier == system_identifier]


def _tables_of(session: LakeSession, groups: list[str]) -> list[TableName]:
    tables = [TableName(OWN_SCHEMA, name) for name in OWN_TABLES] if groups else []
    for group in groups:
        tables.append(progress_table(group))
        tables += [state.target for state in read_states(session, group).values()]
    return list(dict.fromkeys(tables))


def _orphans_of(config: SyncConfig, session: LakeSession, groups: list[str], older_than: datetime) -> int:
    removed = 0
    for group in groups:
        kept = journaled_files(journals_of(Path(config.state_dir) / group).glob("*"))
        removed += remove_old_orphans(
            session,
            [state.target for state in read_states(session, group).values()],
            older_than=older_than,
            groups=[group],
            keep=kept.__contains__,
        )
    return removed
