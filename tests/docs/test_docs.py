"""
What the documents show has to work: files, commands, SQL, Python, links, and the site's navigation.

Here everything is at least parsed by the program that has to understand it.  `WHOLE`, and comments in the documents, say
which tests run what.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
import typer
import yaml

from aqueduck.cli.commands import app
from aqueduck.config.events import parse_events
from aqueduck.config.fanout import parse_fanout
from aqueduck.config.sync import parse_config
from tests.docs.reader import ROOT, Block, blocks_of

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FLOWS = {"groups": parse_config, "routing": parse_fanout, "sink": parse_events}
DSN = "host=127.0.0.1 dbname=app"
POSTGRES_ONLY = re.compile(
    r"\s*(alter (system|role|table \S+ replica)|create (role|publication)|drop (publication|owned|role|schema aqueduck))\b"
    r"|\s*(grant|listen)\b"
    r"|.*(create schema .* authorization|ALTER_REPLICATION_SLOT|pg_drop_replication_slot)"
)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Code blocks of a language, each with a name to find it by."""
    for path in DOCUMENTS:
        texts = [block.text for block in blocks_of(path) if block.language == language]
        for number, text in enumerate(texts):
            yield f"{path.relative_to(ROOT)}-{number}", text


def named(language: str) -> list[Any]:
    return [pytest.param(block, id=name) for name, block in blocks(language)]


# -- files

FILES = [
    *named("yaml"),
    *(
        pytest.param(path.read_text(encoding="utf-8"), id=str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "examples").rglob("*.yaml"))
    ),
]


@pytest.mark.parametrize("text", FILES)
def test_a_configuration_is_accepted_unchanged(text: str, tmp_path: Path) -> None:
    """Whole files of each flow by the loader of the flow; pieces of files have at least to be YAML."""
    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    flow = next((parse for key, parse in FLOWS.items() if key in values and "source" in values), None)
    if flow is not None:
        env = {
            **dict.fromkeys(re.findall(r"_env: \"?(\w+)", text), DSN),
            "WEBHOOK_URL": "http://127.0.0.1/",
        }
        flow(text, base_dir=tmp_path, env=env)  # raises if a key or a value is wrong


# -- commands


def command_lines() -> Iterator[tuple[str, str]]:
    """The commands of the documents, in blocks and within sentences."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        typed = [block.text for block in blocks_of(path) if block.language == "sh"]
        lines = [line for commands in typed for line in re.sub(r"\\\n\s*", " ", commands).splitlines()]
        spans = re.findall(
            r"`((?:aqueduck|\S+=\S+ aqueduck)\s[^`]+)`",
            re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE),
        )
        for line in [*lines, *spans]:
            if command := re.match(r"\s*(?:\$ |[A-Z_]+=\S+ )?(aqueduck\s.+)", line.replace("\n", " ")):
                yield str(path.relative_to(ROOT)), re.split(r"\s#|\s{3,}(?!-)|  or:", command[1])[0]


def problem_of(line: str) -> str | None:
    """Why the command line would not be understood; placeholders and lists of choices are fine."""
    words = [
        word
        for word in shlex.split(line.replace("[", " ").replace("]…", " ").replace("]", " "))
        if word != "…"
    ]
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        choices = rest[0].split("|")
        if missing := [name for name in choices if name not in command.commands]:
            return f"there is no command {missing}"
        command, rest = command.commands[choices[0]], rest[1:]
    known = {
        name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    unknown = [word for word in rest if word.startswith("-") and word.split("=")[0] not in known]
    takes = any(parameter.param_type_name == "argument" for parameter in command.params)
    valued = {o for p in command.params if p.param_type_name == "option" and not p.is_flag for o in p.opts}
    free = [
        word
        for before, word in zip(["", *rest], rest, strict=False)
        if word[0] != "-" and before not in valued
    ]
    if unknown or (free and not takes):
        return f"not understood: {unknown or free}"
    return None


def test_commands_in_the_documents_exist_with_their_options() -> None:
    """Every command line in the documents is valid."""
    lines = list(command_lines())
    assert len(lines) > 60
    problems = [f"{where}: {line}: {problem}" for where, line in lines if (problem := problem_of(line))]
    assert problems == []


@pytest.mark.parametrize(
    "line",
    [
        "aqueduck sync -c FILE",
        "aqueduck run --onces",
        "aqueduck tables addd -c FILE T",
        "aqueduck check -c FILE more",
    ],
)
def test_a_wrong_command_would_be_found(line: str) -> None:
    """The test above can fail."""
    assert problem_of(line)


# -- SQL and Python


def signatures() -> dict[str, list[str]]:
    """Functions of the schema `aqueduck` and their parameters, as docs/sql-api.md has them (tested against a server)."""
    text = " ".join((ROOT / "docs" / "sql-api.md").read_text(encoding="utf-8").split())
    found = re.findall(r"`(\w+)\(([^`]*?)\) returns [^`]+`", text)
    return {name: [part.split()[0] for part in arguments.split(", ") if part] for name, arguments in found}


CALL = re.compile(r"\baqueduck\.(\w+)\(((?:[^()']|'(?:[^']|'')*')*)\)")


def test_sql_in_the_documents_calls_functions_that_exist() -> None:
    """Names, named parameters and their number, in blocks and within sentences."""
    known = signatures()
    assert len(known) > 15
    problems = []
    calls = 0
    for path in DOCUMENTS:
        text = re.sub(r"```python.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, arguments in CALL.findall(text):
            calls += 1
            parts = [a for a in re.split(r",\s*(?=(?:[^']*'[^']*')*[^']*$)", arguments.strip()) if a.strip()]
            given = [match[1] for part in parts if (match := re.match(r"\s*(\w+)\s*=>", part))]
            if name not in known or len(parts) > len(known[name]) or not set(given) <= set(known[name]):
                problems.append(f"{path.name}: aqueduck.{name}({arguments})")
    assert calls > 30
    assert problems == []


@pytest.mark.parametrize("block", named("sql"))
def test_sql_in_the_documents_can_be_parsed(block: str) -> None:
    """By DuckDB, whose grammar is PostgreSQL's but for a few statements."""
    text = re.sub(r"--[^\n]*", "", block)
    for statement in re.split(r";\s*\n|;\s*$", text):
        if statement.strip() and not POSTGRES_ONLY.match(statement):
            assert duckdb.extract_statements(statement.replace("…", "x"))


@pytest.mark.parametrize("block", named("python"))
def test_python_in_the_documents_can_be_parsed(block: str) -> None:
    assert ast.parse(block).body


# -- who runs what

WHOLE = {
    "docs/events.md": "tests/docs/test_events_docs.py",
    "docs/fanout.md": "tests/docs/test_run.py",
    "docs/how-to/add-a-table.md": "tests/docs/test_howtos.py",
    "docs/how-to/alerting.md": "tests/docs/test_howtos.py",
    "docs/how-to/query-the-lake.md": "tests/docs/test_tutorials.py",
    "docs/layout.md": "tests/lake/target/test_layouts.py",
    "docs/modes.md": "tests/sync/modes/test_modes.py",
    "docs/operations.md": "tests/docs/test_run.py",
    "docs/spark.md": "tests/spark/formats/test_sources.py",
    "docs/sql-api.md": "tests/postgres/registry/test_document.py",
    "docs/time-travel.md": "tests/docs/test_run.py",
    "docs/tutorials/first-events.md": "tests/docs/test_tutorials.py",
    "docs/tutorials/first-fanout.md": "tests/docs/test_tutorials.py",
    "docs/tutorials/first-sync.md": "tests/docs/test_start_docs.py",
    "docs/types.md": "tests/model/columns/test_typemap.py",
    **{f"examples/{name}": "tests/docs/test_examples.py" for name in (
        "README.md", "audit-log/README.md", "events-webhook/README.md", "multi-tenant-fanout/README.md",
        "pyspark-job/README.md", "shop-sync/README.md",
    )},
}  # fmt: skip
"""Documents whose statements and scripts, but for those with a comment, are run by one test."""

SHOWN = {"json", "text", "yaml"}
"""What is not run: files (which are read by their loaders, above), output, and drawings."""


def unaccounted(path: str, block: Block) -> str | None:
    """Why it is unknown whether a block works, or None if it is known."""
    if block.language in SHOWN:
        return None
    if not block.language:
        return "a block without a language"
    if block.mark.startswith("not run: "):
        return None if len(block.mark) > 20 else "no reason is given"
    if block.mark.startswith("run by ") or path in WHOLE:
        test = block.mark.removeprefix("run by ") if block.mark else WHOLE[path]
        return None if (ROOT / test).is_file() else f"there is no {test}"
    if all(re.match(r"aqueduck\s", line) for line in block.lines):
        return None  # tests/docs/test_run.py
    return f"no test runs {block.lines[0]}"


def test_every_block_is_run_or_says_why_not() -> None:
    """Commands, statements and scripts: a test runs them, or a comment before the block has the reason."""
    paths = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
    assert set(WHOLE) <= set(paths)
    found = [(path, block) for path in paths for block in blocks_of(ROOT / path)]
    assert len(found) > 150
    problems = [f"{path}: {problem}" for path, block in found if (problem := unaccounted(path, block))]
    assert problems == []


@pytest.mark.parametrize(
    "block",
    [
        Block("sh", "curl localhost"),
        Block("", "aqueduck run -c aqueduck.yaml"),
        Block("sql", "select 1", "run by tests/gone.py"),
        Block("sh", "curl localhost", "not run: no"),
    ],
)
def test_a_block_that_no_test_runs_would_be_found(block: Block) -> None:
    """The test above can fail."""
    assert unaccounted("docs/new.md", block)


# -- links, names of files, the site


def anchors(path: Path) -> set[str]:
    """The headings of a document, as links name them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_documents_link_to_files_and_headings_that_exist() -> None:
    """No link between our documents is broken."""
    broken, links = [], 0
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        pictures = [(name, "") for name in re.findall(r"src(?:set)?=\"([^\":]+)\"", text)]
        for target, anchor in [*re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text), *pictures]:
            links += 1
            there = path.parent / target if target else path
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{path.name}: {target}#{anchor}")
    assert links > 100
    assert broken == []


def test_files_that_the_documents_name_exist() -> None:
    """Tests, sources and files of the deployment, as paths from the root of the repository."""
    named = [
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(
            r"`((?:tests|src|deploy|docs|examples)/[\w./-]+)`", path.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 20
    assert [(document, name) for document, name in named if not (ROOT / name).exists()] == []


def test_every_fault_point_is_documented_and_crashed_at() -> None:
    """Each fault point of the code is a row in the table of durable steps in guarantees.md, and in a test."""
    sources, tests = (
        "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / d).rglob("*.py")))
        for d in ("src", "tests")
    )
    points = set(re.findall(r'faults\.point\("([a-z_.]+)"\)', sources))
    assert len(points) > 20
    documented = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert [p for p in sorted(points) if f"`{p}`" not in documented] == []
    assert [p for p in sorted(points) if not re.search(rf'"{re.escape(p)}[":]', tests)] == []


def test_every_decision_has_a_number_of_its_own() -> None:
    """No two ADRs have the same number, and their titles say it."""
    files = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert len({file.name[:4] for file in files}) == len(files)
    for file in files:
        assert file.read_text(encoding="utf-8").startswith(f"# {int(file.name[:4])}. "), file.name


def test_the_compatibility_table_has_the_pinned_versions() -> None:
    """docs/compatibility.md names the versions of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(d.split("==") for d in project["dependencies"] if "==" in d)
    ranges = dict(d.split(">=") for d in project["dependencies"] if d.startswith("duckdb"))
    assert set(ranges.values()) == {ranges["duckdb"]}
    oldest, below = ranges["duckdb"].split(",<")
    table = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert f"| Apache Spark | {pins['pyspark']} only" in table
    assert below == "1.6"
    assert f"| DuckDB that writes the lake | {oldest} and later 1.5 releases" in table
    assert f"| Python | {project['requires-python'].removeprefix('>=')} and later" in table


def test_every_document_has_its_place_in_the_site() -> None:
    """The navigation has every page, and none that does not exist."""
    pages = runpy.run_path(str(ROOT / "docs" / "_site" / "pages.py"))
    assert pages["missing"](pages["configuration"]()) == []
    assert pages["missing"]({"nav": ["index.md", "gone.md"]})[0].startswith("gone.md")


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """As `make docs` does it, where its generator is installed: no broken link, no script or style of another host."""
    pytest.importorskip("zensical")
    program = shutil.which("zensical", path=str(Path(sys.executable).parent))
    assert program
    subprocess.run([sys.executable, str(ROOT / "docs" / "_site" / "pages.py"), str(tmp_path)], check=True)
    subprocess.run([program, "build", "--strict", "-f", "mkdocs.yml"], cwd=tmp_path, check=True)
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*",
            page.read_text(encoding="utf-8"),
        )
        assert loaded == [], page.name
    assert (tmp_path / "site" / "adr" / "index.html").exists()
