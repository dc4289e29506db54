"""What the commands of the command line share: the options that several of them have, and where they print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

__all__ = ["ConfigFile", "Json", "Log", "out"]

out = Console(width=None if sys.stdout.isatty() else 200)

Log = Annotated[
    Literal["console", "json"],
    typer.Option(
        "--log-format", envvar="AQUEDUCK_LOG_FORMAT", help="Log lines for people, or JSON for machines."
    ),
]
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
