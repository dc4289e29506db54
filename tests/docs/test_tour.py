"""The tour names real functions, in an order in which they can be read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "aqueduck"
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
STOP = re.compile(r"^\d+\. `([\w/]+\.py)` · `([\w.]+)` — (.+)$", re.MULTILINE)
WALKS = {
    title: STOP.findall(text)
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TOUR, re.M | re.S)
}
FIRST = next(iter(WALKS))
STOPS = [(module, name) for stops in WALKS.values() for module, name, _ in stops]

SHARED = ("model", "config", "overview", "state_files", "faults")
"""What all stops share: plain values, the configuration, state files, and the points at which tests kill."""


def names(module: str) -> set[str]:
    """What a module defines: functions, classes and their methods."""
    found = set()
    for node in ast.parse((PACKAGE / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
    return found


def imported(module: str) -> set[str]:
    """Modules of ours that a module imports, as paths."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aqueduck"):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                path = "/".join(str(name).split(".")[1:]) + ".py"
                if (PACKAGE / path).exists():
                    found.add(path)
    return found


@pytest.mark.parametrize(("module", "name"), STOPS, ids=[f"{m}-{n}" for m, n in STOPS])
def test_every_stop_exists(module: str, name: str) -> None:
    """A reader who follows the tour finds what it names."""
    assert name in names(module)


def test_every_walk_has_its_stops() -> None:
    """A line that is not written as a stop would not be checked."""
    lines = [line for line in TOUR.splitlines() if re.match(r"\d+\. ", line)]
    assert len(lines) == len(STOPS) >= 40
    assert all(WALKS.values())


def test_the_first_walk_is_an_evening() -> None:
    """The way of one change through `sync` is about 20 modules and 5 000 lines."""
    modules = {module for module, _, _ in WALKS[FIRST]}
    lines = sum(len((PACKAGE / module).read_text(encoding="utf-8").splitlines()) for module in modules)
    assert len(modules) <= 22
    assert lines <= 5500


BORROWED = tuple(
    row.removesuffix("/")
    for row in re.findall(r"^\| `([\w/]+(?:\.py)?)` \|", TOUR.split("\n## ")[1], re.MULTILINE)
)
"""Modules and folders that the first walk names besides its stops."""


def test_the_first_walk_imports_what_the_reader_has_met() -> None:
    """Each import of a module of the walk is a stop, a shared package, or is explained in one line below the walk."""
    stops = {module for module, _, _ in WALKS[FIRST]}
    known = (*stops, *BORROWED, *(f"{package}/" for package in SHARED), "faults.py")
    unknown = {(m, other) for m in stops for other in imported(m) if not other.startswith(known)}
    assert unknown == set(), "name them in the table of docs/tour.md"


def test_the_first_walk_names_nothing_that_it_does_not_import() -> None:
    """The table below the walk does not grow stale."""
    used = {other for module, _, _ in WALKS[FIRST] for other in imported(module)}
    assert [name for name in BORROWED if not any(other.startswith(name) for other in used)] == []


AHEAD = {
    # The buffer's type is the decoder's.
    ("postgres/session/wire.py", "postgres/decode/pgoutput.py"),
    # A task names the writer of its files, which is met at the next stop.
    ("spark/query/capture_source.py", "lake/fold/fold_tasks.py"),
    # What a task made is put into the plan that a commit takes.
    ("lake/fold/fold_tasks.py", "lake/commit/commit.py"),
    ("lake/fold/fold_tasks.py", "lake/ledger/progress.py"),
}
"""Imports of a module that the reader meets only later, and why."""


def test_the_first_walk_can_be_read_in_its_order() -> None:
    """A module of the walk imports no later one, but for the few that are named here with their reason."""
    stops = list(dict.fromkeys(module for module, _, _ in WALKS[FIRST] if not module.startswith(SHARED)))
    ahead = {(m, later) for i, m in enumerate(stops) for later in imported(m) & set(stops[i + 1 :])}
    assert ahead == AHEAD
