"""
What `--help` shows besides the options: examples for each command, and where to read more.

The examples are also in docs/cli.md. `add_examples` attaches them to the commands.
"""

from __future__ import annotations

import typer
from rich.markup import escape

__all__ = ["EXAMPLES", "add_examples"]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        'aqueduck new --dsn "host=db.example dbname=shop user=aqueduck"',
        "aqueduck check",
        "aqueduck run",
    ),
    "asof": (
        "aqueduck asof --time 2026-05-01T12:00:00Z",
        "aqueduck asof --lsn 0/1A2B3C4 --json",
    ),
    "bench": ("aqueduck bench drain --json",),
    "check": ("aqueduck check", "aqueduck check --fix-sql | psql"),
    "demo": ("aqueduck demo --seconds 60",),
    "groups": ("aqueduck groups create bulk", "aqueduck groups disable bulk"),
    "init": ("aqueduck init",),
    "maintain": ("aqueduck maintain --json",),
    "new": (
        'aqueduck new --dsn "host=db.example dbname=shop user=aqueduck"',
        "aqueduck new --schema public -c shop.yaml",
    ),
    "run": ("aqueduck run -c shop.yaml", "aqueduck run --once"),
    "settings": ("aqueduck settings set flush_interval_ms 500 --group default",),
    "slots": ("aqueduck slots list",),
    "status": ("aqueduck status --watch", "aqueduck status --json"),
    "tables": (
        "aqueduck tables add public.invoices",
        "aqueduck tables add people --exclude notes --mask email=hash",
        "aqueduck tables retry public.orders",
    ),
    "tail": ("aqueduck tail --table public.orders --format pretty",),
    "uninstall": ("aqueduck uninstall", "aqueduck uninstall --yes"),
    "verify": ("aqueduck verify --table public.orders", "aqueduck verify --deep --json"),
}
"""Command lines by command; those of the whole program have no name."""

_READ_MORE = "All commands: docs/cli.md. Every key of the file: docs/configuration.md."


def add_examples(app: typer.Typer) -> None:
    """Show the examples below the help of the program and of its commands."""
    app.info.epilog = _shown(EXAMPLES[""]) + "\n\n" + _READ_MORE
    for command in app.registered_commands:
        command.epilog = _shown(EXAMPLES[str(command.name or getattr(command.callback, "__name__", ""))])
    for group in app.registered_groups:
        group.epilog = _shown(EXAMPLES[str(group.name)])


def _shown(lines: tuple[str, ...]) -> str:
    return "\n".join(["Examples:", *(f"  {escape(line)}" for line in lines)])
