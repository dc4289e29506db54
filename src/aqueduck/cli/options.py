"""Options that several commands share, how they are completed, and the consoles they print to."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from aqueduck.model.errors import ConfigError

__all__ = ["CONFIG", "Adopt", "ConfigFile", "Dsn", "Json", "Log", "out"]

CONFIG = Path("aqueduck.yaml")
"""The configuration file if no option names one."""


def _make_printable() -> None:
    """
    Make a stream safe to print to: a closed stream accepts and drops everything; a stream with a small
    character set prints `?` for characters it lacks.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


_make_printable()
out = Console(width=None if sys.stdout.isatty() else 200)

Log = Annotated[
    Literal["console", "json"],
    typer.Option(
        "--log-format", envvar="AQUEDUCK_LOG_FORMAT", help="Log lines for people, or JSON for machines."
    ),
]


def _check_default(ctx: typer.Context, path: Path | None) -> Path | None:
    """Refuse a default file that does not exist; the shell, which completes a command, needs none."""
    if path == CONFIG and not ctx.resilient_parsing and not path.exists():
        raise ConfigError(
            f"there is no {CONFIG} in this directory",
            hint="name the file with -c FILE, or write one: aqueduck new --dsn …",
        )
    return path


ConfigFile = Annotated[
    Path,
    typer.Option("--config", "-c", help="The configuration file.", metavar="FILE", callback=_check_default),
]
Dsn = Annotated[
    str,
    typer.Option("--dsn", envvar="PG_DSN", help="The database, as libpq keywords or URI.", show_envvar=True),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Adopt = Annotated[
    bool,
    typer.Option(
        "--adopt", help="Take over slots, publications and lake tables that Aqueduck did not create."
    ),
]
