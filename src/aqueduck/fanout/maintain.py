"""
Maintenance of the lakes that a fan-out writes, by the service between two cycles or by `aqueduck maintain`.

A lock file beside the instance's state shows whether the service is running. If it is, the service maintains
its destinations, a few at a time, in the lane that writes them, so that no lake is written while it is
maintained.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.lake_place import LakePlace, resolve
from aqueduck.config.sync import MaintenanceConfig
from aqueduck.lake.destinations.destination import STATE
from aqueduck.lake.session.engine import is_remote
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.upkeep.foreign_files import refuse_foreign_files
from aqueduck.lake.upkeep.lake_readers import destinations_of
from aqueduck.lake.upkeep.maintenance import LakeWork, Progress, maintain
from aqueduck.lake.upkeep.orphans import remove_old_orphans
from aqueduck.model.errors import AqueduckError, ServiceLockedError
from aqueduck.model.schema import TableName
from aqueduck.model.upkeep import MaintenanceReport
from aqueduck.overview.values import to_plain
from aqueduck.state_files.destinations import state_path
from aqueduck.state_files.private_files import private_directory

__all__ = [
    "DestinationUpkeep",
    "maintain_destination",
    "maintain_fanout",
    "only_instance",
    "shares_directory",
]

log = structlog.get_logger()

Target = tuple[str, LakePlace, TableName]
"""A destination: its id, its lake and its table there."""


class _Session:
    """The session with one destination's lake, reopened when needed."""

    def __init__(self, pool: LakePool, place: LakePlace) -> None:
        self._pool, self._place = pool, place
        self._stack = contextlib.ExitStack()
        self.lake = self._open()

    def _open(self) -> PooledLake:
        return self._stack.enter_context(self._pool.use(self._place))

    def renew(self) -> PooledLake:
        self._stack.close()
        self._pool.forget(self._place)
        self.lake = self._open()
        return self.lake

    def close(self) -> None:
        self._stack.close()
        self._pool.forget(self._place)


def maintain_destination(
    pool: LakePool, target: Target, config: MaintenanceConfig, places: Collection[LakePlace]
) -> MaintenanceReport:
    """
    One maintenance run on one destination's lake; no other process may write it meanwhile.

    `places` are the source's and all destinations' lakes: if lakes share a directory, a file that one catalog
    does not list may belong to another lake, so orphans are not removed.
    """
    name, place, table = target
    try:
        session = _Session(pool, place)
    except AqueduckError as exc:
        log.warning("maintenance stopped", lake=name, error=str(exc))
        return MaintenanceReport(lake=name, error=str(exc), complete=False)
    tables = [table, STATE]

    @contextlib.contextmanager
    def exclusive() -> Iterator[PooledLake]:
        refuse_foreign_files(session.lake, place.data_path)  # before every step: others may write the catalog
        yield session.lake

    def orphans(lake: Any, older_than: Any) -> int:
        if is_remote(place.data_path) or shares_directory(place, places):
            return 0  # in an object store, only DuckLake has the credentials, and it asks for no names
        return remove_old_orphans(lake, tables, older_than=older_than)

    work = LakeWork(
        name, "fanout", exclusive, lambda: True, session.renew, lambda: tables,
        remove_orphans=orphans, progress=Progress(),
    )  # fmt: skip
    try:
        return maintain(work, config)
    finally:
        session.close()


def shares_directory(place: LakePlace, places: Iterable[LakePlace]) -> bool:
    """Whether another lake has its files in this one's directory, above or below it."""
    mine = Path(place.data_path).absolute().resolve()
    for other in places:
        if (other.catalog, other.metadata_schema) == (place.catalog, place.metadata_schema):
            continue
        theirs = Path(other.data_path).absolute().resolve()
        if not is_remote(other.data_path) and (mine.is_relative_to(theirs) or theirs.is_relative_to(mine)):
            return True
    return False


class DestinationUpkeep:
    """Maintains each destination once per interval, as many at a time as fit between two cycles."""

    def __init__(self, config: MaintenanceConfig) -> None:
        self._config = config
        self._done_at: dict[str, float] = {}
        self._began = time.monotonic()

    def some(
        self, targets: Iterable[Target], places: Collection[LakePlace], *, seconds: float = 2.0
    ) -> list[MaintenanceReport]:
        """
        Maintain the destinations that waited longest, for about this long; `places` as for
        `maintain_destination`.
        """
        if not self._config.enabled:
            return []
        began = time.monotonic()
        due = sorted(
            (
                t
                for t in targets
                if began - self._done_at.get(t[0], self._began) >= self._config.interval_seconds
            ),
            key=lambda t: self._done_at.get(t[0], self._began),
        )
        reports: list[MaintenanceReport] = []
        if due:
            pool = LakePool(max_open=1, threads=1)
            try:
                for target in due:
                    reports.append(maintain_destination(pool, target, self._config, places))
                    self._done_at[target[0]] = time.monotonic()
                    if time.monotonic() - began > seconds:
                        break
            finally:
                pool.close()
        return reports


def maintain_fanout(config: FanoutConfig, env: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """`aqueduck maintain` on a file of this flow: every destination in turn."""
    with only_instance(config):
        pool = LakePool(max_open=1, threads=2)
        try:
            targets = list(_targets(config, env))
            places = [resolve(config.source, {}, env), *(place for _, place, _ in targets)]
            return [
                to_plain(maintain_destination(pool, target, config.maintenance, places)) for target in targets
            ]
        finally:
            pool.close()


def _targets(config: FanoutConfig, env: Mapping[str, str]) -> Iterator[Target]:
    for destination in destinations_of(config, env):
        place = config.place_of(destination, env)
        yield destination.id, place, config.target_of(destination)


@contextlib.contextmanager
def only_instance(config: FanoutConfig) -> Iterator[None]:
    """Hold the instance's lock on this machine; raises if another process holds it."""
    path = state_path(config).with_suffix(".lock")
    private_directory(path.parent)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServiceLockedError(
                f"another process runs the fan-out {config.instance.id}, and maintains its destinations itself",
                hint="stop it, or use another instance.id here",
            ) from None
        yield
