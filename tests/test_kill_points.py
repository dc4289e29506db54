"""
Hazard 8: CI kills a process at every fault point of every flow.

A test that kills carries `@pytest.mark.kills(flow)`, and its points are the values of its parameter `point`, or are in the mark.
Here the tests that CI selects are collected, and their points are compared with those in the source.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOWS = {
    "batch": {"sync", "events"}, "batch.files_written": {"sync"}, "bookmark": {"events"}, "capture": {"sync", "events", "jobs"},
    "copy": {"sync"}, "events": {"events"}, "fanout": {"fanout"}, "lake": {"sync"}, "poll": {"sync", "events", "jobs"},
    "sink": {"events"}, "switch": {"sync", "events", "jobs"}, "switch.behind": {"sync", "events"}, "write": {"jobs"},
}  # fmt: skip
"""
Which flows pass a point, by its name or the first part of it; `jobs` are queries of users with `postgres_cdc` and `ducklake`,
which have caught up before they could fall behind.
"""
TARGETS = ("test", "test-faults")
"""What `.ci/run` calls."""


def fault_points() -> set[str]:
    """The names of all points in the source."""
    calls = [
        node
        for file in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.point"
    ]
    names = [ast.literal_eval(node.args[0]) for node in calls]
    assert all(isinstance(name, str) for name in names)
    return set(names)


def selections() -> list[str]:
    """The marks by which the targets of CI select tests."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = []
    for target in TARGETS:
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe, f"the Makefile has no target {target}"
        found += re.findall(r"pytest .*-m '([^']+)'", recipe[1])
    assert len(found) >= len(TARGETS)
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    """As a plugin (`-p tests.test_kill_points`): what the collected tests kill, as pairs of flow and point."""
    found = set()
    for item in session.items:
        for mark in item.iter_markers("kills"):
            assert isinstance(item, pytest.Function)
            flow, *points = mark.args
            points = points or [item.callspec.params["point"]]
            found |= {(flow, point.partition(":")[0]) for point in points}
    print("\nkilled:", json.dumps(sorted(found)))


def killed(expression: str) -> set[tuple[str, str]]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "tests.test_kill_points"]
    files = [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.kills(" in file.read_text(encoding="utf-8")
    ]
    done = subprocess.run(
        [*command, *map(str, files), "-p", "no:cacheprovider", "-m", expression], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )  # fmt: skip
    found = re.search(r"^killed: (.+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return {(flow, point) for flow, point in json.loads(found[1])}


def test_ci_kills_at_every_fault_point() -> None:
    """Each durable step has a test that kills the process there; a step of several flows has one for each flow."""
    assert f"make {' '.join(TARGETS)}\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    passed = {
        (flow, point)
        for point in fault_points()
        for flow in FLOWS.get(point) or FLOWS[point.partition(".")[0]]
    }
    pairs = killed(" or ".join(f"({selection})" for selection in selections()))
    assert sorted(passed - pairs) == [], "no test of CI kills there"
    gone = {(flow, point) for flow, point in pairs - passed if not point.startswith("test.")}
    assert gone == set(), "these points are gone, or passed by other flows"
