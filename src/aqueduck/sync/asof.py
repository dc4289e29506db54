"""
`aqueduck asof`: from a position or a time of the source to a lake snapshot. `lake.ledger.lineage` does the
search.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

from aqueduck.config.sync import SyncConfig
from aqueduck.lake.ledger.lineage import SourceState, source_state_at
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.errors import ConfigError, NoSnapshotError
from aqueduck.model.schema import parse_lsn

__all__ = ["find_snapshot"]


def find_snapshot(config: SyncConfig, *, lsn: str | None, time: str | None, group: str | None) -> SourceState:
    """Find the lake snapshot for the command's options; mistakes raise `ConfigError`."""
    if (lsn is None) == (time is None):
        raise ConfigError("give either --lsn or --time")
    names = [g.name for g in config.groups]
    if group is None and len(names) > 1:
        raise ConfigError("the file has several groups", hint=f"add --group, one of: {', '.join(names)}")
    position, moment = _position(lsn), None if time is None else _time(time)
    with contextlib.closing(open_lake(config.lake, read_only=True)) as lake:
        try:
            return source_state_at(lake, group or names[0], position=position, time=moment)
        except NoSnapshotError as exc:
            if group is None or group in names:
                raise
            raise NoSnapshotError(exc.message, hint=f"groups of the file: {', '.join(names)}") from exc


def _position(text: str | None) -> int | None:
    try:
        return None if text is None else parse_lsn(text)
    except ValueError:
        raise ConfigError(f"--lsn: {text} is not a position", hint="such as 0/1A2B3C4") from None


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--time: {text} is not a time", hint="such as 2026-05-01T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
