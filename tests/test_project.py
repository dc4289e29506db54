"""The project keeps its own rules: layers, documents, targets, and a lock file that works anywhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqueduck.config.sync import setting_names
from aqueduck.model.errors import error_codes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "aqueduck"
MODULES = sorted(PACKAGE.rglob("*.py"))

DOOR = "aqueduck/__init__.py"
"""Where users come in: it hands over to `spark` when it is called, and loads nothing before."""

_PURE = {"model", "faults"}
_SETTINGS = _PURE | {"envelopes", "config", "state_files", "overview"}
_WORK = _SETTINGS | {"postgres", "lake", "sinks", "spark"}
_FLOW = _WORK | {"service", "web"}

# Which packages a package may import; the three flows never import each other.
LAYERS = {
    DOOR: {"spark"},
    "cli": _FLOW | {"sync", "fanout", "events", "lab", "cli"},
    "lab": _FLOW | {"sync", "fanout", "events", "lab"},
    "sync": _FLOW | {"sync"},
    "fanout": _FLOW | {"fanout"},
    "events": _FLOW | {"events"},
    "service": _WORK | {"service"},
    "web": _PURE | {"config", "overview", "web"},
    "spark": _WORK,
    "sinks": _SETTINGS | {"postgres", "lake", "sinks"},
    "lake": _SETTINGS | {"lake"},
    "postgres": _SETTINGS | {"postgres"},
    "overview": _PURE | {"config", "state_files", "overview"},
    "state_files": _PURE | {"config", "state_files"},
    "config": _PURE | {"envelopes", "config"},
    "envelopes": _PURE | {"envelopes"},
    "model": _PURE,
    "faults": _PURE,
}

# What opens files, sockets, processes or sessions, or waits for them.
INPUT_OUTPUT = {
    "asyncio",
    "duckdb",
    "fastapi",
    "http",
    "httpx",
    "multiprocessing",
    "psycopg",
    "py4j",
    "pyspark",
    "requests",
    "select",
    "shutil",
    "socket",
    "sqlite3",
    "ssl",
    "starlette",
    "subprocess",
    "tempfile",
    "threading",
    "urllib",
    "uvicorn",
}

TARGETS = {
    "help",
    "setup",
    "demo",
    "test",
    "test-faults",
    "test-random",
    "test-long",
    "chain",
    "coverage",
    "lint",
    "fmt",
    "bench-drain",
    "bench-mixed",
    "soak",
    "docs",
    "reference",
    "screenshots",
    "dist",
    "release",
    "clean",
}


def package_of(module: Path) -> str:
    parts = module.relative_to(PACKAGE).parts
    if parts == ("__init__.py",):
        return DOOR
    return parts[0].removesuffix(".py")


def imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def headings(document: str) -> list[str]:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return re.findall(r"^#+ `([^`]+)`$", text, re.MULTILINE)


def documented_settings() -> set[str]:
    """Headings of docs/configuration.md, and the first cells of the tables below them."""
    found: set[str] = set()
    section = ""
    for line in (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"#+ `([^`]+)`", line):
            section = heading[1]
            found.add(section)
        elif row := re.match(r"\| `([^`]+)` \|", line):
            found.add(f"{section}.{row[1]}")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_inward(module: Path) -> None:
    """A layer knows only the layers below it, so each can be read and tested without the others."""
    package = package_of(module)
    assert package in LAYERS, f"{package} has no place in the layers yet"
    for name in imports(module):
        if name.startswith("aqueduck.") and name != "aqueduck.__version__":
            assert name.split(".")[1] in LAYERS[package], f"{module.relative_to(ROOT)} must not import {name}"


# Calls by which a module touches files, processes or the clock of others, whatever it imports.
TOUCHES = {
    "open",
    "fsync",
    "getenv",
    "iterdir",
    "kill",
    "mkdir",
    "read_bytes",
    "read_text",
    "rename",
    "sleep",
    "stat",
    "system",
    "unlink",
    "write_bytes",
    "write_text",
}


def calls(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                yield called.attr
            elif isinstance(called, ast.Name):
                yield called.id


PURE = ("model/", "envelopes/", "postgres/decode/")
SPOOLS = "postgres/decode/text_rows.py"
"""Holds a step of the server in a temporary file, because a step may be larger than memory."""


@pytest.mark.parametrize(
    "module",
    [
        name
        for path in MODULES
        if (name := str(path.relative_to(PACKAGE))).startswith(PURE) and name != SPOOLS
    ],
)
def test_pure_modules_touch_nothing(module: str) -> None:
    """`model`, `envelopes` and the decoder open no file, socket, process or session: neither their imports nor their calls do."""
    path = PACKAGE / module
    assert not {name.split(".")[0] for name in imports(path)} & INPUT_OUTPUT
    assert not set(calls(path)) & TOUCHES


def closure(start: str) -> set[str]:
    """The modules that are loaded when one is imported, without those that functions import later."""
    code = f"import sys, {start}; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return set(found.stdout.split())


def test_a_fanout_loads_nothing_of_other_flows() -> None:
    """A running fan-out has neither the other flows nor what reads PostgreSQL's stream and tables."""
    loaded = closure("aqueduck.fanout.run")
    strange = (
        "aqueduck.sync",
        "aqueduck.events",
        "aqueduck.postgres.decode",
        "aqueduck.postgres.capture",
        "aqueduck.postgres.copy",
    )
    assert "aqueduck.fanout.service" in loaded
    assert not [name for name in loaded if name.startswith(strange)]


@pytest.mark.parametrize(("flow", "module"), [("sync", "service"), ("events", "run")])
def test_a_flow_loads_no_other(flow: str, module: str) -> None:
    """Each flow can be read and changed without the two others."""
    loaded = closure(f"aqueduck.{flow}.{module}")
    others = tuple(f"aqueduck.{other}" for other in {"sync", "fanout", "events"} - {flow})
    assert f"aqueduck.{flow}.service" in loaded
    assert not [name for name in loaded if name.startswith(others)]
    assert not loaded & {"fastapi", "httpx"}, "only the HTTP server and the webhook load them"


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in MODULES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_folder_needs_no_search(folder: Path) -> None:
    """A reader takes in about fifteen modules at a glance; a larger folder needs subfolders."""
    assert len(list(folder.glob("[!_]*.py"))) <= 15


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_lives_in_it(module: Path) -> None:
    """A module opens with a docstring; only the marker of a package may be empty."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree)


def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Our classes, by name: their bases, and the methods that they define."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                named = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                bases, methods = found.setdefault(node.name, (set(), set()))
                bases.update(base.id for base in named if isinstance(base, ast.Name))
                methods.update(
                    n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                )
    return found


def overridden(name: str, known: dict[str, tuple[set[str], set[str]]]) -> set[str]:
    """Private methods of a class that a class above it has, too."""
    bases, methods = known[name]
    above: set[str] = set()
    waiting = list(bases & known.keys())
    while waiting:
        base = waiting.pop()
        above |= known[base][1]
        waiting += known[base][0] & known.keys()
    return {m for m in methods & above if m.startswith("_") and not m.endswith("__")}


def test_no_class_overrides_a_private_method() -> None:
    """What varies is passed in, as a function or an object: a reader of the base class sees where it calls something else."""
    known = classes()
    assert {"Stage", "CdcStage"} <= known.keys(), "the classes are found"
    assert {name: found for name in known if (found := overridden(name, known))} == {}


def test_every_error_code_has_its_heading() -> None:
    """Every error code is documented: what it means and what to do."""
    assert sorted(headings("errors.md")) == sorted(error_codes())


def test_every_error_is_drawn_in_the_tree() -> None:
    """The docstring of `model.errors` shows each class with its code."""
    docstring = (
        ast.get_docstring(
            ast.parse((PACKAGE / "model" / "errors" / "__init__.py").read_text(encoding="utf-8"))
        )
        or ""
    )
    for code, cls in error_codes().items():
        assert re.search(rf"\b{cls.__name__} +{re.escape(code)}\b", docstring), cls.__name__


def test_every_setting_is_documented() -> None:
    """docs/configuration.md names every key of a file, and none that does not exist."""
    assert documented_settings() == set(setting_names())


def test_every_target_explains_itself() -> None:
    """`make help` shows all that a person may call."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) >= TARGETS
    for target in phony[1].split():
        assert re.search(rf"^{target}:.* ## \w", makefile, re.MULTILINE), f"{target} has no ## help"


def test_ci_runs_what_a_person_runs() -> None:
    """CI runs exactly the two targets that a person can run."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test test-faults" in script.read_text(encoding="utf-8")


def test_the_lock_file_names_public_places_only() -> None:
    """Set-up works on any machine, not only where the versions were locked."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    sources = [package["source"] for package in lock["package"] if package["name"] != "aqueduck"]
    assert {source.get("registry") for source in sources} == {"https://pypi.org/simple"}
    files = [file for package in lock["package"] for file in package.get("wheels", [])]
    assert files
    assert all(file["url"].startswith("https://files.pythonhosted.org/") for file in files)


def test_every_ignored_lint_rule_has_its_reason() -> None:
    """Every exception has a reason, so that a reader can judge whether it still applies."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert ignored
    for line in ignored[1].splitlines():
        assert re.search(r'^ +("[A-Z]+\d+", +)+# \S', line), line
