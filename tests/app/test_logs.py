"""Log lines: for people or for machines, on standard error."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from aqueduck.app.logs import configure_logs


@pytest.fixture(autouse=True)
def _leave_logs_alone() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def test_json_lines_have_time_level_event_and_keys() -> None:
    """Every line is one JSON object, those of libraries too."""
    stream = io.StringIO()
    configure_logs("json", stream=stream)
    structlog.get_logger().info("group started", group="shop", tables=3)
    logging.getLogger("py4j").warning("gateway %s", "closed")
    try:
        raise ValueError("secret")
    except ValueError:
        structlog.get_logger().exception("failed")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["group"], first["tables"]) == (
        "group started",
        "info",
        "shop",
        3,
    )
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"], second["logger"]) == ("gateway closed", "warning", "py4j")
    assert third["exception"][0]["exc_type"] == "ValueError"


def test_console_lines_are_for_people() -> None:
    """No colours where nobody looks at a terminal."""
    stream = io.StringIO()
    configure_logs("console", stream=stream)
    structlog.get_logger().info("group started", group="shop")
    structlog.get_logger().debug("not shown")
    line = stream.getvalue()
    assert "group started" in line
    assert "group=shop" in line
    assert "\x1b" not in line
    assert line.count("\n") == 1
