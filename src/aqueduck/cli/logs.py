"""
The format of log lines: for people on a console, or as JSON for machines; always on standard error.

An event is a few lowercase words with keys and values. Warnings that libraries log have the same format. Of
an exception, only the type and the place are logged: its message and its frames may hold cell values and
connection strings.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from aqueduck.model.errors import own_error

__all__ = ["LogFormat", "configure_logs"]

LogFormat = Literal["console", "json"]


def configure_logs(how: LogFormat = "console", *, stream: TextIO | None = None) -> None:
    """Configure logging for the whole process; the command calls this once."""
    out = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _exception_in_a_line,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if how == "json":
        rendering: list[Any] = [structlog.processors.JSONRenderer(sort_keys=False, default=str)]
    else:
        colors = out.isatty() and not os.environ.get("NO_COLOR")
        rendering = [structlog.dev.ConsoleRenderer(colors=colors)]
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
    threading.excepthook = _thread_ended


def _exception_in_a_line(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    raised = event.pop("exc_info", None)
    exc = raised[1] if isinstance(raised, tuple) else raised if raised is not True else sys.exception()
    if isinstance(exc, BaseException):
        event.setdefault("error", str(own_error(exc)))
    return event


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and ended.exc_type is not SystemExit:
        thread = ended.thread.name if ended.thread is not None else None
        structlog.get_logger().error("thread ended", thread=thread, error=str(own_error(ended.exc_value)))
