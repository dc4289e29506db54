"""
How log lines look: for people on a console, or as JSON for machines, always on standard error.

An event is a few lowercase words with keys and values; what the libraries log as warnings goes the same way.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog

__all__ = ["LogFormat", "configure_logs"]

LogFormat = Literal["console", "json"]


def configure_logs(how: LogFormat = "console", *, stream: TextIO | None = None) -> None:
    """For the whole process; called once, by the command."""
    out = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if how == "json":
        rendering: list[Any] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(sort_keys=False, default=str),
        ]
    else:
        rendering = [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: structlog.PrintLogger(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
