"""
The control plane as the service sees it: what is wanted, and where to write what is.

`open_control` installs the registry in the source database and writes the configuration file into it.
Where that is not permitted the file alone says what is wanted, and nothing is written.  Acting
on what is wanted is the service's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import psycopg
import structlog

from aqueduck.config import GroupConfig, SyncConfig
from aqueduck.errors import AqueduckError, ConfigError, PrivilegeError
from aqueduck.lifecycle import ErrorClass, TableState
from aqueduck.modes import MODES
from aqueduck.postgres import registry
from aqueduck.postgres.connection import connect, is_pooled
from aqueduck.postgres.registry import GroupObservation, GroupRow, TableObservation, TableRow
from aqueduck.schema import TableName
from aqueduck.table_options import check_options

__all__ = ["Control", "Wanted", "inline_limits", "open_control"]

log = structlog.get_logger()

_GROUP_SETTINGS = sorted(
    {f.name for f in fields(registry.Settings)} & set(GroupConfig.model_fields)
)  # inline_rows is of tables, see `inline_limits`


@dataclass(frozen=True, slots=True)
class Wanted:
    """One group as somebody wants it; `rows` are its tables in the registry, by source name."""

    group: GroupConfig
    enabled: bool = True
    removed: bool = False
    id: int | None = None
    rows: dict[str, TableRow] = field(default_factory=dict)

    @property
    def refused(self) -> list[TableObservation]:
        """Tables that this version cannot sync, as the registry should show them."""
        return [
            replace(
                row.observed,
                state=TableState.ERRORED,
                error_code=ConfigError.code,
                error_class=ErrorClass.CONFIGURATION,
                error_message=str(why),
            )
            for row in self.rows.values()
            if not row.removed and (why := _why_refused(row)) is not None
        ]

    @property
    def disabled(self) -> set[str]:
        """Sources whose changes are to be parked until they are enabled again."""
        return {name for name, row in self.rows.items() if not row.removed and not row.enabled}

    @property
    def removed_tables(self) -> list[TableRow]:
        return [row for row in self.rows.values() if row.removed]


@dataclass
class Control:
    """The registry of one source database, or only the file."""

    config: SyncConfig
    conn: psycopg.Connection[Any] | None
    listens: bool = True
    """Whether the server tells us of changes; through a pooler it does not."""

    def wanted(self) -> list[Wanted]:
        if self.conn is None:
            return [Wanted(group) for group in self.config.groups]
        data_path = self.config.lake.data_path
        groups = registry.read_desired(self.conn, lake=data_path)
        mine = [g for g in groups if g.lake is not None or registry.claim_group(self.conn, g.name, data_path)]
        return [_wanted(g) for g in mine]

    def has_notice(self) -> bool:
        """Whether somebody changed what is wanted since the last call."""
        return self.conn is not None and self.listens and registry.wait_for_notice(self.conn, 0)

    def observe(self, tables: Sequence[TableObservation], groups: Sequence[GroupObservation]) -> None:
        if self.conn is not None:
            registry.write_observed(self.conn, tables)
            registry.write_group_observed(self.conn, groups)

    def heartbeat(self) -> None:
        """A small message in WAL, so that the slot has something of this database to follow."""
        if self.conn is not None:
            registry.emit_heartbeat(self.conn)
            return
        with connect(self.config.source.dsn) as conn:  # there is no registry
            registry.emit_heartbeat(conn)

    def forget(self, *, tables: Iterable[TableRow] = (), group: Wanted | None = None) -> None:
        """Delete what was removed, after it was taken down."""
        if self.conn is not None:
            groups = [group.id] if group is not None and group.id is not None else []
            registry.delete_removed(self.conn, tables=[row.id for row in tables], groups=groups)

    def close(self) -> None:
        if self.conn is not None:
            self.conn.close()
            self.conn = None


def open_control(config: SyncConfig) -> Control:
    """The registry, installed and brought up to date with the file; without the rights, the file alone."""
    conn = connect(config.source.dsn)
    try:
        registry.install(conn)
        registry.reconcile_file(conn, config)
        listens = not is_pooled(conn)
        if listens:
            registry.listen(conn)
    except PrivilegeError as exc:
        conn.close()
        log.warning("no registry in the source database, the file alone says what is wanted", reason=str(exc))
        return Control(config, None)
    except AqueduckError:
        conn.close()
        raise
    return Control(config, conn, listens)


def inline_limits(groups: Iterable[Wanted]) -> dict[TableName, int]:
    """How many rows of a batch may be inlined, by target table; where several sources fill it, the lowest counts."""
    limits: dict[TableName, int] = {}
    for row in (row for wanted in groups for row in wanted.rows.values() if not row.removed):
        rows = row.settings.inline_rows
        limits[row.target] = min(rows, limits.get(row.target, rows))
    return limits


def _why_refused(row: TableRow) -> ConfigError | None:
    """Why a table of the registry cannot be synced, if that can be told without looking at it."""
    if row.mode not in MODES:
        return ConfigError(f"mode {row.mode} is unknown here", hint="upgrade this Aqueduck")
    try:
        check_options(str(row.source), row.options, row.mode)
    except ConfigError as exc:
        return exc
    return None


def _wanted(row: GroupRow) -> Wanted:
    live = [t for t in row.tables if not t.removed and _why_refused(t) is None]
    settings = {name: getattr(row.settings, name) for name in _GROUP_SETTINGS}
    group = GroupConfig.model_validate(
        {
            "name": row.name,
            "slot_name": row.slot_name,
            "publication": row.publication,
            "capture": "poll" if row.settings.plugin == "test_decoding" else row.capture,
            **settings,
            "tables": [_table(t) for t in live],
        }
    )
    rows = {("removed:" if t.removed else "") + str(t.source): t for t in row.tables}
    return Wanted(group, row.enabled, row.removed, row.id, rows)


def _table(row: TableRow) -> dict[str, Any]:
    mode = row.table_mode
    return {
        "source": str(row.source),
        "target": str(row.target),
        "copy": row.copy,
        "mode": mode.name,
        "source_column": mode.source_column,
        "source_value": mode.source_value,
        **row.options,
    }
