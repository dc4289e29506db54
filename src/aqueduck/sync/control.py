"""
The control plane from the service's side: read the desired state, write the observed state.

`open_control` installs the registry in the source database and writes the configuration file into it. If
there is none and none may be created, the file alone is the desired state (`FileControl`). A registry that
cannot be read gives no answer: `wanted` raises, and neither the file nor a missing row is used in its place.
A table leaves a group only with a `Parting`, which requires data that was actually read. The service applies
the desired state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import psycopg
import structlog
from pydantic import ValidationError

from aqueduck.config.sync import GroupConfig, SyncConfig
from aqueduck.config.table_options import check_options
from aqueduck.model.errors import AqueduckError, ConfigError, PrivilegeError, RegistryIncompleteError
from aqueduck.model.lifecycle import ErrorClass, SyncState
from aqueduck.model.modes import MODES, TableMode
from aqueduck.model.schema import TableName
from aqueduck.postgres.registry import registry
from aqueduck.postgres.registry.registry import GroupObservation, GroupRow, TableObservation, TableRow
from aqueduck.postgres.session.connection import connect, is_pooled

__all__ = [
    "Control",
    "FileControl",
    "Parting",
    "RegistryControl",
    "Wanted",
    "inline_limits",
    "open_control",
    "reopen_registry",
    "wanted_groups",
]

log = structlog.get_logger()

_GROUP_SETTINGS = sorted(
    {f.name for f in fields(registry.Settings)} & set(GroupConfig.model_fields)
)  # inline_rows is per table, see `inline_limits`


@dataclass(frozen=True, slots=True)
class Parting:
    """Proof that a table is to leave its group."""

    why: str
    drop_target: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    The desired state of one group, read completely: from the registry, or from the file if there is no
    registry (`id` is None).

    `rows` are its tables in the registry, by source name; removed tables have separate names.
    """

    group: GroupConfig
    enabled: bool = True
    removed: bool = False
    id: int | None = None
    rows: dict[str, TableRow] = field(default_factory=dict)
    elsewhere: tuple[TableRow, ...] = ()
    """The rows of the lake's other groups."""
    partial: bool = False
    """
    Whether the desired state may contain more: the registry exists, but is not readable for the role, or
    malformed here.
    """
    problem: ConfigError | None = None
    """Why the group cannot run: a row of the registry is malformed."""

    def parting(self, oid: int, source: str, target: TableName, mode: TableMode) -> Parting | None:
        """
        Why a table that the group has, and the registry does not list, is to leave it; None if it was not
        removed.
        """
        if self.partial:
            return None
        if self.id is None:
            return Parting("it is not in the file, and there is no registry")
        if self.removed:
            return Parting("its group was removed")
        for row in (*self.rows.values(), *self.elsewhere):
            if row.removed and row.is_of(oid, source, target, mode):
                return Parting("it was removed", row.drop_target)
        if any(not row.removed and row.is_about(oid, source) for row in self.elsewhere):
            return Parting("it was moved to another group")
        if any(not row.removed and row.is_about(oid, source) for row in self.rows.values()):
            return Parting("its configuration was changed")
        return None

    def as_observed(self, seen: Mapping[int, TableObservation]) -> Wanted:
        """The same, updated with the tables' observed state since it was read, by row id."""
        rows = {n: replace(row, observed=seen.get(row.id, row.observed)) for n, row in self.rows.items()}
        return replace(self, rows=rows)

    def wants(self, removed: TableRow) -> bool:
        """Whether a removed table was added again unchanged."""
        same = (removed.source, removed.target, removed.table_mode)
        return any(not r.removed and (r.source, r.target, r.table_mode) == same for r in self.rows.values())

    @property
    def unusable(self) -> dict[str, ConfigError]:
        """Why this version cannot sync a table, by source name, as far as its row alone shows."""
        live = ((name, row) for name, row in self.rows.items() if not row.removed)
        return {name: why for name, row in live if (why := _why_refused(row)) is not None}

    @property
    def refused(self) -> list[TableObservation]:
        """The same tables, with the errors to show in the registry."""
        return [
            replace(
                self.rows[name].observed,
                state=SyncState.ERRORED,
                error_code=ConfigError.code,
                error_class=ErrorClass.CONFIGURATION,
                error_message=str(why),
            )
            for name, why in self.unusable.items()
        ]

    @property
    def disabled(self) -> set[str]:
        """Sources whose changes are parked until they are enabled."""
        return {name for name, row in self.rows.items() if not row.removed and not row.enabled}

    @property
    def removed_tables(self) -> list[TableRow]:
        return [row for row in self.rows.values() if row.removed]


class Control(Protocol):
    """The desired state of one source database, and the place for the observed state."""

    listens: bool
    """Whether the server notifies us of changes; through a pooler it cannot."""

    def wanted(self) -> list[Wanted]:
        """The complete desired state; raises if it cannot be read now."""

    def has_notice(self) -> bool:
        """Whether the desired state changed since the last call."""

    def observe(self, tables: Sequence[TableObservation], groups: Sequence[GroupObservation]) -> None:
        """Write the observed state."""

    def heartbeat(self) -> None:
        """Write a small message to WAL, so that the slot sees WAL of this database."""

    def forget(self, *, tables: Iterable[TableRow] = (), group: Wanted | None = None) -> None:
        """Delete removed rows, after they were taken down."""

    def close(self) -> None: ...


@dataclass
class FileControl:
    """No registry that the role may use or create: the file alone is the desired state."""

    config: SyncConfig
    partial: bool = False
    """Whether a registry exists all the same, which may contain more."""
    listens: bool = False

    def wanted(self) -> list[Wanted]:
        return [Wanted(group, partial=self.partial) for group in self.config.groups]

    def has_notice(self) -> bool:
        return False

    def observe(self, tables: Sequence[TableObservation], groups: Sequence[GroupObservation]) -> None:
        pass

    def heartbeat(self) -> None:
        with connect(self.config.source.dsn) as conn:
            registry.emit_heartbeat(conn)

    def forget(self, *, tables: Iterable[TableRow] = (), group: Wanted | None = None) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class RegistryControl:
    """
    The registry on one connection; once the connection is lost, every call raises until the registry is
    reopened.
    """

    config: SyncConfig
    conn: psycopg.Connection[Any]
    listens: bool = True

    def wanted(self) -> list[Wanted]:
        data_path = self.config.lake.data_path
        groups = registry.read_desired(self.conn, lake=data_path)
        mine = [g for g in groups if g.lake is not None or registry.claim_group(self.conn, g.name, data_path)]
        return [_wanted(g, [t for other in mine if other is not g for t in other.tables]) for g in mine]

    def has_notice(self) -> bool:
        return self.listens and registry.wait_for_notice(self.conn, 0)

    def observe(self, tables: Sequence[TableObservation], groups: Sequence[GroupObservation]) -> None:
        registry.write_observed(self.conn, tables)
        registry.write_group_observed(self.conn, groups)

    def heartbeat(self) -> None:
        registry.emit_heartbeat(self.conn)

    def forget(self, *, tables: Iterable[TableRow] = (), group: Wanted | None = None) -> None:
        groups = [group.id] if group is not None and group.id is not None else []
        rows = [row.id for row in tables]
        if rows or groups:
            registry.delete_removed(self.conn, tables=rows, groups=groups)

    def close(self) -> None:
        self.conn.close()


def open_control(config: SyncConfig) -> Control:
    """The registry, installed and updated with the file; without the privileges, the file alone."""
    conn = connect(config.source.dsn)
    try:
        return _open_registry(config, conn)
    except PrivilegeError as exc:
        with contextlib.closing(conn):
            hidden = registry.exists(conn)
        log.warning("no registry in the source database, only the file is used", reason=str(exc))
        return FileControl(config, partial=hidden)
    except BaseException:
        conn.close()
        raise


def reopen_registry(config: SyncConfig) -> Control:
    """Reopen the registry; a missing one is not re-created, because it would lack tables and groups."""
    conn = connect(config.source.dsn)
    try:
        if not registry.exists(conn):
            raise RegistryIncompleteError(
                "the registry, the schema aqueduck, is gone; everything running continues with its last configuration",
                hint="restore it, or restart the service, which creates a new one from the file, and add"
                " what was added by SQL again",
            )
        return _open_registry(config, conn)
    except BaseException:
        conn.close()
        raise


def _open_registry(config: SyncConfig, conn: psycopg.Connection[Any]) -> Control:
    registry.install(conn)
    registry.reconcile_file(conn, config)
    listens = not is_pooled(conn)
    if listens:
        registry.listen(conn)
    return RegistryControl(config, conn, listens)


def wanted_groups(conn: psycopg.Connection[Any], config: SyncConfig) -> list[Wanted]:
    """
    What a start would find: the file's groups, plus the tables and groups that SQL made; for read-only callers.

    What only an earlier version of the file made is left out, because a start removes it.
    """
    try:
        if not registry.exists(conn):
            return [Wanted(group) for group in config.groups]
        rows = registry.read_desired(conn, lake=config.lake.data_path)
    except AqueduckError:  # the role may not read it, or not trust its owner
        return [Wanted(group) for group in config.groups]
    live = (row for row in rows if row.lake is not None and row.enabled and not row.removed)
    by_sql = {
        row.name: _wanted(_without_the_file(row), []) for row in live if not _left_the_file(row, config)
    }
    groups = []
    for group in config.groups:
        known = {table.source_table for table in group.tables}
        found = by_sql.pop(group.name, Wanted(group))
        extra = [t for t in found.group.tables if t.source_table not in known]
        tables = (*group.tables, *extra) if found.id is not None else group.tables
        groups.append(replace(found, group=group.model_copy(update={"tables": tables})))
    return [*groups, *by_sql.values()]


def _without_the_file(row: GroupRow) -> GroupRow:
    return replace(row, tables=tuple(table for table in row.tables if not table.created_by_file))


def _left_the_file(row: GroupRow, config: SyncConfig) -> bool:
    """Whether a start removes the group."""
    by_sql = row.problem is not None or _without_the_file(row).tables
    return row.created_by_file and not by_sql and row.name not in {group.name for group in config.groups}


def inline_limits(groups: Iterable[Wanted]) -> dict[TableName, int]:
    """
    How many rows of a batch may be inlined, by target table; if several sources fill it, the lowest limit
    applies.
    """
    limits: dict[TableName, int] = {}
    for row in (row for wanted in groups for row in wanted.rows.values() if not row.removed):
        rows = row.settings.inline_rows
        limits[row.target] = min(rows, limits.get(row.target, rows))
    return limits


def _why_refused(row: TableRow) -> ConfigError | None:
    """Why a table of the registry cannot be synced, as far as its row alone shows."""
    if row.mode not in MODES:
        return ConfigError(f"mode {row.mode} is unknown here", hint="upgrade this Aqueduck")
    try:
        check_options(str(row.source), row.options, row.mode)
    except ConfigError as exc:
        return exc
    return None


def _wanted(row: GroupRow, elsewhere: Sequence[TableRow]) -> Wanted:
    """A group with unreadable rows: it has no tables, only its error."""
    if row.problem is None:
        try:
            return _readable(row, elsewhere)
        except ValidationError as exc:
            row = replace(row, problem=_what_is_wrong(exc))
    group = GroupConfig(name=row.name, slot_name=row.slot_name, publication=row.publication)
    where = f"the registry's rows of the group {row.name} cannot be read: {row.problem}"
    problem = ConfigError(
        where, hint=f"correct them in aqueduck.sync_groups and aqueduck.table_mappings (group_id = {row.id})"
    )
    return Wanted(
        group, row.enabled, row.removed, row.id, {}, tuple(elsewhere), partial=True, problem=problem
    )


def _what_is_wrong(exc: ValidationError) -> str:
    """The first key that is invalid, without its value."""
    first = exc.errors(include_input=False, include_url=False, include_context=False)[0]
    return ".".join(map(str, first["loc"])) or "a value"


def _readable(row: GroupRow, elsewhere: Sequence[TableRow]) -> Wanted:
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
    rows = {(f"removed {t.id}:" if t.removed else "") + str(t.source): t for t in row.tables}
    return Wanted(group, row.enabled, row.removed, row.id, rows, tuple(elsewhere))


def _table(row: TableRow) -> dict[str, Any]:
    mode = row.table_mode
    return {
        "source": str(row.source),
        "target": str(row.target),
        "copy": row.copy,
        "adopt": row.adopt,
        "mode": mode.name,
        "source_column": mode.source_column,
        "source_value": mode.source_value,
        **row.options,
    }
