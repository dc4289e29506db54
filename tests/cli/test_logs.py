"""Log lines: for people or for machines, on standard error."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest
import structlog

from aqueduck.cli.logs import LogFormat, configure_logs


@pytest.fixture(autouse=True)
def _leave_logs_alone() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hook = list(root.handlers), root.level, threading.excepthook
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level
    threading.excepthook = hook


def test_json_lines_have_time_level_event_and_keys() -> None:
    """Every line is one JSON object, those of libraries too."""
    stream = io.StringIO()
    configure_logs("json", stream=stream)
    structlog.get_logger().info("group started", group="shop", tables=3)
    logging.getLogger("py4j").warning("gateway %s", "closed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["group"], first["tables"]) == (
        "group started",
        "info",
        "shop",
        3,
    )
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"], second["logger"]) == ("gateway closed", "warning", "py4j")


def test_console_lines_are_for_people() -> None:
    """No colours if the output is no terminal."""
    stream = io.StringIO()
    configure_logs("console", stream=stream)
    structlog.get_logger().info("group started", group="shop")
    structlog.get_logger().debug("not shown")
    line = stream.getvalue()
    assert "group started" in line
    assert "group=shop" in line
    assert "\x1b" not in line
    assert line.count("\n") == 1


def connects(dsn: str) -> None:
    raise ValueError(f"cannot use {dsn}")


@pytest.mark.parametrize("how", ["console", "json"])
def test_an_exception_is_its_kind_and_place(how: LogFormat) -> None:
    """Neither its message nor the local variables of its frames are shown, whether it is logged or not."""
    stream = io.StringIO()
    configure_logs(how, stream=stream)
    try:
        connects("password=hunter2")
    except ValueError:
        structlog.get_logger().exception("failed")
        logging.getLogger("asyncio").error("failed", exc_info=True)
    thread = threading.Thread(target=connects, args=["password=hunter2"], name="reader")
    thread.start()
    thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert all("ValueError in connects (line " in line for line in lines)
    assert "hunter2" not in stream.getvalue()


def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR counts on a terminal too."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    configure_logs("console", stream=stream)
    structlog.get_logger().info("group started")
    assert "\x1b" not in stream.getvalue()
