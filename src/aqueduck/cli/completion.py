"""
Shell completion of the names of tables, groups and settings, which are read from the source.

The shell waits for the answer, so an unreachable server soon means no completion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from aqueduck.cli.options import CONFIG
from aqueduck.model.errors import AqueduckError

if TYPE_CHECKING:
    import psycopg

__all__ = ["complete_group", "complete_new_table", "complete_setting", "complete_table"]

CONNECT_SECONDS_MAX = 2

Question = Callable[["psycopg.Connection[Any]"], set[str]]


def complete_table(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tables that are replicated."""
    return _beginning(incomplete, _ask(ctx, _column("tables", "source")))


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, _ask(ctx, _column("groups", "name")))


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, _ask(ctx, _column("list_settings", "name")))


def complete_new_table(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tables of the source that could be added."""
    from aqueduck.postgres.catalog.user_tables import user_tables

    every = _ask(ctx, lambda conn: {str(one.table) for one in user_tables(conn)})
    return _beginning(incomplete, every - _ask(ctx, _column("tables", "source")))


def _beginning(incomplete: str, names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _column(function: str, column: str) -> Question:
    """Ask for a column of what a function of the registry returns."""
    from aqueduck.postgres.registry.registry import rows_of

    return lambda conn: {row[column] for row in rows_of(conn, function)}


def _ask(ctx: typer.Context, question: Question) -> set[str]:
    """Ask the source of the configuration file; no answer if anything is wrong."""
    from aqueduck.config.sync import load_config
    from aqueduck.postgres.session.connection import connect

    with contextlib.suppress(AqueduckError):
        dsn = load_config(ctx.params.get("config") or CONFIG).source.dsn
        with connect(dsn, connect_timeout=CONNECT_SECONDS_MAX) as conn:
            return question(conn)
    return set()
