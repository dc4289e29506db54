"""
Control of a running service by the HTTP API: the registry's functions under Python names.

SQL and the command line use the same functions (docs/sql-api.md), so errors are the same everywhere. Each
call opens its own connection: calls are rare, and a lost connection affects nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aqueduck.postgres.registry.registry import call, rows_of
from aqueduck.postgres.session.connection import connect

__all__ = ["RegistryActions"]


@dataclass(frozen=True, slots=True)
class RegistryActions:
    """`overview.values.Actions` on the registry of one source database."""

    dsn: str = field(repr=False)

    def settings(self) -> Sequence[dict[str, Any]]:
        with connect(self.dsn) as conn:
            return rows_of(conn, "list_settings")

    def set_setting(
        self, name: str, value: str | None, *, group_name: str | None = None, source: str | None = None
    ) -> None:
        self._call("set_setting", name=name, value=value, group_name=group_name, source=source)

    def create_group(
        self,
        name: str,
        *,
        publication: str | None = None,
        slot_name: str | None = None,
        capture: str | None = None,
    ) -> int:
        made = self._call(
            "create_group", name=name, publication=publication, slot_name=slot_name, capture=capture
        )
        return int(made)

    def drop_group(self, name: str, *, with_tables: bool = False) -> None:
        self._call("drop_group", name=name, with_tables=with_tables)

    def enable_group(self, name: str) -> None:
        self._call("enable_group", name=name)

    def disable_group(self, name: str) -> None:
        self._call("disable_group", name=name)

    def add_table(
        self,
        source: str,
        *,
        target: str | None = None,
        group_name: str = "default",
        mode: str = "upsert",
        copy: bool = True,
        source_column: str | None = None,
        source_value: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> int:
        made = self._call(
            "add_table",
            source=source,
            target=target,
            group_name=group_name,
            mode=mode,
            copy=copy,
            source_column=source_column,
            source_value=source_value,
            options=json.dumps(dict(options or {})),
        )
        return int(made)

    def remove_table(self, source: str, *, drop_target: bool = False, group_name: str | None = None) -> None:
        self._call("remove_table", source=source, drop_target=drop_target, group_name=group_name)

    def move_table(self, source: str, group_name: str, *, from_group: str | None = None) -> None:
        self._call("move_table", source=source, group_name=group_name, from_group=from_group)

    def resync_table(self, source: str, *, group_name: str | None = None) -> None:
        self._call("resync_table", source=source, group_name=group_name)

    def retry_table(self, source: str, *, group_name: str | None = None) -> None:
        self._call("retry_table", source=source, group_name=group_name)

    def _call(self, function: str, **arguments: Any) -> Any:
        with connect(self.dsn) as conn:
            return call(conn, function, **arguments)
