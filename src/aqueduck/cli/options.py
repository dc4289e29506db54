"""Options that several commands share, and the consoles they print to."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

__all__ = ["ConfigFile", "Json", "Log", "out"]


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
ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The configuration file.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
